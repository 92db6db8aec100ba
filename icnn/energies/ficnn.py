"""The fully input convex network: section 3.1 of the paper."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_batch, check_choice, check_count, check_widths
from icnn.energies.activations import Activation, convex_activation, identity
from icnn.energies.energy import Layer, LayeredEnergy
from icnn.energies.layers import POSITIVITY, frozen, nonnegative_weight


class FICNN(LayeredEnergy):
    """An energy that is jointly convex in all that it sees.

        z_{i+1} = g_i(Wz_i z_i + Wy_i y + b_i),    f(y) = z_k,    Wz_i >= 0

    Args:
        dim_y: Length of `y`.
        hidden: Widths of the hidden layers; one linear layer with a single unit follows them.
        dim_x: Length of `x`. With 0 the energy is `f(y)` and its `x` is ignored (`None` will do);
            otherwise `x` enters every layer as `y` does, and the energy is convex in both.
        activation: A convex, non-decreasing activation: a name, or an `icnn.Activation`.
        positivity: How `Wz` is kept non-negative, see `icnn.NonNegative`.

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
    ):
        super().__init__()
        self.dim_y = check_count("dim_y", dim_y)
        self.y_shape = (self.dim_y,)
        self.dim_x = check_count("dim_x", dim_x, minimum=0)
        self.hidden = check_widths("hidden", hidden)
        self.activation = convex_activation("activation", activation)
        self.positivity = check_choice("positivity", positivity, list(POSITIVITY))
        activations = [self.activation] * len(self.hidden) + [identity()]
        self.layers = nn.ModuleList(
            FullLayer(g, before, after, self.dim_x, self.dim_y, self.positivity)
            for g, before, after in zip(
                activations, (0, *self.hidden), (*self.hidden, 1), strict=True
            )
        )

    @property
    def _weight(self) -> Tensor:
        """A weight that says which dtype and device the energy lives on."""
        first = self.layers[0]
        assert isinstance(first, FullLayer)
        return first.wy.weight

    def describe(self, x: Tensor | None) -> list[Layer]:
        if self.dim_x:
            x = check_batch("x", x, (None, self.dim_x), like=self._weight)
        return [layer(x) for layer in self.layers]

    def extra_repr(self) -> str:
        return (
            f"dim_y={self.dim_y}, hidden={self.hidden}, dim_x={self.dim_x}, "
            f"activation={self.activation.name!r}, positivity={self.positivity!r}"
        )


class FullLayer(nn.Module):
    """The weights of one layer, `Wz`, `Wy`, `Wx` and `b`; called with `x` it is a `Layer`."""

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
        self.wz = nonnegative_weight(width, dim_z, positivity) if dim_z else None
        self.wy = nn.Linear(dim_y, width)
        self.wx = nn.Linear(dim_x, width, bias=False) if dim_x else None

    def forward(self, x: Tensor | None) -> Layer:
        b = frozen(self.wy.bias)
        return Layer(
            self.activation,
            wy=frozen(self.wy.weight),
            bias=b if self.wx is None or x is None else F.linear(x, self.wx.weight, b),
            wz=None if self.wz is None else self.wz(),
        )
