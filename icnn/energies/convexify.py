"""An existing feed-forward network made input-convex: section 3.1 of the paper."""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from icnn.checks import check_choice, check_instance, check_widths
from icnn.energies.activations import (
    IDENTITY,
    Activation,
    any_activation,
    convex_activation,
    elu,
    leaky_relu,
    relu,
    softplus,
)
from icnn.energies.energy import Apply, Conv, Dense, Geometry, Layer, LayeredEnergy
from icnn.energies.initialisation import PASSED, PASSED_CONV, nonnegative_weight, spread_
from icnn.energies.layers import POSITIVITY, frozen
from icnn.energies.passes import Back

POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d)
DROPOUTS = (nn.Dropout, nn.Dropout2d)


def convexify(
    module: nn.Sequential,
    y_shape: Sequence[int] | None = None,
    *,
    positivity: str | None = "project",
) -> "Convexified":
    """Make a feed-forward network convex in its input, and thereby an energy `f(y)`.

    Every linear layer and convolution but the first gets non-negative weights, and a passthrough
    from `y`, resampled to its maps. The architecture is taken over and not the weights: those of
    a network that was free to cancel mean nothing under the constraint. Every layer has a bias.

    Args:
        module: An `nn.Sequential`, nested or not, of `Linear`, `Conv2d`, poolings, `Flatten`,
            dropout and convex activations, ending in a `Linear` with one output.
        y_shape: The shape of its input without the batch; a network that starts with a `Linear`
            tells it itself.
        positivity: How the weights are kept non-negative, see `icnn.NonNegative`.

    Examples:
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        ...     torch.nn.Flatten(), torch.nn.Linear(72, 1))
        >>> icnn.convexify(net, (3, 8, 8))(None, torch.rand(5, 3, 8, 8)).shape
        torch.Size([5])
    """
    return Convexified(module, y_shape, positivity=positivity)


class Convexified(LayeredEnergy):
    """The energy that `convexify` makes."""

    def __init__(
        self,
        module: nn.Sequential,
        y_shape: Sequence[int] | None = None,
        *,
        positivity: str | None = "project",
    ):
        super().__init__()
        parts = list(leaves(check_instance("module", module, nn.Sequential)))
        if len({id(part) for part in parts}) < len(parts):
            raise ValueError("`module` must hold each layer once, got a layer that is used twice")
        if y_shape is None:
            if not parts or not isinstance(parts[0], nn.Linear):
                raise ValueError("`y_shape` must be given for a network that starts with no Linear")
            y_shape = (parts[0].in_features,)
        self.y_shape = check_widths("y_shape", y_shape)
        self.positivity = check_choice("positivity", positivity, list(POSITIVITY))
        # What it was made from, without weights; in a tuple, so that it is no part of this module.
        self.blueprint = (copy.deepcopy(module).to("meta"),)

        z, incoming, steps = torch.empty(2, *self.y_shape, device="meta"), None, []
        for part in parts:
            check_plain(part, z.ndim)
            try:
                after = copy.deepcopy(part).to("meta").eval()(z)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(
                    f"`module` must fit its input: {part} got {tuple(z.shape[1:])} ({error})"
                ) from error
            below = None if incoming is None else z.shape[1:]
            if isinstance(part, nn.Linear):
                steps.append(DenseStep(part, self.y_shape, below, incoming, self.positivity))
                incoming = IDENTITY
            elif isinstance(part, nn.Conv2d):
                steps.append(ConvStep(part, self.y_shape, z.shape[1:], incoming, self.positivity))
                incoming = IDENTITY
            elif isinstance(part, POOLS + DROPOUTS):
                steps.append(copy.deepcopy(part))
                incoming = incoming or IDENTITY
            elif isinstance(part, nn.Flatten) and after.shape == z.flatten(1).shape:
                steps.append(nn.Flatten())
            elif isinstance(part, nn.Identity):
                pass
            else:
                incoming = convex_activation("module", activation_of(part))
                steps.append(Elementwise(incoming))
            z = after
        if not steps or not isinstance(steps[-1], DenseStep) or z.shape[1:] != (1,):
            raise ValueError(
                f"`module` must end in a Linear with one output, got {parts[-1:] and parts[-1]}"
            )
        self.steps = nn.ModuleList(steps)
        like = next(module.parameters())
        self.to(like.device, like.dtype).train(module.training)

    def describe(self, x: Tensor | None) -> list[Layer]:
        found: list[Layer] = []
        for step in self.steps:
            if isinstance(step, (DenseStep, ConvStep)):
                found.append(step())
            elif isinstance(step, DROPOUTS):
                if step.training:
                    found.append(Mask(type(step), step.p, {}))
            else:
                found.append(Apply(step.activation if isinstance(step, Elementwise) else step))
        return found

    def extra_repr(self) -> str:
        return f"y_shape={self.y_shape}, positivity={self.positivity!r}"


class Mask(NamedTuple):
    """Dropout with a mask that is drawn once, at the first call with a batch of that size."""

    kind: type[nn.Module]
    p: float
    drawn: dict[int, Tensor]

    def __call__(self, z: Tensor | None, y: Tensor) -> Tensor:
        z = y if z is None else z
        if z.shape[0] not in self.drawn:
            self.drawn[z.shape[0]] = self.kind(self.p)(torch.ones_like(z))
        return z * self.drawn[z.shape[0]]

    def there(self, z: Tensor, y: Tensor) -> tuple[Tensor, Back]:
        """The units, and the way back: without a graph."""
        units = self(z, y)
        return units, lambda slope, gradient: slope * self.drawn[z.shape[0]]

    def select(self, index: Tensor) -> "Mask":
        """The mask that was drawn last, for some of its examples; before that, one to be drawn."""
        last = list(self.drawn.values())[-1:]
        return self._replace(drawn={len(index): mask.index_select(0, index) for mask in last})


class Elementwise(nn.Module):
    """An activation as a module."""

    def __init__(self, activation: Activation):
        super().__init__()
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        return self.activation(z)

    def extra_repr(self) -> str:
        return self.activation.name


class DenseStep(nn.Module):
    """A linear layer with its passthrough."""

    def __init__(
        self,
        linear: nn.Linear,
        y_shape: tuple[int, ...],
        below: Sequence[int] | None,
        incoming: Activation | None,
        positivity: str | None,
    ):
        super().__init__()
        share = 1.0 if below is None else PASSED
        dim_y = torch.Size(y_shape).numel()
        self.wy = spread_(nn.Linear(dim_y, linear.out_features), share)
        self.wz = None
        if below is not None and incoming is not None:
            shape = (linear.out_features, linear.in_features)
            self.wz, bias = nonnegative_weight(shape, incoming, positivity)
            self.wy.bias.data.add_(bias)

    def forward(self) -> Dense:
        wz = None if self.wz is None else self.wz()
        return Dense(IDENTITY, frozen(self.wy.weight), frozen(self.wy.bias), wz=wz)


class ConvStep(nn.Module):
    """A convolution with its passthrough."""

    def __init__(
        self,
        conv: nn.Conv2d,
        y_shape: tuple[int, ...],
        below: Sequence[int],
        incoming: Activation | None,
        positivity: str | None,
    ):
        super().__init__()
        reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = conv.padding
        if padding == "valid":
            padding = (0, 0)
        elif padding == "same" and not any(r % 2 for r in reach):
            padding = tuple(r // 2 for r in reach)
        if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(padding, str):
            raise ValueError(
                "`module` must have convolutions with one group and as many zeros on each side as "
                f"on the other, got {conv}"
            )
        pairs = (conv.stride, padding, conv.dilation)
        stride, padding, dilation = ((int(p[0]), int(p[1])) for p in pairs)
        self.geometry: Geometry = (stride, padding, dilation)
        self.size = (int(below[1]), int(below[2]))
        kernel = (conv.kernel_size[0], conv.kernel_size[1])
        share = 1.0 if incoming is None else PASSED_CONV
        self.wy = spread_(nn.Conv2d(y_shape[0], conv.out_channels, kernel), share)
        self.wz = None
        if incoming is not None:
            shape = (conv.out_channels, conv.in_channels, *kernel)
            self.wz, bias = nonnegative_weight(shape, incoming, positivity)
            assert self.wy.bias is not None, "convolutions have a bias by default"
            self.wy.bias.data.add_(bias)

    def forward(self) -> Conv:
        assert self.wy.bias is not None, "convolutions have a bias by default"
        return Conv(
            IDENTITY,
            wy=frozen(self.wy.weight),
            bias=frozen(self.wy.bias)[:, None, None],
            size=self.size,
            geometry=self.geometry,
            wz=None if self.wz is None else self.wz(),
        )

    def extra_repr(self) -> str:
        return "stride={}, padding={}, dilation={}".format(*self.geometry)


def check_plain(part: nn.Module, ndim: int) -> None:
    """A layer of PyTorch itself, used as we use it: a subclass may compute anything."""
    flat, maps = isinstance(part, nn.Linear), isinstance(part, (nn.Conv2d, nn.Dropout2d, *POOLS))
    if (flat and ndim != 2) or (maps and ndim != 4):
        expected = "vectors (a Flatten before it?)" if flat else "maps (channels, height, width)"
        raise ValueError(f"`module` must give {part} {expected}, got {ndim - 1} dimensions")
    override = getattr(part, "divisor_override", None)
    if (
        not type(part).__module__.startswith("torch.nn.modules.")
        or getattr(part, "return_indices", False)
        or (override is not None and override < 1)
        or part._forward_hooks
        or part._forward_pre_hooks
        or getattr(part, "threshold", 20) < 20  # a softplus that is no softplus
    ):
        raise ValueError(f"`module` must be made of plain layers of torch.nn, got {part}")


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of nested sequences, in order."""
    if type(module) is nn.Sequential:
        for part in module:
            yield from leaves(part)
    else:
        yield module


def activation_of(part: nn.Module) -> Activation:
    """What a module of PyTorch is in our registry."""
    match part:
        case nn.ReLU():
            return relu()
        case nn.LeakyReLU():
            return leaky_relu(part.negative_slope)
        case nn.Softplus():
            return softplus(part.beta)
        case nn.ELU():
            return elu(part.alpha)
        case nn.Tanh() | nn.Sigmoid() | nn.GELU() | nn.SiLU():
            return any_activation("module", type(part).__name__.lower())
    raise ValueError(
        "`module` must consist of Linear, Conv2d, poolings, Flatten, dropout and the activations "
        f"ReLU, LeakyReLU, Softplus, ELU, Identity, got {part}"
    )
