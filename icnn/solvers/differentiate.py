"""The answers of a search with their gradients: the way is chosen here, and all is tied up."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from icnn.solvers.adjoint import Answer, Bend, Held, System
from icnn.solvers.bowl import Bowl
from icnn.solvers.bundle import Bundle
from icnn.solvers.bundle_entropy import BundleEntropy
from icnn.solvers.differences import opaque, seems_smooth, tensors
from icnn.solvers.domains import Box, Domain, steepness
from icnn.solvers.graph import Traits, Watched, leaves, traits
from icnn.solvers.problem import Pieces, Problem, Record, rows
from icnn.solvers.solution import Status
from icnn.solvers.tangents import alone, attached, counting, merged

PRESS, STILL = 1e8, 1e-3  # how far a slope is pressed against bounds, and the motion allowed
LEAST = 1e-100  # a slope that is none


class Learned(NamedTuple):
    """The answers and the objective there, with gradients."""

    y: Tensor  # (B, *y_shape)
    value: Tensor  # (B,): by the envelope theorem, the answer's own motion does not count


def differentiate(problem: Problem, record: Record, solve: Callable[[Problem], Record]) -> Learned:
    """Tie the answers to all that made them: parameters, `x`, bounds, values that are given.

    With "unroll" the answers of the record are tied already; `solve` makes them again where some
    examples are broken.
    """
    y, domain, entropy = record.y.detach(), problem.domain, problem.entropy
    bad = record.status == int(Status.NONFINITE)
    level = record.value.masked_fill(bad, torch.nan)
    # The answer as its domain alone moves it: at its own coordinates, and at its own slope.
    carry, slope = getattr(domain, "carry", None), mixture(problem, record)
    moved = y.double() if carry is None else carry(y.double())
    here = domain.minimise(slope.reshape(y.shape), entropy) if entropy else moved
    if not (problem.live or here.requires_grad):
        return Learned(y, level)
    broken = int(bad.sum())
    if broken:
        told = f"{broken} of {len(bad)} examples are not finite: they get no gradient"
        warnings.warn(told, RuntimeWarning, stacklevel=4)
    if broken == len(bad):  # also where there are no examples
        inputs = [*leaves(problem.energy(y), tensors(problem.x)), *leaves(here)]
        return Learned(*Severed.apply(y, level, *inputs))  # pyright: ignore
    spot = y
    if broken:
        problem, spot = without(problem, y, bad)
        domain = problem.domain
        here = domain.minimise(slope.reshape(y.shape), entropy) if entropy else moved

    if problem.gradient == "unroll":
        with torch.no_grad():
            last = solve(problem).y if broken else record.y
        value = problem.energy(moved.to(y.dtype)).double() - problem.bend(moved)
        read(problem, record, spot)  # refuses what cannot be unrolled
        return Learned(torch.where(rows(bad, y), y, last), tied(level, value, bad))

    def hold(point: Tensor, rows: Tensor) -> Tensor:
        free = problem.free
        if free is None or not here.requires_grad:
            return point
        return torch.where(free[rows], point, here[rows].to(y.dtype))

    found = read(problem, record, spot)
    straight = problem.gradient == "cuts" or (
        problem.gradient == "auto" and found.kinked and not found.curved
    )
    kinked = straight or found.kinked
    pieces = alone(spot, slope)
    if kinked:
        cuts = record.pieces or searched(problem, spot)
        pieces = counting(cuts, spot, bad | record.given)
    if found.opaque:
        part = opaque(problem, here, pieces, spot, not straight)
    else:
        part = attached(problem, hold, pieces, spot, not straight)

    # The envelope theorem: the mixture of pieces moves the value, and the answer with its domain.
    steady = part.mean.detach().double()
    value = (part.lam * part.heights.double()).sum(dim=1) - problem.bend(moved)
    value = value + (steady * moved.flatten(start_dim=1)).sum(dim=1)

    slope = slope if entropy else pressed(domain, y, slope, steady)
    bend = Bend(domain, slope, entropy or 1.0, y.shape)
    if kinked and not straight:
        part = merged(part, bend)
    eps = torch.finfo(y.dtype).eps
    system = System(bend, part.slopes, part.lam, part.hessian, entropy > 0, eps)
    parts = (here.flatten(start_dim=1), part.heights, part.mean)
    return Learned(Answer.apply(y, system, ~bad, *parts), tied(level, value, bad))  # pyright: ignore


def tied(level: Tensor, value: Tensor, bad: Tensor) -> Tensor:
    """The numbers of the one with the graph of the other, of first order."""
    return level + torch.where(bad, 0.0, Held.apply(value - value.detach()))  # pyright: ignore


def searched(problem: Problem, y: Tensor) -> Pieces:
    """Cuts around an answer of a solver that keeps none: a bundle that starts there finds them."""
    bundle = BundleEntropy(tol=1e-6) if problem.entropy else Bundle()
    with torch.no_grad():
        found = bundle.solve(replace(problem, start=y.clone())).pieces
    assert found is not None
    return found


def pressed(domain: Domain, y: Tensor, slope: Tensor, energy: Tensor) -> Tensor:
    """Without entropy, a slope of `H` that lies as far out as the energy presses the answer.

    There `J` leaves out the directions in which the answer sits on a bound. The energy's own slope
    is added as many times as that does not move the answer; in a box, in each coordinate.
    """
    one = torch.ones_like(y, dtype=torch.float64)
    ends = domain.minimise(one, 0.0), domain.minimise(-one, 0.0)
    width = torch.sub(*ends).abs().flatten(start_dim=1)
    width = torch.where(width > 0, width, 1.0)
    times = (PRESS / energy.abs().amax(dim=1, keepdim=True).clamp(min=LEAST)).expand_as(energy)
    for _ in range(12):
        moved = domain.minimise((slope + times * energy).reshape(y.shape), 1.0)
        still = (moved - y).abs().flatten(start_dim=1) <= STILL * width
        still = still if isinstance(domain, Box) else still.all(dim=1, keepdim=True)
        times = torch.where(still, times, times / 10)
    return slope + times * energy


def mixture(problem: Problem, record: Record) -> Tensor:
    """The slope `s` with `Y(s) = y`: the mixture of cuts that the search found, or that of `H`."""
    # A loss sees the answer as it was rounded: in float32 that of H there goes with it. But on the
    # rim of a bowl only the mixture tells how firmly it sits there.
    exact = record.y.dtype == torch.float64 or isinstance(problem.domain, Bowl)
    if problem.entropy and record.pieces is not None and exact:
        return record.pieces.slope
    return (problem.entropy or 1.0) * steepness(problem.domain, record.y.detach().double())


def read(problem: Problem, record: Record, y: Tensor) -> Traits:
    """Whether an energy is kinked, curved, opaque: as it declares, else as its graph tells."""
    y = y.clone().requires_grad_()
    value, smooth = problem.energy(y), getattr(problem.source, "smooth", None)
    if not value.requires_grad:
        return Traits(False, False, False)
    found = traits(value, y)
    if found.opaque and problem.gradient == "unroll":
        raise ValueError(
            '`gradient` must be "cuts" or "implicit" for an energy without second derivatives, '
            'got "unroll": solve it with icnn.BundleEntropy'
        )
    if smooth is None and found.opaque:
        # What cannot be looked into is tried out, unless the user knows.
        tried = problem.gradient == "auto" and seems_smooth(problem, y.detach())
        smooth = tried or problem.gradient == "implicit"
    if smooth is not None:
        curved = smooth or (found.curved and not found.opaque)
        return found._replace(kinked=not smooth, curved=curved)
    if not (found.kinked or found.curved) and record.pieces is not None:
        # Python's own branches leave no trace, but two tangents of a plane are the same.
        slopes, lam = record.pieces.slopes, record.pieces.lam[:, :, None]
        apart = torch.where(lam > 0, slopes - record.pieces.slope[:, None], 0.0).abs()
        noise = 64 * torch.finfo(y.dtype).eps * torch.where(lam > 0, slopes, 0.0).abs()
        found = found._replace(kinked=bool((apart > noise).any()))
    return found


class Severed(torch.autograd.Function):
    """Answers and values that depend on their inputs by name only: their gradient is zero."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor, *inputs: Tensor) -> Any:
        ctx.count = len(inputs)
        return y.clone(), value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * (2 + ctx.count)


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
    energy, domain = problem.again(x)
    return replace(problem, energy=Watched(energy), domain=domain, x=x), y[index]
