"""Promise 3: what else is in the batch does not matter."""

from typing import Any

import pytest
import torch
from problems import PROBLEMS, Parts, Problem
from torch import Tensor

import icnn
from icnn import Solution, Status

NAMES = (
    "planes-6-simplex",
    "planes-6-twice",
    "coupled-17",
    "coupled-6-simplex",
    "picnn-17-bounds",
    "picnn-2-trained-softplus",
    "conv-36-image",
    "kink-159",
)
MIXED = pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.name in NAMES], ids=repr)
SOLVER = icnn.BundleEntropy(max_steps=300, tol=1e-12)
FEW = icnn.BundleEntropy(max_steps=60, tol=1e-5)


def rows(parts: Parts, which: list[int]) -> Parts:
    """Some examples of a problem, in any order; bounds of each example go with them."""
    energy, x, domain = parts
    assert x is not None
    if isinstance(domain, icnn.Box) and isinstance(domain.low, Tensor):
        low, high = (torch.as_tensor(bound)[which] for bound in (domain.low, domain.high))
        domain = icnn.Box(low, high)
    return Parts(energy, x[which], domain)


def solve(parts: Parts, entropy: float, solver: Any = SOLVER) -> Solution:
    return icnn.argmin(parts.energy, parts.x, parts.domain, entropy=entropy, solver=solver)


def apart(problem: Problem, a: Tensor, b: Tensor, parts: Parts | None = None) -> Tensor:
    """The distance of answers in the norm of `Solution.radius`."""
    away, domain = (a - b).double(), (parts or problem.parts).domain
    if isinstance(domain, icnn.Box):
        return (away / domain.width).flatten(start_dim=1).norm(dim=1)
    return away.abs().flatten(start_dim=1).sum(dim=1)


def same(problem: Problem, a: Tensor, b: Tensor, radii: Tensor, parts: Parts | None = None):
    """To 1e-9 at a kink; a gap of 1e-12 leaves an answer on smooth ground 1e-6 of room."""
    assert (apart(problem, a, b, parts) <= radii + 1e-9).all()
    if not problem.smooth:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@MIXED
def test_alone_and_in_batch_agree(problem: Problem):
    parts = problem.parts
    together = solve(parts, problem.entropy)
    alone = [solve(rows(parts, [i]), problem.entropy) for i in range(problem.batch)]
    radius = torch.cat([s.radius for s in alone])
    same(problem, torch.cat([s.y for s in alone]), together.y, radius + together.radius)


@MIXED
def test_alone_and_in_batch_agree_within_radii_in_float32(problem: Problem):
    parts = problem.parts.to(torch.float32)
    together = solve(parts, problem.entropy, FEW)
    alone = [solve(rows(parts, [i]), problem.entropy, FEW) for i in range(problem.batch)]
    y, radius = torch.cat([s.y for s in alone]), torch.cat([s.radius for s in alone])
    # A gap may be below its rounding.
    ground = problem.domain.radius(problem.rounding(y), problem.entropy, y.shape)
    assert (apart(problem, y, together.y) <= radius + together.radius + 2 * ground).all()


@MIXED
def test_order_and_company_do_not_matter(problem: Problem):
    order = [*reversed(range(problem.batch)), 0, 0]
    together = solve(problem.parts, problem.entropy)
    mixed = solve(rows(problem.parts, order), problem.entropy)
    parts = rows(problem.parts, order)
    same(problem, mixed.y, together.y[order], mixed.radius + together.radius[order], parts)
    # Duplicates of one row are treated alike, but for the sums of a matrix product.
    torch.testing.assert_close(mixed.y[-2], mixed.y[-1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@MIXED
def test_a_nan_row_leaves_the_others_as_they_are(problem: Problem, dtype: torch.dtype):
    parts = problem.parts.to(dtype)
    assert parts.x is not None
    x = parts.x.clone()
    x[0] = torch.nan
    finite = solve(parts, problem.entropy, FEW)
    broken = solve(parts._replace(x=x), problem.entropy, FEW)
    assert broken.status[0] == Status.NONFINITE
    assert broken.value[0].isnan()
    assert broken.gap[0].isinf()
    for name in ("y", "value", "lower", "gap", "radius", "steps", "status"):
        a, b = getattr(finite, name), getattr(broken, name)
        assert torch.equal(a[1:], b[1:]), name


@MIXED
def test_an_empty_batch_has_an_empty_answer(problem: Problem):
    found = solve(rows(problem.parts, []), problem.entropy)
    assert found.y.shape == (0, *problem.y_shape)
    assert found.value.shape == found.gap.shape == found.steps.shape == found.status.shape == (0,)
    assert "0 of 0" in found.report()


@MIXED
def test_twice_is_the_same(problem: Problem):
    first, second = (solve(problem.parts, problem.entropy, FEW) for _ in range(2))
    assert torch.equal(first.y, second.y)
    assert torch.equal(first.lower, second.lower)
