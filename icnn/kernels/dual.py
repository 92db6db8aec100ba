"""The dual of a bundle step: the best mixture of cuts, for every example of a batch.

The cuts of an example are `c_i + G_i . y <= f(y)`. Their model, with an entropy `e H(y)` and
perhaps a tilt `t . y`, is minimised over a domain:

    min_y  max_i (c_i + G_i . y) + t . y - e H(y)
        =  max_lam D(lam),    D(lam) = c . lam + min_y ((G^T lam + t) . y - e H(y)),

with `lam` on the simplex. `D` is smooth and concave. Its gradient is `g = c + G y(lam)`, its
Hessian `-G J G^T` with `J = -dy/ds` in the slope `s = G^T lam + t`, and the duality gap of a `lam`
is `max_i g_i - lam . g`.

We maximise it by a projected Newton method (Bertsekas, 1982): the largest `lam_r` is written as one
minus the others, those at zero whose gradient is below the mean `lam . g` stay there, and a few
rounds find which of the others Newton's step takes to zero. The step is searched along an arc that
is bent at zero and brought back to sum one. Where the slopes are large beside the entropy, `D` is
almost a polyhedron and steps are short: then the entropy comes down in stages, as the barrier of an
interior-point method does.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from icnn.kernels.choice import chosen

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny
TOL = 1e-13  # the duality gap to reach, relative to the terms of D
FIRST, STAGE, LAST = 30, 15, 60  # steps: at once, in each stage, at the end
FALL, MOST = 4.0, 20  # of the entropy, from stage to stage; and stages at most
HALVINGS = 20  # of a step (to a quarter each) until D rises
RIDGE = 1e-12  # beside a diagonal of ones, for cuts that depend on each other
FLAT = 1e-10  # of the gradient: a curvature that is none
ROUGH = 1e-11  # a gap at which there is more to gain, whatever a step promises
# What compiled versions have besides: an interior method for what Newton's steps do not solve.
INTERIOR, WITHIN = 60, 0.99  # its steps, and how near to bounds one may go
ROUNDS = 8  # of finding out which cuts a step drops
MOST_CUTS = 128  # of an example on a GPU, where a program keeps a matrix of that size in registers
BELOW = -1e300  # the offset of a cut that is not there: below all others
DUAL, STEP, END = 0, 1, 2  # what compiled steps are asked for: the dual alone, all, the last look


class Domain(Protocol):
    """What the dual needs of a domain: see `icnn.solvers.domains`."""

    def entropy(self, y: Tensor) -> Tensor: ...

    def minimise(self, slope: Tensor, entropy: Tensor) -> Tensor: ...


class Dual(NamedTuple):
    """The mixture, the minimiser of the model, and `D(lam)`: at most the model's minimum."""

    lam: Tensor  # (B, k)
    y: Tensor  # (B, *y_shape)
    value: Tensor  # (B,)


class Point(NamedTuple):
    """`D` at one `lam`, its gradient and its duality gap, relative to the terms of `D`."""

    lam: Tensor
    slope: Tensor
    y: Tensor
    value: Tensor
    gradient: Tensor
    gap: Tensor
    size: Tensor


@dataclass(frozen=True)
class Model:
    """The cuts of a batch.

    Args:
        domain: Where `y` lives.
        slopes: `G`, `(B, k, n)`, in any precision; all the rest is in float64.
        offsets: `c`, `(B, k)`.
        alive: Which of the cuts there are, `(B, k)`: at least one for each example.
        entropy: `e > 0`, `(B,)`.
        shape: Of `y`, with the batch.
        tilt: `t`, `(B, n)`.
        near: A point `v`, `(B, n)`: the terms of `D` are taken relative to it, `c + G v` and
            `s . (y - v)`, so that they are small near the answer and do not drown it in rounding.
    """

    domain: Domain
    slopes: Tensor
    offsets: Tensor
    alive: Tensor
    entropy: Tensor
    shape: torch.Size
    tilt: Tensor | None = None
    near: Tensor | None = None

    def at(self, lam: Tensor, entropy: Tensor) -> Point:
        """`D` at `lam`, with another entropy perhaps."""
        slope = (lam[:, None, :] @ self.slopes).squeeze(1)
        slope = slope if self.tilt is None else slope + self.tilt
        y = self.domain.minimise(slope.reshape(self.shape), column(entropy, self.shape))
        flat = y.flatten(start_dim=1)
        flat = flat if self.near is None else flat - self.near
        gradient = self.offsets + (self.slopes @ flat[:, :, None]).squeeze(2)
        level = (lam * self.offsets).sum(dim=1)
        bend = entropy * self.domain.entropy(y)
        value = level + (slope * flat).sum(dim=1) - bend
        size = 1 + level.abs() + (slope * flat).abs().sum(dim=1) + bend.abs()
        gap = gradient.masked_fill(~self.alive, -math.inf).amax(dim=1) - (lam * gradient).sum(dim=1)
        return Point(lam, slope, y, value, gradient, gap / size, size)

    def bend(self, here: Point, entropy: Tensor, directions: Tensor) -> Tensor:
        """`A J A^T` at a point, for the rows of `directions`, `(B, k, n)`."""
        entropy = column(entropy, self.shape)
        own = getattr(self.domain, "curvature", None)
        if own is not None:
            return own(here.y, entropy, directions)
        # The domain has no formula: differentiate its `minimise`.
        with torch.enable_grad():
            slope = here.slope.detach().requires_grad_()
            flat = self.domain.minimise(slope.reshape(self.shape), entropy).flatten(start_dim=1)
        rows = directions.unbind(dim=1)
        bent = [torch.autograd.grad(flat, slope, row, retain_graph=True)[0] for row in rows]
        product = -directions @ torch.stack(bent, dim=2)
        return (product + product.mT) / 2


class Slotted(NamedTuple):
    """A model as compiled kernels read it: cuts in the first of some slots, contiguous."""

    slopes: Tensor  # (B, slots, n), or a part of that with its strides
    offsets: Tensor  # (B, slots)
    lam: Tensor  # (B, slots)
    near: Tensor  # (B, n)


def slotted(model: Model, start: Tensor) -> Slotted:
    """Where slopes lie in more slots than they fill, nothing is copied but what is small."""
    (batch, count), slopes = start.shape, model.slopes
    n = slopes.shape[2]
    slots = slopes.stride(0) // max(1, n)
    if slopes.stride()[1:] != (n, 1) or slots < count:
        slopes, slots = slopes.clone(memory_format=torch.contiguous_format), count
    offsets, lam = start.new_zeros(2, batch, slots)
    offsets[:, :count] = torch.where(model.alive, model.offsets, BELOW)
    lam[:, :count] = start
    near = start.new_zeros(batch, n) if model.near is None else model.near.double().contiguous()
    return Slotted(slopes, offsets, lam, near)


def column(values: Tensor, shape: torch.Size) -> Tensor:
    """One number for each example, as a tensor that broadcasts to `shape`."""
    return values.reshape(-1, *(1 for _ in shape[1:]))


def solve(model: Model, start: Tensor, active: Tensor, kernel: str = "auto") -> Dual:
    """Maximise `D` from `start`, each example until its duality gap is a matter of rounding.

    Args:
        model: The cuts.
        start: Shares on the simplex, `(B, k)`.
        active: Which examples count, `(B,)`; what is found for others means nothing.
        kernel: What computes: see `icnn.kernels.choice`.
    """
    kernel = chosen(kernel, model.domain, start)
    try:
        if kernel == "numba":
            from icnn.kernels import numba_steps

            return Dual(*numba_steps.dual(model, start, active))
        if kernel == "triton":
            from icnn.kernels import triton_steps

            return Dual(*triton_steps.dual(model, start, active))
    except NotImplementedError:
        pass  # too large for that kernel
    return reference(model, start)


def reference(model: Model, start: Tensor) -> Dual:
    """The same in plain PyTorch: what compiled versions are held against."""
    slopes, near = model.slopes.double(), model.near
    # All cuts from the point that they are relative to, and the highest of them there at zero.
    offsets = model.offsets
    offsets = offsets if near is None else offsets + (slopes @ near[:, :, None]).squeeze(2)
    level = offsets.masked_fill(~model.alive, -math.inf).amax(dim=1)
    offsets = torch.where(model.alive, offsets - level[:, None], 0.0)
    found = staged(replace(model, slopes=slopes, offsets=offsets), start)
    return found._replace(value=found.value + level)


def staged(model: Model, start: Tensor) -> Dual:
    """At once, and where that is not enough with an entropy that comes down in stages."""
    everyone = torch.ones_like(start[:, 0], dtype=torch.bool)
    here, late = climb(model, model.at(start, model.entropy), model.entropy, FIRST, everyone)
    if bool(late.any()):
        # From an entropy at which slopes that differ by as much as ours do not look large.
        slopes = model.slopes.masked_fill(~model.alive[:, :, None], 0)
        widest = (slopes.amax(dim=1) - slopes.amin(dim=1)).amax(dim=1)
        ratio = (widest / model.entropy).nan_to_num(nan=1.0).clamp(1, FALL**MOST)
        stages = math.ceil(math.log(max(float(ratio[late].max()), 1.0)) / math.log(FALL))
        there = here
        for stage in range(stages, 0, -1):
            entropy = model.entropy * FALL**stage
            # Each example by its own slopes: what else is in the batch does not matter.
            joining = late & (FALL ** (stage - 1) <= ratio)
            there = pick(joining, model.at(there.lam, entropy), there)
            there, _ = climb(model, there, entropy, STAGE, joining)
        there = pick(late, model.at(there.lam, model.entropy), here)
        there, _ = climb(model, there, model.entropy, LAST, late)
        here = pick(late & (there.value > here.value), there, here)
    return Dual(here.lam, here.y, here.value)


def climb(
    model: Model, here: Point, entropy: Tensor, steps: int, active: Tensor
) -> tuple[Point, Tensor]:
    """Newton steps for the examples that are active; and which of them are not optimal after it."""
    asked = active
    for _ in range(steps):
        active = active & (here.gap > TOL)
        if not bool(active.any()):
            break
        here, active = newton(model, here, entropy, active)
    return here, asked & (here.gap > torch.where(active, TOL, ROUGH))


def newton(model: Model, here: Point, entropy: Tensor, active: Tensor) -> tuple[Point, Tensor]:
    """One step of the projected Newton method, and which examples could still rise before it."""
    lam, slopes = here.lam, model.slopes
    top = lam.argmax(dim=1, keepdim=True)
    is_top = torch.zeros_like(model.alive).scatter(1, top, True)
    level = (lam * here.gradient).sum(dim=1, keepdim=True)
    free = model.alive & ~is_top & ((lam > 0) | (here.gradient > level))
    gradient = (here.gradient - here.gradient.gather(1, top)).masked_fill(~free, 0)

    # Differences before products: cuts near the answer are almost the same.
    apart = slopes - slopes.gather(1, top[:, :, None].expand(-1, -1, slopes.shape[2]))
    hessian = model.bend(here, entropy, apart.masked_fill(~free[:, :, None], 0))
    step = quadratic_step(hessian, gradient, lam, free)
    step = torch.where(is_top, -step.sum(dim=1, keepdim=True), step)

    # Bent at zero and brought back to sum one, D rises along the arc at first: what is bent is at
    # zero with a gradient above the mean `lam . g`, and the mean itself does not change by scaling.
    length = (2 / step.abs().sum(dim=1).clamp(min=TINY)).clamp(max=1)
    # Where no more than rounding is to be gained, the duality gap tells whether a step is good, and
    # where that does not shrink, this is the maximum.
    promise = length * (step * (here.gradient - level)).sum(dim=1)
    settled = promise <= 4 * EPS * here.size
    # Where the arc bends first is worth a try: the bend may be what spoils the step.
    room = torch.where(step < 0, lam / (-step).clamp(min=TINY), math.inf).amin(dim=1)
    best, searching = here, active
    for _ in range(HALVINGS):
        moved = lam + length[:, None] * step
        moved = torch.where(moved > EPS, moved, 0.0)
        there = model.at(moved / moved.sum(dim=1, keepdim=True), entropy)
        gain = ((there.lam - lam) * (here.gradient - level)).sum(dim=1)
        rises = there.value >= here.value + 1e-4 * gain - 4 * EPS * here.size
        good = torch.where(settled, rises & (there.gap < here.gap / 2), rises)
        best = pick(searching & good, there, best)
        active = active & ~(searching & settled & ~good)
        searching = searching & ~good & ~settled
        if not bool(searching.any()):
            break
        shorter = torch.where((length / 4 < room) & (room < length), room, length / 4)
        length = torch.where(searching, shorter, length)
    return best, active


def quadratic_step(hessian: Tensor, gradient: Tensor, lam: Tensor, free: Tensor) -> Tensor:
    """Where `gradient . d - d . hessian d / 2` is largest with `lam + d >= 0`, or near to that.

    Those that Newton's direction takes below zero go to zero, and the others are solved for again,
    a few times. Else one tiny share would hold back, or bend, the step of all.
    """
    # Each in its own units: cuts may be almost the same, or far apart.
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    least = 1e-18 * diagonal.amax(dim=1, keepdim=True)
    # Where there is no curvature at all, as at a corner of a bowl, a step is long and still finite.
    flat = FLAT * gradient.abs().amax(dim=1, keepdim=True)
    least = torch.maximum(least, flat).clamp(min=TINY)
    units = torch.where(free, torch.maximum(diagonal, least), 1.0).rsqrt()
    scaled = hessian * units[:, :, None] * units[:, None, :]
    step, leaving = torch.zeros_like(lam), torch.zeros_like(free)
    for _ in range(ROUNDS):
        rest = free & ~leaving
        gone = torch.where(leaving, -lam, 0.0)
        pull = (gradient - (hessian @ gone[:, :, None]).squeeze(2)).masked_fill(~rest, 0)
        system = scaled * rest[:, :, None] * rest[:, None, :]
        # Cuts that depend on each other leave directions without curvature.
        system.diagonal(dim1=1, dim2=2).fill_(1 + RIDGE)
        factor, failed = torch.linalg.cholesky_ex(system)
        found = units * torch.cholesky_solve((units * pull)[:, :, None], factor).squeeze(2)
        sound = ((failed == 0) & found.isfinite().all(dim=1))[:, None]
        steepest = pull / pull.abs().amax(dim=1, keepdim=True).clamp(min=TINY)
        found = torch.where(sound, found, steepest).masked_fill(~rest, 0) + gone
        # Too many may have left: then the step before is better.
        gain = ((gradient - (hessian @ found[:, :, None]).squeeze(2) / 2) * found).sum(dim=1)
        step = torch.where((gain > 0)[:, None] | ~leaving.any(dim=1, keepdim=True), found, step)
        below = rest & (lam + found < 0)
        if not bool(below.any()):
            break
        # Those first that their own gradient takes there: others may only follow them.
        willing = below & (pull < 0)
        leaving = leaving | torch.where(willing.any(dim=1, keepdim=True), willing, below)
    return step


def pick(mask: Tensor, first: Point, second: Point) -> Point:
    """Examples of the one under the mask, of the other elsewhere."""

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(column(mask, a.shape), a, b)

    return Point(*(chosen(a, b) for a, b in zip(first, second, strict=True)))
