"""Promise 2: a certificate never lies, under random search, and it is not idle.

The search itself is `benchmarks/certificates.py`, which runs it on far more problems.
"""

import random
from statistics import median

import pytest
import torch

import icnn
from benchmarks.certificates import KINDS, Tally, check, draw


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_are_below_random_points_and_tight_answers(kind: str):
    rng, tally = random.Random(1), Tally()
    for _ in range(6):
        check(draw(rng, 16, kind), tally, count=1000)
    assert tally.problems == 96
    assert tally.lies == 0, f"a bound is above the objective by {tally.worst:.3g} roundings"
    assert set(tally.statuses) <= {"CONVERGED", "MAX_STEPS", "STALLED"}


def test_bounds_are_not_idle():
    rng, tally = random.Random(2), Tally()
    for _ in range(12):
        check(draw(rng, 8, "planes"), tally, count=10, exact=True)
    assert tally.lies == 0, f"a bound is above the optimum by {tally.worst:.3g} roundings"
    assert len(tally.ratios) >= 10
    assert min(tally.ratios) >= 1 - 1e-3  # the gap is never below the true error
    assert median(tally.ratios) < 10


def test_a_check_that_finds_lies():
    """The search would see a bound that is too high: that of an energy that is not convex."""
    case, tally = draw(random.Random(3), 16, "planes"), Tally()
    case.energy = lambda x, y: -(y - y.detach().mean()).square().sum(dim=1) + 0 * x[1][:, 0]
    case.domain, case.entropy = icnn.Box(torch.zeros(1), torch.ones(1)), 0.1
    case.solver, case.dtype = icnn.BundleEntropy(5), torch.float64
    check(case, tally, count=100)
    assert tally.lies or "NONCONVEX" in tally.statuses
