"""Duals that Newton's method alone does not solve, on a CPU: from the inside, with Numba.

Where slopes are large beside the entropy, or cuts depend on each other, Newton's steps along the
boundary of the shares become short. `maximise` tries them first, and is what a step calls.
"""

import math

import numpy as np

from icnn.kernels.dual import FIRST, INTERIOR, LAST, TINY, WITHIN
from icnn.kernels.numba_dual import climb, evaluate, gram, solve_positive, substitute
from icnn.kernels.numba_points import PLAIN, SUMS, jit


@jit(fastmath=SUMS)
def bend_by(w, domain, n, v, out):
    """`J v`."""
    m = domain[0]
    for j in range(n):
        out[j] = w[j] * v[j]
    if m > 0:
        for begin in range(0, n, m):
            mass = total = 0.0
            for j in range(begin, begin + m):
                mass += w[j]
                total += out[j]
            for j in range(begin, begin + m):
                out[j] -= w[j] * total / max(mass, TINY)


@jit(fastmath=SUMS)
def inner(slopes, first, k, n, v, out):
    """`(G_i - G_first) . v`."""
    base = 0.0
    for j in range(n):
        base += slopes[first, j] * v[j]
    for i in range(k):
        total = 0.0
        for j in range(n):
            total += slopes[i, j] * v[j]
        out[i] = total - base


@jit(fastmath=PLAIN)
def interior(slopes, k, n, d, v, tilt, e, domain, tol, here, there, work):
    """Mehrotra's primal-dual method, for duals that Newton's alone does not solve.

    Where slopes are large beside the entropy, `D` is almost a polyhedron, and `y(lam)` jumps from
    bound to bound. Here `y` is a variable of its own, and so are the slacks of the cuts:

        s + slope of -e H(y) = 0,    slack = z - c - G y,    lam * slack = mu -> 0,

    with an entropy that comes down to `e` together with `mu`.
    From `here[0]`, where the result goes too.
    """
    m, low, width, bottom, weight = domain
    t, bits, a, matrix, factor, vectors, free, down = work
    lam, s, _, w, g = here
    _, jr, y, move, _ = there
    slack, right, one, first_lam, first_slack, rate, heights, turn = (
        vectors[0], vectors[1], vectors[2], vectors[3], vectors[4], vectors[5], vectors[6],
        vectors[7],
    )  # fmt: skip
    # From a point well inside, at a slope between those of the cuts.
    for i in range(k):
        lam[i] = 0.5 * lam[i] + 0.5 / k
        free[i] = i
    evaluate(slopes, k, n, lam, d, v, tilt, e, domain, s, y, w, g, t, bits)
    centre_of(domain, n, y)
    best, kept = np.inf, lam[:k].copy()
    for j in range(n):
        t[j] = y[j] - v[j]
        # From here on `y` is the distance to the lower bound, and `down` that to the upper.
        down[j] = low[j] + width[j] - y[j]
        y[j] = y[j] if m > 0 else y[j] - low[j]
    inner(slopes, 0, k, n, t, heights)
    z = wide = -np.inf
    for i in range(k):
        heights[i] += d[i]
        z = max(z, heights[i])
    for i in range(k):
        wide = max(wide, z - heights[i])
    z += 0.1 * wide + 1e-3 * (1 + abs(z))
    mu = 0.0
    for i in range(k):
        slack[i] = z - heights[i]
        mu += lam[i] * slack[i] / k
    # The quadratic of a bowl is no barrier: there it comes down to nothing.
    least = 0.0 if m < 0 else e
    soft = max(least, mu)
    for _ in range(INTERIOR):
        _, gap, _, _ = evaluate(slopes, k, n, lam, d, v, tilt, e, domain, s, move, w, g, t, bits)
        if gap < best:
            best = gap
            kept[:] = lam[:k]
        if not gap > tol:
            break
        # r = s + slope of -e H, and J, at y.
        for j in range(n):
            if m > 0:
                w[j] = y[j] / soft if width[j] > 0 else 0.0
                move[j] = s[j] + soft * math.log(y[j]) if width[j] > 0 else 0.0
            else:
                w[j] = y[j] * down[j] / soft if width[j] > 0 else 0.0
                way = soft / width[j] * math.log(y[j] / down[j]) if width[j] > 0 else 0.0
                move[j] = s[j] + way if width[j] > 0 else 0.0
                if m < 0 and width[j] > 0:
                    bend = e * weight[j]
                    w[j] /= 1 + w[j] * bend
                    move[j] += bend * (low[j] + y[j] - bottom[j])
        bend_by(w, domain, n, move, jr)
        gram(slopes, n, np.int64(0), free, k, w, domain, a, matrix)
        inner(slopes, 0, k, n, jr, heights)  # A J r
        for j in range(n):
            if m > 0 or width[j] == 0:
                t[j] = (y[j] if width[j] > 0 else low[j]) - v[j]
            else:
                t[j] = (low[j] + y[j] if y[j] < down[j] else low[j] + width[j] - down[j]) - v[j]
        inner(slopes, 0, k, n, t, turn)
        for i in range(k):
            turn[i] = z - d[i] - turn[i] - slack[i]  # what the slack is off by
            matrix[i, i] += slack[i] / lam[i] + 1e-14 * (1 + matrix[i, i])
        for p in range(k):
            for q in range(p + 1):
                factor[p, q] = matrix[p, q]
            one[p] = 1.0
            right[p] = -slack[p] - turn[p] - heights[p]
        if not solve_positive(factor, right, k):
            break
        substitute(factor, one, k)
        total = share = 0.0
        for i in range(k):
            total += right[i]
            share += one[i]
        rise = total / share
        # The predictor: straight to the boundary.
        reach = 1.0
        for i in range(k):
            first_lam[i] = right[i] - rise * one[i]
            first_slack[i] = -slack[i] - slack[i] / lam[i] * first_lam[i]
            if first_lam[i] < 0:
                reach = min(reach, -lam[i] / first_lam[i])
            if first_slack[i] < 0:
                reach = min(reach, -slack[i] / first_slack[i])
        ahead = 0.0
        for i in range(k):
            ahead += (lam[i] + reach * first_lam[i]) * (slack[i] + reach * first_slack[i]) / k
        target = mu * min(1.0, (ahead / mu) ** 3)
        # The corrector.
        for i in range(k):
            rate[i] = target - lam[i] * slack[i] - first_lam[i] * first_slack[i]
            right[i] = rate[i] / lam[i] - turn[i] - heights[i]
        substitute(factor, right, k)
        total = 0.0
        for i in range(k):
            total += right[i]
        rise, reach = total / share, 1.0
        for i in range(k):
            first_lam[i] = right[i] - rise * one[i]
            first_slack[i] = (rate[i] - slack[i] * first_lam[i]) / lam[i]
            if first_lam[i] < 0:
                reach = min(reach, -WITHIN * lam[i] / first_lam[i])
            if first_slack[i] < 0:
                reach = min(reach, -WITHIN * slack[i] / first_slack[i])
        # dy = -J (r + A^T dlam)
        for j in range(n):
            t[j] = 0.0
        for i in range(k):
            for j in range(n):
                t[j] += first_lam[i] * (np.float64(slopes[i, j]) - np.float64(slopes[0, j]))
        for j in range(n):
            t[j] += move[j]
        bend_by(w, domain, n, t, move)
        if not reach > 1e-12:
            break
        mass = 0.0
        for i in range(k):
            lam[i] += reach * first_lam[i]
            slack[i] += reach * first_slack[i]
            mass += lam[i]
        mu = 0.0
        for i in range(k):
            lam[i] /= mass
            mu += lam[i] * slack[i] / k
        # Newton's steps do not see in time how steep a small entropy gets near a bound.
        soft = max(least, mu, soft * (1 - 0.7 * reach))
        z += reach * rise
        # Each coordinate as far as it may go: one on its way to a bound holds back no other.
        for j in range(n):
            if width[j] > 0:
                up = max(y[j] - reach * move[j], 0.1 * y[j])
                if m > 0:
                    y[j] = max(up, 1e-20)
                else:
                    rest = max(down[j] + reach * move[j], 0.1 * down[j])
                    y[j] = max(up if up < rest else width[j] - rest, 1e-20 * width[j])
                    down[j] = max(width[j] - up if up < rest else rest, 1e-20 * width[j])
        if m > 0:
            level_out(domain, n, y)
    # Shares that are only on their way to zero.
    total = 0.0
    for i in range(k):
        lam[i] = kept[i] if kept[i] > 1e-10 else 0.0
        total += lam[i]
    for i in range(k):
        lam[i] /= total


@jit()
def centre_of(domain, n, y):
    """Half-way between `y` and the middle of the domain."""
    m, low, width = domain[:3]
    for j in range(n):
        if width[j] > 0:
            y[j] = 0.5 * y[j] + 0.5 * (1.0 / m if m > 0 else low[j] + width[j] / 2)
    if m > 0:
        level_out(domain, n, y)


@jit()
def level_out(domain, n, y):
    """Scale the free coordinates of each simplex to its mass."""
    m, low, width = domain[:3]
    for begin in range(0, n, m):
        mass, total = 1.0, 0.0
        for j in range(begin, begin + m):
            if width[j] > 0:
                total += y[j]
            else:
                mass -= low[j]
        for j in range(begin, begin + m):
            if width[j] > 0:
                y[j] *= max(mass, 1e-300) / total


@jit(fastmath=PLAIN)
def maximise(slopes, k, n, d, v, tilt, e, domain, tol, last, here, there, other, work):
    """Maximise `D` from `here[0]`: at once, and where that is not enough from the inside."""
    best, best_bend, tried = -np.inf, 0.0, False
    while True:
        value, bend, late = climb(
            slopes, k, n, d, v, tilt, e, domain, tol, LAST if tried else FIRST,
            np.nan if tried else last, here, there, work,
        )  # fmt: skip
        if tried or not late:
            break
        best, best_bend, tried = value, bend, True
        other[0][:k] = here[0][:k]
        other[1][:] = here[1]
        other[2][:] = here[2]
        other[3][:] = here[3]
        interior(slopes, k, n, d, v, tilt, e, domain, tol, here, there, work)
    # Also where it is no number: then there is nothing else.
    if not tried or value > best:
        return value, bend
    here[0][:k] = other[0][:k]
    here[1][:] = other[1]
    here[2][:] = other[2]
    here[3][:] = other[3]
    return best, best_bend
