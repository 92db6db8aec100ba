"""What an energy is, and the recurrence that FICNN and PICNN share."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from icnn.checks import check_batch
from icnn.energies.passes import Apply, Conv, Dense, Geometry, Layer, cast, flat, gated, resample

__all__ = [
    "Apply",
    "Conv",
    "Dense",
    "Energy",
    "EnergyAt",
    "Geometry",
    "Layer",
    "LayeredEnergy",
    "at",
    "cast",
    "gated",
    "resample",
]

EnergyAt = Callable[[Tensor], Tensor]
"""An energy at a given `x`: maps `y` of shape `(B, *y_shape)` to `(B,)`.

It may have two more abilities, which those who evaluate it often look for with `getattr(f, name,
None)`:

- `value_and_gradient(y)`: the values and their gradient in `y`, without a graph, and faster;
- `select(index)`: the same energy at the same `x` for some of its examples, in any order and
  number, with its graph; nothing that depends on `x` alone is computed, or drawn, again.
"""


def at(energy: Callable[[Any, Tensor], Tensor], x: Any) -> EnergyAt:
    """`energy` at `x` as a function of `y` alone, ours or anybody's; what it returns is checked."""
    method = getattr(energy, "at", None)
    return Checked(energy, partial(energy, x) if method is None else method(x))


def able(ability: str, parts: Iterable[Any]) -> bool:
    """Whether all of them have it."""
    return all(getattr(part, ability, None) is not None for part in parts)


class Checked:
    """Anybody's energy at `x`, whose values are looked at; it has the abilities of the original."""

    def __init__(self, energy: Callable[[Any, Tensor], Tensor], f: Any):
        self.energy, self.f = energy, f

    def __call__(self, y: Tensor) -> Tensor:
        value = self.f(y)
        if not isinstance(value, Tensor) or value.shape != y.shape[:1]:
            self.refuse("(x, y)` must be one value per example", y.shape[:1], value)
        return value

    @property
    def value_and_gradient(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        return self._both if able("value_and_gradient", [self.f]) else None

    @property
    def select(self) -> "Callable[[Tensor], Checked] | None":
        return self._some if able("select", [self.f]) else None

    def _both(self, y: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.f.value_and_gradient(y)
        for name, part, shape in (("value", value, y.shape[:1]), ("gradient", gradient, y.shape)):
            if not isinstance(part, Tensor) or part.shape != shape:
                self.refuse(f".at(x).value_and_gradient(y)` must give a {name}", shape, part)
        return value, gradient

    def _some(self, index: Tensor) -> "Checked":
        return Checked(self.energy, self.f.select(index))

    def refuse(self, rule: str, shape: Sequence[int], value: Any) -> None:
        """Say what was expected and what came."""
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        name = getattr(self.energy, "__name__", type(self.energy).__name__)
        raise ValueError(f"`{name}{rule}, shape {tuple(shape)}, got {got}")


class Energy(nn.Module):
    """A scalar `f(x, y)` per example, convex in `y` for every `x`.

    A subclass defines `at` (or only `forward`), and `y_shape` where it knows it. Anything that is
    called in the same way is an energy too: subclassing is a convenience.
    """

    y_shape: tuple[int, ...] | None = None

    def at(self, x: Any) -> EnergyAt:
        """Compute all that depends on `x` alone, once; the callable maps `y` to `(B,)`.

        Dropout masks and batch statistics along the x-path are those of this one computation.
        Made under `torch.no_grad()`, the callable has gradients in `y` alone. It holds until the
        parameters change: call `at` again after an optimiser step.
        """
        if type(self).forward is Energy.forward:
            raise TypeError(f"{type(self).__name__} must define `at(x)` or `forward(x, y)`")
        return partial(self, x)

    def forward(self, x: Any, y: Tensor) -> Tensor:
        return self.at(x)(y)


def spread(slope: Tensor, like: Tensor) -> Tensor:
    """A slope for all examples or for each, `(1 or B, n)`, in the shape of a batch of points."""
    if slope.shape == like.shape:
        return slope
    return slope.expand(like.shape[0], -1).reshape(like.shape)


class LayeredEnergy(Energy):
    """An energy whose y-path is a stack of `Layer`s; a subclass says which, at each `x`."""

    def describe(self, x: Tensor | None) -> Sequence[Layer]:
        """The layers of the y-path at `x`; the last is `Dense`, linear, with one unit."""
        raise TypeError(f"{type(self).__name__} must define `describe(x)`")

    def at(self, x: Tensor | None) -> EnergyAt:
        assert self.y_shape is not None, "a network knows the shape of its y"
        return LayeredAt(self.describe(x), self.y_shape)


class LayeredAt:
    """A stack of layers at a given `x`.

    Args:
        layers: As `LayeredEnergy.describe` gives them.
        y_shape: The shape of `y` without the batch.
    """

    def __init__(self, layers: Sequence[Layer], y_shape: tuple[int, ...]):
        *below, last = layers
        assert isinstance(last, Dense), "an energy ends in one linear unit"
        # Autocast may have left parts in a lower precision; the callable must not depend on
        # being called under the same autocast.
        dtype = last.wy.dtype
        self.below: list[Any] = [cast(layer, dtype) for layer in below]
        self.last = cast(last, dtype)
        # Weights times gates of the last unit are one slope in z and one in y, per example.
        # That saves its products in every call.
        wz, bias = self.last.wz, self.last.bias.squeeze(-1)
        self.slope_y = gated(self.last.wy, self.last.gate_y)
        self.slope_z = None if wz is None else gated(wz, self.last.gate_z)
        self.bias, self.shape = bias, (bias.shape[0] if bias.ndim else None, *y_shape)

    @property
    def layers(self) -> list[Any]:
        """All of them, in one precision."""
        return [*self.below, self.last]

    def __call__(self, y: Tensor) -> Tensor:
        check_batch("y", y, self.shape, like=self.slope_y)
        z = None
        for layer in self.below:
            z = layer(z, y)
        return self.total(y if z is None else z, y)

    def total(self, z: Tensor, y: Tensor) -> Tensor:
        """The last unit."""
        value = (flat(y) * self.slope_y).sum(dim=1) + self.bias
        if self.slope_z is None:
            return value
        return (flat(z) * self.slope_z).sum(dim=1) + value

    @property
    def value_and_gradient(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        return self._both if able("there", self.below) else None

    @property
    def select(self) -> "Callable[[Tensor], LayeredAt] | None":
        return self._some if able("select", self.below) else None

    @torch.no_grad()
    def _both(self, y: Tensor) -> tuple[Tensor, Tensor]:
        check_batch("y", y, self.shape, like=self.slope_y)
        if torch.is_autocast_enabled(y.device.type):  # it knows nothing of operations in place
            with torch.autocast(y.device.type, enabled=False):
                value, gradient = self._both(y.to(self.slope_y.dtype))
                return value, gradient.to(y.dtype)
        z, ways = y, []
        for layer in self.below:
            z, back = layer.there(z, y)
            ways.append(back)
        # f = slope_z . z + slope_y . y + bias
        gradient = spread(self.slope_y, y).clone(memory_format=torch.contiguous_format)
        slope = None if self.slope_z is None else spread(self.slope_z, z)
        value = self.total(z, y)
        # The units of a layer are held by its way back alone, and go with it.
        del z
        while ways:
            back = ways.pop()
            slope = None if slope is None else back(slope, gradient)
        # What is below the first layer is y.
        return value, gradient if slope is None else gradient.add_(slope)

    def _some(self, index: Tensor) -> "LayeredAt":
        layers = [layer.select(index) for layer in self.layers]
        return LayeredAt(layers, self.shape[1:])
