# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Steps of an interior method for the dual of a bundle step, as parts of a kernel.

Where slopes are large beside the entropy, `D` is almost a polyhedron, `y(lam)` jumps from bound to
bound, and Newton's steps are short. Then `y` becomes a variable of its own, and so do the slacks of
the cuts (Mehrotra's primal-dual method, as in `icnn.kernels.numba_interior`):

    r = s + slope of -e H(y) = 0,    slack_i = z - c_i - G_i . y,    lam_i slack_i = mu -> 0.

A step of Newton on these for a given `mu` is, with `J` of this `y` and any constant for `z`,

    (G J G^T + diag(slack / lam)) dlam = c + G (y - J r) + mu / lam - z,    sum dlam = 0,
    dslack = mu / lam - slack - slack / lam * dlam,    dy = -J (r + G^T dlam).

The entropy is never below `mu`: Newton's steps do not see in time how steep a small one gets. In a
bowl, whose quadratic is no barrier, such an entropy is added, and goes to zero with `mu`. This
`y` is kept where the answer goes, rounded as that is: what follows is exact for what is there.
"""

import triton
import triton.language as tl

from icnn.kernels import dual

TINY = tl.constexpr(2.2250738585072014e-308)
WITHIN = tl.constexpr(dual.WITHIN)
NEAREST = tl.constexpr(1e-20)  # to a bound, in units of the width


@triton.jit
def newton_move(
    up, down, total, s, width, e, rate, bottom, free, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`J r` at a point with the distances `up` and `down` to its bounds, in units of the width.

    A bowl has its bottom in these units, from the lower bound, and the curvature `rate` in them.
    """
    if WHOLE <= 0:
        slope = width * s * (1 / e)
        if WHOLE < 0:
            slope += rate * (up - bottom) * (1 / e)
        move = up * down * (slope + tl.log(up / down))
        if WHOLE < 0:
            move = move / (1 + up * down * rate * (1 / e))
    else:
        # On a simplex it is y (r - mean of r with the weights y) / e, with r = s + e log y.
        rate = tl.where(free, s * (1 / e) + tl.log(tl.where(free, up, 1.0)), 0.0)
        mean = tl.sum(tl.reshape(up * rate, (GROUPS, WHOLE)), axis=1) / total
        mean = tl.broadcast_to(mean[:, None], (GROUPS, WHOLE))
        move = up * (rate - tl.reshape(mean, (GROUPS * WHOLE,)))
    return move


@triton.jit
def distances(kept, total, free, GROUPS: tl.constexpr, WHOLE: tl.constexpr):
    """To both bounds, from the smaller one, which is below zero if it is that to the upper bound.

    On simplices it is `y` itself, scaled to its sum.
    """
    if WHOLE <= 0:
        up, down = tl.where(kept > 0, kept, 1 + kept), tl.where(kept > 0, 1 - kept, -kept)
    else:
        up, down = tl.where(free, kept, 0.0), tl.where(free, 1.0, 1.0)
        scale = total / tl.maximum(tl.sum(tl.reshape(up, (GROUPS, WHOLE)), axis=1), TINY)
        scale = tl.broadcast_to(scale[:, None], (GROUPS, WHOLE))
        up = up * tl.reshape(scale, (GROUPS * WHOLE,))
    return up, down


@triton.jit
def own_point(
    ys, y, s, ahead, reach, begun, lows, widths, j, used, n, e, plain,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A step of the interior method's own `y`: then it, `y - J r`, and the diagonal of `J`.

    The step is for the slope at the end of the step of `lam`, `ahead`. Each coordinate goes as far
    as it may: one on its way to a bound holds back no other. The first time it is the middle
    between the domain's and `y`. The entropy is `e`, and that of the model is `plain`.
    """
    GROUPS: tl.constexpr = TILE // WHOLE if WHOLE > 0 else 1
    low, width = tl.load(lows + j, used, 0.0), tl.load(widths + j, used, 0.0)
    free, kept = used & (width > 0), tl.load(ys + j, used, 0.5).to(tl.float64)
    total, unit = tl.full((GROUPS,), 1.0, tl.float64), tl.where(free, width, 1.0)
    if WHOLE > 0:
        given = tl.reshape(tl.where(used & (width == 0), low, 0.0), (GROUPS, WHOLE))
        total = tl.maximum(1 - tl.sum(given, axis=1), TINY)
        low, width, unit = tl.where(free, 0.0, low), tl.where(free, 1.0, 0.0), unit * 0 + 1
    rate, bottom = width * 0, width * 0
    if WHOLE < 0:
        rate = plain * tl.load(widths + n + j, used, 0.0) * width * width
        bottom = (tl.load(lows + n + j, used, 0.0) - low) / unit
    middle = 0.5 * (y - low) / unit + (0.5 / WHOLE if WHOLE > 0 else 0.25)
    kept = tl.where(begun, kept, middle)
    up, down = distances(tl.where(free, kept, 0.5), total, free, GROUPS, WHOLE)
    move = newton_move(up, down, total, ahead, width, e, rate, bottom, free, GROUPS, WHOLE)
    move = reach * move
    up, down = tl.maximum(up - move, 0.1 * up), tl.maximum(down + move, 0.1 * down)
    kept = tl.maximum(up, NEAREST)
    if WHOLE <= 0:
        kept = tl.where(up < down, kept, -tl.maximum(down, NEAREST))
    kept = kept.to(ys.dtype.element_ty)
    tl.store(ys + j, kept, used)
    up, down = distances(kept.to(tl.float64), total, free, GROUPS, WHOLE)
    move = newton_move(up, down, total, s, width, e, rate, bottom, free, GROUPS, WHOLE)
    bend = width * width * up * down * (1 / e)
    if WHOLE < 0:
        bend = bend / (1 + up * down * rate * (1 / e))
    return low + width * up, low + width * (up - move), bend


@triton.jit
def eliminate(system, rest, top, units, ROWS: tl.constexpr):
    """Gauss-Jordan on the rows `rest`, with the right side in the column of the top cut, no row.

    Gives the solution, and whether the matrix was positive.
    """
    i = tl.arange(0, ROWS)
    sound = True
    p = tl.min(tl.where(rest, i, ROWS))
    while p < ROWS:
        row = tl.sum(tl.where(i[:, None] == p, system, 0.0), axis=0)
        column = tl.sum(tl.where(i[None, :] == p, system, 0.0), axis=1)
        pivot = tl.sum(tl.where(i == p, row, 0.0))
        sound = sound & (pivot > 0)
        row = row / pivot
        less = system - column[:, None] * row[None, :]
        system = tl.where(i[:, None] == p, row[None, :], less)
        p = tl.min(tl.where(rest & (i > p), i, ROWS))
    found = units * tl.sum(tl.where(i[None, :] == top, system, 0.0), axis=1)
    found = tl.where(rest, found, 0.0)
    return found, sound & (tl.sum(tl.where(tl.abs(found) < float("inf"), 0, 1)) == 0)


@triton.jit
def interior_step(scratch, heights, lam, slack, alive, top, ROWS: tl.constexpr):
    """The change of `lam` and of `slack`, and how much of it to take: nothing if that fails.

    The share of the top cut is one minus the others, whose system is then

        (G J G^T + diag(slack / lam) + slack_r / lam_r) dlam = right - right_r.
    """
    i = tl.arange(0, ROWS)
    rest, is_top = alive & (i != top), i == top
    both = rest[:, None] & rest[None, :]
    shares, total = tl.where(alive, lam, 1.0), tl.sum(alive.to(tl.int32))
    ratio = tl.where(alive, slack / shares, 0.0)
    own = tl.sum(tl.where(is_top, ratio, 0.0))
    diagonal = tl.where(rest, tl.load(scratch + i * (ROWS + 1)), 0.0)
    units = 1 / tl.sqrt(tl.where(rest, diagonal + ratio + own + 1e-14 * (1 + diagonal), 1.0))
    mean = tl.sum(tl.where(alive, lam * slack, 0.0)) / total
    change, drift = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    turn = tl.zeros((ROWS,), tl.float64)
    room, good = mean * 0, True
    # First straight to the boundary; how far that goes says which `mu` to aim at, and how far the
    # products `lam * slack` bend on the way.
    for _ in range(2):
        right = heights + turn
        pull = tl.where(rest, right - tl.sum(tl.where(is_top, right, 0.0)), 0.0)
        tl.debug_barrier()  # so that the matrix is read again, not kept
        system = tl.load(scratch + i[:, None] * ROWS + i[None, :], both, 0.0) + own
        system = system * units[:, None] * units[None, :]
        system = tl.where(i[:, None] == i[None, :], 1.0, system)
        system = tl.where(both, system, 0.0)
        system = tl.where(is_top[None, :], (units * pull)[:, None], system)
        found, sound = eliminate(system, rest, top, units, ROWS)
        good = good & sound
        change = tl.where(is_top, -tl.sum(found), found)
        drift = tl.where(alive, turn - slack - ratio * change, 0.0)
        room = tl.min(tl.where(change < 0, lam / -change, float("inf")))
        room = tl.minimum(room, tl.min(tl.where(drift < 0, slack / -drift, float("inf"))))
        most = tl.minimum(room, 1.0)
        products = (lam + most * change) * (slack + most * drift)
        fall = tl.minimum(tl.sum(tl.where(alive, products, 0.0)) / total / mean, 1.0)
        turn = tl.where(alive, (mean * fall * fall * fall - change * drift) / shares, 0.0)
    reach = tl.where(good, tl.minimum(WITHIN * room, 1.0), 0.0)
    return change, drift, reach
