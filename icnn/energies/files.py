"""Energies in files: one safetensors file that holds the tensors and a description in JSON.

A file is data, never code: see `icnn.energies.descriptions` for what it can describe. A SHA-256
over all of it tells a damaged file from a whole one. It is no signature: whoever writes a file can
write its sum, so that every other check stands on its own.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

import icnn
from icnn.checks import check_choice, check_shape
from icnn.energies.activations import Activation
from icnn.energies.descriptions import ENERGIES, build, describe, facts
from icnn.energies.energy import Energy
from icnn.energies.layers import NonNegative

VERSION = 1
FLOATS = {"F16": torch.half, "BF16": torch.bfloat16, "F32": torch.float, "F64": torch.double}


def save(energy: Energy, path: str | os.PathLike[str]) -> None:
    """Write `energy` to one file, which `icnn.load` reads.

    Our classes can be stored, with the activations of `icnn.activations`, and as networks of `x`
    the usual layers of `torch.nn` (Linear, Conv2d, norms, pooling, activations, dropout), alone
    or in `nn.Sequential`. Functions and classes of your own cannot, for a file holds no code: store
    the `state_dict` of those. All is checked before the file is touched, and an older file of that
    name is replaced in one move, or stays.

    A parameter that is used twice comes back as one; tensors that only share memory come back
    apart. Clipped weights are stored as they are read, at zero or above. Hooks and modes are not
    stored.
    """
    path = file_path(path)
    text, tensors = written(energy)
    try:
        compare(energy, assemble(text, tensors))
    except ValueError as error:
        raise ValueError(f"`energy` must be one that a file can hold: {error}") from error
    metadata = {"icnn": text, "sha256": digest(text, tensors)}
    with tempfile.TemporaryDirectory(prefix=".icnn-", dir=path.parent) as folder:
        whole = Path(folder, path.name)
        with whole.open("wb") as file:
            file.write(to_bytes(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, path)


def load(path: str | os.PathLike[str]) -> Energy:
    """Read what `icnn.save` wrote: the same energy to the bit, on the CPU, in eval mode.

    A file that is damaged, or that describes what no energy of ours is, is a `ValueError`. No code
    from the file is run, and no memory is taken for tensors that the file does not hold.
    """
    if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
        raise ValueError(f"`path` must be a file that icnn.save wrote, got {path!r}")
    try:
        return assemble(*read(path))
    except ValueError as error:
        wanted = "`path` must be a file that icnn.save wrote"
        raise ValueError(f"{wanted}, got {path}: {error}") from error


def file_path(path: Any) -> Path:
    """A path at which a file can be made."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"`path` must be a str or a Path, got {path!r}")
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"`path` must be a file in a folder that exists, got {path}")
    return path


def written(energy: Energy) -> tuple[str, dict[str, Tensor]]:
    """The description of an energy and its tensors, as a file holds them."""
    description = describe("energy", energy, ENERGIES)
    clipped = constrained(energy)
    state = energy.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    tensors = {}
    for first, *others in names.values():
        tensor = state[first].detach().cpu()
        check_choice(f"energy.{first}.dtype", tensor.dtype, [*FLOATS.values(), torch.int64])
        # Where it is also used without the constraint, clipping would change the function.
        if clipped.issuperset([first, *others]):
            tensor = tensor.clamp(min=0)
        tensors[first] = tensor.clone(memory_format=torch.contiguous_format)
    header = {
        "format": "icnn",
        "version": VERSION,
        "icnn": icnn.__version__,
        "energy": description,
        "tied": {alias: first for first, *others in names.values() for alias in others},
        "frozen": [name for name, p in energy.named_parameters() if not p.requires_grad],
    }
    return json.dumps(header, allow_nan=False), tensors


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, Tensor]]:
    """The description and the tensors that a file holds, if its sum is right."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if "icnn" not in metadata:
                raise ValueError("it has no icnn description")
            check_version(metadata["icnn"])
            names = list(file.keys())
            for name in names:
                check_choice(f"{name}.dtype", file.get_slice(name).get_dtype(), [*FLOATS, "I64"])
            # A clone, or the tensor would be a window on the file and change with it.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise ValueError(f"it is no whole safetensors file ({error})") from error
    if metadata.get("sha256") != digest(metadata["icnn"], tensors):
        raise ValueError("its contents do not match their SHA-256: it is damaged")
    return metadata["icnn"], tensors


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the description, then of each tensor's name, dtype, shape and bytes."""
    total = sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def check_version(text: str) -> dict[str, Any]:
    """The description as an object, of a version that we read."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its description is no JSON ({error})") from error
    if not isinstance(header, dict) or header.get("format") != "icnn":
        raise ValueError("its description is not of the format 'icnn'")
    if header.get("version") is True or header.get("version") != VERSION:
        raise ValueError(f"its version must be {VERSION}, got {header.get('version')!r}")
    return header


def assemble(text: str, tensors: Mapping[str, Tensor]) -> Energy:
    """The energy that a description and its tensors make, sharing those tensors."""
    header = check_version(text)
    # Layers bring tensors: without them, a long description would only cost time and memory.
    if text.count(",") > 2000 + 20 * len(tensors):
        raise ValueError(f"its description is too long for its {len(tensors)} tensors")
    tied, frozen = header.get("tied"), header.get("frozen")
    if not isinstance(tied, dict) or any(
        alias in tensors or not isinstance(first, str) or first not in tensors
        for alias, first in tied.items()
    ):
        raise ValueError(f"`tied` must map new names to names of tensors, got {tied!r}")
    state = {**tensors, **{alias: tensors[first] for alias, first in tied.items()}}
    try:
        with torch.device("meta"):
            energy = build("energy", header.get("energy"), ENERGIES)
        assert isinstance(energy, Energy), "every class of the table is one"
        expected = energy.state_dict(keep_vars=True)
        check_state(state, expected, constrained(energy))
        learned = [name for name, value in expected.items() if isinstance(value, nn.Parameter)]
        if not isinstance(frozen, list) or any(name not in learned for name in frozen):
            raise ValueError(f"`frozen` must list names of parameters, got {frozen!r}")
        if any((alias in learned) != (first in learned) for alias, first in tied.items()):
            raise ValueError(f"`tied` must not mix parameters and constants, got {tied!r}")
        energy.load_state_dict(state, assign=True)
        loaded = energy.state_dict(keep_vars=True)
        for alias, first in tied.items():
            owner, _, name = alias.rpartition(".")
            setattr(energy.get_submodule(owner), name, loaded[first])
        for name in frozen:
            energy.get_parameter(name).requires_grad_(False)
        for name, part in energy.named_modules():
            if isinstance(part, NonNegative) and not bool(part().isfinite().all()):
                raise ValueError(f"`{name}` must be finite, got weights that overflow")
        return energy.eval()
    except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        # Whatever a constructor says to arguments that no energy of ours was made with.
        raise ValueError(f"its description cannot be built ({error})") from error


def check_state(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], clipped: set[str]
) -> None:
    """The tensors that an energy needs, and numbers in them that it may have."""
    if missing := expected.keys() - state.keys():
        raise ValueError(f"tensors are missing: {', '.join(sorted(missing))}")
    if unexpected := state.keys() - expected.keys():
        raise ValueError(f"tensors that no part has: {', '.join(map(repr, sorted(unexpected)))}")
    for name, tensor in state.items():
        want = expected[name]
        check_shape(name, tensor, want.shape)
        dtypes = FLOATS.values() if want.is_floating_point() else [torch.int64]
        check_choice(f"{name}.dtype", tensor.dtype, list(dtypes))
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"`{name}` must be finite, got NaN or infinity")
        # Of the other names only batch norms' variances have a sign.
        if (name in clipped or name.endswith("running_var")) and bool((tensor < 0).any()):
            raise ValueError(f"`{name}` must be at least 0, got a minimum of {tensor.min():g}")


def constrained(energy: nn.Module) -> set[str]:
    """The names of the tensors that are clipped at zero on reading."""
    return {
        f"{where}.{name}"
        for where, part in energy.named_modules(remove_duplicate=False)
        if isinstance(part, NonNegative) and part.positivity == "project"
        for name in part.state_dict()
    }


def compare(energy: Energy, twin: Energy) -> None:
    """Refuse an energy that someone changed after its constructor: its twin would not be it."""
    own, other = (dict(e.named_modules(remove_duplicate=False)) for e in (energy, twin))
    for name in own.keys() | other.keys():
        part, made = own.get(name), other.get(name)
        if type(part) is not type(made):
            raise ValueError(
                f"`{name}` must be what the constructor made, {type(made)}, got {type(part)}"
            )
        for key, value in settings(made).items():
            if settings(part).get(key) != value:
                raise ValueError(f"`{name}.{key}` must be as the constructor made it, {value}")
        if changed := {"forward", "at", "describe"} & vars(part).keys():
            raise ValueError(f"`{name}` must have the methods of its class, got {changed}")


def settings(part: nn.Module | None) -> dict[str, Any]:
    """The numbers, words and activations that a part keeps as plain attributes."""
    found = {name: v for name, v in vars(part).items() if name[0] != "_" and name != "training"}
    known = int | float | str | tuple | Activation
    return {
        name: facts(v) if isinstance(v, Activation) else v
        for name, v in found.items()
        if isinstance(v, known) and name != "blueprint"
    }
