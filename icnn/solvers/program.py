"""An energy of straight pieces as a linear program, for one example."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import OptimizeResult

from icnn.energies.activations import Activation
from icnn.solvers.cutting_planes import Numbers, Region, solved


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


def selection(columns: Any, width: int, rows: int | None = None) -> sparse.csr_array:
    """A matrix that picks these columns, one for each row; the rows beyond them pick nothing."""
    count = len(columns)
    shape = (count if rows is None else rows, width)
    return sparse.csr_array((np.ones(count), (np.arange(count), columns)), shape=shape)


def widened(matrix: sparse.csr_array, width: int) -> sparse.csr_array:
    """With columns of zeros after its own."""
    parts = (matrix.data, matrix.indices, matrix.indptr)
    return sparse.csr_array(parts, shape=(len(matrix.indptr) - 1, width))
