"""The answers of a search with their gradients: which pieces of the energy count, as a graph."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from icnn.energies.energy import at
from icnn.solvers.adjoint import Answer, Bend, System
from icnn.solvers.domains import Domain, steepness
from icnn.solvers.graph import Traits, Watched, leaves, traits
from icnn.solvers.problem import Pieces, Problem, Record, rows
from icnn.solvers.solution import Status

PRESS, STILL = 1e8, 1e-3  # how far a slope is pressed against bounds, and the motion allowed
SAME = 0.1  # tangents that curvature brings this much nearer to each other are of one piece
TINY = torch.finfo(torch.float64).tiny

Hold = Callable[[Tensor], Tensor]
"""Puts the coordinates that are given in their place, with their graph."""


class Learned(NamedTuple):
    """The answers and the objective there, with gradients."""

    y: Tensor  # (B, *y_shape)
    value: Tensor  # (B,): by the envelope theorem, the answer's own motion does not count


def differentiate(problem: Problem, record: Record, solve: Callable[[Problem], Record]) -> Learned:
    """Tie the answers to all that made them: parameters, `x`, bounds, values that are given.

    With "unroll" the record's answers are tied already.
    """
    y, gradient, domain = record.y.detach(), problem.gradient, problem.domain
    bad = record.status == Status.NONFINITE
    level = record.value.masked_fill(bad, torch.nan)
    slope, entropy = mixture(problem, record), problem.entropy
    carry = getattr(domain, "carry", None)
    moved = y.double() if carry is None else carry(y.double())
    here = domain.minimise(slope.reshape(y.shape), entropy) if entropy else moved
    if not (problem.live or here.requires_grad):
        return Learned(y, level)
    if bool(bad.any()):
        warnings.warn(
            f"{int(bad.sum())} of {len(bad)} examples are not finite: they get no gradient",
            RuntimeWarning,
            stacklevel=3,
        )
    if bool(bad.all()):  # also where there are no examples
        inputs = [*leaves(problem.energy(y), tensors(problem.x)), *leaves(here)]
        return Learned(*Severed.apply(y, level, *inputs))  # pyright: ignore
    spot = y
    if bool(bad.any()):
        problem, spot = without(problem, y, bad)
        if gradient == "unroll":
            with torch.no_grad():
                record.y = solve(problem).y

    def hold(point: Tensor) -> Tensor:
        held = problem.free is not None and here.requires_grad
        return torch.where(problem.free, point, here.to(y.dtype)) if held else point  # pyright: ignore

    leaf = spot.clone().requires_grad_()
    found = read(problem, problem.energy(hold(leaf)), leaf, gradient)
    if gradient == "unroll":
        if found.opaque:
            raise ValueError(
                '`gradient` must be "cuts" or "implicit" for an energy without second derivatives, '
                'got "unroll": solve it with icnn.BundleEntropy'
            )
        value = problem.energy(moved.to(y.dtype)).double() - problem.bend(moved)
        value = torch.where(bad, 0.0, value)
        return Learned(torch.where(rows(bad, y), y, record.y), level + (value - value.detach()))

    straight = gradient == "cuts" or (gradient == "auto" and found.kinked and not found.curved)
    kinked, lost = straight or found.kinked, False
    pieces = Pieces(spot[:, None], torch.ones_like(slope[:, :1]), slope)
    if kinked and record.pieces is not None:
        given = torch.zeros_like(bad) if problem.free is None else ~problem.free.flatten(1).any(1)
        pieces = counting(record.pieces, spot, bad | given)
    elif kinked and gradient == "auto":
        lost = True
    elif kinked:
        raise ValueError(
            f'`gradient` must be "auto" for an energy with kinks and this solver, got '
            f"{gradient!r}, which needs the cuts of icnn.BundleEntropy or icnn.Bundle"
        )
    make = opaque if found.opaque else attached
    part = make(problem, here, hold, pieces, spot, not straight)
    # The envelope theorem: the mixture of pieces moves the value, and the answer with its domain.
    steady = part.mean.detach().double()
    value = (part.lam * part.heights.double()).sum(dim=1)
    value = value + (steady * moved.flatten(start_dim=1)).sum(dim=1) - problem.bend(moved)
    value = level + torch.where(bad, 0.0, value - value.detach())
    if lost:
        return Learned(Refused.apply(y, part.heights), value)  # pyright: ignore

    slope = slope if entropy else pressed(domain, y, slope, steady)
    bend = Bend(domain, slope, entropy or 1.0, y.shape)
    if not straight and kinked:
        part = merged(part, bend)
    eps = torch.finfo(y.dtype).eps
    system = System(bend, part.slopes, part.lam, part.hessian, entropy > 0, eps)
    parts = (here.flatten(start_dim=1), part.heights, part.mean)
    return Learned(Answer.apply(y, system, ~bad, *parts), value)  # pyright: ignore


def pressed(domain: Domain, y: Tensor, slope: Tensor, energy: Tensor) -> Tensor:
    """Without entropy, a slope of `H` that lies as far out as the energy presses the answer.

    There `J` leaves out the directions in which the answer sits on a bound. The energy's own slope
    is added as many times as that does not move the answer.
    """
    size = energy.abs().amax(dim=1, keepdim=True)
    wide = torch.full_like(size, PRESS) / size.clamp(min=TINY)
    for _ in range(12):
        moved = domain.minimise((slope + wide * energy).reshape(y.shape), 1.0)
        far = (moved - y).abs().flatten(start_dim=1).amax(dim=1, keepdim=True)
        wide = torch.where(
            far <= STILL * (1 + y.abs().flatten(1).amax(1, keepdim=True)), wide, wide / 10
        )
    return slope + wide * energy


def mixture(problem: Problem, record: Record) -> Tensor:
    """The slope `s` with `Y(s) = y`: the mixture of cuts that the search found, or that of `H`."""
    if problem.entropy and record.pieces is not None:
        return record.pieces.slope
    return (problem.entropy or 1.0) * steepness(problem.domain, record.y.detach().double())


def read(problem: Problem, value: Tensor, y: Tensor, gradient: str | None) -> Traits:
    """Whether an energy is kinked, curved, opaque: as it declares, else as its graph tells."""
    if not value.requires_grad:
        return Traits(False, False, False)
    found, smooth = traits(value, y), getattr(problem.source, "smooth", None)
    if smooth is None and found.opaque:
        # What cannot be looked into is tried out, unless the user knows.
        smooth = gradient == "implicit" or (
            gradient == "auto" and seems_smooth(problem, y.detach())
        )
    if smooth is not None:
        found = found._replace(
            kinked=not smooth, curved=smooth or (found.curved and not found.opaque)
        )
    return found


def seems_smooth(problem: Problem, y: Tensor) -> bool:
    """Whether slopes change around the answers, and in proportion to the distance."""
    way = torch.ones_like(y).cumsum(dim=-1).sin()

    def change(size: float) -> Tensor:
        ends = (problem.tangent(y + sign * size * way).slope for sign in (1, -1))
        return torch.sub(*ends) / size

    size = torch.finfo(y.dtype).eps ** 0.25
    far, near = change(size), change(size / 2)
    return bool((far - near).abs().sum() < 0.1 * far.abs().sum())


def counting(pieces: Pieces, y: Tensor, none: Tensor) -> Pieces:
    """The cuts that share in the answers, in as few slots as will hold them; `none` have no cut."""
    lam = pieces.lam
    if not lam.shape[1]:
        return Pieces(y[:, None], torch.ones_like(pieces.slope[:, :1]), pieces.slope)
    order = lam.argsort(dim=1, descending=True, stable=True)
    order = order[:, : max(1, int((lam > 0).sum(dim=1).amax()))]
    lam = lam.gather(1, order)
    points = pieces.points.gather(1, order[:, :, None].expand(-1, -1, pieces.points.shape[2]))
    taken = (lam > 0) & ~none[:, None]
    points = torch.where(taken[:, :, None], points, y.flatten(start_dim=1)[:, None])
    return Pieces(points.unflatten(2, y.shape[1:]), lam, pieces.slope)


class Part(NamedTuple):
    """What the optimality conditions are made of; the first two carry a graph."""

    heights: Tensor  # (B, k): the pieces at the answer
    mean: Tensor  # (B, n): the mixture of their slopes there
    slopes: Tensor  # (B, k, n), in float64
    plain: Tensor  # (B, k, n): the slopes where the cuts were made
    lam: Tensor  # (B, k)
    hessian: Callable[[Tensor], Tensor] | None


def attached(
    problem: Problem, here: Tensor, hold: Hold, pieces: Pieces, y: Tensor, curved: bool
) -> Part:
    """The pieces as PyTorch's graph has them, cut by cut.

    Cuts are made near the answer and not at it. Straight pieces are the same there; of curved ones
    the heights and slopes are taken along, by their curvature where the cut was made.
    """
    points, slopes, heights, carried = [], [], [], []
    for point in pieces.points.unbind(dim=1):
        point = point.detach().clone().requires_grad_()
        height = problem.energy(hold(point))
        slope = slope_of(height, point, problem.free)
        away = (y - point.detach()).flatten(start_dim=1)
        taken, bent = slope, torch.zeros_like(slope)
        if curved and slope.requires_grad and bool(away.any()):
            bent = slope_of((slope * away).sum(dim=1), point, problem.free)
            taken = slope + bent
        points.append(point)
        slopes.append(slope)
        heights.append(height + ((slope + bent / 2) * away).sum(dim=1))
        carried.append(taken)
    stacked = torch.stack(carried, dim=1)
    lam = pieces.lam

    def hessian(q: Tensor) -> Tensor:
        shares = [(share[:, None] * q).to(y.dtype) for share in lam.unbind(dim=1)]
        ways = [
            (s, p, v) for s, p, v in zip(slopes, points, shares, strict=True) if s.requires_grad
        ]
        if not ways:
            return torch.zeros_like(q)
        outputs, inputs, vectors = zip(*ways, strict=True)
        bent = torch.autograd.grad(
            outputs, inputs, vectors, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        total = torch.stack(bent).sum(dim=0)
        total = total if problem.free is None else torch.where(problem.free, total, 0.0)
        return total.flatten(start_dim=1).double()

    return Part(
        torch.stack(heights, dim=1),
        (lam.to(y.dtype)[:, None, :] @ stacked).squeeze(1),
        stacked.detach().double(),
        torch.stack(slopes, dim=1).detach().double(),
        lam,
        hessian if curved else None,
    )


def slope_of(value: Tensor, point: Tensor, free: Tensor | None) -> Tensor:
    """The gradient of each example in its free coordinates, `(B, n)`, with its graph."""
    if not value.requires_grad:
        return torch.zeros_like(point).flatten(start_dim=1)
    (slope,) = torch.autograd.grad(
        value.sum(), point, create_graph=True, allow_unused=True, materialize_grads=True
    )
    slope = slope if free is None else torch.where(free, slope, torch.zeros_like(slope))
    return slope.flatten(start_dim=1)


def merged(part: Part, bend: Bend) -> Part:
    """Tangents of one curved piece are one: two of them would pin the answer between their points.

    Two cuts are of one piece if its curvature explains most of the difference of their slopes.
    """
    before, after = (apart(bend.gram(slopes)) for slopes in (part.plain, part.slopes))
    there = part.lam > 0
    same = (after <= SAME**2 * before) & there[:, :, None] & there[:, None, :]
    same = same | torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
    for _ in range(max(1, (same.shape[1] - 1).bit_length())):
        same = (same.double() @ same.double()) > 0
    # The first of a piece, the one with the largest share, stands for all.
    first = same.double().argmax(dim=1)
    belongs = torch.zeros_like(same).scatter(1, first[:, None, :], True)
    share = belongs * part.lam[:, None, :]
    lam = share.sum(dim=2)
    share = share / lam[:, :, None].clamp(min=TINY)
    heights = (share.to(part.heights.dtype) @ part.heights[:, :, None]).squeeze(2)
    return part._replace(heights=heights, slopes=share @ part.slopes, lam=lam)


def apart(gram: Tensor) -> Tensor:
    """Squared distances, from the products of vectors with each other."""
    own = gram.diagonal(dim1=1, dim2=2)
    return (own[:, :, None] + own[:, None, :] - 2 * gram).clamp(min=0)


def opaque(
    problem: Problem, here: Tensor, hold: Hold, pieces: Pieces, y: Tensor, curved: bool
) -> Part:
    """The pieces of an energy without second derivatives: differences stand in for them."""
    inputs = list(leaves(problem.energy(y.clone().requires_grad_()), tensors(problem.x)))
    points = pieces.points
    heights, slopes = Differences.apply(problem, points, here, *inputs)  # pyright: ignore
    away = (y[:, None] - points).flatten(start_dim=2)
    lam = pieces.lam

    def hessian(q: Tensor) -> Tensor:
        step = length(y.flatten(start_dim=1), q)
        ends = (problem.tangent(y + sign * (step * q).reshape(y.shape)).slope for sign in (1, -1))
        return torch.sub(*ends) / (2 * step)

    return Part(
        heights + (slopes * away).sum(dim=2),
        (lam.to(y.dtype)[:, None, :] @ slopes).squeeze(1),
        slopes.detach().double(),
        slopes.detach().double(),
        lam,
        hessian if curved else None,
    )


class Differences(torch.autograd.Function):
    """Values and slopes of an energy at some points; `grad_theta (slope . d)` by differences.

    As section 5.1 of the paper offers: the gradient in the parameters is taken ahead of and behind
    each point, along `d`.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, points: Tensor, here: Tensor, *inputs: Tensor) -> Any:
        ctx.problem, ctx.points, ctx.here, ctx.inputs = problem, points, here, inputs
        found = [problem.tangent(point) for point in points.unbind(dim=1)]
        values, slopes = (torch.stack(t, dim=1) for t in zip(*found, strict=True))
        return values.to(points.dtype), slopes.to(points.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore
        problem, weights, ways = ctx.problem, *gradients
        # A graph of its own: that of the search may be gone.
        known = {id(t): t.detach().requires_grad_() for t in tensors(problem.x) if t.requires_grad}
        x = pytree.tree_map(lambda leaf: known.get(id(leaf), leaf), problem.x)
        here = ctx.here.detach().requires_grad_()
        inputs = [here, *(known.get(id(t), t) for t in ctx.inputs)]
        with torch.enable_grad():
            energy, total = at(problem.source, x), 0 * here.sum()
            for j, point in enumerate(ctx.points.unbind(dim=1)):
                way = ways[:, j]
                step = length(point.flatten(start_dim=1), way)
                move = (step * way).reshape(point.shape)
                if problem.free is not None:
                    point = torch.where(problem.free, point, here.to(point.dtype))
                slant = (energy(point + move) - energy(point - move)) / (2 * step[:, 0])
                total = total + (weights[:, j] * energy(point) + slant).sum()
            found = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True)
        return (None, None, *found)


def length(point: Tensor, way: Tensor) -> Tensor:
    """How far to go for a central difference: where rounding and curvature are alike, `(B, 1)`."""
    size = 1 + point.abs().amax(dim=1, keepdim=True)
    far = way.abs().amax(dim=1, keepdim=True)
    step = torch.finfo(point.dtype).eps ** (1 / 3) * size / far.clamp(min=TINY)
    return torch.where(far > 0, step, torch.ones_like(step))


class Severed(torch.autograd.Function):
    """Answers and values that depend on their inputs by name only: their gradient is zero."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor, *inputs: Tensor) -> Any:
        ctx.count = len(inputs)
        return y.clone(), value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * (2 + ctx.count)


class Refused(torch.autograd.Function):
    """An answer whose gradient is not known."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, inputs: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "solution.y has no gradient after this solver, which keeps no cuts of an energy with "
            "kinks: use icnn.BundleEntropy, or icnn.Bundle() without entropy"
        )


def tensors(x: Any) -> list[Tensor]:
    """The tensors in `x`."""
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


def without(problem: Problem, y: Tensor, bad: Tensor) -> tuple[Problem, Tensor]:
    """The problem with the `x` of a good example in the place of bad ones, and its answer too.

    A gradient of zero does not help where a number is NaN: the products of both are NaN.
    """
    good = (~bad).double().argmax()
    index = torch.where(bad, good, torch.arange(len(bad), device=bad.device))

    def chosen(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == len(bad)
        return leaf[index] if batched else leaf

    x = pytree.tree_map(chosen, problem.x)
    # Dropout masks are those of the search.
    with torch.random.fork_rng([y.device] if y.is_cuda else []):
        if problem.noise is not None:
            torch.random.set_rng_state(problem.noise[0])
            if y.is_cuda:
                torch.cuda.set_rng_state(problem.noise[1], y.device)
        energy = Watched(at(problem.source, x))
    return replace(problem, energy=energy, x=x), y[index]
