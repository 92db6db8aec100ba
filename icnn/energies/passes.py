"""The layers of the y-path at a given `x`: what each computes, and the way back through it.

`layer(z, y)` is for PyTorch's graph. `layer.there(z, y)` is the same without one: it gives the
units, and a function that takes a slope in them back to the layer below and to `y`. Nothing is
kept but what the way back needs, nothing is copied that may be overwritten.
"""

from collections.abc import Callable, Hashable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from icnn.energies.activations import Activation, same, smooth_plus

Geometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Stride, padding and dilation of a convolution."""

Back = Callable[[Tensor, Tensor], Tensor | None]
"""Takes the slope in a layer's units, and the gradient in `y` so far, contiguous: adds the layer's
part to the gradient, in place, and gives the slope in the layer below, or `None` if it has none."""

LANES = 16
"""Columns of a result below which a product on the CPU was measured to be faster transposed."""

FEW = 8
"""Input maps below which a convolution on the CPU goes back by patches: measured to be seven times
as fast as PyTorch's own way for one map, and slower for 32; 8 is a guess in between."""

PATCHES = 2**16
"""Numbers in the patches of a convolution that are there at a time: a cache holds them."""

L = TypeVar("L", bound="Layer")

aten = torch.ops.aten


class Layer(Protocol):
    """One layer of the y-path at a given `x`: maps the layer below and `y` to the layer's units.

    The first layer has no layer below: its `z` is `None`, and counts as `y` where it is needed.
    The layers are what `at(x)` evaluates, and what anything that looks inside an energy reads.
    Each kind is a tuple with names: what PyTorch's compiler follows in all its versions.
    A kind may also have `there` and `select`; an energy has the abilities that its layers have.
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
        total = torch.addmm(self.bias, gated(flat(y), self.gate_y), self.wy.t())
        if self.wz is not None:
            z = gated(flat(y if z is None else z), self.gate_z)
            total = torch.addmm(total, z, self.wz.t())
        return self.activation(total)

    def there(self, z: Tensor, y: Tensor) -> tuple[Tensor, Back]:
        """The units, and the way back: without a graph."""
        total = torch.addmm(self.bias, gated(flat(y), self.gate_y), self.wy.t())
        if self.wz is not None:
            total.addmm_(gated(flat(z), self.gate_z), self.wz.t())
        units, pull = activated(self.activation, total, fresh=True)

        def back(slope: Tensor, gradient: Tensor) -> Tensor | None:
            # s = slope . activation'
            s, sum_ = pull(slope), flat(gradient)
            # dy += (s Wy) . gate_y
            part = times(s, self.wy)
            sum_.add_(part) if self.gate_y is None else sum_.addcmul_(part, self.gate_y)
            # dz = (s Wz) . gate_z
            if self.wz is None:
                return None
            below = gated_(s @ self.wz, self.gate_z)
            return below if z.ndim == 2 else below.view(z.shape)

        return units, back

    def select(self, index: Tensor) -> "Dense":
        """The same layer for some of its examples."""
        return selected(self, index, each=self.bias.ndim == 2)


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

    def there(self, z: Tensor, y: Tensor) -> tuple[Tensor, Back]:
        """The units, and the way back: without a graph."""
        high = wide = None
        if y.ndim == 2:
            total = self.bias + F.linear(gated(y, self.gate_y), self.wy)[:, :, None, None]
        else:
            if y.shape[2:] != self.size:
                # S y = high y wide'
                sizes = zip(y.shape[2:], self.size, strict=True)
                high, wide = (averages(*pair, y.dtype, y.device) for pair in sizes)
                y = high @ y @ wide.t()
            total = F.conv2d(gated(y, self.gate_y), self.wy, None, *self.geometry)
            total += self.bias
        if self.wz is not None:
            total += F.conv2d(gated(z, self.gate_z), self.wz, None, *self.geometry)
        units, pull = activated(self.activation, total, fresh=True)

        def back(slope: Tensor, gradient: Tensor) -> Tensor | None:
            # s = slope . activation'
            s = pull(slope)
            # dy += S' (Wy' * s) . gate_y, with ' for the transpose of a linear map
            if y.ndim == 2:
                part = times(s.sum(dim=(2, 3)), self.wy)
            else:
                part = unconvolved(s, self.wy, self.size, self.geometry)
            part = gated_(part, self.gate_y)
            gradient += part if high is None or wide is None else high.t() @ part @ wide
            # dz = (Wz' * s) . gate_z
            if self.wz is None:
                return None
            return gated_(unconvolved(s, self.wz, self.size, self.geometry), self.gate_z)

        return units, back

    def select(self, index: Tensor) -> "Conv":
        """The same layer for some of its examples."""
        return selected(self, index, each=self.bias.ndim == 4)


class Apply(NamedTuple):
    """A function of `z` alone that is convex and non-decreasing: pooling, an activation."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor | None, y: Tensor) -> Tensor:
        return self.function(y if z is None else z)

    def there(self, z: Tensor, y: Tensor) -> tuple[Tensor, Back]:
        """The units, and the way back."""
        units, pull = activated(self.function, z)
        return units, lambda slope, gradient: pull(slope)

    def select(self, index: Tensor) -> "Apply":
        """The same for all examples."""
        return self


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


@cache
def averages(before: int, after: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`resample` along one dimension as a matrix: its own, and its transpose on the way back."""
    unit = torch.eye(before, dtype=dtype, device=device)[:, None, :, None]
    return resample(unit, (after, 1))[:, 0, :, 0].t().contiguous()


def cast(layer: L, dtype: torch.dtype) -> L:
    """The same layer with all its tensors of one dtype."""
    tensors = {k: v.to(dtype) for k, v in layer._asdict().items() if isinstance(v, Tensor)}
    return layer._replace(**tensors)


def flat(values: Tensor) -> Tensor:
    """`(B, ...) -> (B, n)`; not even a view where it is that already, which small networks feel."""
    return values if values.ndim == 2 else values.flatten(start_dim=1)


def gated(value: Tensor, gate: Tensor | None) -> Tensor:
    """`value * gate`, where no gate is a gate of ones."""
    return value if gate is None else value * gate


def gated_(value: Tensor, gate: Tensor | None) -> Tensor:
    """The same in place."""
    return value if gate is None else value.mul_(gate)


def selected(layer: Any, index: Tensor, each: bool) -> Any:
    """Gates, and the bias where `each` example has its own, for some of the examples."""
    parts = {"gate_y": layer.gate_y, "gate_z": layer.gate_z, "bias": layer.bias if each else None}
    return layer._replace(
        **{name: part.index_select(0, index) for name, part in parts.items() if part is not None}
    )


Pull = Callable[[Tensor], Tensor]
"""The transpose of a derivative: from a slope in the result of a function to one in its input."""


class Known(NamedTuple):
    """A function of PyTorch, the numbers that it takes, and the transpose of its derivative.

    The latter is what PyTorch's graph would call: from the slope, the input, the result and the
    numbers, in one pass over memory.
    """

    function: Callable[..., Tensor]
    numbers: tuple[str, ...]
    pull: Callable[..., Tensor]


leaky_back = aten.leaky_relu_backward

KNOWN = (
    Known(same, (), lambda s, z, a: s),
    Known(F.relu, (), lambda s, z, a: aten.threshold_backward(s, a, 0)),
    Known(F.leaky_relu, ("negative_slope",), lambda s, z, a, k: leaky_back(s, z, k, False)),
    Known(F.elu, ("alpha",), lambda s, z, a, k: aten.elu_backward(s, k, 1, 1, False, z)),
    Known(smooth_plus, ("beta",), lambda s, z, a, k: aten.softplus_backward(s, z, k, 40.0)),
)
"""How `icnn.activations` makes them."""


def activated(
    function: Callable[[Tensor], Tensor], z: Tensor, fresh: bool = False
) -> tuple[Tensor, Pull]:
    """An activation, and the way back; what is not known goes by PyTorch's graph.

    A `fresh` input, that nobody else looks at, may be overwritten.
    """
    own = function.function if isinstance(function, Activation) else function
    found = known(own) if isinstance(own, Hashable) else None
    if found is None:
        return by_autograd(function, z)
    pull, numbers = found
    a = z.relu_() if fresh and own is F.relu else own(z)
    return a, lambda slope: pull(slope, z, a, *numbers)


@lru_cache
def known(function: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], list[Any]] | None:
    """The way back through a function, and the numbers that it takes."""
    numbers = function.keywords if isinstance(function, partial) and not function.args else {}
    plain = function.func if isinstance(function, partial) and numbers else function
    ways = [k.pull for k in KNOWN if plain is k.function and tuple(numbers) == k.numbers]
    return (ways[0], list(numbers.values())) if ways else None


def by_autograd(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Pull]:
    """Any function, and the way back by its own small graph."""
    with torch.inference_mode(False), torch.enable_grad():
        start = (z.clone() if z.is_inference() else z.detach()).requires_grad_()
        a = function(start)
    return a.detach(), lambda slope: torch.autograd.grad(a, start, slope)[0]


def times(s: Tensor, weight: Tensor) -> Tensor:
    """`s @ weight`; for few columns transposed, so that vectors are filled with examples."""
    few = weight.shape[1] < LANES and s.is_cpu
    return (weight.t() @ s.t()).t() if few else s @ weight


def unconvolved(maps: Tensor, weight: Tensor, size: tuple[int, int], geometry: Geometry) -> Tensor:
    """The transpose of a convolution: from maps after it to maps of a size before it."""
    stride, padding, dilation = geometry
    batch, few = maps.shape[0], weight.shape[1]
    if few < FEW and maps.is_cpu:
        # Patch by patch, added up where they overlap; some examples at a time, as patches are many.
        matrix, before = weight.flatten(1).t(), maps.new_empty(batch, few, *size)
        some = max(1, PATCHES // (len(matrix) * maps.shape[2:].numel()))
        for part, into in zip(maps.split(some), before.split(some), strict=True):
            patches = torch.bmm(matrix.expand(len(part), -1, -1), part.flatten(2))
            into.copy_(F.fold(patches, size, weight.shape[2:], dilation, padding, stride))
        return before
    before = maps.new_empty(1).expand(batch, few, *size)  # nothing but its shape is read
    mask, none = (True, False, False), (0, 0)
    return aten.convolution_backward(
        maps, before, weight, None, stride, padding, dilation, False, none, 1, mask
    )[0]
