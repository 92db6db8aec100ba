"""Reading an energy: which straight pieces its layers, sums and maxima are made of.

What must look inside does so through `describe(x)`; what is not known here is refused.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor, nn

from icnn.energies.activations import Activation
from icnn.energies.compose import Max, Scale, Score, Sum, output, read
from icnn.energies.conv import POOLS
from icnn.energies.convexify import Elementwise, Mask
from icnn.energies.energy import Apply, Conv, Dense, Geometry, Layer, LayeredEnergy, resample
from icnn.solvers.cutting_planes import Numbers
from icnn.solvers.program import Affine, Program, selection, slopes

Write = Callable[[Program, int], Affine]
"""Adds the units of one example to a program; what comes back is its energy."""

Stage = Callable[[Program, int, Affine, Affine], Affine]
"""The same for a layer, from the layer below and `y`."""


def writer(energy: Any, x: Any, y: Tensor) -> Write:
    """What all examples share is done once, here."""
    match energy:
        case LayeredEnergy():
            stages, z = [], None
            layers = energy.describe(x)
            drops = any(isinstance(layer, Mask) for layer in layers)
            for layer in layers:
                z = layer(z, y) if drops else None  # draws its mask
                stages.append(stage(layer, y))

            def write(program: Program, row: int) -> Affine:
                z = own = program.variables(0, tuple(y.shape[1:]))
                for each in stages:
                    z = each(program, row, z, own)
                return z

        case Sum() | Max():
            parts = [writer(part, x, y) for part in energy.energies]
            is_sum = isinstance(energy, Sum)

            def write(program: Program, row: int) -> Affine:
                first, *others = (part(program, row) for part in parts)
                if not is_sum:
                    return program.maximum([first, *others])
                for other in others:
                    first = first.plus(other)
                return first

        case Scale():
            part, c = writer(energy.energy, x, y), float(read(energy.c))

            def write(program: Program, row: int) -> Affine:
                return part(program, row).times(c)

        case Score():
            slope = -numbers(output("net", energy.net, x)).reshape(y.shape[0], -1)

            def write(program: Program, row: int) -> Affine:
                return Affine(sparse.csr_array(slope[row : row + 1]), np.zeros(1), (1,))

        case _:
            raise ValueError(unknown(energy))
    return write


def stage(layer: Layer, y: Tensor) -> Stage:
    """A layer of the y-path, for programs."""
    match layer:
        case Dense() | Conv():
            return affine_stage(layer, y)
        case Mask():
            masks = numbers(layer.drawn[y.shape[0]]).reshape(y.shape[0], -1)
            return lambda program, row, z, _: z.times(masks[row])
        case Apply():
            return function_stage(layer.function, y)
    raise ValueError(unknown(layer))


def affine_stage(layer: Dense | Conv, y: Tensor) -> Stage:
    """`activation(Wz (z . gate_z) + Wy (y . gate_y) + bias)`, with matrices or convolutions."""
    bias, activation, dtype = numbers(layer.bias), layer.activation, layer.wy.dtype
    gates = [None if gate is None else numbers(gate) for gate in (layer.gate_y, layer.gate_z)]
    weights = [None if weight is None else numbers(weight) for weight in (layer.wy, layer.wz)]
    spread = None
    if isinstance(layer, Dense):
        map_y, map_z = (None if w is None else sparse.csr_array(w) for w in weights)
        shape = layer.wy.shape[:1]
    else:
        map_y, map_z = (
            convolution(w, layer.size, layer.geometry) if w is not None and w.ndim == 4 else None
            for w in weights
        )
        # A vector y has no maps of its own, but those of x are in the bias.
        shape = bias.shape[1:] if bias.ndim == 4 else conv_shape(layer)
        if y.ndim == 2:
            map_y = sparse.csr_array(np.repeat(numbers(layer.wy), shape[1] * shape[2], axis=0))
        elif y.shape[2:] != layer.size:
            spread = per_map(partial(resample, size=layer.size), tuple(y.shape[1:]))
    assert map_y is not None, "every layer sees y"
    each = bias.ndim > len(shape)

    def write(program: Program, row: int, z: Affine, y: Affine) -> Affine:
        passed = y if spread is None else y.then(spread, y.shape)
        total = passed.then(gated(map_y, gates[0], row), shape)
        if map_z is not None:
            total = total.plus(z.then(gated(map_z, gates[1], row), shape))
        own = np.broadcast_to(bias[row] if each else bias, shape).ravel()
        total = total._replace(offset=total.offset + own)
        return program.activate(total, activation, dtype)

    return write


def function_stage(function: Any, y: Tensor) -> Stage:
    """Activations, poolings and flattening."""
    kind = kind_of(function)
    if isinstance(kind, Activation):
        return lambda program, row, z, _: program.activate(z, kind, y.dtype)
    if kind == "flat":
        return lambda program, row, z, _: z._replace(shape=(len(z.offset),))
    pooling = cache(partial(per_map, function))

    def write(program: Program, row: int, z: Affine, _: Affine) -> Affine:
        met = pooling(z.shape)
        after = tuple(function(torch.empty(1, *z.shape, dtype=torch.float64)).shape[1:])
        if kind == "average":
            return z.then(met, after)
        # The members of each window, one after the other; short ones repeat their last.
        count = np.diff(met.indptr)
        members = [met.indices[met.indptr[:-1] + np.minimum(k, count - 1)]
                   for k in range(count.max())]  # fmt: skip
        return program.maximum([z.then(selection(m, len(z.offset)), after) for m in members])

    return write


MAXIMA = (nn.MaxPool2d, nn.AdaptiveMaxPool2d)
AVERAGES = (nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def kind_of(function: Any) -> "Activation | str":
    """What an `Apply` applies: an activation, `"max"`, `"average"` or `"flat"`."""
    own = function.func if isinstance(function, partial) else None
    match function:
        case Activation():
            return function
        case Elementwise():
            return function.activation
        case nn.Flatten():
            return "flat"
    if isinstance(function, MAXIMA) or own is POOLS["max"]:
        return "max"
    if isinstance(function, AVERAGES) or own is POOLS["avg"]:
        return "average"
    raise ValueError(unknown(function))


def check_pieces(energy: Any, x: Any) -> None:
    """Refuse an energy that has other parts than straight pieces, or that hides them."""
    match energy:
        case LayeredEnergy():
            # Without examples a description costs little, and leaves batch statistics alone.
            for layer in energy.describe(x[:0] if isinstance(x, Tensor) else x):
                kind = layer.activation if isinstance(layer, Dense | Conv) else None
                kind = kind_of(layer.function) if isinstance(layer, Apply) else kind
                if isinstance(kind, Activation):
                    slopes(kind, torch.float64)
                elif kind is None and not isinstance(layer, Mask):
                    raise ValueError(unknown(layer))
        case Sum() | Max():
            for part in energy.energies:
                check_pieces(part, x)
        case Scale():
            check_pieces(energy.energy, x)
        case Score():
            pass
        case _:
            raise ValueError(unknown(energy))


def unknown(part: Any) -> str:
    """What is wrong with a part of an energy."""
    name = getattr(part, "__name__", repr(part).splitlines()[0].removesuffix("("))
    return (
        "`energy` must consist of networks with piecewise-linear activations, Score, Sum, Max and "
        f"Scale for LinearProgram, which looks inside, got {name}: use icnn.Bundle()"
    )


def conv_shape(layer: Conv) -> tuple[int, ...]:
    """Of the maps that a convolution makes."""
    pairs = zip(layer.size, layer.wy.shape[2:], *layer.geometry, strict=True)
    return layer.wy.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in pairs)


def convolution(weight: Numbers, size: tuple[int, int], geometry: Geometry) -> sparse.csr_array:
    """A convolution as a matrix, from channels and places to channels and places."""
    after, channels, *_ = weight.shape
    stride, padding, dilation = geometry
    # Which number below each weight meets at each place: (weights, places), -1 for padding.
    index = torch.arange(1, channels * size[0] * size[1] + 1, dtype=torch.float64)
    met = F.unfold(index.reshape(1, channels, *size), weight.shape[2:], dilation, padding, stride)
    column = met[0].numpy().astype(np.int64) - 1
    shape = (after, *column.shape)
    row = np.arange(after * shape[2]).reshape(after, 1, shape[2])
    row, column, value = (
        np.broadcast_to(part, shape) for part in (row, column, weight.reshape(after, -1, 1))
    )
    real = column >= 0
    matrix = (value[real], (row[real], column[real]))
    return sparse.csr_array(matrix, shape=(after * shape[2], len(index)))


def per_map(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> sparse.csr_array:
    """How a pooling or resampling acts on all maps, from what it makes of single bright pixels.

    That is the matrix of an average, and says of a maximum which pixels each window holds.
    """
    channels, height, width = shape
    pixels = torch.arange(height * width)
    blocks = []
    for some in pixels.split(max(1, 2**22 // len(pixels))):
        bright = F.one_hot(some, len(pixels)).double().reshape(-1, 1, height, width)
        blocks.append(sparse.csr_array(function(bright).flatten(start_dim=1).numpy()))
    one = sparse.vstack(blocks, format="csr").T
    return sparse.csr_array(sparse.kron(sparse.eye_array(channels), one, format="csr"))


def gated(matrix: sparse.csr_array, gate: Numbers | None, row: int) -> sparse.csr_array:
    """`matrix @ diag(gate)` for one example, where no gate is a gate of ones."""
    if gate is None:
        return matrix
    scaled = matrix.data * gate[row].ravel()[matrix.indices]
    found = sparse.csr_array((scaled, matrix.indices, matrix.indptr), shape=matrix.shape, copy=True)
    found.eliminate_zeros()
    return found


def numbers(tensor: Tensor) -> Numbers:
    """For scipy."""
    return tensor.detach().double().cpu().numpy()
