"""Energies made of others, and the two separable ones: all of them keep convexity in `y`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from icnn.checks import (
    check_callable,
    check_nonnegative,
    check_number,
    check_tensor,
)
from icnn.energies.composed import MaxAt, QuadraticAt, ScaleAt, ScoreAt, SumAt, check_broadcast
from icnn.energies.energy import Energy, EnergyAt, at
from icnn.energies.layers import NonNegative, frozen

AnyEnergy = Callable[[Any, Tensor], Tensor]


class Score(Energy):
    """The energy of a feed-forward network: `-sum(y * net(x))`, linear in `y`.

    Minus the entropy of `y` its minimum is at `sigmoid(net(x))` on the unit box and at
    `softmax(net(x))` on the simplex, so that a plain classifier is a special case.

    Args:
        net: A module or function from `x` to a tensor with the shape of `y`, batch first.
    """

    def __init__(self, net: Callable[[Any], Tensor]):
        super().__init__()
        self.net = check_callable("net", net)

    def at(self, x: Any) -> EnergyAt:
        slope = -output("net", self.net, x)
        return ScoreAt(slope)


class Quadratic(Energy):
    """`0.5 * sum(weight * (y - center)^2)`.

    Args:
        center: A module or function of `x`, or a constant: a tensor of shape `y_shape`, a number.
        weight: A non-negative number, or a tensor that broadcasts to `y_shape`. An `nn.Parameter`
            is learned, and clipped at zero like any constrained weight. Other tensors are
            constants, here and for `center`: they are copied, without gradients.
    """

    def __init__(
        self, center: Callable[[Any], Tensor] | Tensor | float, weight: Tensor | float = 1.0
    ):
        super().__init__()
        if isinstance(center, Tensor):
            check_tensor("center", center)
            self.y_shape = tuple(center.shape) or None
        if isinstance(center, nn.Parameter) or callable(center):
            self.center = center
        elif isinstance(center, Tensor):
            self.register_buffer("center", center.detach().clone())
        else:
            self.center = check_number("center", center)
        self.weight = nonnegative("weight", weight)
        if self.y_shape is not None:
            check_broadcast("weight", self.weight, self.y_shape)

    def at(self, x: Any) -> EnergyAt:
        weight, center, batch, y_shape = read(self.weight), self.center, None, self.y_shape
        if callable(center):
            center = output("center", center, x)
            batch, *y_shape = center.shape
        elif isinstance(center, Tensor):
            center = frozen(center)

        return QuadraticAt(center, weight, batch, y_shape)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={value:g}"
            for name, value in (("center", self.center), ("weight", self.weight))
            if isinstance(value, float)
        )


class Sum(Energy):
    """The sum of energies."""

    def __init__(self, *energies: AnyEnergy):
        super().__init__()
        self.energies, self.y_shape = members("energies", energies)

    def at(self, x: Any) -> EnergyAt:
        return SumAt([at(energy, x) for energy in self.energies])


class Max(Energy):
    """The pointwise maximum of energies."""

    def __init__(self, *energies: AnyEnergy):
        super().__init__()
        self.energies, self.y_shape = members("energies", energies)

    def at(self, x: Any) -> EnergyAt:
        return MaxAt([at(energy, x) for energy in self.energies])


class Scale(Energy):
    """`c * energy` for a number `c >= 0`; an `nn.Parameter` is learned, and clipped at zero."""

    def __init__(self, energy: AnyEnergy, c: Tensor | float):
        super().__init__()
        (self.energy,), self.y_shape = members("energy", [energy])
        self.c = nonnegative("c", c)
        if isinstance(c, Tensor) and c.ndim:
            raise ValueError(f"`c` must be a single number, got shape {tuple(c.shape)}")

    def at(self, x: Any) -> EnergyAt:
        return ScaleAt(read(self.c), at(self.energy, x))

    def extra_repr(self) -> str:
        return f"c={self.c:g}" if isinstance(self.c, float) else ""


class Function(Energy):
    """A user's plain function of `x` and `y`, as a module; its convexity is taken on trust."""

    def __init__(self, function: AnyEnergy):
        super().__init__()
        self.function = function

    def at(self, x: Any) -> EnergyAt:
        return at(self.function, x)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def members(
    argument: str, energies: Sequence[AnyEnergy]
) -> tuple[nn.ModuleList, tuple[int, ...] | None]:
    """The parts of a composition as modules, and the shape of `y` that those who know it share."""
    if not energies:
        raise ValueError(f"`{argument}` must name at least one energy, got none")
    for energy in energies:
        check_callable(argument, energy)
    modules = nn.ModuleList(e if isinstance(e, nn.Module) else Function(e) for e in energies)
    shapes = [tuple(s) for e in energies if (s := getattr(e, "y_shape", None)) is not None]
    if len(set(shapes)) > 1:
        raise ValueError(f"`{argument}` must share one y_shape, got {', '.join(map(str, shapes))}")
    return modules, shapes[0] if shapes else None


def nonnegative(argument: str, value: Tensor | float) -> NonNegative | float:
    """Keep a number as it is, exact in every dtype, and a tensor where training may move it."""
    if not isinstance(value, Tensor):
        return check_number(argument, value, minimum=0)
    return NonNegative(check_nonnegative(argument, value))


def read(value: NonNegative | float) -> Tensor | float:
    """What `nonnegative` stored."""
    return value() if isinstance(value, NonNegative) else value


def output(argument: str, function: Callable[[Any], Tensor], x: Any) -> Tensor:
    """What a user's network gives at `x`, checked, and in full precision under autocast."""
    result = function(x)
    if not isinstance(result, Tensor) or result.ndim < 2:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"`{argument}(x)` must be a tensor of shape (B, *y_shape), got {got}")
    low = result.dtype in (torch.bfloat16, torch.float16)
    return result.float() if low and torch.is_autocast_enabled(result.device.type) else result
