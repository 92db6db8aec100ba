# pyright: reportCallIssue=false
"""The dual of a bundle step on a CPU, by Newton's method: one example after another, with Numba.

The same method as in `icnn.kernels.dual`, the reference, and the same names; what does not yield to
it is for `icnn.kernels.numba_interior`. A thread takes some of the examples, and all of an
example's work stays in its cache: no step waits for the slowest of a batch, and none of them costs
a call into Python. Cuts are read in the precision that they were made in; all arithmetic is
float64.
"""

import math

import numpy as np

from icnn.kernels.dual import EPS, FLAT, HALVINGS, RIDGE, ROUGH, ROUNDS, TINY
from icnn.kernels.numba_points import PLAIN, SUMS, bowl_point, box_point, jit, simplex_point

TILE = 256  # coordinates at a time in the Hessian: what stays in the nearest cache


@jit(fastmath=SUMS)
def evaluate(slopes, k, n, lam, d, v, tilt, e, domain, s, y, w, g, t, bits):
    """`D` and its gradient at `lam`: the point `y`, `J` in `w`, the gradient in `g`.

    Gives the value, the duality gap relative to the terms of `D`, their size, and `e H(y)`.
    """
    m, low, width, bottom, weight = domain
    if tilt.shape[0]:
        for j in range(n):
            s[j] = tilt[j]
    else:
        for j in range(n):
            s[j] = 0.0
    level = 0.0
    for i in range(k):
        if lam[i] > 0:
            share, row = lam[i], slopes[i]
            level += share * d[i]
            for j in range(n):
                s[j] += share * row[j]
    if m == 0:
        value, size, bend = box_point(s, v, low, width, e, n, y, w, t, bits)
    elif m > 0:
        value, size, bend = simplex_point(s, v, low, width, m, e, n, y, w, t, bits)
    else:
        value, size, bend = bowl_point(s, v, low, width, bottom, weight, e, n, y, w)
    size = 1 + abs(level) + size + abs(bend)
    for j in range(n):
        t[j] = y[j] - v[j]
    top, mean = -np.inf, 0.0
    for i in range(k):
        row, total = slopes[i], d[i]
        for j in range(n):
            total += row[j] * t[j]
        g[i] = total
        top = max(top, total)
        mean += lam[i] * total
    return level + value, (top - mean) / size, size, bend


@jit(fastmath=SUMS)
def recall(k, n, lam, d, v, e, bend, domain, s, y, w, g):
    """`evaluate` where `lam` led to `v` just before: `d` is the gradient, `bend` is `e H(v)`.

    As `v` may be rounded, the value could be above `D` by as much: it is taken a little lower.
    """
    m, low, width, _, weight = domain
    for j in range(n):
        high, s[j], y[j] = low[j] + width[j], 0.0, v[j]
        if m == 0:
            w[j] = max((v[j] - low[j]) * (high - v[j]), 0.0) / e
        elif m > 0:
            w[j] = v[j] / e if width[j] > 0 else 0.0
        else:
            w[j] = 1 / (e * weight[j]) if low[j] < v[j] < high else 0.0
    top, level = -np.inf, 0.0
    for i in range(k):
        g[i] = d[i]
        top = max(top, d[i])
        level += lam[i] * d[i]
    size = 1 + abs(level) + abs(bend)
    return level - bend - 16 * EPS * size, (top - level) / size, size


@jit(fastmath=SUMS)
def gram(slopes, n, first, free, count, w, domain, a, hessian):
    """`A J A^T` with the rows `G_i - G_first`: differences before products."""
    m = domain[0]
    for p in range(count):
        for q in range(p + 1):
            hessian[p, q] = 0.0
    base = slopes[first]
    for begin in range(0, n, TILE):
        size = min(TILE, n - begin)
        # Slices: an index that is a sum could be negative, and LLVM would not make vectors.
        near, weight, scaled = base[begin : begin + size], w[begin : begin + size], a[count]
        for p in range(count):
            row, own = slopes[free[p]][begin : begin + size], a[p]
            for j in range(size):
                own[j] = np.float64(row[j]) - np.float64(near[j])
        for p in range(count):
            own = a[p]
            for j in range(size):
                scaled[j] = own[j] * weight[j]
            for q in range(p + 1):
                other, total = a[q], 0.0
                for j in range(size):
                    total += scaled[j] * other[j]
                hessian[p, q] += total
    if m > 0:
        # J = diag(w) - w w^T / sum(w), in every simplex apart.
        moments = a[:, 0]
        for group in range(n // m):
            begin, mass = group * m, 0.0
            for j in range(begin, begin + m):
                mass += w[j]
            mass = max(mass, TINY)
            for p in range(count):
                row, total = slopes[free[p]], 0.0
                for j in range(begin, begin + m):
                    total += (np.float64(row[j]) - np.float64(base[j])) * w[j]
                moments[p] = total
            for p in range(count):
                for q in range(p + 1):
                    hessian[p, q] -= moments[p] * moments[q] / mass
    for p in range(count):
        for q in range(p):
            hessian[q, p] = hessian[p, q]


@jit(fastmath=PLAIN)
def solve_positive(matrix, right, count):
    """Cholesky in place, and the solution into `right`; whether the matrix was positive.

    On its diagonal the factor holds inverses: one division a row.
    """
    for p in range(count):
        for q in range(p + 1):
            total = matrix[p, q]
            for r in range(q):
                total -= matrix[p, r] * matrix[q, r]
            if p > q:
                matrix[p, q] = total * matrix[q, q]
            elif total > 0:
                matrix[p, p] = 1 / math.sqrt(total)
            else:
                return False
    substitute(matrix, right, count)
    return True


@jit(fastmath=PLAIN)
def substitute(matrix, right, count):
    """Solve with a Cholesky factor."""
    for p in range(count):
        for r in range(p):
            right[p] -= matrix[p, r] * right[r]
        right[p] *= matrix[p, p]
    for p in range(count - 1, -1, -1):
        for r in range(p + 1, count):
            right[p] -= matrix[r, p] * right[r]
        right[p] *= matrix[p, p]


@jit(fastmath=PLAIN)
def quadratic_step(hessian, gradient, shares, count, step, work):
    """Where `gradient . d - d . hessian d / 2` is largest with `shares + d >= 0`, or near to it."""
    system, vectors = work
    found, pull, leaving, right = vectors[0], vectors[1], vectors[2], vectors[3]
    largest = flat = TINY
    for p in range(count):
        largest = max(largest, hessian[p, p])
        flat = max(flat, FLAT * abs(gradient[p]))
        leaving[p] = 0.0
    least = max(1e-18 * largest, flat)
    for round_ in range(ROUNDS):
        rest, steepest = 0, TINY
        for p in range(count):
            if leaving[p] > 0:
                found[p] = -shares[p]
                pull[p] = 0.0
                continue
            total = gradient[p]
            if round_:
                for q in range(count):
                    if leaving[q] > 0:
                        total += hessian[p, q] * shares[q]
            pull[p] = right[rest] = total
            steepest = max(steepest, abs(total))
            place = 0
            for q in range(p):
                if leaving[q] == 0:
                    system[rest, place] = hessian[p, q]
                    place += 1
            # Cuts that depend on each other leave directions without curvature.
            system[rest, rest] = max(hessian[p, p], least) * (1 + RIDGE)
            rest += 1
        sound, place = solve_positive(system, right, rest), 0
        for p in range(count):
            if leaving[p] == 0:
                found[p] = right[place]
                sound = sound and math.isfinite(found[p])
                place += 1
        if not sound:
            for p in range(count):
                if leaving[p] == 0:
                    found[p] = pull[p] / steepest
        below, willing, gain = False, False, 0.0
        for p in range(count):
            if leaving[p] == 0 and shares[p] + found[p] < 0:
                below = True
                willing = willing or pull[p] < 0
        # Too many may have left: then the step before is better.
        if round_:
            for p in range(count):
                total = 0.0
                for q in range(count):
                    total += hessian[p, q] * found[q]
                gain += (gradient[p] - total / 2) * found[p]
        if gain > 0 or round_ == 0:
            for p in range(count):
                step[p] = found[p]
        if not below:
            return
        # Those first that their own gradient takes there: others may only follow them.
        for p in range(count):
            if leaving[p] == 0 and shares[p] + found[p] < 0 and (pull[p] < 0 or not willing):
                leaving[p] = 1.0


@jit(fastmath=PLAIN)
def climb(slopes, k, n, d, v, tilt, e, domain, tol, most, last, here, there, work):
    """At most so many Newton steps from `here[0]`, until the duality gap is below `tol`.

    If `here[0]` led to `v` just before, `last` is `e H(v)`, else it is no number.
    `here` and `there` hold a `lam`, `s`, `y`, `J` and gradient each. Gives `D`, `e H(y)`, and
    whether there is more to gain.
    """
    t, bits, a, hessian, system, vectors, free, _ = work
    step = vectors[7]
    lam, s, y, w, g = there
    next_lam, next_s, next_y, next_w, next_g = here
    swapped, late, settled = True, False, False
    value, gap, size, bend, level, length, total = -np.inf, np.inf, 1.0, 0.0, 0.0, 1.0, 0.0
    gain = along = room = 0.0
    top, count, steps, halvings = np.int64(0), 0, 0, 0
    while True:
        if steps == 0 and last == last:
            new, new_gap, new_size = recall(
                k, n, next_lam, d, v, e, last, domain, next_s, next_y, next_w, next_g
            )
            new_bend = last
        else:
            new, new_gap, new_size, new_bend = evaluate(
                slopes, k, n, next_lam, d, v, tilt, e, domain,
                next_s, next_y, next_w, next_g, t, bits,
            )  # fmt: skip
        rises = new >= value + 1e-4 * gain - 4 * EPS * size
        if steps == 0 or (rises and (not settled or new_gap < gap / 2)):
            lam, s, y, w, g, next_lam, next_s, next_y, next_w, next_g = (
                next_lam, next_s, next_y, next_w, next_g, lam, s, y, w, g,
            )  # fmt: skip
            swapped = not swapped
            value, gap, size, bend = new, new_gap, new_size, new_bend
            # Not a number is not above: a broken example ends here.
            late = gap > tol
            if not late or steps == most:
                break
            steps, halvings = steps + 1, 0
            top, level = np.int64(0), 0.0
            for i in range(k):
                level += lam[i] * g[i]
                if lam[i] > lam[top]:
                    top = i
            count = 0
            for i in range(k):
                if i != top and (lam[i] > 0 or g[i] > level):
                    free[count] = i
                    vectors[5, count] = g[i] - g[top]
                    vectors[6, count] = lam[i]
                    count += 1
            gram(slopes, n, top, free, count, w, domain, a, hessian)
            quadratic_step(hessian, vectors[5], vectors[6], count, step, (system, vectors))
            along, reach, total, room = 0.0, 0.0, 0.0, np.inf
            for p in range(count):
                total += step[p]
                reach += abs(step[p])
                along += step[p] * (g[free[p]] - level)
                if step[p] < 0:
                    room = min(room, lam[free[p]] / -step[p])
            along -= total * (g[top] - level)
            if total > 0:
                room = min(room, lam[top] / total)
            length = min(1.0, 2 / max(reach + abs(total), TINY))
            # Where no more than rounding is to be gained, the duality gap tells whether a step is
            # good, and where that does not shrink, this is the maximum.
            settled = length * along <= 4 * EPS * size
        else:
            halvings += 1
            if settled or halvings == HALVINGS:
                late = not settled or gap > ROUGH
                break
            # Where the arc bends first is worth a try: the bend may be what spoils the step.
            length = room if length / 4 < room < length else length / 4
        # Bent at zero and brought back to sum one.
        mass = gain = 0.0
        for i in range(k):
            next_lam[i] = lam[i]
        for p in range(count):
            next_lam[free[p]] += length * step[p]
        next_lam[top] -= length * total
        for i in range(k):
            next_lam[i] = next_lam[i] if next_lam[i] > EPS else 0.0
            mass += next_lam[i]
        for i in range(k):
            next_lam[i] /= mass
            gain += (next_lam[i] - lam[i]) * (g[i] - level)
    if swapped:
        # The state is in the other half.
        for i in range(k):
            next_lam[i] = lam[i]
        for j in range(n):
            next_s[j], next_y[j], next_w[j] = s[j], y[j], w[j]
    return value, bend, late
