"""The partially input convex network: section 3.2 of the paper."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_batch, check_choice, check_count, check_widths
from icnn.energies.activations import Activation, any_activation, convex_activation, identity
from icnn.energies.energy import Layer, LayeredEnergy
from icnn.energies.layers import POSITIVITY, frozen, nonnegative_weight

NORMS = {None: nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class PICNN(LayeredEnergy):
    """An energy that is convex in `y` and an arbitrary network in `x`.

        u_{i+1} = h_i(V_i u_i + v_i),    u_0 = x
        z_{i+1} = g_i(Wz_i (z_i * [Wzu_i u_i + bz_i]_+) + Wy_i (y * (Wyu_i u_i + by_i))
                      + Wu_i u_i + b_i),    f(x, y) = z_k,    Wz_i >= 0

    Args:
        dim_x: Length of `x`.
        dim_y: Length of `y`.
        hidden: Widths of the hidden layers, of the x-path and the y-path alike; one linear layer
            with a single unit follows them.
        activation: A convex, non-decreasing activation for the y-path: a name, or an
            `icnn.Activation`.
        x_activation: Any activation, for the x-path.
        x_norm: `None`, `"batch"` or `"layer"`: what normalises the x-path before its activation.
        positivity: How `Wz` is kept non-negative, see `icnn.NonNegative`.

    Examples:
        >>> energy = icnn.PICNN(dim_x=3, dim_y=2)
        >>> f = energy.at(torch.rand(5, 3))  # the x-path, once
        >>> f(torch.rand(5, 2)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        hidden: Sequence[int] = (200, 200),
        *,
        activation: str | Activation = "relu",
        x_activation: str | Activation = "relu",
        x_norm: str | None = None,
        positivity: str | None = "project",
    ):
        super().__init__()
        self.dim_x = check_count("dim_x", dim_x)
        self.dim_y = check_count("dim_y", dim_y)
        self.y_shape = (self.dim_y,)
        self.hidden = check_widths("hidden", hidden)
        self.activation = convex_activation("activation", activation)
        self.x_activation = any_activation("x_activation", x_activation)
        self.x_norm = check_choice("x_norm", x_norm, list(NORMS))
        self.positivity = check_choice("positivity", positivity, list(POSITIVITY))
        u_widths = (self.dim_x, *self.hidden)
        self.x_path = nn.ModuleList(
            XLayer(self.x_activation, before, after, self.x_norm)
            for before, after in pairwise(u_widths)
        )
        activations = [self.activation] * len(self.hidden) + [identity()]
        self.layers = nn.ModuleList(
            PartialLayer(g, u, before, after, self.dim_y, self.positivity)
            for g, u, before, after in zip(
                activations, u_widths, (0, *self.hidden), (*self.hidden, 1), strict=True
            )
        )

    @property
    def _weight(self) -> Tensor:
        """A weight that says which dtype and device the energy lives on."""
        first = self.layers[0]
        assert isinstance(first, PartialLayer)
        return first.wy.weight

    def describe(self, x: Tensor | None) -> list[Layer]:
        u = check_batch("x", x, (None, self.dim_x), like=self._weight)
        layers = [self.layers[0](u)]
        for x_layer, layer in zip(self.x_path, self.layers[1:], strict=True):
            u = x_layer(u)
            layers.append(layer(u))
        return layers

    def extra_repr(self) -> str:
        return (
            f"dim_x={self.dim_x}, dim_y={self.dim_y}, hidden={self.hidden}, "
            f"activation={self.activation.name!r}, x_activation={self.x_activation.name!r}, "
            f"x_norm={self.x_norm!r}, positivity={self.positivity!r}"
        )


class XLayer(nn.Module):
    """One layer of the x-path: linear, norm, activation."""

    def __init__(self, activation: Activation, dim_u: int, width: int, norm: str | None):
        super().__init__()
        self.activation = activation
        self.linear = nn.Linear(dim_u, width)
        self.norm = NORMS[norm](width)

    def forward(self, u: Tensor) -> Tensor:
        u = self.linear(u)
        if isinstance(self.norm, nn.BatchNorm1d) and self.training and u.shape[0] < 2:
            if u.shape[0] == 1:
                raise ValueError(
                    "`x` must hold at least 2 examples in training mode with x_norm='batch', got 1"
                )
            # Statistics of an empty batch are NaN and would stay in the running averages.
            return self.activation(u)
        return self.activation(self.norm(u))


class PartialLayer(nn.Module):
    """The weights of one layer, by their names in the paper; called with `u` it is a `Layer`."""

    def __init__(
        self,
        activation: Activation,
        dim_u: int,
        dim_z: int,
        width: int,
        dim_y: int,
        positivity: str | None,
    ):
        super().__init__()
        self.activation = activation
        self.wz = nonnegative_weight(width, dim_z, positivity) if dim_z else None
        self.wzu = gate(dim_u, dim_z) if dim_z else None
        self.wy = nn.Linear(dim_y, width, bias=False)
        self.wyu = gate(dim_u, dim_y)
        self.wu = nn.Linear(dim_u, width)

    def forward(self, u: Tensor) -> Layer:
        return Layer(
            self.activation,
            wy=frozen(self.wy.weight),
            bias=self.wu(u),
            gate_y=self.wyu(u),
            wz=None if self.wz is None else self.wz(),
            gate_z=None if self.wzu is None else F.relu(self.wzu(u)),
        )


def gate(dim_u: int, width: int) -> nn.Linear:
    """Make a gate that starts near one, where a PICNN is a FICNN plus a term in `x`."""
    linear = nn.Linear(dim_u, width)
    nn.init.ones_(linear.bias)
    return linear
