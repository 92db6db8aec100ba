"""Exact inference by a linear program: supplement B of the paper, with HiGHS.

An energy made of straight pieces is a tower of maxima of affine functions, in which every unit
rises with the units below it. Minimising it is the linear program in which each unit is a variable
above its pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from scipy.optimize import OptimizeResult
from torch import Tensor, nn

from icnn.energies.activations import Activation
from icnn.energies.compose import Max, Scale, Score, Sum, output, read
from icnn.energies.conv import POOLS
from icnn.energies.convexify import Elementwise, Mask
from icnn.energies.energy import Apply, Conv, Dense, Geometry, Layer, LayeredEnergy, resample
from icnn.solvers.cutting_planes import Numbers, Region, regions_of, solved
from icnn.solvers.problem import Problem, Record, Tangent
from icnn.solvers.solution import Status

TOL = 1e-7


@dataclass(frozen=True)
class LinearProgram:
    """The exact minimiser of a piecewise-linear energy, one linear program for each example.

    For `entropy == 0`, on a box or the simplex, and networks with the activations relu, leaky_relu
    and identity, their sums, maxima and multiples. It looks inside the energy; a program has as
    many variables as the network has units, so that it is for small networks and for checks.
    """

    def check(self, problem: Problem) -> None:
        """Refuse what this solver is not for."""
        if problem.entropy:
            raise ValueError(
                f"`entropy` must be 0 for LinearProgram, got {problem.entropy:g}: use "
                "icnn.BundleEntropy()"
            )
        regions_of(problem)
        check_pieces(problem.source, problem.x)

    def solve(self, problem: Problem) -> Record:
        """One program for each example that has finite numbers."""
        record, start, regions = Record(problem, TOL), problem.start, regions_of(problem)
        # Dropout in front of y is drawn when the energy is first called: here, and below again.
        with torch.random.fork_rng([start.device] if start.is_cuda else []):
            write = writer(problem.source, problem.x, start)
        tangent = problem.tangent(start)
        record.look(start, tangent, record.lower, 0)
        y, slope = start.flatten(start_dim=1).double(), tangent.slope.clone()
        offset = torch.full_like(tangent.value, -torch.inf)
        broken = torch.zeros_like(record.active)
        size = tangent.value.abs() + (slope * y).abs().sum(dim=1)
        for row in record.active.nonzero().flatten().tolist():
            program = Program(y.shape[1])
            energy = write(program, row)
            if not program.finite(energy):
                broken[row] = True
                continue
            own = program.evaluate(energy, y[row].cpu().numpy())
            slack = torch.finfo(start.dtype).eps ** 0.5 * (1 + float(size[row]))
            if not abs(own - float(tangent.value[row])) <= slack:
                raise ValueError(
                    "`energy` must be what its layers say for LinearProgram, got "
                    f"{float(tangent.value[row]):g} instead of {own:g} in example {row}: does it "
                    "draw at random (then call energy.eval()), or define its own `at` or `forward`?"
                )
            found = program.minimise(energy, regions[row], row)
            cut = program.minorant(energy, found)
            y[row], slope[row], offset[row] = (
                torch.from_numpy(part) for part in (found.x[: program.n], *cut)
            )
        y = problem.domain.project(y.reshape(start.shape)).to(start.dtype)
        value = problem.evaluate(y).masked_fill(broken, torch.nan)
        record.look(y, Tangent(value, slope), problem.bound(slope, offset), 1)
        # There is no second step: what is left of a gap is a matter of rounding.
        record.status = torch.where(record.active, int(Status.STALLED), record.status)
        return record


class Affine(NamedTuple):
    """`matrix @ v + offset`, where `v` is `y` and then the units of a program as far as needed."""

    matrix: sparse.csr_array
    offset: Numbers
    shape: tuple[int, ...]  # in which the values stand in the network

    @property
    def width(self) -> int:
        """How many variables it may see."""
        shape: Any = self.matrix.shape
        return shape[1]

    def then(self, matrix: sparse.csr_array, shape: tuple[int, ...]) -> "Affine":
        """A linear map of it."""
        return Affine(matrix @ self.matrix, matrix @ self.offset, shape)

    def plus(self, other: "Affine") -> "Affine":
        width = max(self.width, other.width)
        total = widened(self.matrix, width) + widened(other.matrix, width)
        return Affine(total, self.offset + other.offset, self.shape)

    def times(self, factor: Any) -> "Affine":
        """Each value times its factor."""
        factor = np.broadcast_to(factor, self.offset.shape)
        return self.then(sparse.csr_array(sparse.diags_array(factor)), self.shape)


class Units(NamedTuple):
    """Units `max_k pieces[k]`, which are the variables from `first` on."""

    first: int
    pieces: Sequence[Affine]

    @property
    def place(self) -> slice:
        return slice(self.first, self.first + len(self.pieces[0].offset))


class Program:
    """One example's energy as units above their pieces; the first `n` variables are `y`."""

    def __init__(self, n: int):
        self.n = self.width = n
        self.units: list[Units] = []

    def variables(self, first: int, shape: tuple[int, ...]) -> Affine:
        """Some of the variables as an expression."""
        m = int(np.prod(shape))
        return Affine(selection(first + np.arange(m), first + m), np.zeros(m), shape)

    def maximum(self, pieces: Sequence[Affine]) -> Affine:
        """New units, the larger ones of the pieces' values."""
        for piece in pieces:
            self.check_rising(piece)
        units = Units(self.width, pieces)
        self.units.append(units)
        self.width = units.place.stop
        return self.variables(units.first, pieces[0].shape)

    def activate(self, value: Affine, activation: Activation, dtype: torch.dtype) -> Affine:
        """`max(low * value, high * value)`."""
        low, high = slopes(activation, dtype)
        if low == high:
            return value.times(high)
        if low:  # units of their own for the value, so that its matrix is there only once
            value = self.maximum([value])
        nothing = Affine(selection([], 0, len(value.offset)), 0 * value.offset, value.shape)
        return self.maximum([value.times(high), value.times(low) if low else nothing])

    def check_rising(self, value: Affine) -> None:
        """A unit that falls where a unit below it rises is not convex, nor above its pieces."""
        rise = value.matrix.data[value.matrix.indices >= self.n]
        if (rise < 0).any():
            raise ValueError(
                "`energy` must have non-negative weights between its layers for LinearProgram, or "
                f"it is not convex (positivity=None?), got {rise.min():g}"
            )

    def finite(self, energy: Affine) -> bool:
        """Whether all numbers are."""
        parts = [energy, *(piece for units in self.units for piece in units.pieces)]
        return all(np.isfinite(p.matrix.data).all() and np.isfinite(p.offset).all() for p in parts)

    def evaluate(self, energy: Affine, y: Numbers) -> float:
        """The energy at `y`, by what is written here."""
        v = np.concatenate([y, np.zeros(self.width - self.n)])
        for units in self.units:
            values = [p.matrix @ v[: p.width] + p.offset for p in units.pieces]
            v[units.place] = np.max(values, axis=0)
        return float((energy.matrix @ v[: energy.width] + energy.offset)[0])

    def minimise(self, energy: Affine, region: Region, row: int) -> OptimizeResult:
        """`min energy` subject to `unit >= piece` for all pieces of all units, `y` in its region.

        A piece that is a number is a bound of its units. The precision of HiGHS is absolute: where
        it cannot be had, units are measured in their `sizes`.
        """
        self.check_rising(energy)
        found = self.minimise_in(np.ones(self.width), energy, region)
        if found.status != 0:
            sizes = self.sizes(np.maximum(abs(region.low), abs(region.high)))
            found = self.minimise_in(sizes, energy, region)
        return solved(found, row)

    def minimise_in(self, sizes: Numbers, energy: Affine, region: Region) -> OptimizeResult:
        """The same with variables `v / sizes`."""
        matrix, limit = [sparse.csr_array((0, self.width))], [np.zeros(0)]
        for units in self.units:
            own = selection(np.arange(self.width)[units.place], self.width)
            inverse = sparse.diags_array(1 / sizes[units.place])
            for piece in units.pieces:
                if piece.matrix.nnz:
                    scaled = inverse @ piece.matrix @ sparse.diags_array(sizes[: piece.width])
                    matrix.append(widened(scaled, self.width) - own)
                    limit.append(-piece.offset / sizes[units.place])
        above, below = sparse.vstack(matrix, format="csr"), np.concatenate(limit)
        cost = widened(energy.matrix, self.width).toarray()[0] * sizes
        cost = cost / (abs(cost).max() or 1)
        return region.minimise(cost, above, below, (self.floor() / sizes)[self.n :])

    def sizes(self, y: Numbers) -> Numbers:
        """How large the units may be where `|y|` is at most so; `y` itself counts as 1."""
        sizes = np.append(y, np.zeros(self.width - self.n))
        for units in self.units:
            for piece in units.pieces:
                square = piece.matrix.power(2) @ sizes[: piece.width] ** 2 + piece.offset**2
                sizes[units.place] = np.maximum(sizes[units.place], np.sqrt(square))
        sizes[: self.n] = 1
        return np.where(sizes > 0, sizes, 1.0)

    def floor(self) -> Numbers:
        """The largest number among the pieces of each unit."""
        floor = np.full(self.width, -np.inf)
        for units in self.units:
            for piece in units.pieces:
                if not piece.matrix.nnz:
                    floor[units.place] = np.maximum(floor[units.place], piece.offset)
        return floor

    def minorant(self, energy: Affine, found: OptimizeResult) -> tuple[Numbers, Numbers]:
        """A slope and an offset with `offset + slope . y <= energy(y)` for all y.

        Any shares `p >= 0` of its pieces that sum to one bound a unit from below, and all weights
        of units are non-negative: from the top down, each unit's weight goes to its pieces. The
        multipliers of the program are the shares that are best; what HiGHS leaves of rounding in
        them makes the bound less tight and not less true.
        """
        weight = np.zeros(self.width)
        weight[: energy.width] = energy.matrix.toarray()[0]
        offset = energy.offset.sum()
        multipliers = np.maximum(-found.ineqlin.marginals, 0)
        bounds, floor = np.maximum(found.lower.marginals, 0), self.floor()
        stop = len(multipliers)
        for units in reversed(self.units):
            shares = []
            for piece in reversed(units.pieces):
                if piece.matrix.nnz:
                    stop, end = stop - len(piece.offset), stop
                    shares.append(multipliers[stop:end])
                else:
                    tight = piece.offset == floor[units.place]
                    shares.append(np.where(tight, bounds[units.place], 0.0))
            total = np.sum(shares, axis=0)
            for piece, share in zip(reversed(units.pieces), shares, strict=True):
                even = np.full_like(total, 1 / len(shares))
                part = np.divide(share, total, out=even, where=total > 0) * weight[units.place]
                weight[: piece.width] += piece.matrix.T @ part
                offset += piece.offset @ part
        return weight[: self.n], np.asarray(offset)


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


def slopes(activation: Activation, dtype: torch.dtype) -> tuple[float, float]:
    """Of an activation with a kink at zero, below and above it."""
    points = torch.tensor([-1.0, 1.0, 0.0, -1e-3, 1e-3, -1e3, 1e3], dtype=dtype)
    values = activation(points).double()
    low, high = -float(values[0]), float(values[1])
    straight = torch.maximum(low * points.double(), high * points.double())
    if not activation.piecewise_linear or not torch.allclose(values, straight, rtol=1e-5):
        raise ValueError(
            "`energy` must have activations with one kink, at zero, for LinearProgram (relu, "
            f"leaky_relu, identity), got {activation.name}: use icnn.Bundle()"
        )
    return low, high


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


def selection(columns: Any, width: int, rows: int | None = None) -> sparse.csr_array:
    """A matrix that picks these columns, one for each row; the rows beyond them pick nothing."""
    count = len(columns)
    shape = (count if rows is None else rows, width)
    return sparse.csr_array((np.ones(count), (np.arange(count), columns)), shape=shape)


def widened(matrix: sparse.csr_array, width: int) -> sparse.csr_array:
    """With columns of zeros after its own."""
    parts = (matrix.data, matrix.indices, matrix.indptr)
    return sparse.csr_array(parts, shape=(len(matrix.indptr) - 1, width))


def numbers(tensor: Tensor) -> Numbers:
    """For scipy."""
    return tensor.detach().double().cpu().numpy()
