"""Domains: Box and Simplex against brute force, and a domain that a user writes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize_scalar
from torch import Tensor

import icnn
from icnn.solvers.domains import Domain

BATCH = 5


@dataclass(frozen=True)
class Budget:
    """All y with sum |y| <= r: the domain of docs/your-own-domain.md."""

    r: float

    def center(self, like):
        return torch.zeros_like(like)

    def contains(self, y):
        return y.flatten(1).abs().sum(dim=1) <= self.r * (1 + 1e-5)

    def project(self, y):
        # Shrink all |y_j| by the one level that leaves a sum of r.
        size = y.flatten(1).abs()
        ordered = size.sort(dim=1, descending=True).values
        count = torch.arange(1, size.shape[1] + 1, device=y.device)
        level = ((ordered.cumsum(dim=1) - self.r) / count).amax(dim=1).clamp(min=0)
        return y.sign() * (size - level[:, None]).clamp(min=0).reshape(y.shape)

    def entropy(self, y):
        return -y.flatten(1).square().sum(dim=1) / 2

    def minimise(self, slope, entropy):
        if isinstance(entropy, torch.Tensor) or entropy > 0:
            return self.project(-slope / entropy)  # slope . y + entropy |y|^2 / 2, squared out
        steepest = slope.flatten(1).abs().argmax(dim=1, keepdim=True)
        corner = torch.zeros_like(slope.flatten(1)).scatter(1, steepest, self.r)
        return -slope.sign() * corner.reshape(slope.shape)

    def radius(self, gap, entropy, shape):
        return (2 * gap / entropy).sqrt()  # Euclidean: -H is 1-strongly convex


# Boxes of all kinds, simplices, products of simplices, and both with coordinates that are given.


def held(domain: Any, shape: tuple[int, ...], seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.4
    mask[..., 0] = False
    values = torch.rand(shape, generator=generator, dtype=torch.float64) / shape[-1]
    return domain.restrict(mask, values)


def bounds(*shape: int) -> icnn.Box:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(shape, generator=generator, dtype=torch.float64)
    return icnn.Box(low, low + 0.1 + 3 * torch.rand(low.shape, generator=generator).double())


CASES: dict[str, tuple[Domain, tuple[int, ...]]] = {
    "box": (icnn.Box(), (BATCH, 4)),
    "box, wide": (icnn.Box(-3, 20.0), (BATCH, 2, 3)),
    "box, tensors": (bounds(BATCH, 4), (BATCH, 4)),
    "box, one bound": (icnn.Box(torch.tensor([-1.0, 0.0, 0.9]).double(), 1.0), (BATCH, 3)),
    "box, held": (held(icnn.Box(-1, 2), (BATCH, 6), 1), (BATCH, 6)),
    "simplex": (icnn.Simplex(), (BATCH, 4)),
    "simplex, one": (icnn.Simplex(), (BATCH, 1)),
    "simplices": (icnn.Simplex(), (BATCH, 3, 4)),
    "simplex, held": (held(icnn.Simplex(), (BATCH, 6), 2), (BATCH, 6)),
    "simplices, held": (held(icnn.Simplex(), (BATCH, 2, 5), 3), (BATCH, 2, 5)),
    "budget": (Budget(1.5), (BATCH, 4)),
    "budget, image": (Budget(0.7), (BATCH, 2, 3)),
}
EVERY = pytest.mark.parametrize(("domain", "shape"), CASES.values(), ids=CASES)


def normal(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def points(domain: Domain, shape: tuple[int, ...], count: int = 150) -> list[Tensor]:
    """Points of the domain, made without `project`: mixtures of corners and the centre."""
    corners = [domain.minimise(normal(shape, 100 + i), 0.0) for i in range(count)]
    center, found = domain.center(normal(shape)), []
    for i, corner in enumerate(corners):
        weight = np.random.default_rng(i).uniform(0, 1, 2)
        # Differences first: what is the same in both stays so.
        mixed = corner + weight[0] * (corners[i - 1] - corner)
        found += [corner, mixed + weight[1] * (center - mixed)]
    return found


def objective(domain: Domain, slope: Tensor, entropy: float, y: Tensor) -> Tensor:
    level = (slope * y).flatten(start_dim=1).sum(dim=1)
    return level - entropy * domain.entropy(y) if entropy else level


@EVERY
def test_a_domain_is_one_and_holds_its_points(domain: Domain, shape: tuple[int, ...]):
    assert isinstance(domain, Domain)
    for y in points(domain, shape, 20):
        assert y.shape == shape
        assert domain.contains(y).all()
        torch.testing.assert_close(domain.project(y), y, atol=1e-14, rtol=0)
    far = domain.center(normal(shape)) + 100 * (1 + normal(shape).abs())
    assert not domain.contains(far).any()


@EVERY
def test_the_centre_has_the_largest_entropy(domain: Domain, shape: tuple[int, ...]):
    most = domain.entropy(domain.center(normal(shape)))
    assert all((domain.entropy(y) <= most + 1e-12).all() for y in points(domain, shape))


@EVERY
def test_projection_is_the_nearest_point(domain: Domain, shape: tuple[int, ...]):
    """It is, exactly if no point of the set lies in a direction `y - p`."""
    for scale in (0.1, 1.0, 30.0):
        y = scale * normal(shape, 7)
        p = domain.project(y)
        assert domain.contains(p).all()
        for corner in points(domain, shape, 100):
            along = ((y - p) * (corner - p)).flatten(start_dim=1).sum(dim=1)
            assert (along <= 1e-12 * (1 + scale**2)).all()


@EVERY
@pytest.mark.parametrize("entropy", [0.0, 0.05, 1.0, 10.0])
def test_nothing_is_below_the_minimiser(domain: Domain, shape: tuple[int, ...], entropy: float):
    for scale in (0.0, 0.1, 1.0, 30.0):
        slope = scale * normal(shape, 8)
        best = domain.minimise(slope, entropy)
        assert domain.contains(best).all()
        least = objective(domain, slope, entropy, best)
        near = [best + 1e-3 * (y - best) for y in points(domain, shape, 50)]
        for y in points(domain, shape) + near:
            assert (objective(domain, slope, entropy, y) >= least - 1e-12 * (1 + scale)).all()


@EVERY
def test_an_entropy_may_differ_from_example_to_example(domain: Domain, shape: tuple[int, ...]):
    slope, entropy = normal(shape, 9), torch.logspace(-1, 1, BATCH, dtype=torch.float64)
    together = domain.minimise(slope, entropy.reshape(-1, *(1 for _ in shape[1:])))
    for row in range(BATCH):
        alone = domain.minimise(slope, float(entropy[row]))
        torch.testing.assert_close(together[row], alone[row])


CURVED = [name for name in CASES if not name.startswith("budget")]


@pytest.mark.parametrize("name", CURVED)
def test_curvature_is_the_slope_of_minimise(name: str):
    domain: Any = CASES[name][0]
    shape, entropy, small = CASES[name][1], 0.7, 1e-6
    slope, n = normal(shape, 10), int(np.prod(shape[1:]))
    rows = normal((BATCH, 3, n), 11)
    bend = domain.curvature(domain.minimise(slope, entropy), entropy, rows)
    for i in range(3):
        step = small * rows[:, i].reshape(shape)
        ends = [domain.minimise(slope + sign * step, entropy) for sign in (1, -1)]
        change = ((ends[0] - ends[1]) / (2 * small)).flatten(start_dim=1)
        expected = -(rows @ change[:, :, None]).squeeze(2)
        torch.testing.assert_close(bend[:, :, i], expected, atol=1e-8, rtol=1e-6)


@EVERY
def test_radius_bounds_the_distance(domain: Any, shape: tuple[int, ...]):
    entropy, slope = 0.7, 2 * normal(shape, 12)
    best = domain.minimise(slope, entropy)
    least = objective(domain, slope, entropy, best)
    tight = 0.0
    near = [best + 0.05 * (y - best) for y in points(domain, shape, 100)]
    for y in points(domain, shape) + near:
        gap = (objective(domain, slope, entropy, y) - least).clamp(min=0)
        radius = domain.radius(gap, entropy, torch.Size(shape))
        if isinstance(domain, icnn.Box):
            distance = (domain.unit(y) - domain.unit(best)).flatten(start_dim=1).norm(dim=1)
        elif isinstance(domain, icnn.Simplex):
            distance = (y - best).flatten(start_dim=1).abs().sum(dim=1)
        else:
            distance = (y - best).flatten(start_dim=1).norm(dim=1)
        assert (distance <= radius + 1e-7).all()
        tight = max(tight, float((distance / radius.clamp(min=1e-9)).max()))
    assert tight > 0.2 or shape[-1] == 1  # and not by far


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("held")])
def test_given_coordinates_stand_at_their_values(name: str):
    domain: Any = CASES[name][0]
    shape = CASES[name][1]
    generator = torch.Generator().manual_seed({"box, held": 1, "simplex, held": 2}.get(name, 3))
    mask = torch.rand(shape, generator=generator) < 0.4
    mask[..., 0] = False
    values = torch.rand(shape, generator=generator, dtype=torch.float64) / shape[-1]
    y = normal(shape)
    found = (domain.project(y), domain.center(y), *(domain.minimise(y, e) for e in (0.0, 1.0)))
    for y in found:
        assert torch.equal(y[mask], values[mask])
        if isinstance(domain, icnn.Simplex):
            torch.testing.assert_close(y.sum(dim=-1), torch.ones(shape[:-1]).double())


def test_a_projection_onto_the_simplex_by_brute_force():
    """`max(y - t, 0)` for the one `t` at which it sums to one."""
    for seed in range(20):
        y = 3 * normal((1, 7), seed)
        miss = minimize_scalar(
            lambda t, y=y: float((y - t).clamp(min=0).sum() - 1) ** 2,
            bounds=(float(y.min()) - 1, float(y.max())),
            method="bounded",
            options={"xatol": 1e-13},
        )
        expected = (y - float(np.asarray(miss.x))).clamp(min=0)
        torch.testing.assert_close(icnn.Simplex().project(y), expected, atol=1e-7, rtol=0)


# The budget through the solvers, against exact answers.

ENTROPIC: list[Any] = [
    icnn.BundleEntropy(300, 1e-9),
    icnn.ProjectedGradient(300, rule="spectral", tol=1e-9),
]
BARE: list[Any] = [icnn.Bundle(300, 1e-6), icnn.ProjectedGradient(300, rule="spectral", tol=1e-6)]
R, N = 2.0, 6


def solved(energy: Any, x: Any, entropy: float, solver: Any) -> icnn.Solution:
    start = torch.zeros(x.shape[0], N, dtype=torch.float64)
    found = icnn.argmin(energy, x, Budget(R), entropy=entropy, solver=solver, start=start)
    assert found.converged.all(), found.report()
    return found


def planes(x: Tensor, y: Tensor) -> Tensor:
    return (y @ (3 * normal((8, N), 20)).T + x).amax(dim=1)


@pytest.mark.parametrize(
    ("entropy", "solver"), [(1.0, s) for s in ENTROPIC] + [(0.0, s) for s in BARE]
)
def test_budget_with_a_linear_energy(entropy: float, solver: Any):
    x = 3 * normal((8, N), 21)
    found = solved(lambda x, y: (x * y).sum(dim=1), x, entropy, solver)
    if entropy:
        best = Budget(R).project(-x / entropy)
        value = (x * best).sum(dim=1) + entropy * best.square().sum(dim=1) / 2
        assert ((found.y - best).norm(dim=1) <= found.radius + 1e-9).all()
    else:
        value = -R * x.abs().amax(dim=1)
    torch.testing.assert_close(found.value, value, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize(
    ("entropy", "solver"), [(0.5, s) for s in ENTROPIC] + [(0.0, s) for s in BARE]
)
def test_budget_with_a_quadratic(entropy: float, solver: Any):
    """`|y - x|^2 / 2 + e |y|^2 / 2` is `(1 + e) / 2 |y - x / (1 + e)|^2` and a constant."""
    x = 2 * normal((8, N), 22)
    found = solved(lambda x, y: (y - x).square().sum(dim=1) / 2, x, entropy, solver)
    best = Budget(R).project(x / (1 + entropy))
    value = ((best - x).square() + entropy * best.square()).sum(dim=1) / 2
    torch.testing.assert_close(found.value, value, atol=1e-6, rtol=2e-6)
    assert (found.lower <= value + 1e-10).all()
    # Strongly convex by itself: |y - y*|^2 / 2 <= gap.
    assert ((found.y - best).square().sum(dim=1) / 2 <= found.gap + 1e-9).all()


@pytest.mark.parametrize("entropy", [0.0, 0.5])
def test_budget_with_planes(entropy: float):
    x = normal((6, 8), 23)
    solver = icnn.BundleEntropy(300, 1e-9) if entropy else icnn.Bundle(300, 1e-6)
    found = solved(planes, x, entropy, solver)
    assert torch.isinf(found.radius).all() == (entropy == 0)
    slopes, ones = 3 * normal((8, N), 20).numpy(), np.ones((8, 1))
    for row in range(len(x)):
        if entropy:
            import cvxpy as cp

            y = cp.Variable(N)
            cost = cp.max(slopes @ y + x[row].numpy()) + entropy / 2 * cp.sum_squares(y)
            task = cp.Problem(cp.Minimize(cost), [cp.norm1(y) <= R])
            task.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
            optimum = float(cost.value)  # pyright: ignore[reportArgumentType]
        else:
            # y = a - b with a, b >= 0 and sum (a + b) <= r; the smallest t above all planes.
            matrix = np.block([[slopes, -slopes, -ones], [np.ones((1, 2 * N)), np.zeros((1, 1))]])
            answer = linprog(
                np.append(np.zeros(2 * N), 1.0),
                matrix,
                np.append(-x[row].numpy(), R),
                bounds=[(0, None)] * (2 * N) + [(None, None)],
            )
            optimum = answer.fun
        assert float(found.lower[row]) <= optimum + 1e-7
        assert optimum - 1e-7 <= float(found.value[row])
        assert float(found.value[row]) == pytest.approx(optimum, abs=1e-5)


def test_budget_stays_inside_and_refuses_what_it_cannot():
    x, start = normal((4, 8), 24), torch.zeros(4, N, dtype=torch.float64)
    for solver, entropy in (
        (icnn.BundleEntropy(), 1.0),
        (icnn.ProjectedGradient(rule="adam"), 0.0),
    ):
        found = icnn.argmin(planes, x, Budget(R), entropy=entropy, solver=solver, start=start)
        assert (found.y.abs().sum(dim=1) <= R * (1 + 1e-12)).all()
        assert (found.gap >= -1e-12).all()
    with pytest.raises(ValueError, match="`start` must lie in Budget"):
        icnn.argmin(planes, x, Budget(R), start=start + 1)
    with pytest.raises(ValueError, match="`fixed` must be None on Budget"):
        icnn.argmin(planes, x, Budget(R), start=start, fixed=(start > 0, start))
    with pytest.raises(ValueError, match="`domain` must be a Box or a Simplex"):
        icnn.argmin(planes, x, Budget(R), entropy=0, solver=icnn.Bundle(master="lp"), start=start)
