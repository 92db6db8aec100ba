"""The fully input convex network: section 3.1 of the paper."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_batch, check_choice, check_count, check_widths
from icnn.energies.activations import IDENTITY, Activation, convex_activation
from icnn.energies.energy import Dense, LayeredEnergy
from icnn.energies.initialisation import PASSED, nonnegative_weight, spread_
from icnn.energies.layers import POSITIVITY, Constrained, frozen
from icnn.energies.monotone import check_monotone, clip_, signed, turn_


class FICNN(LayeredEnergy, Constrained):
    """An energy that is jointly convex in all that it sees.

        z_{i+1} = g_i(Wz_i z_i + Wy_i y + b_i),    f(y) = z_k,    Wz_i >= 0

    Args:
        dim_y: Length of `y`.
        hidden: Widths of the hidden layers; one linear layer with a single unit follows them.
        dim_x: Length of `x`. With 0 the energy is `f(y)` and its `x` is ignored (`None` will do);
            otherwise `x` enters every layer as `y` does, and the energy is convex in both.
        activation: A convex, non-decreasing activation: a name, or an `icnn.Activation`.
        positivity: How `Wz` is kept non-negative, see `icnn.NonNegative`.
        monotone: Where the energy rises (1) or falls (-1) in `y`: a sign for each coordinate, or
            one for all; 0 is either.

    Examples:
        >>> energy = icnn.FICNN(dim_y=2)
        >>> energy(None, torch.rand(5, 2)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        dim_y: int,
        hidden: Sequence[int] = (200, 200),
        *,
        dim_x: int = 0,
        activation: str | Activation = "relu",
        positivity: str | None = "project",
        monotone: int | Sequence[int] | None = None,
    ):
        super().__init__()
        self.dim_y = check_count("dim_y", dim_y)
        self.y_shape = (self.dim_y,)
        self.dim_x = check_count("dim_x", dim_x, minimum=0)
        self.hidden = check_widths("hidden", hidden)
        self.activation = convex_activation("activation", activation)
        self.positivity = check_choice("positivity", positivity, list(POSITIVITY))
        self.monotone = check_monotone(monotone, self.dim_y, self.positivity)
        z_widths = (0, *self.hidden, 1)
        self.layers = nn.ModuleList(
            FullLayer(self.activation, before, after, self.dim_x, self.dim_y, self.positivity)
            for before, after in pairwise(z_widths)
        )
        for layer in self.layers:
            turn_(layer.wy, self.monotone)  # pyright: ignore

    @property
    def _weight(self) -> Tensor:
        """A weight that says which dtype and device the energy lives on."""
        first = self.layers[0]
        assert isinstance(first, FullLayer)
        return first.wy.weight

    def describe(self, x: Tensor | None) -> list[Dense]:
        if self.dim_x:
            x = check_batch("x", x, (None, self.dim_x), like=self._weight)
        *hidden, last = (signed(layer(x), self.monotone) for layer in self.layers)
        return [*hidden, last._replace(activation=IDENTITY)]

    def project_(self) -> None:
        for layer in self.layers:
            clip_(layer.wy.weight, self.monotone)  # pyright: ignore

    def extra_repr(self) -> str:
        return (
            f"dim_y={self.dim_y}, hidden={self.hidden}, dim_x={self.dim_x}, "
            f"activation={self.activation.name!r}, positivity={self.positivity!r}"
            + ("" if self.monotone is None else f", monotone={self.monotone}")
        )


class FullLayer(nn.Module):
    """The weights of one layer, `Wz`, `Wy`, `Wx` and `b`; called with `x` it is a `Dense`."""

    def __init__(
        self,
        activation: Activation,
        dim_z: int,
        width: int,
        dim_x: int,
        dim_y: int,
        positivity: str | None,
    ):
        super().__init__()
        self.activation = activation
        # Passthroughs share their part of the variance; in the first layer all of it is theirs.
        share = (PASSED if dim_z else 1.0) / (2 if dim_x else 1)
        self.wy = spread_(nn.Linear(dim_y, width), share)
        self.wx = spread_(nn.Linear(dim_x, width, bias=False), share) if dim_x else None
        self.wz = None
        if dim_z:
            self.wz, bias = nonnegative_weight((width, dim_z), activation, positivity)
            self.wy.bias.data.add_(bias)

    def forward(self, x: Tensor | None) -> Dense:
        b = frozen(self.wy.bias)
        return Dense(
            self.activation,
            wy=frozen(self.wy.weight),
            bias=b if self.wx is None or x is None else F.linear(x, self.wx.weight, b),
            wz=None if self.wz is None else self.wz(),
        )
