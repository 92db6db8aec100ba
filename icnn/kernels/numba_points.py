# pyright: reportCallIssue=false
"""The minimiser of `s . y - e H(y)` over a domain, with Numba: its value, curvature and entropy.

One function for each kind of domain in `icnn.kernels.ground`. Logarithms are not needed: with
`t = width * s / e` a coordinate of the box has the minimum

    min_y (s y - e h(y)) = s * corner - e log(1 + exp(-|t|)),    corner = high if s < 0 else low,

and the logarithms of many coordinates are one, of their product.
"""

import math
from functools import partial

import numba
import numpy as np

from icnn.kernels.dual import TINY

FACTORS = 512  # of at most two each: their product is below what float64 holds

SUMS = {"reassoc", "contract", "nsz"}
"""Sums in any order: several at once, in the lanes of a vector unit. NaN and infinity stay."""
PLAIN = {"contract", "nsz"}
jit = partial(numba.njit, error_model="numpy", no_cfunc_wrapper=True)
LOG2E, LN2 = 1 / math.log(2), math.log(2)
MAGIC = 1.5 * 2.0**52  # added and taken away again, it rounds to a whole number


@jit(fastmath=PLAIN)
def exp_negative(t, n, out, bits):
    """`exp(-|t|)` for n numbers: 2^k times a polynomial, in loops that LLVM makes vectors of."""
    whole = bits.view(np.float64)
    for j in range(n):
        x = max(-LOG2E * abs(t[j]), -1000.0)
        rounded = x + MAGIC
        whole[j] = rounded
        r = (x - (rounded - MAGIC)) * LN2
        p = 1 / 479001600
        p = p * r + 1 / 39916800
        p = p * r + 1 / 3628800
        p = p * r + 1 / 362880
        p = p * r + 1 / 40320
        p = p * r + 1 / 5040
        p = p * r + 1 / 720
        p = p * r + 1 / 120
        p = p * r + 1 / 24
        p = p * r + 1 / 6
        p = p * r + 0.5
        p = p * r + 1
        out[j] = p * r + 1
    for j in range(n):
        bits[j] = (bits[j] + 1023) << 52
    for j in range(n):
        out[j] *= whole[j]


@jit(fastmath=SUMS)
def log_product(ex, n):
    """The sum of `log(1 + ex)`."""
    total = 0.0
    for first in range(0, n, FACTORS):
        product = 1.0
        for j in range(first, min(n, first + FACTORS)):
            product *= 1 + ex[j]
        total += math.log(product)
    return total


@jit(fastmath=SUMS)
def box_point(s, v, low, width, e, n, y, w, t, bits):
    """The minimiser of `s . y - e H(y)` into `y`, and `J` into `w`.

    Gives `s . (y - v) - e H(y)`, the sum of `|s (y - v)|`, and `e H(y)`.
    """
    rate = 1 / e
    for j in range(n):
        # A coordinate that is given has no entropy.
        t[j] = width[j] * s[j] * rate if width[j] > 0 else np.inf
    exp_negative(t, n, w, bits)
    logs = e * log_product(w, n)
    level = size = bend = 0.0
    for j in range(n):
        ex, wide = w[j], width[j]
        large = 1 / (1 + ex)
        small = ex * large
        # u = sigmoid(-t): small where t is positive.
        rises = s[j] > 0
        corner = low[j] if rises else low[j] + wide
        y[j] = low[j] + wide * (small if rises else large)
        level += s[j] * (corner - v[j])
        size += abs(s[j] * (y[j] - v[j]))
        bend += abs(s[j]) * wide * small
        w[j] = wide * wide * rate * small * large
    return level - logs, size, bend + logs


@jit(fastmath=SUMS)
def simplex_point(s, v, low, width, m, e, n, y, w, t, bits):
    """The same on simplices of `m` coordinates each; `w` is `y / e` where it is free."""
    level = size = bend = 0.0
    for group in range(n // m):
        a, b = group * m, group * m + m
        least, mass = np.inf, 1.0
        for j in range(a, b):
            if width[j] > 0:
                least = min(least, s[j])
            else:
                mass -= low[j]
        mass = max(mass, 0.0)
        for j in range(a, b):
            t[j] = (s[j] - least) / e if width[j] > 0 else np.inf
        exp_negative(t[a:b], m, w[a:b], bits[a:b])
        total = 0.0
        for j in range(a, b):
            w[j] = w[j] if width[j] > 0 else 0.0
            total += w[j]
        total = max(total, TINY)
        share = mass / total
        # -sum y log y with y = mass p and log p = -t - log(total).
        turn = 0.0
        for j in range(a, b):
            y[j] = share * w[j] if width[j] > 0 else low[j]
            turn += w[j] * t[j] if width[j] > 0 else 0.0
            level += s[j] * (y[j] - v[j])
            size += abs(s[j] * (y[j] - v[j]))
            w[j] = share * w[j] / e
        if mass > 0 and least < np.inf:
            bend += e * mass * (turn / total + math.log(total) - math.log(mass))
    return level - bend, size, bend


@jit(fastmath=SUMS)
def bowl_point(s, v, low, width, bottom, weight, e, n, y, w):
    """The same for `H(y) = -weight . (y - bottom)^2 / 2` in a box."""
    level = size = bend = 0.0
    for j in range(n):
        rate, high = 1 / (e * weight[j]), low[j] + width[j]
        free = bottom[j] - s[j] * rate
        y[j] = min(max(free, low[j]), high)
        w[j] = rate if low[j] < free < high else 0.0
        bend -= 0.5 * e * weight[j] * (y[j] - bottom[j]) ** 2
        level += s[j] * (y[j] - v[j])
        size += abs(s[j] * (y[j] - v[j]))
    return level - bend, size, bend


@jit(fastmath=SUMS)
def rounded(s, exact, w, y, domain, e, n):
    """How much `e H` changes where `exact`, the minimiser for the slope `s`, was rounded to `y`.

    To second order, without logarithms: the slope of `e H` is `s` there, but for a number that all
    coordinates of a simplex share, and its curvature `-1 / J`. One by one where that is not enough.
    """
    m, low, width, bottom, weight = domain
    change, far = 0.0, 0
    if m < 0:
        for j in range(n):
            off = np.float64(y[j]) - exact[j]
            change -= e * weight[j] * off * (exact[j] - bottom[j] + off / 2)
        return change
    if m:
        for begin in range(0, n, m):
            top = begin
            for j in range(begin, begin + m):
                top = j if width[j] > 0 and (exact[j] > exact[top] or width[top] == 0) else top
            if not exact[top] > 0 or width[top] == 0:
                continue
            # e H' = -e (log y + 1) = s + c
            c = -e * (math.log(exact[top]) + 1) - s[top]
            for j in range(begin, begin + m):
                off = np.float64(y[j]) - exact[j]
                if off != 0 and exact[j] > 0:
                    change += (s[j] + c) * off - off * off / (2 * w[j])
        return change
    for j in range(n):
        off = np.float64(y[j]) - exact[j]
        # w = J = width^2 u (1 - u) / e
        near = abs(off) * width[j] <= 1e-3 * e * w[j]
        far += 0 if near else 1
        change += s[j] * off - off * off / (2 * w[j] + TINY) if near else 0.0
    if far:
        for j in range(n):
            off = np.float64(y[j]) - exact[j]
            if width[j] > 0 and not abs(off) * width[j] <= 1e-3 * e * w[j]:
                t = abs(width[j] * s[j] / e)
                ex = math.exp(-t)
                before = math.log(1 + ex) + t * ex / (1 + ex)
                now = min(max((np.float64(y[j]) - low[j]) / width[j], 0.0), 1.0)
                change += e * (binary(now) + binary(1 - now) - before)
    return change


@jit()
def entropy_at(y, domain, n):
    """`H(y)`, with logarithms."""
    m, low, width, bottom, weight = domain
    total = 0.0
    if m < 0:
        for j in range(n):
            total -= 0.5 * weight[j] * (np.float64(y[j]) - bottom[j]) ** 2
        return total
    for j in range(n):
        if width[j] > 0:
            u = np.float64(y[j]) if m else (np.float64(y[j]) - low[j]) / width[j]
            u = min(max(u, 0.0), 1.0)
            # -y log y on the simplex, and the same of 1 - u in a box.
            total += binary(u) + (0.0 if m else binary(1 - u))
    return total


@jit()
def binary(u):
    """`-u log u`."""
    return -u * math.log(u) if u > 0 else 0.0
