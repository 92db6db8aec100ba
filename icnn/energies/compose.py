"""Energies made of others, and the two separable ones: all of them keep convexity in `y`."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from icnn.checks import check_batch, check_callable
from icnn.energies.energy import Energy, EnergyAt, at
from icnn.energies.layers import NonNegative, frozen

AnyEnergy = Callable[[Any, Tensor], Tensor]


class Score(Energy):
    """The energy of a feed-forward network: `-sum(y * net(x))`, linear in `y`.

    With entropy 1 its argmin is `sigmoid(net(x))` on the unit box and `softmax(net(x))` on the
    simplex, so that a plain classifier is a special case.

    Args:
        net: A module or function from `x` to a tensor with the shape of `y`, batch first.
    """

    def __init__(self, net: Callable[[Any], Tensor]):
        super().__init__()
        self.net = check_callable("net", net)

    def at(self, x: Any) -> EnergyAt:
        slope = -output("net", self.net, x)
        return lambda y: per_example(check_batch("y", y, slope.shape, like=slope) * slope)


class Quadratic(Energy):
    """`0.5 * sum(weight * (y - center)^2)`.

    Args:
        center: A module or function of `x`, or a constant: a tensor of shape `y_shape`, a number.
        weight: A non-negative number, or a tensor that broadcasts to `y_shape`. An `nn.Parameter`
            is learned, and clipped at zero like any constrained weight.
    """

    def __init__(
        self, center: Callable[[Any], Tensor] | Tensor | float, weight: Tensor | float = 1.0
    ):
        super().__init__()
        if isinstance(center, Tensor) and not isinstance(center, nn.Parameter):
            self.register_buffer("center", center)
        else:
            self.center = center
        if isinstance(center, Tensor):
            self.y_shape = tuple(center.shape)
        self.weight = nonnegative("weight", weight)

    def at(self, x: Any) -> EnergyAt:
        weight, center = read(self.weight), self.center
        batch = None
        if callable(center):
            center = output("center", center, x)
            batch, *y_shape = center.shape
        else:
            center = frozen(center) if isinstance(center, Tensor) else center
            y_shape = self.y_shape

        def energy(y: Tensor) -> Tensor:
            if isinstance(center, Tensor) and y_shape is not None:
                check_batch("y", y, (batch, *y_shape), like=center)
            return 0.5 * per_example(weight * (y - center).square())

        return energy


class Sum(Energy):
    """The sum of energies."""

    def __init__(self, *energies: AnyEnergy):
        super().__init__()
        self.energies, self.y_shape = members(energies)

    def at(self, x: Any) -> EnergyAt:
        terms = [at(energy, x) for energy in self.energies]
        return lambda y: reduce(torch.add, [term(y) for term in terms])


class Max(Energy):
    """The pointwise maximum of energies."""

    def __init__(self, *energies: AnyEnergy):
        super().__init__()
        self.energies, self.y_shape = members(energies)

    def at(self, x: Any) -> EnergyAt:
        terms = [at(energy, x) for energy in self.energies]
        return lambda y: reduce(torch.maximum, [term(y) for term in terms])


class Scale(Energy):
    """`c * energy` for a number `c >= 0`; an `nn.Parameter` is learned, and clipped at zero."""

    def __init__(self, energy: AnyEnergy, c: Tensor | float):
        super().__init__()
        (self.energy,), self.y_shape = members([energy])
        self.c = nonnegative("c", c)
        if isinstance(c, Tensor) and c.ndim:
            raise ValueError(f"`c` must be a single number, got shape {tuple(c.shape)}")

    def at(self, x: Any) -> EnergyAt:
        c, energy = read(self.c), at(self.energy, x)
        return lambda y: c * energy(y)


class Function(Energy):
    """A user's plain function of `x` and `y`, as a module; its convexity is taken on trust."""

    def __init__(self, function: AnyEnergy):
        super().__init__()
        self.function = function

    def at(self, x: Any) -> EnergyAt:
        return at(self.function, x)


def members(energies: Sequence[AnyEnergy]) -> tuple[nn.ModuleList, tuple[int, ...] | None]:
    """The parts of a composition as modules, and the shape of `y` that those who know it share."""
    if not energies:
        raise ValueError("`energies` must name at least one energy, got none")
    for i, energy in enumerate(energies):
        check_callable(f"energies[{i}]", energy)
    modules = nn.ModuleList(e if isinstance(e, nn.Module) else Function(e) for e in energies)
    shapes = [shape for e in energies if (shape := getattr(e, "y_shape", None)) is not None]
    if len(set(shapes)) > 1:
        raise ValueError(f"`energies` must share one y_shape, got {', '.join(map(str, shapes))}")
    return modules, shapes[0] if shapes else None


def nonnegative(argument: str, value: Tensor | float) -> NonNegative | float:
    """Keep a number as it is, exact in every dtype, and a tensor where training may move it."""
    if bool((torch.as_tensor(value) >= 0).all()):
        return NonNegative(value) if isinstance(value, Tensor) else float(value)
    raise ValueError(f"`{argument}` must be at least 0, got {value!r}")


def read(value: NonNegative | float) -> Tensor | float:
    """What `nonnegative` stored."""
    return value() if isinstance(value, NonNegative) else value


def output(argument: str, function: Callable[[Any], Tensor], x: Any) -> Tensor:
    """What a user's network gives at `x`, checked."""
    result = function(x)
    if not isinstance(result, Tensor) or result.ndim < 2:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"`{argument}(x)` must be a tensor of shape (B, *y_shape), got {got}")
    return result


def per_example(values: Tensor) -> Tensor:
    """Sum over all dimensions but the first: `(B, ...) -> (B,)`."""
    return values.flatten(start_dim=1).sum(dim=1)
