"""The answers of a search with their gradients: the way is chosen here, and all is tied up."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from icnn.energies.energy import at
from icnn.solvers.adjoint import Answer, Bend, System
from icnn.solvers.differences import opaque, seems_smooth, tensors
from icnn.solvers.domains import Domain, steepness
from icnn.solvers.graph import Traits, Watched, leaves, traits
from icnn.solvers.problem import Pieces, Problem, Record, rows
from icnn.solvers.solution import Status
from icnn.solvers.tangents import attached, counting, merged

PRESS, STILL = 1e8, 1e-3  # how far a slope is pressed against bounds, and the motion allowed
TINY = torch.finfo(torch.float64).tiny


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
    bad = record.status == Status.NONFINITE
    level = record.value.masked_fill(bad, torch.nan)
    # The answer as its domain alone moves it: at its own coordinates, and at its own slope.
    carry, slope = getattr(domain, "carry", None), mixture(problem, record)
    moved = y.double() if carry is None else carry(y.double())
    here = domain.minimise(slope.reshape(y.shape), entropy) if entropy else moved
    if not (problem.live or here.requires_grad):
        return Learned(y, level)
    spot = y
    if bool(bad.any()):
        warnings.warn(
            f"{int(bad.sum())} of {len(bad)} examples are not finite: they get no gradient",
            RuntimeWarning,
            stacklevel=3,
        )
        if not bool(bad.all()):
            problem, spot = without(problem, y, bad)
    if bool(bad.all()):  # also where there are no examples
        inputs = [*leaves(problem.energy(y), tensors(problem.x)), *leaves(here)]
        return Learned(*Severed.apply(y, level, *inputs))  # pyright: ignore

    def hold(point: Tensor) -> Tensor:
        held = problem.free is not None and here.requires_grad
        return torch.where(problem.free, point, here.to(y.dtype)) if held else point  # pyright: ignore

    leaf = spot.clone().requires_grad_()
    found = read(problem, problem.energy(hold(leaf)), leaf)
    if problem.gradient == "unroll":
        if found.opaque:
            raise ValueError(
                '`gradient` must be "cuts" or "implicit" for an energy without second derivatives, '
                'got "unroll": solve it with icnn.BundleEntropy'
            )
        with torch.no_grad():
            unrolled = solve(problem).y if bool(bad.any()) else record.y
        value = problem.energy(moved.to(y.dtype)).double() - problem.bend(moved)
        value = level + torch.where(bad, 0.0, value - value.detach())
        return Learned(torch.where(rows(bad, y), y, unrolled), value)

    straight = problem.gradient == "cuts" or (
        problem.gradient == "auto" and found.kinked and not found.curved
    )
    kinked = straight or found.kinked
    known = record.pieces is not None or not kinked
    if not known and problem.gradient != "auto":
        raise ValueError(
            f'`gradient` must be "auto" for an energy with kinks and this solver, got '
            f"{problem.gradient!r}, which needs the cuts of icnn.BundleEntropy or icnn.Bundle"
        )
    pieces = Pieces(spot[:, None], torch.ones_like(slope[:, :1]), slope)
    if kinked and record.pieces is not None:
        given = torch.zeros_like(bad) if problem.free is None else ~problem.free.flatten(1).any(1)
        pieces = counting(record.pieces, spot, bad | given)
    part = (opaque if found.opaque else attached)(problem, here, hold, pieces, spot, not straight)

    # The envelope theorem: the mixture of pieces moves the value, and the answer with its domain.
    steady = part.mean.detach().double()
    value = (part.lam * part.heights.double()).sum(dim=1) - problem.bend(moved)
    value = value + (steady * moved.flatten(start_dim=1)).sum(dim=1)
    value = level + torch.where(bad, 0.0, value - value.detach())
    if not known:
        return Learned(Refused.apply(y, part.heights), value)  # pyright: ignore

    slope = slope if entropy else pressed(domain, y, slope, steady)
    bend = Bend(domain, slope, entropy or 1.0, y.shape)
    if kinked and not straight:
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
    times = PRESS / energy.abs().amax(dim=1, keepdim=True).clamp(min=TINY)
    most = STILL * (1 + y.abs().flatten(start_dim=1).amax(dim=1, keepdim=True))
    for _ in range(12):
        moved = domain.minimise((slope + times * energy).reshape(y.shape), 1.0)
        far = (moved - y).abs().flatten(start_dim=1).amax(dim=1, keepdim=True)
        times = torch.where(far <= most, times, times / 10)
    return slope + times * energy


def mixture(problem: Problem, record: Record) -> Tensor:
    """The slope `s` with `Y(s) = y`: the mixture of cuts that the search found, or that of `H`."""
    if problem.entropy and record.pieces is not None:
        return record.pieces.slope
    return (problem.entropy or 1.0) * steepness(problem.domain, record.y.detach().double())


def read(problem: Problem, value: Tensor, y: Tensor) -> Traits:
    """Whether an energy is kinked, curved, opaque: as it declares, else as its graph tells."""
    if not value.requires_grad:
        return Traits(False, False, False)
    found, smooth = traits(value, y), getattr(problem.source, "smooth", None)
    if smooth is None and found.opaque:
        # What cannot be looked into is tried out, unless the user knows.
        tried = problem.gradient == "auto" and seems_smooth(problem, y.detach())
        smooth = tried or problem.gradient == "implicit"
    if smooth is None:
        return found
    return found._replace(kinked=not smooth, curved=smooth or (found.curved and not found.opaque))


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
