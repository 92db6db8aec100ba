"""What an energy is, and the recurrence that FICNN and PICNN share."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from icnn.checks import check_batch
from icnn.energies.activations import Activation

EnergyAt = Callable[[Tensor], Tensor]
"""An energy at a given `x`: maps `y` of shape `(B, *y_shape)` to `(B,)`."""


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


class Layer(NamedTuple):
    """One layer of the y-path at a given `x`, with every quantity that it needs.

        z' = activation(wz (z * gate_z) + wy (y * gate_y) + bias)

    The layers are what `at(x)` evaluates, and what anything that looks inside an energy reads.
    `None` stands for a gate of ones, and for the term of `z` that the first layer does not have.
    """

    activation: Activation
    wy: Tensor  # (m', n)
    bias: Tensor  # (m',) or (B, m')
    gate_y: Tensor | None = None  # (B, n)
    wz: Tensor | None = None  # (m', m), non-negative
    gate_z: Tensor | None = None  # (B, m), non-negative

    def __call__(self, z: Tensor | None, y: Tensor) -> Tensor:
        total = torch.addmm(self.bias, gated(y, self.gate_y), self.wy.t())
        if self.wz is not None and z is not None:
            total = torch.addmm(total, gated(z, self.gate_z), self.wz.t())
        return self.activation(total)

    def to(self, dtype: torch.dtype) -> "Layer":
        """The same with all its tensors of one dtype."""
        tensors = {k: v.to(dtype) for k, v in self._asdict().items() if isinstance(v, Tensor)}
        return self._replace(**tensors)


def gated(value: Tensor, gate: Tensor | None) -> Tensor:
    """`value * gate`, where no gate is a gate of ones."""
    return value if gate is None else value * gate


class LayeredEnergy(Energy):
    """An energy whose y-path is a stack of `Layer`s; a subclass says which, at each `x`."""

    def describe(self, x: Tensor | None) -> list[Layer]:
        """The layers of the y-path at `x`."""
        raise TypeError(f"{type(self).__name__} must define `describe(x)`")

    def at(self, x: Tensor | None) -> EnergyAt:
        # Autocast may have left parts in a lower precision; the callable must not depend on
        # being called under the same autocast.
        layers = self.describe(x)
        *hidden, last = (layer.to(layers[0].wy.dtype) for layer in layers)
        assert last.wz is not None, "`hidden` has at least one width"
        # The last layer is linear with one unit: its weights times its gates are one slope in z
        # and one in y, per example. That saves its products in every call.
        slope_z, slope_y = gated(last.wz, last.gate_z), gated(last.wy, last.gate_y)
        bias = last.bias.squeeze(-1)
        return lambda y: evaluate(hidden, slope_z, slope_y, bias, y)


def evaluate(
    layers: list[Layer], slope_z: Tensor, slope_y: Tensor, bias: Tensor, y: Tensor
) -> Tensor:
    """The recurrence: the first layer has no `z`, the last one is linear."""
    batch = bias.shape[0] if bias.ndim else None
    check_batch("y", y, (batch, slope_y.shape[1]), like=layers[0].wy)
    z = layers[0](None, y)
    for layer in layers[1:]:
        z = layer(z, y)
    return (z * slope_z).sum(dim=1) + (y * slope_y).sum(dim=1) + bias
