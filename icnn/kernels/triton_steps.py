# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A bundle step of a whole batch on a GPU: all that is not the energy, in three launches.

The first takes note of the energy and its slope at a point, one program an example; the others are
the dual, which finds the next point. What `icnn.kernels.numba_steps` does after its dual is done
here at the beginning of the next step. `Record.look`, `Cuts.add` and `Cuts.minimise` say the same
in plain PyTorch. Nothing waits for the host, and the host for nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from icnn.kernels import triton_dual
from icnn.kernels.dual import END, TOL, Model, slotted
from icnn.kernels.ground import Ground
from icnn.kernels.triton_launch import submit

WIDEST = 1024  # coordinates that a program takes at once

TINY = triton_dual.TINY
RUNNING, CONVERGED = tl.constexpr(-1), tl.constexpr(0)
STALLED, NONFINITE, NONCONVEX = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
FINEST, ROUGHEST = tl.constexpr(TOL), tl.constexpr(1e-2)  # of a dual gap, relative

# What the first launch reads and writes, in the order of its arguments.
NAMES = (
    "numbers", "slopes", "offsets", "lam", "idle", "points", "y", "energy", "slope", "answer",
    "value", "lower", "bound", "best", "rounding", "given", "steps", "status", "low", "width",
    "found", "near", "active", "fine", "left",
)  # fmt: skip


@triton.jit
def entropy_of(y, lows, widths, j, used, n, KIND: tl.constexpr):
    """The terms of `H(y)`; a coordinate that is given has none, but in a bowl."""
    low, width = tl.load(lows + j, used, 0.0), tl.load(widths + j, used, 0.0)
    if KIND < 0:
        away = y - tl.load(lows + n + j, used, 0.0)
        terms = 0.5 * tl.load(widths + n + j, used, 0.0) * away * away
    elif KIND == 0:
        u = (y - low) / tl.where(width > 0, width, 1.0)
        u = tl.minimum(tl.maximum(u, 0.0), 1.0)
        v = tl.maximum(1 - u, TINY)
        u = tl.maximum(u, TINY)
        terms = u * tl.log(u) + v * tl.log(v)
    else:
        u = tl.maximum(y, TINY)
        terms = u * tl.log(u)
    return tl.where(used & ((width > 0) | (KIND < 0)), -terms, 0.0)


@triton.jit(do_not_specialize=["step", "count", "slots", "gaps"])
def note(
    step, count, slots, gaps,
    numbers, slopes, offsets, lams, idles, points, ys, energies, gradients, answers,
    values, lowers, bounds, bests, roundings, givens, taken, statuses, lows, widths,
    founds, nears, actives, fines, left, n, row,
    ROWS: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, LEARNING: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """`Record.look` and `Cuts.add` for one example. While it runs, `answer` is the best so far."""
    b = tl.program_id(0).to(tl.int64)
    value, lower = tl.load(values + b), tl.load(lowers + b)
    if tl.load(statuses + b) != RUNNING:
        gap = value - lower
        tl.store(gaps + b, tl.where(gap == gap, gap, float("inf")), step > 0)
        tl.store(actives + b, False)
        return
    e, tol = tl.load(numbers), tl.load(numbers + 1)
    inexact, eps = tl.load(numbers + 2), tl.load(numbers + 3)
    energy, given = tl.load(energies + b), tl.load(givens + b)
    best, rounding = tl.load(bests + b), tl.load(roundings + b)
    # D(lam) is a bound for any lam: the best one holds.
    bound = tl.maximum(tl.load(bounds + b), tl.load(founds + b))

    ys, gradients, nears, answers = ys + b * n, gradients + b * n, nears + b * n, answers + b * n
    products, sizes = tl.zeros((TILE,), tl.float64), tl.zeros((TILE,), tl.float64)
    bends = tl.zeros((TILE,), tl.float64)
    bad, moved = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for start in range(0, n, TILE):
        j = start + tl.arange(0, TILE)
        used = j < n
        own, slope = tl.load(ys + j, used, 0.0), tl.load(gradients + j, used, 0.0)
        y, g = own.to(tl.float64), slope.to(tl.float64)
        products += g * y
        sizes += tl.abs(g * y)
        bad += tl.where(tl.abs(g) < float("inf"), 0, 1)
        moved += tl.where(own == tl.load(nears + j, used, 0.0), 0, 1)
        bends += entropy_of(y, lows + b * row, widths + b * row, j, used, n, KIND)
    product, size, bend = tl.sum(products), tl.sum(sizes), e * tl.sum(bends)
    finite = (tl.sum(bad) == 0) & (tl.abs(energy) < float("inf"))
    # A point that should be new and is not has the same tangent: no more is to be learned, unless
    # it was found by a step that was not solved to the end, as the next one is then.
    same = (step > 1) & (tl.sum(moved) == 0)
    exact = tl.load(fines + b) <= FINEST
    again = same & exact

    f = energy - bend
    noise = 32 * eps * (tl.abs(f) + size)
    rounding = tl.maximum(rounding, noise)
    lower = tl.where(finite, tl.maximum(lower, tl.where(given, f, bound)), lower)
    better = finite & (f < best)
    best = tl.where(better, f, best)
    # A point of any step below a bound of any step is a proof against convexity.
    broken = finite & (best < lower - rounding)
    back = broken | again
    f = tl.where(back & finite, best, f)
    gap = f - lower
    status = tl.where((gap <= noise) | again, STALLED, RUNNING)
    status = tl.where(gap <= tol * tl.maximum(tl.abs(f), 1.0), CONVERGED, status)
    status = tl.where(broken, NONCONVEX, status)
    status = tl.where(finite, status, NONFINITE)
    over = status != RUNNING
    if LAST:
        over = status == status
    going = over == 0
    kept = better | (finite & over & (back == 0))

    i = tl.arange(0, ROWS)
    there = i < count
    lam = tl.load(lams + b * slots + i, there, 0.0)
    idle = tl.load(idles + b * slots + i, there, 0.0)
    idle = tl.where(i < tl.minimum(step, count), tl.where(lam > 0, 0.0, idle + 1), 0.0)
    # The one that has been idle for longest; if none is, the one with the least share.
    oldest = tl.argmax(tl.where(there, idle - lam, -float("inf")), axis=0)
    slot = tl.where(step < slots, count - 1, oldest)
    lam = tl.where(i == slot, 0.0, lam)
    total = tl.sum(lam)
    lam = tl.where(total > 0, lam / total, tl.where(i == slot, 1.0, 0.0))
    offset = energy - product - 16 * eps * (tl.abs(energy) + size)
    # No finer than what is left to gain is worth.
    rest = (f - lower) / (1 + tl.abs(f) + size)
    fine = tl.where(same, 0.0, tl.minimum(inexact * rest, ROUGHEST))
    fine = tl.maximum(fine, FINEST)

    tl.debug_barrier()  # all have read before one writes
    tl.store(values + b, f)
    tl.store(lowers + b, lower)
    tl.store(bounds + b, bound)
    tl.store(bests + b, best)
    tl.store(roundings + b, rounding)
    tl.store(taken + b, step)
    tl.store(statuses + b, status)
    tl.store(gaps + b, tl.where(gap == gap, gap, float("inf")), step > 0)
    tl.store(actives + b, going)
    tl.store(fines + b, fine)
    tl.store(lams + b * slots + i, lam, there & going)
    tl.store(idles + b * slots + i, tl.where(i == slot, 0.0, idle), there & going)
    tl.store(offsets + b * slots + slot, offset, going)
    tl.atomic_add(left + step, 1, going, sem="relaxed")
    cut = (b * slots + slot) * n
    if kept | going:
        for start in range(0, n, TILE):
            j = start + tl.arange(0, TILE)
            used = j < n
            y = tl.load(ys + j, used, 0.0)
            tl.store(answers + j, y, used & kept)
            tl.store(nears + j, y, used & going)
            tl.store(slopes + cut + j, tl.load(gradients + j, used, 0.0), used & going)
            if LEARNING:
                tl.store(points + cut + j, y, used & going)


class Table:
    """The tensors of a search by name, as those of `icnn.kernels.numba_steps.Table`.

    One name is for the GPU alone: `left`, int32, one zero for each step at first, counts the
    examples that go on after it. `bend` and `same` are not needed.

    Args:
        slopes: `(B, slots, n)`, in the energy's dtype.
        fields: Sizes and tensors by name, all of them on the GPU and contiguous.
    """

    def __init__(self, slopes: Tensor, **fields: Any):
        self.fields: dict[str, Any] = {}
        value, numbers = fields["value"], fields["numbers"]
        ground = Ground(*(fields.pop(name, None) for name in Ground._fields))
        low, width = triton_dual.sides(ground)
        own = {
            "found": torch.full_like(value, -torch.inf),
            "near": torch.empty_like(fields["y"]),
            "active": torch.ones_like(value, dtype=torch.bool),
            "fine": torch.empty_like(value),
            "entropy": numbers[:1].expand(len(value)).contiguous(),
            "ground": Ground(low, width, ground.group),
        }
        self.set(slopes=slopes, low=low, width=width, **own, **fields)

    def set(self, **fields: Any) -> None:
        """Point to other tensors."""
        self.fields.update(fields)

    def __call__(self) -> None:
        """A step; where a dual is too large for a kernel, an error after the rest of it."""
        f = self.fields
        (batch, slots), n, last = f["lam"].shape, f["y"].shape[1], f["mode"] == END
        kind = min(f["ground"].group, 1)  # one version for simplices of all sizes
        tile = min(WIDEST, triton.next_power_of_2(max(n, 32)))
        submit(
            note, batch, (f["step"], f["count"], slots, f["gaps"]),
            (*(f[name] for name in NAMES), n, f["low"].shape[1] if f["rows"] > 1 else 0,
             triton.next_power_of_2(slots), tile, kind, bool(f["learning"]), last),
            num_warps=max(1, tile // 256),
        )  # fmt: skip
        if not last:
            triton_dual.launch(
                f["ground"], f["slopes"], f["offsets"], f["count"], f["entropy"], f["lam"],
                f["near"], None, f["active"], f["y"], f["found"], f["fine"],
            )  # fmt: skip


def dual(model: Model, start: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`icnn.kernels.dual.solve`."""
    count = start.shape[1]
    ground = model.domain.ground(start.new_empty(model.shape))  # pyright: ignore
    slopes, offsets, lam, near = slotted(model, start)
    y = torch.empty_like(near)
    value = torch.zeros_like(offsets[:, 0])
    tilt = None if model.tilt is None else model.tilt.contiguous()
    with torch.cuda.device_of(start):
        triton_dual.launch(
            ground, slopes, offsets, count, model.entropy.contiguous(), lam, near, tilt,
            active.contiguous(), y, value, torch.full_like(value, TOL),
        )  # fmt: skip
    return lam[:, :count], y.reshape(model.shape), value
