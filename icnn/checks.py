"""Bad input is met at the door: a message names the argument, what was expected, what came."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}


def check_count(argument: str, value: Any, minimum: int = 1) -> int:
    """A whole number of at least `minimum`."""
    try:
        if not isinstance(value, bool) and index(value) >= minimum:
            return index(value)
    except TypeError:
        pass
    raise ValueError(f"`{argument}` must be an integer of at least {minimum}, got {value!r}")


def check_widths(argument: str, value: Any) -> tuple[int, ...]:
    """A non-empty sequence of layer widths."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) == 0:
        raise ValueError(f"`{argument}` must be a non-empty sequence of widths, got {value!r}")
    return tuple(check_count(f"{argument}[{i}]", width) for i, width in enumerate(value))


def check_choice(argument: str, value: Any, choices: Sequence[Any]) -> Any:
    """One of a short list."""
    # A list and not a set: the value may be anything, unhashable things included.
    if value not in list(choices):
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"`{argument}` must be one of {expected}, got {value!r}")
    return value


def check_batch(argument: str, value: Any, shape: Sequence[int | None], like: Tensor) -> Tensor:
    """A tensor of the given shape (`None` is any size) that can meet `like` in one product."""
    if not isinstance(value, Tensor):
        raise ValueError(f"`{argument}` must be a tensor, got {type(value).__name__}")
    if value.ndim != len(shape) or any(
        want is not None and got != want for got, want in zip(value.shape, shape, strict=True)
    ):
        names = ("B" if i == 0 and n is None else str(n) for i, n in enumerate(shape))
        expected = f"({', '.join(names)}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"`{argument}` must have shape {expected}, got {tuple(value.shape)}")
    # Autocast chooses the precision of each product itself, among the types that it knows.
    mixed = torch.is_autocast_enabled(like.device.type) and {value.dtype, like.dtype} <= AUTOCAST
    if value.dtype != like.dtype and not mixed:
        raise ValueError(f"`{argument}` must have dtype {like.dtype}, got {value.dtype}")
    if value.device != like.device:
        raise ValueError(f"`{argument}` must be on {like.device}, got {value.device}")
    return value


def check_callable(argument: str, value: Any) -> Any:
    """A module or a function."""
    if not callable(value):
        raise ValueError(f"`{argument}` must be a module or a function, got {value!r}")
    return value
