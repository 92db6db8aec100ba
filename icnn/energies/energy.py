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
    """`energy` at `x` as a function of `y` alone, for our energies and for anybody's function."""
    method = getattr(energy, "at", None)
    return partial(energy, x) if method is None else method(x)


class Energy(nn.Module):
    """A scalar `f(x, y)` per example, convex in `y` for every `x`.

    A subclass defines `at`, and `y_shape` where it knows it. Anything that is called in the same
    way is an energy too: subclassing is a convenience.
    """

    y_shape: tuple[int, ...] | None = None

    def at(self, x: Any) -> EnergyAt:
        """Compute all that depends on `x` alone, once; the callable maps `y` to `(B,)`.

        Dropout masks and batch statistics along the x-path are those of this one computation.
        """
        raise TypeError(f"{type(self).__name__} must define `at(x)`")

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
        gated = y if self.gate_y is None else y * self.gate_y
        total = torch.addmm(self.bias, gated, self.wy.t())
        if self.wz is not None:
            assert z is not None, "only the first layer has no z"
            gated = z if self.gate_z is None else z * self.gate_z
            total = torch.addmm(total, gated, self.wz.t())
        return self.activation(total)


class LayeredEnergy(Energy):
    """An energy whose y-path is a stack of `Layer`s; a subclass says which, at each `x`."""

    def describe(self, x: Tensor | None) -> list[Layer]:
        """The layers of the y-path at `x`."""
        raise TypeError(f"{type(self).__name__} must define `describe(x)`")

    def at(self, x: Tensor | None) -> EnergyAt:
        return partial(evaluate, self.describe(x))


def evaluate(layers: list[Layer], y: Tensor) -> Tensor:
    """The recurrence itself: the first layer has no `z`, the last one has a single unit."""
    wy, bias = layers[0].wy, layers[0].bias
    y = check_batch("y", y, (len(bias) if bias.ndim == 2 else None, wy.shape[1]), like=wy)
    z = None
    for layer in layers:
        z = layer(z, y)
    assert z is not None, "an energy has at least one layer"
    return z.squeeze(-1)
