# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The dual of a bundle step in one kernel: `icnn.kernels.dual.solve`, one program per example.

The method is the one of `icnn.kernels.dual`, which says why each part of it is there. Here it is a
loop around one evaluation of `D`: value, gradient and Hessian of a trial come from one pass over
the cuts, and what follows is decided from them: take the trial and make the next Newton step, go
back to a quarter of the step, or give up. Nothing waits for the host.

Where a few evaluations are not enough, a second launch of the same kernel goes on, and in the end
from the inside (`icnn.kernels.triton_interior`). Few examples need it, and are done sooner with
larger programs.

All cuts are taken relative to the one with the largest share, `G_i - G_r`, gradients too: cuts near
the answer are almost the same, and what counts is how they differ.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from icnn.kernels import dual
from icnn.kernels.dual import MOST_CUTS, TOL
from icnn.kernels.ground import Ground
from icnn.kernels.triton_interior import TINY, eliminate, interior_step, own_point
from icnn.kernels.triton_launch import submit

MOST_TILE = 8192  # numbers of a tile of cuts: whole simplices must fit into one

EPS = tl.constexpr(2.220446049250313e-16)
# Evaluations: of Newton's method in each launch, of the interior one, and of Newton's again.
FIRST, SECOND = tl.constexpr(3), tl.constexpr(20)
INTERIOR, LAST = tl.constexpr(dual.INTERIOR), tl.constexpr(dual.LAST)
FINEST, FINER = tl.constexpr(TOL), tl.constexpr(1e-3)  # where shares are to tell zero from more
FLAT = tl.constexpr(dual.FLAT)
ROUGH = tl.constexpr(dual.ROUGH)
ABSENT = tl.constexpr(-1e250)  # offsets of cuts that are not there are below
HALVINGS, ROUNDS, RIDGE = tl.constexpr(20), tl.constexpr(8), tl.constexpr(1e-12)


@cache
def processors(device: torch.device) -> int:
    """How many programs a GPU runs without sharing."""
    cuda = device.type == "cuda"  # it is not in Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1


def sizes(ground: Ground, count: int) -> tuple[int, int]:
    """Powers of two that hold the cuts and a simplex; 0 for a box, -1 for a bowl."""
    whole = triton.next_power_of_2(ground.group) if ground.group > 0 else ground.group
    return max(16, triton.next_power_of_2(count)), whole


def fits(ground: Ground, count: int) -> bool:
    """Whether the kernel can: else it is for `icnn.kernels.dual.reference`."""
    rows, whole = sizes(ground, count)
    return rows <= MOST_CUTS and rows * whole <= MOST_TILE


def sides(ground: Ground) -> tuple[Tensor, Tensor]:
    """Lower bounds and widths; those of a bowl are followed by its bottom and its weights."""
    if ground.bottom is None or ground.weight is None:
        return ground.low, ground.width
    return torch.cat([ground.low, ground.bottom], 1), torch.cat([ground.width, ground.weight], 1)


def split(rows: int, n: int, whole: int, crowded: bool) -> tuple[int, int]:
    """Warps of a program, and how many coordinates it takes at once: what measured best.

    Few programs are to be fast each; of many, as many as possible are to run at once.
    """
    if rows == 16:
        warps, tile = (8, 128) if n <= 512 else (8, 256)
        if crowded:
            warps, tile = (1, 32) if n <= 512 else (2, 64)
    elif rows == 32:
        warps, tile = (2, 64) if crowded or n > 512 else (4, 64)
    else:
        warps, tile = (8, 32) if rows == 64 else (16, 32)
    tile = max(min(tile, triton.next_power_of_2(n)), 16, whole)
    if rows == 16:
        # No more warps than there are coordinates for: they would wait for each other.
        warps = min(warps, tile // 16)
    return (max(warps, 8) if rows * tile > 4096 else warps), tile


def launch(
    ground: Ground,
    slopes: Tensor,
    offsets: Tensor,
    count: int,
    entropy: Tensor,
    lam: Tensor,
    near: Tensor,
    tilt: Tensor | None,
    active: Tensor,
    y: Tensor,
    value: Tensor,
    tol: Tensor,
    *,
    shape: tuple[int, int] | None = None,
) -> None:
    """Maximise `D` for the examples that are active, in place: `lam`, `y` and `value`.

    Args:
        ground: A box, simplices, or a bowl.
        slopes: `G`, `(B, count, n)` or more, float32 or float64, in room for `cap` cuts each.
        offsets: `c`, `(B, cap)`, float64, as all below but `near` and `y`.
        count: How many cuts each example has.
        entropy: `e > 0`, `(B,)`.
        lam: Shares to start from, `(B, cap)`, zero beyond `count`; and those found.
        near: The point that terms are taken relative to, `(B, n)`, float32 or float64.
        tilt: `t`, `(B, n)`, or `None`.
        active: `(B,)`, bool: the others stay as they are.
        y: The minimiser of the model, `(B, *y_shape)`, float32 or float64.
        value: `D(lam)`, `(B,)`.
        tol: The duality gap to reach, relative to the terms of `D`, `(B,)`.
        shape: For measurements: warps of a program, and how many coordinates it takes at once.
    """
    (batch, cap), n = offsets.shape, slopes.shape[2]
    if not fits(ground, count):
        raise NotImplementedError(f"{count} cuts, simplices of {ground.group} coordinates")
    parts = (slopes, offsets, entropy, lam, near, tilt, active, y, value, tol)
    if slopes.stride() != (cap * n, n, 1) or not all(
        part is None or part.is_contiguous() for part in parts[1:]
    ):
        raise ValueError("the kernel takes contiguous tensors")
    rows, whole = sizes(ground, count)
    padded = n // ground.group * whole if ground.group > 0 else n
    # By the batch, and not by how many are active: another shape adds up in another order.
    crowded = batch > 2 * processors(slopes.device)
    scratch = torch.empty(batch, rows + 4, rows, dtype=torch.float64, device=slopes.device)
    low, width = sides(ground)
    for again in (False,) if count == 1 else (False, True):
        warps, tile = shape or split(rows, padded, whole, crowded and not again)
        submit(
            maximise, batch, (count, cap),
            (*parts, low, width, scratch, low.shape[1] if len(low) > 1 else 0, n,
             max(ground.group, 1), rows, tile, whole, tilt is not None, again),
            num_warps=warps, num_stages=1,
        )  # fmt: skip


@triton.jit
def place(start, n, size, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """Which coordinates a tile has, and which of its places are in use: whole simplices of it."""
    j = start + tl.arange(0, TILE)
    used = j >= 0
    if WHOLE > 0:
        used = j % WHOLE < size
        j = j // WHOLE * size + j % WHOLE
    return j, used & (j < n)


@triton.jit
def minimum(s, lows, widths, j, used, e, n, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """The minimiser of `s . y - e H(y)`, the terms of `e H(y)`, and the diagonal of `J`."""
    low, width = tl.load(lows + j, used, 0.0), tl.load(widths + j, used, 0.0)
    if WHOLE == 0:
        # u = sigmoid(-t), e h(u) = e (|t| v + log(1 + exp(-|t|))) with v the smaller of u, 1 - u.
        # One division: in float64 they are the larger part of the work.
        t = width * s * (1 / e)
        far = tl.minimum(tl.abs(t), 1000.0)
        ex = tl.exp(-far)
        w = 1 + ex
        u = 1 / w
        v = ex * u
        y = low + width * tl.where(t > 0, v, u)
        # log(1 + ex) to its last digit where ex is small: w is rounded.
        bend = tl.where(width > 0, e * (far * v + tl.log(w) + (ex - (w - 1)) * u), 0.0)
        weight = width * width * v * u * (1 / e)
    elif WHOLE < 0:
        bottom, rate = tl.load(lows + n + j, used, 0.0), e * tl.load(widths + n + j, used, 1.0)
        free = bottom - s * (1 / rate)
        y = tl.minimum(tl.maximum(free, low), low + width)
        bend = -0.5 * rate * (y - bottom) * (y - bottom)
        weight = tl.where((free > low) & (free < low + width), 1 / rate, 0.0)
    else:
        # y = mass softmax(-s / e) in each simplex.
        GROUPS: tl.constexpr = TILE // WHOLE
        free = used & (width > 0)
        z = tl.reshape(tl.where(free, -s / e, -float("inf")), (GROUPS, WHOLE))
        highest = tl.max(z, axis=1)
        z = z - tl.where(highest > -float("inf"), highest, 0.0)[:, None]
        ex = tl.exp(z)
        total = tl.maximum(tl.sum(ex, axis=1), TINY)
        given = tl.reshape(tl.where(used & (width == 0), low, 0.0), (GROUPS, WHOLE))
        mass = tl.maximum(1 - tl.sum(given, axis=1), 0.0)
        share = ex * (mass / total)[:, None]
        log_y = z + tl.log(tl.maximum(mass, TINY) / total)[:, None]
        bend = tl.reshape(tl.where(share > 0, -e * share * log_y, 0.0), (TILE,))
        y = tl.where(free, tl.reshape(share, (TILE,)), low)
        weight = tl.where(free, y / e, 0.0)
    return y, bend, weight


@triton.jit
def mixture(slopes, tilt, lam, top, i, j, there, used, n, TILTED: tl.constexpr):
    """`G - G_r` for the top cut `r`, and `s = G^T lam + t` for shares that sum to one."""
    inside = there[:, None] & used[None, :]
    apart = tl.load(slopes + i[:, None] * n + j[None, :], inside, 0.0).to(tl.float64)
    first = tl.load(slopes + top * n + j, used, 0.0).to(tl.float64)
    apart = tl.where(inside, apart - first[None, :], 0.0)
    s = first + tl.sum(apart * lam[:, None], axis=0)
    if TILTED:
        s += tl.load(tilt + j, used, 0.0)
    return apart, s


@triton.jit
def evaluate(
    slopes, tilt, near, low, width, ys, scratch, lam, top, offsets, off_top, e, count, n, size,
    inside, begun, reach, soft,
    ROWS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, TILTED: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """`D`, the gradient less that of the top cut, gap and size at `lam`; `y`, and `G J G^T`.

    Inside, `ys` and `J` are of the interior method's own `y`, with an entropy `soft`, and the last
    result is `c + G (y - J r)`. At its beginning the gradient is the one at that `y` too.
    """
    i = tl.arange(0, ROWS)
    there, is_top = i < count, i == top
    # Through memory, as the Hessian below: a vector from there takes the layout that it is used in.
    # Else those of the tiles follow those of the small matrices, many times in each warp.
    shares = scratch + ROWS * ROWS + i
    tl.debug_barrier()
    tl.store(shares, lam)
    tl.debug_barrier()
    mix = tl.load(shares)
    product, absolute = tl.zeros((TILE,), tl.float64), tl.zeros((TILE,), tl.float64)
    bends, shift = tl.zeros((TILE,), tl.float64), tl.zeros((ROWS,), tl.float64)
    hessian, inner = tl.zeros((ROWS, ROWS), tl.float64), tl.zeros((ROWS,), tl.float64)
    end = n // size * WHOLE if WHOLE > 0 else n
    for start in range(0, end, TILE):
        j, used = place(start, n, size, TILE, WHOLE)
        apart, s = mixture(slopes, tilt, mix, top, i, j, there, used, n, TILTED)
        y, bend, weight = minimum(s, low, width, j, used, e, n, TILE, WHOLE)
        v = tl.load(near + j, used, 0.0).to(tl.float64)
        flat = tl.where(used, y - v, 0.0)
        product += s * flat
        absolute += tl.abs(s * flat)
        bends += tl.where(used, bend, 0.0)
        if AGAIN and inside:
            ahead = tl.load(shares + ROWS)
            _, next_s = mixture(slopes, tilt, ahead, top, i, j, there, used, n, TILTED)
            own, point, weight = own_point(
                ys, y, s, next_s, reach, begun, low, width, j, used, n, soft, e, TILE, WHOLE
            )
            flat = tl.where(used, tl.where(begun, y, own) - v, 0.0)
            inner += tl.sum(apart * flat[None, :], axis=1)
            flat = tl.where(used, point - v, 0.0)
        else:
            tl.store(ys + j, y.to(ys.dtype.element_ty), used)
        if WHOLE > 0:
            # J = (diag(y) - y y^T / mass) / e: differences to the mean in each simplex.
            GROUPS: tl.constexpr = TILE // WHOLE
            mass = tl.sum(tl.reshape(weight, (GROUPS, WHOLE)), axis=1)
            parts = tl.reshape(apart * weight[None, :], (ROWS, GROUPS, WHOLE))
            mean = tl.sum(parts, axis=2) / tl.maximum(mass, TINY)[None, :]
            spread = tl.broadcast_to(mean[:, :, None], (ROWS, GROUPS, WHOLE))
            apart = apart - tl.where(used[None, :], tl.reshape(spread, (ROWS, TILE)), 0.0)
            sums = tl.sum(tl.reshape(flat, (GROUPS, WHOLE)), axis=1)
            shift += tl.sum(mean * sums[None, :], axis=1)
        # The top row of the differences is zero: in its place the gradient is summed.
        left = tl.where(is_top[:, None], flat[None, :], apart * weight[None, :])
        hessian = tl.dot(left, tl.trans(apart), hessian, out_dtype=tl.float64)
    tl.store(scratch + i[:, None] * ROWS + i[None, :], hessian)
    tl.debug_barrier()
    heights = tl.load(scratch + top * ROWS + i) + shift
    heights = tl.where(there & (i != top), heights + offsets - off_top, 0.0)
    gradient = heights
    if AGAIN:
        own = tl.where(there & (i != top), inner + offsets - off_top, 0.0)
        gradient = tl.where(inside, own, heights)
    level = off_top + tl.sum(tl.where(there, lam * (offsets - off_top), 0.0))
    value = level + tl.sum(product) - tl.sum(bends)
    scale = 1 + tl.abs(level) + tl.sum(absolute) + tl.abs(tl.sum(bends))
    gap = tl.max(tl.where(there, gradient, -float("inf"))) - tl.sum(lam * gradient)
    return value, gradient, gap / scale, scale, heights


@triton.jit
def quadratic_step(scratch, gradient, lam, free, top, ROWS: tl.constexpr):
    """Where `gradient . d - d . hessian d / 2` is largest with `lam + d >= 0`, or near to that."""
    i = tl.arange(0, ROWS)
    entries = scratch + i[:, None] * ROWS + i[None, :]
    frees = free[:, None] & free[None, :]
    diagonal = tl.where(free, tl.load(scratch + i * (ROWS + 1)), 0.0)
    flat = FLAT * tl.max(tl.where(free, tl.abs(gradient), 0.0))
    least = tl.maximum(tl.maximum(1e-18 * tl.max(diagonal), flat), TINY)
    units = 1 / tl.sqrt(tl.where(free, tl.maximum(diagonal, least), 1.0))
    step = tl.zeros((ROWS,), tl.float64)
    leaving = i < 0
    searching, tries = True, 0
    while searching:
        rest = free & ~leaving
        gone = tl.where(leaving, -lam, 0.0)
        hessian = tl.load(entries, frees, 0.0)
        pull = tl.where(rest, gradient - tl.sum(hessian * gone[:, None], axis=0), 0.0)
        system = hessian * units[:, None] * units[None, :]
        system = tl.where(i[:, None] == i[None, :], 1 + RIDGE, system)
        system = tl.where(rest[:, None] & rest[None, :], system, 0.0)
        system = tl.where(i[None, :] == top, (units * pull)[:, None], system)
        found, sound = eliminate(system, rest, top, units, ROWS)
        steepest = pull / tl.maximum(tl.max(tl.abs(pull)), TINY)
        found = tl.where(sound, found, steepest) + gone
        # Too many may have left: then the step before is better.
        tl.debug_barrier()  # so that the matrix is read again, not kept: registers are few
        bent = tl.sum(tl.load(entries, frees, 0.0) * found[:, None], axis=0)
        gain = tl.sum((gradient - bent / 2) * found)
        step = tl.where((gain > 0) | (tries == 0), found, step)
        below = rest & (lam + found < 0)
        # Those first that their own gradient takes there: others may only follow them.
        willing = below & (pull < 0)
        some = tl.sum(willing.to(tl.int32)) > 0
        leaving = leaving | tl.where(some, willing, below)
        tries += 1
        searching = (tl.sum(below.to(tl.int32)) > 0) & (tries < ROUNDS)
    return step


@triton.jit(do_not_specialize=["count", "cap"])
def maximise(
    count, cap,
    slopes, offsets, entropy, lams, nears, tilts, active, ys, values, tols, lows, widths, scratch,
    row, n, size,
    ROWS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, TILTED: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """`icnn.kernels.dual.solve` for one example: Newton's method, or `AGAIN` what it has left."""
    b = tl.program_id(0).to(tl.int64)
    slopes += b * cap * n
    scratch += b * (ROWS + 4) * ROWS
    late = scratch + (ROWS + 1) * ROWS  # how the first launch tells the second
    if tl.load(active + b) == 0:
        return
    if AGAIN and tl.load(late) == 0:
        return
    near, low, width, ys = nears + b * n, lows + b * row, widths + b * row, ys + b * n
    tilt = tilts + b * n if TILTED else tilts
    i = tl.arange(0, ROWS)
    there = i < count
    e, tol = tl.load(entropy + b), tl.load(tols + b)
    c = tl.load(offsets + b * cap + i, there, 0.0)
    lam = tl.load(lams + b * cap + i, there, 0.0)

    alive = there & (c > ABSENT)

    # All cuts from the last point, the highest of them there at zero.
    end = n // size * WHOLE if WHOLE > 0 else n
    heights = tl.zeros((ROWS, TILE), tl.float64)
    for start in range(0, end, TILE):
        j, used = place(start, n, size, TILE, WHOLE)
        within = there[:, None] & used[None, :]
        g = tl.load(slopes + i[:, None] * n + j[None, :], within, 0.0).to(tl.float64)
        v = tl.load(near + j, used, 0.0).to(tl.float64)
        heights += g * v[None, :]
    c += tl.sum(heights, axis=1)
    level = tl.max(tl.where(there, c, -float("inf")))
    c = tl.where(there, c - level, 0.0)

    # Where we are; the first trial is taken as it is. It must be another tensor than `lam`: of two
    # names for one, Triton does not see that the loop changes the second.
    trial = lam + 0.0
    value, gap, scale, mean = e * 0, e * 0, e * 0, e * 0
    gradient, step = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    length, room, settled, fresh = e * 0 + 1, e * 0 + 1, False, True
    best_lam, best_value = lam + 0.0, e * 0 - float("inf")
    best_gap = e * 0 + float("inf")
    # Of the interior method: how far it went, its entropy and its best gap. What is only used there
    # is in memory: where its step aims, the slacks, the shares of the best gap.
    reach, soft, kept_gap = e * 0, e + 0.0, e * 0 + float("inf")
    inside, last, total = False, False, tl.sum(alive.to(tl.float64))
    aims = late + i
    left, tries = 0 + (SECOND if AGAIN else FIRST), 0
    going, stored = True, False
    while going:
        top = tl.minimum(tl.argmax(trial, axis=0), count - 1)  # shares may be no numbers
        c_top = tl.sum(tl.where(i == top, c, 0.0))
        value_t, gradient_t, gap_t, scale_t, heights_t = evaluate(
            slopes, tilt, near, low, width, ys, scratch, trial, top, c, c_top, e, count, n, size,
            inside, left < INTERIOR, reach, soft,
            ROWS, TILE, WHOLE, TILTED, AGAIN,
        )  # fmt: skip
        if AGAIN and inside:
            begun = left < INTERIOR
            slack, kept = tl.load(aims + ROWS), tl.load(aims + 2 * ROWS)
            falls = gap_t < kept_gap / 2
            nearer = begun & (gap_t < kept_gap)
            kept, kept_gap = tl.where(nearer, trial, kept), tl.where(nearer, gap_t, kept_gap)
            if begun == 0:
                highest = tl.max(tl.where(alive, gradient_t, -float("inf")))
                slack = tl.where(alive, highest - gradient_t, 0.0)
                slack += 0.1 * tl.max(slack) + 1e-3 * (1 + tl.abs(highest))
            change, drift, reach = interior_step(scratch, heights_t, trial, slack, alive, top, ROWS)
            # The first time `J` was not yet of an entropy that goes with the slacks.
            reach = tl.where(begun, reach, 0.0)
            # Below a rough gap, one that does not shrink is a matter of rounding: few more tries.
            left -= tl.where(falls | (kept_gap > ROUGH), 1, INTERIOR // 4)
            fine = tl.maximum(FINER * tol, FINEST)
            inside = (gap_t > fine) & (left > 0) & ((reach > 1e-12) | (begun == 0))
            tl.debug_barrier()
            tl.store(aims, trial + change)
            tl.store(aims + ROWS, slack + reach * drift)
            tl.store(aims + 2 * ROWS, kept)
            # At the end without shares that are only on their way to zero.
            kept = tl.where(kept > 1e-10, kept, 0.0)
            trial = tl.where(inside, trial + reach * change, kept)
            trial = trial / tl.sum(trial)
            # The entropy does not fall faster than the steps can follow.
            mu = tl.sum(tl.where(alive, trial * (slack + reach * drift), 0.0)) / total
            soft = tl.where(begun, soft * (1 - 0.7 * reach), 0.0)
            soft = tl.maximum(tl.maximum(soft, mu), e * 0 if WHOLE < 0 else e)
            if inside == 0:
                fresh, settled, last, left = True, False, True, 0 + LAST
        else:
            gain = tl.sum((trial - lam) * (gradient - mean))
            rises = value_t >= value + 1e-4 * gain - 4 * EPS * scale
            # Where no more than rounding is to be gained, the duality gap tells.
            good = fresh | (rises & ((gap_t < gap / 2) | (settled == 0)))
            if good:
                lam, value, gradient, gap, scale = trial, value_t, gradient_t, gap_t, scale_t
                tries = 0
            else:
                tries += 1
            left -= 1
            if good | settled | (tries >= HALVINGS) | (left <= 0):
                stuck = settled & (good == 0)
                if stuck | (left <= 0) | (tries > 0) | ((gap > tol) == 0):
                    # The end, or else from the inside.
                    going = (last == 0) & (gap > tol) & ((stuck == 0) | (gap > ROUGH))
                    # Where values are the same but for rounding, the gap tells.
                    least = value + tl.where(gap < best_gap, 4, -4) * EPS * scale
                    better = least > best_value
                    best_gap = tl.where(better, gap, best_gap)
                    stored = good & better
                    best_lam = tl.where(better, lam, best_lam)
                    best_value = tl.where(better, value, best_value)
                    if AGAIN:
                        # From a point well inside, at a slope between those of the cuts.
                        inside, left, length = going, 0 + INTERIOR, e * 0
                        step = tl.zeros((ROWS,), tl.float64)
                        lam = tl.where(alive, 0.5 * lam + 0.5 / total, 0.0)
                        tl.debug_barrier()
                        tl.store(aims, lam)
                        tl.store(aims + 2 * ROWS, lam)
                    else:
                        tl.store(late, going.to(tl.float64))
                        going = False
                else:
                    # It was good: the top cut is the one of the trial.
                    mean = tl.sum(lam * gradient)
                    free = there & (i != top) & ((lam > 0) | (gradient > mean))
                    pull = tl.where(free, gradient, 0.0)
                    step = quadratic_step(scratch, pull, lam, free, top, ROWS)
                    step = tl.where(i == top, -tl.sum(step), step)
                    # No step is longer than from one cut to another.
                    length = tl.minimum(2 / tl.maximum(tl.sum(tl.abs(step)), TINY), 1.0)
                    room = tl.min(tl.where(step < 0, lam / -step, float("inf")))
                    promise = length * tl.sum(step * (gradient - mean))
                    settled = promise <= 4 * EPS * scale
                    fresh = False
            else:
                # Not past the point up to which the arc is straight: where cuts depend on each
                # other, D rises on a line all the way to where the first has no share left.
                length = tl.where(length > room, tl.maximum(length / 4, room), length / 4)
            # Bent at zero and brought back to sum one.
            moved = lam + length * step
            moved = tl.where(moved > EPS, moved, 0.0)
            trial = moved / tl.sum(moved)

    # D may be no number: then what we have is what we had.
    tl.store(lams + b * cap + i, best_lam, there)
    tl.store(values + b, level + tl.where(best_value > -float("inf"), best_value, value))
    if stored == 0:
        # The last trial was not the best: its `y` is not ours.
        top = tl.minimum(tl.argmax(best_lam, axis=0), count - 1)
        for start in range(0, end, TILE):
            j, used = place(start, n, size, TILE, WHOLE)
            _, s = mixture(slopes, tilt, best_lam, top, i, j, there, used, n, TILTED)
            y, _, _ = minimum(s, low, width, j, used, e, n, TILE, WHOLE)
            tl.store(ys + j, y.to(ys.dtype.element_ty), used)
