# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
"""A bundle step of a whole batch on a CPU: all that is not the energy, in one compiled call.

Everything that a step reads and writes lies in tensors that are made once. A table of their
addresses is what a call takes: the price of a step in Python is that of one call, whatever the
number of tensors. `Record.look`, `Cuts.add` and `Cuts.minimise` say the same in plain PyTorch.
"""

import ctypes
import os
import zlib
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from icnn.kernels.dual import DUAL, END, STEP, TOL, Model, slotted
from icnn.kernels.numba_dual import TILE
from icnn.kernels.numba_interior import maximise
from icnn.kernels.numba_points import SUMS, entropy_at, jit, rounded

RUNNING, CONVERGED, STALLED, NONFINITE, NONCONVEX = -1, 0, 2, 3, 4
ROUGHEST = 1e-2  # of a dual gap, relative
# Whether a step led to another point. If not, no more is to be learned, unless it was not solved to
# the end, as the next one is then.
MOVED, ROUGHLY, EXACT = 0, 1, 2

# What the table holds: sizes, then addresses.
NAMES = (
    "mode", "step", "count", "batch", "n", "slots", "group", "rows", "tilted", "learning",
    "parts", "taken", "numbers", "slopes", "offsets", "lam", "idle", "points", "y", "energy",
    "slope", "answer", "value", "lower", "bound", "best", "rounding", "bend", "given", "same",
    "steps", "status", "gaps", "low", "width", "bottom", "weight", "entropy", "tilt", "near", "out",
)  # fmt: skip
PLACES = {name: place for place, name in enumerate(NAMES)}
(MODE, STEP_, COUNT, BATCH, N, SLOTS, GROUP, ROWS, TILTED, LEARNING, PARTS, TAKEN, NUMBERS, SLOPES,
 OFFSETS, LAM, IDLE, POINTS, Y, ENERGY, SLOPE, ANSWER, VALUE, LOWER, BOUND, BEST, ROUNDING, BEND,
 GIVEN, SAME, STEPS, STATUS, GAPS, LOW, WIDTH, BOTTOM, WEIGHT, ENTROPY, TILT, NEAR,
 OUT) = range(41)  # fmt: skip
SIZE = len(NAMES)


@intrinsic
def pointer(context, address):
    """An address as a pointer."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


@intrinsic
def next_part(context, table):
    """Count one up, in one go for all threads; what it was before."""

    def code(context, builder, signature, arguments):
        place = builder.gep(arguments[0], [ir.Constant(ir.IntType(64), TAKEN)])
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), code


@jit(fastmath=SUMS)
def relative(slope, offset, v):
    """A cut at the point `v`."""
    for j in range(len(v)):
        offset += slope[j] * v[j]
    return offset


@jit(fastmath=SUMS)
def meet(y, slope):
    """`slope . y`, the sum of its absolute terms, and whether all is finite."""
    product = size = 0.0
    finite = True
    for j in range(len(y)):
        term = np.float64(slope[j]) * np.float64(y[j])
        product += term
        size += abs(term)
        finite = finite and abs(slope[j]) < np.inf
    return product, size, finite


@jit()
def look(step, last, size, finite, same, y, answer, record, tol, eps):
    """`Record.look` for one example. While it runs, `answer` is the best point so far."""
    energy, bend, given, lower, bound, best, rounding = record
    f = energy - bend
    noise = 32 * eps * (abs(f) + size)
    rounding = max(rounding, noise)
    again = same == EXACT and step > 1
    if finite:
        lower = max(lower, f if given else bound)
        if f < best:
            best = f
            for j in range(len(y)):
                answer[j] = y[j]
    broken = finite and best < lower - rounding
    if finite and (broken or again):
        f = best
    gap, status = f - lower, RUNNING
    if not finite:
        status = NONFINITE
    elif broken:
        status = NONCONVEX
    elif gap <= tol * max(1.0, abs(f)):
        status = CONVERGED
    elif gap <= noise or again:
        status = STALLED
    if finite and (status != RUNNING or last) and not (broken or again):
        for j in range(len(y)):
            answer[j] = y[j]
    return f, lower, best, rounding, status


@jit()
def work(table, part, dtype):
    """A step for a part of the examples."""
    t = carray(table, SIZE)
    mode, step, k, batch, n, slots = t[MODE], t[STEP_], t[COUNT], t[BATCH], t[N], t[SLOTS]
    m, rows, parts = t[GROUP], t[ROWS], t[PARTS]
    numbers = carray(pointer(t[NUMBERS]), 4, np.float64)
    e, tol, inexact, eps = numbers[0], numbers[1], numbers[2], numbers[3]
    slopes = carray(pointer(t[SLOPES]), (batch, slots, n), dtype)
    offsets = carray(pointer(t[OFFSETS]), (batch, slots), np.float64)
    lam = carray(pointer(t[LAM]), (batch, slots), np.float64)
    idle = carray(pointer(t[IDLE]), (batch, slots), np.float64)
    points = carray(pointer(t[POINTS]), (batch, slots, n), dtype)
    y = carray(pointer(t[Y]), (batch, n), dtype)
    energy = carray(pointer(t[ENERGY]), batch, np.float64)
    slope = carray(pointer(t[SLOPE]), (batch, n), dtype)
    answer = carray(pointer(t[ANSWER]), (batch, n), dtype)
    value = carray(pointer(t[VALUE]), batch, np.float64)
    lower = carray(pointer(t[LOWER]), batch, np.float64)
    bound = carray(pointer(t[BOUND]), batch, np.float64)
    best = carray(pointer(t[BEST]), batch, np.float64)
    rounding = carray(pointer(t[ROUNDING]), batch, np.float64)
    bend = carray(pointer(t[BEND]), batch, np.float64)
    given = carray(pointer(t[GIVEN]), batch, np.bool_)
    same = carray(pointer(t[SAME]), batch, np.int8)
    taken = carray(pointer(t[STEPS]), batch, np.int64)
    status = carray(pointer(t[STATUS]), batch, np.int64)
    gaps = carray(pointer(t[GAPS]), batch, np.float64)
    low = carray(pointer(t[LOW]), (rows, n), np.float64)
    width = carray(pointer(t[WIDTH]), (rows, n), np.float64)
    bottoms = carray(pointer(t[BOTTOM]), (rows if m < 0 else 0, n), np.float64)
    weights = carray(pointer(t[WEIGHT]), (rows if m < 0 else 0, n), np.float64)
    entropy = carray(pointer(t[ENTROPY]), batch, np.float64)
    tilts = carray(pointer(t[TILT]), (batch if t[TILTED] else 0, n), np.float64)
    near = carray(pointer(t[NEAR]), (batch, n), np.float64)
    out = carray(pointer(t[OUT]), (batch, n), np.float64)

    # Scratch: three states of a search, and what one step of it needs. Numba counts references to
    # arrays that it makes; views by address are free of that, which shows where n is small.
    shares, points_, squares = np.empty((14, k)), np.empty((12, n)), np.empty((2, k, k))
    tiles, whole = np.empty((k + 1, TILE)), np.empty(k + n, np.int64)
    ks = carray(pointer(shares.ctypes.data), (14, k), np.float64)
    ns = carray(pointer(points_.ctypes.data), (12, n), np.float64)
    kk = carray(pointer(squares.ctypes.data), (2, k, k), np.float64)
    tile = carray(pointer(tiles.ctypes.data), (k + 1, TILE), np.float64)
    ints = carray(pointer(whole.ctypes.data), k + n, np.int64)
    here = (ks[8], ns[0], ns[1], ns[2], ks[9])
    there = (ks[10], ns[3], ns[4], ns[5], ks[11])
    other = (ks[12], ns[6], ns[7], ns[11])
    scratch = (ns[8], ints[k:], tile, kk[0], kk[1], ks[:8], ints[:k], ns[9])
    d, v, none = ks[13], ns[10], ks[0, :0]

    # Neighbours in one thread: others would share the lines of its cache.
    for b in range(part * batch // parts, (part + 1) * batch // parts):
        if status[b] == RUNNING:
            going, fine, slot = True, tol, k - 1
            row = b if rows > 1 else 0
            bottom, weight = (bottoms[row], weights[row]) if m < 0 else (none, none)
            own = (m, low[row], width[row], bottom, weight)
            if mode != DUAL:
                if step == 0:
                    bend[b] = e * entropy_at(y[b], own, n)
                product, size, finite = meet(y[b], slope[b])
                finite = finite and abs(energy[b]) < np.inf
                before = (
                    energy[b], bend[b], given[b], lower[b], bound[b], best[b], rounding[b],
                )  # fmt: skip
                value[b], lower[b], best[b], rounding[b], status[b] = look(
                    step, mode == END, size, finite, same[b], y[b], answer[b], before, tol, eps
                )
                taken[b] = step
                going = mode == STEP and status[b] == RUNNING
                if going:
                    if step >= slots:
                        # The one that has been idle for longest; else the one of the least share.
                        slot = np.int64(0)
                        for i in range(slots):
                            if idle[b, i] - lam[b, i] > idle[b, slot] - lam[b, slot]:
                                slot = np.int64(i)
                    # Loops: Numba takes longer to see that slices fit.
                    for j in range(n):
                        slopes[b, slot, j] = slope[b, j]
                    offsets[b, slot] = energy[b] - product - 16 * eps * (abs(energy[b]) + size)
                    if t[LEARNING]:
                        for j in range(n):
                            points[b, slot, j] = y[b, j]
                    total = lam[b, slot] = idle[b, slot] = 0.0
                    for i in range(k):
                        total += lam[b, i]
                    if total > 0:
                        for i in range(k):
                            lam[b, i] /= total
                    else:
                        lam[b, slot] = 1.0
                    # No finer than what is left to gain is worth.
                    rest = (value[b] - lower[b]) / (1 + abs(value[b]) + size)
                    fine = max(TOL, 0.0 if same[b] else min(inexact * rest, ROUGHEST))
            if going:
                level = -np.inf
                for j in range(n):
                    v[j] = near[b, j] if mode == DUAL else y[b, j]
                # All cuts from the last point, and the highest of them there at zero.
                for i in range(k):
                    d[i] = relative(slopes[b, i], offsets[b, i], v)
                    level = max(level, d[i])
                    here[0][i] = lam[b, i]
                for i in range(k):
                    d[i] -= level
                found, bent = maximise(
                    slopes[b], k, n, d, v, tilts[b] if t[TILTED] else none,
                    entropy[b] if mode == DUAL else e,
                    own, fine, bend[b] if mode == STEP and 0 < step < slots else np.nan,
                    here, there, other, scratch,
                )  # fmt: skip
                for i in range(k):
                    lam[b, i] = here[0][i]
                if mode == DUAL:
                    value[b] = found + level
                    out[b] = here[2]
                else:
                    bound[b] = max(bound[b], found + level)
                    for i in range(k):
                        idle[b, i] = 0.0 if lam[b, i] > 0 else idle[b, i] + 1
                    unmoved = True
                    for j in range(n):
                        before_j = y[b, j]
                        y[b, j] = here[2][j]
                        unmoved = unmoved and y[b, j] == before_j
                    bend[b], same[b] = (
                        bent + rounded(here[1], here[2], here[3], y[b], own, e, n),
                        (EXACT if fine <= TOL else ROUGHLY) if unmoved else MOVED,
                    )
        if mode != DUAL and step:
            gap = value[b] - lower[b]
            gaps[b] = gap if gap == gap else np.inf
    # Until here they must live.
    shares[0, 0] = points_[0, 0] = squares[0, 0, 0] = tiles[0, 0] = whole[0] = 0


SIGNATURE = types.void(types.CPointer(types.int64))
C_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
SHARES = 4  # parts for each thread: who is done sooner takes another
LITTLE, EACH = 4096, 64  # numbers that one thread is done with before another has begun
HOME = os.getpid()


@cache
def entry(dtype):
    """`work` for energies of a dtype: compiled once, and kept on disk."""
    kind, folder = DTYPES[dtype], Path(__file__).parent
    # Numba keeps what it compiled until this file changes, or a number that the function holds.
    sources = (file.read_bytes() for file in sorted(folder.glob("numba_*.py")))
    version = zlib.crc32(b"".join(sources))

    def function(table):
        part = next_part(table)
        while part < carray(table, SIZE)[PARTS] and version >= 0:
            work(table, part, kind)
            part = next_part(table)

    make = partial(numba.cfunc, SIGNATURE, error_model="numpy")
    try:
        compiled = make(cache=True)(function)
    except RuntimeError:  # neither the package nor a home can be written to
        compiled = make()(function)
    return compiled.address, C_TYPE(compiled.address)


@cache
def team() -> Any:
    """What starts a function on all of PyTorch's own threads, where they are those of OpenMP.

    Numba's threads would be a second pool, with another number of them and other rules.
    """
    try:
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):  # not on Linux: one thread will do
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return start


class Table:
    """The table of a search, and the tensors that it points to.

    Args:
        slopes: `(B, slots, n)`, in the energy's dtype.
        fields: Sizes and tensors by name, all of them on the CPU and contiguous.
    """

    def __init__(self, slopes: Tensor, **fields: Tensor | int):
        self.numbers = np.zeros(SIZE, np.int64)
        self.address, self.function = entry(slopes.dtype)
        self.kept: dict[str, Tensor] = {}
        batch, slots, n = slopes.shape
        self.set(**{"slopes": slopes, "batch": batch, "slots": slots, "n": n, **fields})

    def set(self, **fields: Tensor | int) -> None:
        """Point to other tensors."""
        for name, field in fields.items():
            if isinstance(field, Tensor):
                # Slopes may be the first of more slots.
                assert name == "slopes" or field.is_contiguous(), f"{name} is read by its address"
                self.kept[name] = field
                field = field.data_ptr()
            self.numbers[PLACES[name]] = field

    def __call__(self) -> None:
        """Do the work that the table describes."""
        batch, n, count = self.numbers[BATCH], self.numbers[N], self.numbers[COUNT]
        # A forked process has none of its parent's threads.
        little = batch * (n * count + EACH) < LITTLE or os.getpid() != HOME
        threads = 1 if little else torch.get_num_threads()
        self.numbers[PARTS] = 1 if threads == 1 else min(batch, SHARES * threads)
        self.numbers[TAKEN] = 0
        if threads > 1 and team() is not None:
            team()(self.address, self.numbers.ctypes.data, threads, 0)
        else:
            self.function(self.numbers.ctypes.data)


def dual(model: Model, start: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`icnn.kernels.dual.solve`."""
    count = start.shape[1]
    slopes, offsets, lam, near = slotted(model, start)
    y = torch.empty_like(near)
    ground = model.domain.ground(start.new_empty(model.shape))
    table = Table(
        slopes,
        mode=DUAL,
        slots=lam.shape[1],
        count=count,
        numbers=start.new_tensor([0.0, TOL, 0.0, 0.0]),
        offsets=offsets,
        lam=lam,
        status=torch.where(active, RUNNING, CONVERGED),
        entropy=model.entropy.contiguous(),
        near=near,
        out=y,
        value=start.new_empty(len(start)),
        rows=len(ground.low),
        **{name: part for name, part in ground._asdict().items() if part is not None},
    )
    if model.tilt is not None:
        table.set(tilt=model.tilt.contiguous(), tilted=1)
    table()
    return lam[:, :count], y.reshape(model.shape), table.kept["value"]
