"""The convolutional, partially input convex network: supplement A of the paper."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_batch, check_choice, check_count, check_widths
from icnn.energies.activations import IDENTITY, Activation, any_activation, convex_activation
from icnn.energies.energy import Apply, Conv, Dense, Geometry, Layer, LayeredEnergy, resample
from icnn.energies.initialisation import PASSED_CONV, nonnegative_weight, open_gate_, spread_
from icnn.energies.layers import POSITIVITY, frozen
from icnn.energies.picnn import NORMS, PartialLayer, XLayer, normalised

POOLS = {"max": F.max_pool2d, "avg": F.avg_pool2d}

Pair = tuple[int, int]


class ConvPICNN(LayeredEnergy):
    """A PICNN over images: convex in `y`, an arbitrary convolutional network in `x`.

        u_{i+1} = h(V_i * u_i + v_i),    u_0 = x
        z_{i+1} = g(Wz_i * (z_i . [Wzu_i c_i + bz_i]_+) + Wy_i * (S y . (Wyu_i c_i + by_i))
                    + Wu_i * c_i + b_i),    c_i = (u_i, S x),    Wz_i >= 0

    with convolutions `*`, products `.` by element, gates from 1 x 1 convolutions, and S, which
    resamples `x` and `y` to the size of the maps. A vector `y` has a product with a matrix in the
    place of its convolution, one number for each map. Dense layers as in `PICNN` follow.

    Args:
        x_shape: `(channels, height, width)`.
        y_shape: The same, of any size, or `(length,)`.
        convs: For each layer `(channels, kernel, stride)`, or `("max", size)` or `("avg", size)`
            for a pooling. Kernels, strides and sizes are numbers or pairs (height, width).
        hidden: Widths of the dense layers after them, or none; one linear unit follows.
        activation: A convex, non-decreasing activation for the y-path: a name, or an
            `icnn.Activation`.
        x_activation: Any activation, for the x-path.
        x_norm: `None`, `"batch"` or `"layer"`: what normalises the x-path before its activation.
        positivity: How `Wz` is kept non-negative, see `icnn.NonNegative`.

    Examples:
        >>> energy = icnn.ConvPICNN((1, 64, 32), (1, 64, 32), ((32, 8, (4, 2)), (64, 4, 2)))
        >>> energy(torch.rand(5, 1, 64, 32), torch.rand(5, 1, 64, 32)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        x_shape: Sequence[int],
        y_shape: Sequence[int],
        convs: Sequence[tuple] = ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
        hidden: Sequence[int] = (512,),
        *,
        activation: str | Activation = "relu",
        x_activation: str | Activation = "relu",
        x_norm: str | None = None,
        positivity: str | None = "project",
    ):
        super().__init__()
        self.x_shape = check_widths("x_shape", x_shape)
        if len(self.x_shape) != 3:
            raise ValueError(f"`x_shape` must be (channels, height, width), got {x_shape!r}")
        self.y_shape = check_widths("y_shape", y_shape)
        if len(self.y_shape) not in (1, 3):
            raise ValueError(
                f"`y_shape` must be (length,) or (channels, height, width), got {y_shape!r}"
            )
        self.hidden = check_widths("hidden", hidden, empty=True)
        self.activation = convex_activation("activation", activation)
        self.x_activation = any_activation("x_activation", x_activation)
        self.x_norm = check_choice("x_norm", x_norm, list(NORMS))
        self.positivity = check_choice("positivity", positivity, list(POSITIVITY))
        self.convs = check_convs(convs)

        maps, size, below = self.x_shape[0], self.x_shape[1:], 0
        steps: list[nn.Module] = []
        for i, conv in enumerate(self.convs):
            if isinstance(conv[0], str):
                kind, kernel = conv
                step = Pool(kind, kernel)
                size = shrink(f"convs[{i}]", size, kernel, kernel)
            else:
                channels, kernel, stride = conv
                step = ConvLayer(self, self.y_shape, maps, below, channels, kernel, stride, size)
                size = shrink(f"convs[{i}]", size, kernel, stride)
                maps = below = channels
            steps.append(step)
        self.steps = nn.ModuleList(steps)

        if not below:
            raise ValueError(f"`convs` must hold at least one convolution, got {convs!r}")
        dim_u, dim_y = maps * size[0] * size[1], torch.Size(self.y_shape).numel()
        u_widths, z_widths = (dim_u, *self.hidden), (dim_u, *self.hidden, 1)
        self.x_path = nn.ModuleList(
            XLayer(self.x_activation, before, after, self.x_norm, first=False)
            for before, after in pairwise(u_widths)
        )
        self.layers = nn.ModuleList(
            PartialLayer(
                self.activation, self.x_activation, u, before, after, dim_y, self.positivity
            )
            for u, (before, after) in zip(u_widths, pairwise(z_widths), strict=True)
        )

    def describe(self, x: Tensor | None) -> list[Layer]:
        first = self.layers[0]
        assert isinstance(first, PartialLayer)
        x = check_batch("x", x, (None, *self.x_shape), like=first.wy.weight)
        u, found = x, []
        for step in self.steps:
            layer, u = step(u, x)
            # Before the first convolution there is no z to pool, and y is resampled anyway.
            if found or isinstance(layer, Conv):
                found.append(layer)
        u = u.flatten(start_dim=1)
        for layer, x_layer in zip(self.layers, [*self.x_path, None], strict=True):
            found.append(layer(u))
            u = u if x_layer is None else x_layer(u)
        last = found.pop()
        assert isinstance(last, Dense)
        return [*found, last._replace(activation=IDENTITY)]

    def extra_repr(self) -> str:
        return (
            f"x_shape={self.x_shape}, y_shape={self.y_shape}, convs={self.convs}, "
            f"hidden={self.hidden}, activation={self.activation.name!r}, "
            f"x_activation={self.x_activation.name!r}, x_norm={self.x_norm!r}, "
            f"positivity={self.positivity!r}"
        )


class Pool(nn.Module):
    """A pooling of both paths: averages are linear, the maximum is convex and non-decreasing."""

    def __init__(self, kind: str, kernel: Pair):
        super().__init__()
        self.kind, self.kernel = kind, kernel

    def forward(self, u: Tensor, x: Tensor) -> tuple[Apply, Tensor]:
        pool = partial(POOLS[self.kind], kernel_size=self.kernel)
        return Apply(pool), pool(u)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, {self.kernel}"


class ConvLayer(nn.Module):
    """The weights of one convolutional layer, by their names in the formula above.

    Called with `u_i` and `x` it is a `Conv` layer of the y-path, and the next `u`.
    """

    def __init__(
        self,
        energy: ConvPICNN,
        y_shape: tuple[int, ...],
        dim_u: int,
        dim_z: int,
        width: int,
        kernel: Pair,
        stride: Pair,
        size: Pair,
    ):
        super().__init__()
        self.activation, self.x_activation = energy.activation, energy.x_activation
        self.size, self.spatial = size, len(y_shape) == 3
        self.geometry: Geometry = (stride, (0, 0), (1, 1))
        conv = partial(nn.Conv2d, kernel_size=kernel, stride=stride)
        dim_y = y_shape[0]

        before = self.x_activation if dim_z else None
        self.v = spread_(conv(dim_u, width), 1.0, before)
        self.norm = norm2d(energy.x_norm, width)

        # The context of a layer: the x-path, and x itself beside it once they differ.
        dim_c = dim_u + (energy.x_shape[0] if dim_z else 0)
        share = (PASSED_CONV if dim_z else 1.0) / 2
        self.wu = spread_(conv(dim_c, width), share, before)
        if self.spatial:
            self.wy = spread_(conv(dim_y, width, bias=False), share)
            self.wyu = open_gate_(nn.Conv2d(dim_c, dim_y, 1))
        else:
            self.wy = spread_(nn.Linear(dim_y, width, bias=False), share)
            self.wyu = open_gate_(nn.Linear(dim_c, dim_y))
        self.wz = self.wzu = None
        if dim_z:
            self.wzu = open_gate_(nn.Conv2d(dim_c, dim_z, 1))
            shape = (width, dim_z, *kernel)
            self.wz, bias = nonnegative_weight(shape, self.activation, energy.positivity)
            assert self.wu.bias is not None, "convolutions have a bias by default"
            self.wu.bias.data.add_(bias)

    def forward(self, u: Tensor, x: Tensor) -> tuple[Conv, Tensor]:
        c = u if self.wz is None else torch.cat([u, resample(x, self.size)], dim=1)
        layer = Conv(
            self.activation,
            wy=frozen(self.wy.weight),
            bias=self.wu(c),
            size=self.size,
            geometry=self.geometry,
            gate_y=self.wyu(c if self.spatial else c.mean(dim=(2, 3))),
            wz=None if self.wz is None else self.wz(),
            gate_z=None if self.wzu is None else F.relu(self.wzu(c)),
        )
        return layer, self.x_activation(normalised(self.norm, self.v(u)))


def norm2d(norm: str | None, width: int) -> nn.Module:
    """The norms of the x-path for feature maps; layer norm is over channels and places."""
    if norm == "batch":
        return nn.BatchNorm2d(width)
    return nn.GroupNorm(1, width) if norm == "layer" else nn.Identity()


def check_convs(convs: Any) -> tuple[tuple, ...]:
    """The convolutions and poolings, numbers made pairs."""
    if isinstance(convs, str) or not isinstance(convs, Sequence) or not convs:
        raise ValueError(f"`convs` must be a non-empty sequence of layers, got {convs!r}")
    found = []
    for i, conv in enumerate(convs):
        name = f"convs[{i}]"
        if isinstance(conv, Sequence) and len(conv) == 2 and conv[0] in list(POOLS):
            found.append((conv[0], check_pair(f"{name}[1]", conv[1])))
        elif isinstance(conv, Sequence) and not isinstance(conv, str) and len(conv) == 3:
            kernel, stride = (check_pair(f"{name}[{j}]", conv[j]) for j in (1, 2))
            found.append((check_count(f"{name}[0]", conv[0]), kernel, stride))
        else:
            raise ValueError(
                f"`{name}` must be (channels, kernel, stride), ('max', size) or ('avg', size), "
                f"got {conv!r}"
            )
    return tuple(found)


def check_pair(argument: str, value: Any) -> Pair:
    """A positive number for both directions, or one for each."""
    if isinstance(value, Sequence) and len(value) == 2:
        return check_count(f"{argument}[0]", value[0]), check_count(f"{argument}[1]", value[1])
    return check_count(argument, value), check_count(argument, value)


def shrink(argument: str, size: Sequence[int], kernel: Pair, stride: Pair) -> Pair:
    """The size of the maps after a convolution or pooling without padding."""
    if size[0] < kernel[0] or size[1] < kernel[1]:
        raise ValueError(
            f"`{argument}` must have a kernel of at most {tuple(size)}, the size of the maps that "
            f"it meets, got {kernel}"
        )
    return (size[0] - kernel[0]) // stride[0] + 1, (size[1] - kernel[1]) // stride[1] + 1
