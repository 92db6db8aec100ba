"""Every solver on every problem of the catalogue that it applies to, against exact answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import PROBLEMS, Problem
from torch import Tensor

import icnn
from icnn import BundleEntropy, Solution, Status

SOLVERS: list[Any] = [BundleEntropy(max_steps=300, tol=1e-9)]
REACHED = {torch.float64: 1e-8, torch.float32: 1e-4}
"""The relative gap that solvers reach, within their steps."""


def applies(solver: Any, problem: Problem) -> bool:
    """Whether a solver is for a problem."""
    if isinstance(solver, BundleEntropy):
        return problem.entropy > 0
    return problem.entropy == 0


def reaches(solver: Any, problem: Problem) -> bool:
    """Whether the gap is promised to be small: else it is true, and may be what it is."""
    if isinstance(solver, BundleEntropy):
        return problem.entropy >= 0.05
    return True


def steps(solver: Any, problem: Problem) -> int:
    """Few where no gap is promised: the answer must say so."""
    return solver.max_steps if reaches(solver, problem) else 20


PAIRS = [(p, s) for s in SOLVERS for p in PROBLEMS if applies(s, p)]
EVERY_PAIR = pytest.mark.parametrize(
    ("problem", "solver"), PAIRS, ids=[f"{type(s).__name__}-{p.name}" for p, s in PAIRS]
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", list(REACHED), ids=["float64", "float32"])


def solve(problem: Problem, solver: Any, dtype: torch.dtype) -> Solution:
    energy, x, domain = problem.parts.to(dtype)
    # The tolerance is below what is asked for, and above rounding.
    solver = replace(solver, tol=REACHED[dtype] / 10, max_steps=steps(solver, problem))
    return icnn.argmin(energy, x, domain, entropy=problem.entropy, solver=solver)


def distance(problem: Problem, y: Tensor) -> Tensor:
    """From the exact minimiser, in the norm of `Solution.radius`."""
    away = y.double() - problem.answer.y
    if isinstance(problem.domain, icnn.Box):
        return (away / problem.domain.width).flatten(start_dim=1).norm(dim=1)
    return away.abs().flatten(start_dim=1).sum(dim=1)


@EVERY_DTYPE
@EVERY_PAIR
def test_against_the_exact_answer(problem: Problem, solver: Any, dtype: torch.dtype):
    found, exact = solve(problem, solver, dtype), problem.answer
    size = found.value.abs().clamp(min=1)
    rounding = problem.rounding(found.y)

    # What comes back is the objective at a point of the domain.
    assert found.y.shape == (problem.batch, *problem.y_shape)
    assert found.y.dtype == dtype
    assert problem.parts.to(dtype).domain.contains(found.y).all()
    assert ((found.value - problem.objective(found.y)).abs() <= rounding).all()
    assert torch.equal(found.gap, found.value - found.lower)

    # The bound is true: the reference is a point of the domain, so the optimum is at most there.
    assert (found.lower <= exact.value + rounding).all()
    assert (found.value >= exact.value - exact.slack - rounding).all()

    # The answer is as near as the radius says; the reference has a radius too.
    if problem.entropy:
        reach = problem.domain.radius(exact.slack, problem.entropy, found.y.shape)
        ground = problem.domain.radius(rounding, problem.entropy, found.y.shape)
        assert (distance(problem, found.y) <= found.radius + reach + ground).all()

    # Gaps and the words for them.
    assert set(found.status.tolist()) <= {Status.CONVERGED, Status.MAX_STEPS, Status.STALLED}
    assert (found.gap[found.converged] <= REACHED[dtype] / 10 * size[found.converged]).all()
    most = steps(solver, problem)
    assert ((found.steps >= 1) & (found.steps <= most)).all()
    assert (found.steps[found.status == Status.MAX_STEPS] == most).all()
    if reaches(solver, problem):
        assert (found.gap <= REACHED[dtype] * size).all()


def test_a_low_entropy_and_few_steps_are_told():
    (problem,) = (p for p in PROBLEMS if 0 < p.entropy < 0.05)
    found = solve(problem, SOLVERS[0], torch.float64)
    assert (found.status == Status.MAX_STEPS).all()
    assert (found.gap > 1e-8).all()


def test_the_catalogue_covers_what_it_should():
    assert {p.n for p in PROBLEMS} >= {1, 2, 6, 17, 159, 2048}
    assert len({p.name for p in PROBLEMS}) == len(PROBLEMS) >= 15
    entropies = {p.entropy for p in PROBLEMS}
    assert {0.0, 0.05, 10.0} <= entropies
    for problem in PROBLEMS:
        # References are points of the domain, and no random point is below them.
        exact, domain = problem.answer, problem.domain
        assert domain.contains(exact.y).all()
        for _ in range(20):
            other = torch.randn(exact.y.shape, dtype=torch.float64)
            y = domain.minimise(3 * other, 1.0)
            y = exact.y + torch.rand(()).double() ** 4 * (y - exact.y)
            assert (problem.objective(y) >= exact.value - exact.slack).all()
