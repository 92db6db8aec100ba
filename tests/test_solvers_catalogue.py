"""Every solver on every problem of the catalogue that it applies to, against exact answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import PROBLEMS, Problem
from torch import Tensor

import icnn
from icnn import Bundle, BundleEntropy, LinearProgram, ProjectedGradient, Solution, Status

SOLVERS: dict[str, Any] = {
    "entropy": BundleEntropy(max_steps=300),
    "bundle": Bundle(max_steps=300),
    "bundle-lp": Bundle(max_steps=300, master="lp"),
    "program": LinearProgram(),
    "momentum": ProjectedGradient(30),
    "spectral": ProjectedGradient(60, rule="spectral"),
    "adam": ProjectedGradient(60, rule="adam", decay=0.5),
}
REACHED = {torch.float64: 1e-8, torch.float32: 1e-4}
"""The relative gap that solvers reach, within their steps."""


def applies(solver: Any, problem: Problem) -> bool:
    """Whether a solver is for a problem."""
    if isinstance(solver, ProjectedGradient):
        return True
    if isinstance(solver, BundleEntropy):
        return problem.entropy > 0
    if isinstance(solver, LinearProgram):
        return problem.entropy == 0 and problem.piecewise_linear and problem.inside
    if solver.master == "lp":
        return problem.entropy == 0 and problem.n <= 17
    return problem.entropy == 0


def reaches(solver: Any, problem: Problem, dtype: torch.dtype) -> bool:
    """Whether the gap is promised to be small: else it is true, and may be what it is."""
    if isinstance(solver, BundleEntropy):
        return problem.entropy >= 0.05
    if isinstance(solver, Bundle):
        # Cuts alone want as many steps as a curved energy has directions, and more. With many
        # coordinates, float32 leaves a gap by its rounding.
        return problem.piecewise_linear and problem.n <= (159 if dtype == torch.float64 else 36)
    return isinstance(solver, LinearProgram)


def steps(solver: Any, problem: Problem, dtype: torch.dtype) -> int:
    """Few where no gap is promised: the answer must say so."""
    if isinstance(solver, LinearProgram):
        return 1
    return solver.max_steps if reaches(solver, problem, dtype) else min(20, solver.max_steps)


PAIRS = [(p, name) for name, s in SOLVERS.items() for p in PROBLEMS if applies(s, p)]
EVERY_PAIR = pytest.mark.parametrize(
    ("problem", "name"), PAIRS, ids=[f"{name}-{p.name}" for p, name in PAIRS]
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", list(REACHED), ids=["float64", "float32"])


def solve(problem: Problem, solver: Any, dtype: torch.dtype) -> Solution:
    energy, x, domain = problem.parts.to(dtype)
    if not isinstance(solver, LinearProgram):
        # The tolerance is below what is asked for, and above rounding.
        solver = replace(solver, tol=REACHED[dtype] / 10, max_steps=steps(solver, problem, dtype))
    return icnn.argmin(energy, x, domain, entropy=problem.entropy, solver=solver)


def distance(problem: Problem, y: Tensor) -> Tensor:
    """From the exact minimiser, in the norm of `Solution.radius`."""
    away = y.double() - problem.answer.y
    if isinstance(problem.domain, icnn.Box):
        return (away / problem.domain.width).flatten(start_dim=1).norm(dim=1)
    return away.abs().flatten(start_dim=1).sum(dim=1)


@EVERY_DTYPE
@EVERY_PAIR
def test_against_the_exact_answer(problem: Problem, name: str, dtype: torch.dtype):
    solver, exact = SOLVERS[name], problem.answer
    found = solve(problem, solver, dtype)
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
    tol = 1e-7 if isinstance(solver, LinearProgram) else REACHED[dtype] / 10
    assert (found.gap[found.converged] <= tol * size[found.converged]).all()
    most = steps(solver, problem, dtype)
    assert ((found.steps >= 1) & (found.steps <= most)).all()
    assert (found.steps[found.status == Status.MAX_STEPS] == most).all()
    if reaches(solver, problem, dtype):
        assert (found.gap <= max(tol, REACHED[dtype]) * size).all()


def test_bundles_and_programs_agree():
    for problem in PROBLEMS:
        if applies(SOLVERS["program"], problem) and problem.n <= 159:
            exact = solve(problem, SOLVERS["program"], torch.float64).value
            for name in ("bundle", "bundle-lp"):
                if applies(SOLVERS[name], problem):
                    found = solve(problem, SOLVERS[name], torch.float64).value
                    assert ((found - exact).abs() <= 1e-7 * exact.abs().clamp(min=1)).all()


def test_a_low_entropy_and_few_steps_are_told():
    (problem,) = (p for p in PROBLEMS if 0 < p.entropy < 0.05)
    found = solve(problem, SOLVERS["entropy"], torch.float64)
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
