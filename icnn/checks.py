"""Bad input is met at the door: a message names the argument, what was expected, what came."""

import math
from collections.abc import Sequence
from numbers import Real
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}


def check_count(argument: str, value: Any, minimum: int = 1) -> int:
    """A whole number of at least `minimum`."""
    try:
        if not isinstance(value, bool) and index(value) >= minimum:
            return index(value)
    except TypeError:
        pass
    raise ValueError(f"`{argument}` must be an integer of at least {minimum}, got {value!r}")


def check_widths(argument: str, value: Any, *, empty: bool = False) -> tuple[int, ...]:
    """A sequence of layer widths, which may be `empty` or not."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not (value or empty):
        expected = "a sequence of widths" if empty else "a non-empty sequence of widths"
        raise ValueError(f"`{argument}` must be {expected}, got {value!r}")
    return tuple(check_count(f"{argument}[{i}]", width) for i, width in enumerate(value))


def check_choice(argument: str, value: Any, choices: Sequence[Any]) -> Any:
    """One of a short list."""
    # A list and not a set: the value may be anything, unhashable things included.
    if value not in list(choices):
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"`{argument}` must be one of {expected}, got {value!r}")
    return value


def check_number(argument: str, value: Any, minimum: float = -math.inf) -> float:
    """A finite real number of at least `minimum`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and float(value) >= minimum:
        return float(value)
    expected = "a finite number" + (f" of at least {minimum:g}" if minimum > -math.inf else "")
    raise ValueError(f"`{argument}` must be {expected}, got {value!r}")


def check_tensor(argument: str, value: Any) -> Tensor:
    """A tensor of real floating-point numbers."""
    if not isinstance(value, Tensor):
        raise ValueError(f"`{argument}` must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise ValueError(
            f"`{argument}` must be a floating-point tensor, got {value.dtype}: try .float()"
        )
    return value


def check_nonnegative(argument: str, value: Any) -> Tensor:
    """A floating-point tensor without negative numbers or NaN."""
    value = check_tensor(argument, value)
    # On the meta device there are no numbers to look at.
    if not value.is_meta and not bool((value >= 0).all()):
        raise ValueError(f"`{argument}` must be at least 0, got a minimum of {value.min():g}")
    return value


def check_shape(argument: str, value: Tensor, shape: Sequence[int | None]) -> None:
    """A shape, in which `None` is any size."""
    if value.ndim != len(shape) or any(
        want is not None and got != want for got, want in zip(value.shape, shape, strict=True)
    ):
        names = ("B" if i == 0 and n is None else str(n) for i, n in enumerate(shape))
        expected = f"({', '.join(names)}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"`{argument}` must have shape {expected}, got {tuple(value.shape)}")


def check_like(argument: str, value: Tensor, like: Tensor) -> None:
    """A dtype and device that can meet those of `like` in one product."""
    if value.dtype != like.dtype:
        # Autocast chooses the precision of each product itself, among the types that it knows.
        mixed = {value.dtype, like.dtype} <= AUTOCAST and torch.is_autocast_enabled(
            like.device.type
        )
        if not mixed:
            raise ValueError(
                f"`{argument}` must have dtype {like.dtype}, got {value.dtype}: try .to()"
            )
    if value.device != like.device:
        raise ValueError(f"`{argument}` must be on {like.device}, got {value.device}")


def check_batch(argument: str, value: Any, shape: Sequence[int | None], like: Tensor) -> Tensor:
    """A floating-point tensor of the given shape that can meet `like` in one product."""
    value = check_tensor(argument, value)
    check_shape(argument, value, shape)
    check_like(argument, value, like)
    return value


def check_instance(argument: str, value: T, kind: type) -> T:
    """An object of a class."""
    if not isinstance(value, kind):
        raise ValueError(f"`{argument}` must be a {kind.__name__}, got {type(value).__name__}")
    return value


def check_callable(argument: str, value: Any) -> Any:
    """A module or a function."""
    if not callable(value):
        raise ValueError(f"`{argument}` must be a module or a function, got {value!r}")
    return value


def check_device(argument: str, value: Any) -> torch.device:
    """A device that is there."""
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, AssertionError, TypeError) as error:
        told = str(error).splitlines()[0]
        raise ValueError(f"`{argument}` must be a device, got {value!r}: {told}") from error
