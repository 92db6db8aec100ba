"""The partially input convex network: section 3.2 of the paper."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_batch, check_choice, check_count, check_widths
from icnn.energies.activations import IDENTITY, Activation, any_activation, convex_activation
from icnn.energies.energy import Dense, LayeredEnergy
from icnn.energies.initialisation import PASSED, nonnegative_weight, open_gate_, spread_
from icnn.energies.layers import POSITIVITY, Constrained, frozen
from icnn.energies.monotone import check_monotone, clip_, signed, turn_

NORMS = {None: nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class PICNN(LayeredEnergy, Constrained):
    """An energy that is convex in `y` and an arbitrary network in `x`.

        u_{i+1} = h_i(V_i u_i + v_i),    u_0 = x
        z_{i+1} = g_i(Wz_i (z_i * [Wzu_i u_i + bz_i]_+) + Wy_i (y * (Wyu_i u_i + by_i))
                      + Wu_i u_i + b_i),    f(x, y) = z_k,    Wz_i >= 0

    Args:
        dim_x: Length of `x`.
        dim_y: Length of `y`.
        hidden: Widths of the hidden layers, of the x-path and the y-path alike; one linear layer
            with a single unit follows them.
        x_hidden: Widths of the x-path, as many, where they are others: gates and biases may need a
            wider network than the convex part.
        activation: A convex, non-decreasing activation for the y-path: a name, or an
            `icnn.Activation`.
        x_activation: Any activation, for the x-path.
        x_norm: `None`, `"batch"` or `"layer"`: what normalises the x-path before its activation.
        positivity: How `Wz` is kept non-negative, see `icnn.NonNegative`.
        monotone: Where the energy rises (1) or falls (-1) in `y`: a sign for each coordinate, or
            one for all; 0 is either.

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
        monotone: int | Sequence[int] | None = None,
        x_hidden: Sequence[int] | None = None,
    ):
        super().__init__()
        self.dim_x = check_count("dim_x", dim_x)
        self.dim_y = check_count("dim_y", dim_y)
        self.y_shape = (self.dim_y,)
        self.hidden = check_widths("hidden", hidden)
        self.x_hidden = None if x_hidden is None else check_widths("x_hidden", x_hidden)
        if self.x_hidden is not None and len(self.x_hidden) != len(self.hidden):
            raise ValueError(
                f"`x_hidden` must have as many widths as `hidden`, {len(self.hidden)}, got "
                f"{len(self.x_hidden)}"
            )
        self.activation = convex_activation("activation", activation)
        self.x_activation = any_activation("x_activation", x_activation)
        self.x_norm = check_choice("x_norm", x_norm, list(NORMS))
        self.positivity = check_choice("positivity", positivity, list(POSITIVITY))
        self.monotone = check_monotone(monotone, self.dim_y, self.positivity)
        u_widths = (self.dim_x, *(self.x_hidden or self.hidden))
        self.x_path = nn.ModuleList(
            XLayer(self.x_activation, before, after, self.x_norm, first=i == 0)
            for i, (before, after) in enumerate(pairwise(u_widths))
        )
        z_widths = (0, *self.hidden, 1)
        self.layers = nn.ModuleList(
            PartialLayer(
                self.activation,
                self.x_activation if i else None,
                u,
                before,
                after,
                self.dim_y,
                self.positivity,
            )
            for i, (u, (before, after)) in enumerate(zip(u_widths, pairwise(z_widths), strict=True))
        )
        for layer in self.layers:
            turn_(layer.wy, self.monotone)  # pyright: ignore

    @property
    def _weight(self) -> Tensor:
        """A weight that says which dtype and device the energy lives on."""
        first = self.layers[0]
        assert isinstance(first, PartialLayer)
        return first.wy.weight

    def describe(self, x: Tensor | None) -> list[Dense]:
        u = check_batch("x", x, (None, self.dim_x), like=self._weight)
        layers = [self.layers[0](u)]
        for x_layer, layer in zip(self.x_path, self.layers[1:], strict=True):
            u = x_layer(u)
            layers.append(layer(u))
        *hidden, last = (signed(layer, self.monotone) for layer in layers)
        return [*hidden, last._replace(activation=IDENTITY)]

    def project_(self) -> None:
        for layer in self.layers:
            clip_(layer.wy.weight, self.monotone)  # pyright: ignore

    def extra_repr(self) -> str:
        return (
            f"dim_x={self.dim_x}, dim_y={self.dim_y}, hidden={self.hidden}, "
            f"activation={self.activation.name!r}, x_activation={self.x_activation.name!r}, "
            f"x_norm={self.x_norm!r}, positivity={self.positivity!r}"
            + ("" if self.monotone is None else f", monotone={self.monotone}")
            + ("" if self.x_hidden is None else f", x_hidden={self.x_hidden}")
        )


class XLayer(nn.Module):
    """One layer of the x-path: linear, norm, activation."""

    def __init__(
        self, activation: Activation, dim_u: int, width: int, norm: str | None, first: bool
    ):
        super().__init__()
        self.activation = activation
        self.v = spread_(nn.Linear(dim_u, width), 1.0, None if first else activation)
        self.norm = NORMS[norm](width)

    def forward(self, u: Tensor) -> Tensor:
        return self.activation(normalised(self.norm, self.v(u)))


def normalised(norm: nn.Module, u: Tensor) -> Tensor:
    """`norm(u)`, where batch statistics can be had."""
    values = u[:, :1].numel()
    if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) and norm.training and values < 2:
        if values == 1:
            raise ValueError(
                "`x` must hold at least 2 examples in training mode with x_norm='batch', got 1"
            )
        # Statistics of an empty batch are NaN and would stay in the running averages.
        return u
    return norm(u)


class PartialLayer(nn.Module):
    """The weights of one layer, by their names in the paper; called with `u` it is a `Dense`."""

    def __init__(
        self,
        activation: Activation,
        x_activation: Activation | None,
        dim_u: int,
        dim_z: int,
        width: int,
        dim_y: int,
        positivity: str | None,
    ):
        super().__init__()
        self.activation = activation
        # Passthroughs share their part of the variance; in the first layer all of it is theirs.
        share = (PASSED if dim_z else 1.0) / 2
        self.wy = spread_(nn.Linear(dim_y, width, bias=False), share)
        self.wyu = open_gate_(nn.Linear(dim_u, dim_y))
        self.wu = spread_(nn.Linear(dim_u, width), share, x_activation)
        self.wz = self.wzu = None
        if dim_z:
            self.wzu = open_gate_(nn.Linear(dim_u, dim_z))
            self.wz, bias = nonnegative_weight((width, dim_z), activation, positivity)
            self.wu.bias.data.add_(bias)

    def forward(self, u: Tensor) -> Dense:
        return Dense(
            self.activation,
            wy=frozen(self.wy.weight),
            bias=self.wu(u),
            gate_y=self.wyu(u),
            wz=None if self.wz is None else self.wz(),
            gate_z=None if self.wzu is None else F.relu(self.wzu(u)),
        )
