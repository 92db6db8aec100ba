"""Files that a run can be continued from, to the last bit; whole at any moment, or not there."""

import io
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

VERSION = 1


def packed(state: dict[str, Any]) -> memoryview:
    """A state as the bytes of a file."""
    # Numbers of NumPy, as a schedule or a callback may have left them, could not be read again.
    plain = pytree.tree_map_only(np.generic, lambda number: number.item(), state)
    data = io.BytesIO()  # torch.save says little about a disk that is full: Python's files do
    torch.save({"version": VERSION, **plain}, data)
    return data.getbuffer()


def write(path: Path, data: memoryview) -> None:
    """Write a file in one piece: whoever looks sees the one before or this one."""
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        if hasattr(os, "O_DIRECTORY"):  # the name itself, where folders can be synchronised
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        aside.unlink(missing_ok=True)
        there = "the one before it is whole" if path.exists() else "there is none before it"
        told = f"{error.strerror}: cannot write the checkpoint; {there}"
        raise OSError(error.errno, told, str(path)) from error


def load(path: Path) -> dict[str, Any]:
    """Read such a file. It holds numbers and tensors only: none can run code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{path} is no checkpoint of `icnn.fit`") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"{path} is no checkpoint of this version of `icnn.fit`")
    return state


def random_state(*loaders: Any) -> dict[str, Any]:
    """Where all generators are that a loader, an augmentation or a dropout may draw from."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "loader": [generator.get_state() for generator in generators(loaders)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any], *loaders: Any) -> None:
    """Go there."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    for generator, own in zip(generators(loaders), state["loader"], strict=False):
        generator.set_state(own)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Those that loaders have for themselves."""
    found = []
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        samplers = [getattr(loader, "sampler", None), getattr(batches, "sampler", None)]
        found += [getattr(part, "generator", None) for part in (loader, batches, *samplers)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
