"""A quadratic in a sum is kept out of the cuts: the same answers, in few steps."""

from typing import Any

import cvxpy as cp
import pytest
import torch
from torch import Tensor, nn

import icnn
from icnn.solvers.solution import Status

BARE: dict[str, Any] = {"entropy": 0.0}
N, PIECES, BATCH = 7, 20, 5


class Case:
    """The maximum of planes, and a quadratic around a point that depends on `x`."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        torch.manual_seed(0)
        self.slopes, self.b = torch.randn(PIECES, N).to(dtype), torch.randn(PIECES).to(dtype)
        self.x = torch.randn(BATCH, N).to(dtype)
        self.weight = (0.2 + torch.rand(N)).to(dtype)
        self.low, self.high = -torch.rand(N).to(dtype), torch.rand(BATCH, N).to(dtype)
        self.energy = icnn.Sum(self.planes, icnn.Quadratic(nn.Identity(), self.weight))

    @property
    def box(self) -> icnn.Box:
        return icnn.Box(self.low, self.high)

    def planes(self, x: Tensor, y: Tensor) -> Tensor:
        return (y @ self.slopes.t() + self.b).amax(dim=1)

    def exact(self, i: int) -> tuple[Tensor, float]:
        """By Clarabel."""
        y = cp.Variable(N)
        low, high, center = self.low, self.high[i], self.x[i]
        value = cp.max(self.slopes.numpy() @ y + self.b.numpy())
        value += 0.5 * cp.sum(cp.multiply(self.weight.numpy(), cp.square(y - center.numpy())))
        problem = cp.Problem(cp.Minimize(value), [y >= low.numpy(), y <= high.numpy()])
        problem.solve(solver=cp.CLARABEL)
        return torch.from_numpy(y.value), float(problem.value)  # pyright: ignore


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_agrees_with_an_exact_solver_in_few_steps(kernel: str):
    case = Case()
    solver = icnn.Bundle(tol=1e-10, kernel=kernel)
    found = icnn.argmin(case.energy, case.x, case.box, solver=solver, **BARE)
    assert bool(found.converged.all())
    assert int(found.steps.max()) <= PIECES
    torch.testing.assert_close(found.value, case.energy(case.x, found.y))
    for i in range(BATCH):
        y, value = case.exact(i)
        assert abs(float(found.value[i]) - value) < 1e-7
        assert float(found.lower[i]) <= value + 1e-7
        torch.testing.assert_close(found.y[i], y, atol=1e-4, rtol=0)
        # Clarabel's own answer is not exact.
        u = (found.y[i] - y) / (case.high[i] - case.low)
        assert float(u.norm()) <= float(found.radius[i]) + 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_answers_as_with_cuts_of_all(dtype: torch.dtype):
    case = Case(dtype)
    tol = 1e-5 if dtype == torch.float32 else 1e-9
    found = icnn.argmin(case.energy, case.x, case.box, solver=icnn.Bundle(tol=tol), **BARE)
    start = case.box.center(case.x)

    def hidden(x: Tensor, y: Tensor) -> Tensor:
        return case.energy(x, y)

    cut = icnn.argmin(hidden, case.x, case.box, start=start, solver=icnn.Bundle(tol=tol), **BARE)
    assert bool(found.converged.all())
    assert bool((found.value <= cut.value + found.gap + 1e-6).all())
    assert bool((cut.lower <= found.value + 1e-6).all())


def test_gradients_against_finite_differences():
    case = Case()
    torch.manual_seed(1)
    net, loss = nn.Linear(3, N).double(), torch.randn(BATCH, N).double()
    weight = nn.Parameter(case.weight)
    energy = icnn.Sum(case.planes, icnn.Quadratic(net, weight))
    x = torch.randn(BATCH, 3).double().requires_grad_()
    leaves = [case.slopes, case.b, case.low, case.high, x, *energy.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()

    def total() -> Tensor:
        solver = icnn.Bundle(tol=1e-13)
        return (icnn.argmin(energy, x, case.box, solver=solver, **BARE).y * loss).sum()

    found = torch.autograd.grad(total(), leaves)
    torch.manual_seed(2)
    for leaf, gradient in zip(leaves, found, strict=True):
        way, step = torch.randn_like(leaf), 1e-6
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                leaf.add_(sign * step * way)
                ends.append(float(total()))
                leaf.sub_(sign * step * way)
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs(slope - float((gradient * way).sum())) < 1e-5 * (1 + abs(slope))


def test_gradients_at_bounds_in_float32():
    case = Case(torch.float32)
    center = 10 * torch.ones(1, N)  # far outside: the answer sits in a corner, and does not move
    energy = icnn.Sum(case.planes, icnn.Quadratic(nn.Identity(), 100.0))
    x = center.clone().requires_grad_()
    box = icnn.Box(torch.zeros(N), torch.ones(N))
    found = icnn.argmin(energy, x, box, solver=icnn.Bundle(tol=1e-5), **BARE)
    assert bool((found.y == 1).all())
    found.y.sum().backward()
    assert bool((x.grad == 0).all())


def test_values_that_are_given():
    case = Case()
    mask = torch.rand(BATCH, N) < 0.4
    mask[0] = True
    values = case.box.center(case.x)
    fixed = (mask, torch.where(mask, values, torch.nan))
    solver = icnn.Bundle(tol=1e-10)
    found = icnn.argmin(case.energy, case.x, case.box, fixed=fixed, solver=solver, **BARE)
    assert bool(found.converged.all())
    assert bool((found.y == values)[mask].all())
    torch.testing.assert_close(found.value, case.energy(case.x, found.y))
    plain = icnn.Bundle(tol=1e-10, kernel="torch")
    other = icnn.argmin(case.energy, case.x, case.box, fixed=fixed, solver=plain, **BARE)
    torch.testing.assert_close(found.y, other.y, atol=1e-6, rtol=0)


@pytest.mark.parametrize("weight", [0.0, torch.tensor([0.0] + [1.0] * (N - 1)).double()])
def test_weights_of_zero_are_cut_as_the_rest(weight: Any):
    case = Case()
    energy = icnn.Sum(case.planes, icnn.Quadratic(0.0, weight))
    found = icnn.argmin(energy, case.x, case.box, solver=icnn.Bundle(tol=1e-4), **BARE)
    assert bool(found.converged.all())


@pytest.mark.parametrize("told", [True, False])
def test_a_broken_example_breaks_no_other(told: bool):
    case, others = Case(), [0, 2, 3, 4]
    net = nn.Linear(N, N).double()

    def planes(x: Tensor, y: Tensor) -> Tensor:
        return case.planes(x, y) + (0 * x.sum(dim=1) if told else 0)

    energy = icnn.Sum(planes, icnn.Quadratic(net, case.weight))
    x, options = case.x.clone(), {"solver": icnn.Bundle(tol=1e-4), **BARE}
    whole = icnn.argmin(energy, x, case.box, **options)
    x[1] = torch.nan
    with pytest.warns(RuntimeWarning, match="1 of 5 examples are not finite"):
        found = icnn.argmin(energy, x, case.box, **options)
    assert found.status[1] == Status.NONFINITE
    assert bool(found.converged[others].all())
    if told:
        assert bool((found.y == whole.y)[others].all())
    found.y.sum().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())


@pytest.mark.parametrize("weight", [1e-2, 1e-4, 1e-6])
def test_weak_quadratics(weight: float):
    torch.manual_seed(0)
    net, x = icnn.PICNN(5, 30, (30, 30)).double(), torch.randn(8, 5).double()
    with torch.no_grad():
        for name, weight_ in net.named_parameters():
            if ".wy." in name and not name.startswith("layers.2."):
                weight_.mul_(4)
    energy = icnn.Sum(net, icnn.Quadratic(nn.Linear(5, 30).double(), weight))
    found = icnn.argmin(energy, x, icnn.Box(-1, 1), solver=icnn.Bundle(), **BARE)
    assert bool(found.converged.all())


def test_points_that_are_images():
    torch.manual_seed(0)
    energy = icnn.ConvPICNN((1, 6, 6), (1, 6, 6), ((4, 3, 1),)).double()
    x, rows = torch.rand(3, 1, 6, 6).double(), torch.linspace(0.5, 2, 6).double()
    both = icnn.Sum(energy, icnn.Quadratic(nn.Identity(), rows[:, None]))
    found = icnn.argmin(both, x, icnn.Box(), solver=icnn.Bundle(), **BARE)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.value, both(x, found.y))


def test_a_network_and_a_quadratic_start_at_its_bottom():
    torch.manual_seed(0)
    center, x = torch.rand(N), torch.randn(BATCH, 3)
    flat = icnn.Sum(icnn.Score(lambda x: torch.zeros(len(x), N)), icnn.Quadratic(center))
    found = icnn.argmin(flat, x, icnn.Box(), solver=icnn.Bundle(), **BARE)
    assert bool(found.converged.all())
    assert int(found.steps.max()) <= 1
    torch.testing.assert_close(found.y, center.expand(BATCH, N))


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_answers_that_leave_a_corner(kernel: str):
    """At a corner nothing bends: the first step of a dual has no curvature to go by."""
    for seed in (1, 8, 9):
        torch.manual_seed(seed)
        net, center = icnn.PICNN(5, 3, (64, 64)).double(), nn.Linear(5, 3).double()
        energy = icnn.Sum(icnn.Scale(net, 8.0), icnn.Quadratic(center))
        x, solver = torch.randn(64, 5).double(), icnn.Bundle(kernel=kernel)
        found = icnn.argmin(energy, x, icnn.Box(), solver=solver, **BARE)
        assert bool(found.converged.all())
