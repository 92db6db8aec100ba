"""What an energy is, and the recurrence that FICNN and PICNN share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_batch
from icnn.energies.activations import Activation

EnergyAt = Callable[[Tensor], Tensor]
"""An energy at a given `x`: maps `y` of shape `(B, *y_shape)` to `(B,)`."""

Geometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Stride, padding and dilation of a convolution."""

L = TypeVar("L", bound="Layer")


def at(energy: Callable[[Any, Tensor], Tensor], x: Any) -> EnergyAt:
    """`energy` at `x` as a function of `y` alone, ours or anybody's; what it returns is checked."""
    method = getattr(energy, "at", None)
    f = partial(energy, x) if method is None else method(x)

    def checked(y: Tensor) -> Tensor:
        value = f(y)
        if not isinstance(value, Tensor) or value.shape != y.shape[:1]:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            name = getattr(energy, "__name__", type(energy).__name__)
            raise ValueError(
                f"`{name}(x, y)` must be one value per example, shape ({y.shape[0]},), got {got}"
            )
        return value

    return checked


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


class Layer(Protocol):
    """One layer of the y-path at a given `x`: maps the layer below and `y` to the layer's units.

    The first layer has no layer below: its `z` is `None`, and counts as `y` where it is needed.
    The layers are what `at(x)` evaluates, and what anything that looks inside an energy reads.
    Each kind is a tuple with names: what PyTorch's compiler follows in all its versions.
    """

    def __call__(self, z: Tensor | None, y: Tensor) -> Tensor:
        """The units of the layer."""
        ...

    def _asdict(self) -> dict[str, Any]: ...

    def _replace(self, **changes: Any) -> Self: ...


class Dense(NamedTuple):
    """`activation(wz (z * gate_z) + wy (y * gate_y) + bias)`, with `z` and `y` as vectors.

    `None` stands for a gate of ones, and for the term of `z` that the first layer does not have.
    """

    activation: Activation
    wy: Tensor  # (m', n)
    bias: Tensor  # (m',) or (B, m')
    gate_y: Tensor | None = None  # (B, n)
    wz: Tensor | None = None  # (m', m), non-negative
    gate_z: Tensor | None = None  # (B, m), non-negative

    def __call__(self, z: Tensor | None, y: Tensor) -> Tensor:
        total = torch.addmm(self.bias, gated(y.flatten(start_dim=1), self.gate_y), self.wy.t())
        if self.wz is not None:
            z = gated((y if z is None else z).flatten(start_dim=1), self.gate_z)
            total = torch.addmm(total, z, self.wz.t())
        return self.activation(total)


class Conv(NamedTuple):
    """The same with convolutions over feature maps: supplement A of the paper.

    A spatial `y` is resampled to the size of the maps below (the paper's S); a vector `y` adds
    one number to each map.
    """

    activation: Activation
    wy: Tensor  # (m', channels of y, *kernel), or (m', n) for a vector
    bias: Tensor  # (m', 1, 1) or (B, m', height, width)
    size: tuple[int, int]  # of the maps below
    geometry: Geometry
    gate_y: Tensor | None = None  # (B, channels of y, *size) or (B, n)
    wz: Tensor | None = None  # (m', m, *kernel), non-negative
    gate_z: Tensor | None = None  # (B, m, *size), non-negative

    def __call__(self, z: Tensor | None, y: Tensor) -> Tensor:
        if y.ndim == 2:
            total = self.bias + F.linear(gated(y, self.gate_y), self.wy)[:, :, None, None]
        else:
            passed = gated(resample(y, self.size), self.gate_y)
            total = self.bias + F.conv2d(passed, self.wy, None, *self.geometry)
        if self.wz is not None:
            z = gated(y if z is None else z, self.gate_z)
            total = total + F.conv2d(z, self.wz, None, *self.geometry)
        return self.activation(total)


class Apply(NamedTuple):
    """A function of `z` alone that is convex and non-decreasing: pooling, an activation."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor | None, y: Tensor) -> Tensor:
        return self.function(y if z is None else z)


def resample(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Feature maps at another size: averages by whole factors, then the nearest place. Linear.

    Averaging by fractions would blur maps that differ by a row or two, at every layer. Factors
    are rounded, so that places are passed over only where sizes differ by less than a half.
    """
    before = maps.shape[-2:]
    if before == size:
        return maps
    factor = max(1, int(before[0] / size[0] + 0.5)), max(1, int(before[1] / size[1] + 0.5))
    return F.interpolate(F.avg_pool2d(maps, factor, ceil_mode=True), size, mode="nearest-exact")


def cast(layer: L, dtype: torch.dtype) -> L:
    """The same layer with all its tensors of one dtype."""
    tensors = {k: v.to(dtype) for k, v in layer._asdict().items() if isinstance(v, Tensor)}
    return layer._replace(**tensors)


def gated(value: Tensor, gate: Tensor | None) -> Tensor:
    """`value * gate`, where no gate is a gate of ones."""
    return value if gate is None else value * gate


class LayeredEnergy(Energy):
    """An energy whose y-path is a stack of `Layer`s; a subclass says which, at each `x`."""

    def describe(self, x: Tensor | None) -> Sequence[Layer]:
        """The layers of the y-path at `x`; the last is `Dense`, linear, with one unit."""
        raise TypeError(f"{type(self).__name__} must define `describe(x)`")

    def at(self, x: Tensor | None) -> EnergyAt:
        *below, last = self.describe(x)
        assert isinstance(last, Dense), "an energy ends in one linear unit"
        assert self.y_shape is not None, "a network knows the shape of its y"
        # Autocast may have left parts in a lower precision; the callable must not depend on
        # being called under the same autocast.
        dtype = last.wy.dtype
        below, last = [cast(layer, dtype) for layer in below], cast(last, dtype)
        # Weights times gates of the last unit are one slope in z and one in y, per example.
        # That saves its products in every call.
        slope_y, bias = gated(last.wy, last.gate_y), last.bias.squeeze(-1)
        slope_z = None if last.wz is None else gated(last.wz, last.gate_z)
        shape = (bias.shape[0] if bias.ndim else None, *self.y_shape)

        def energy(y: Tensor) -> Tensor:
            check_batch("y", y, shape, like=slope_y)
            z = None
            for layer in below:
                z = layer(z, y)
            value = (y.flatten(start_dim=1) * slope_y).sum(dim=1) + bias
            if slope_z is None:
                return value
            z = y if z is None else z
            return (z.flatten(start_dim=1) * slope_z).sum(dim=1) + value

        return energy
