"""Gradients without entropy: answers on bounds, in corners and where pieces meet."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import icnn
from tests.learning import D, bowl, gradient, tensor
from tests.test_solvers_domains import Budget


@pytest.mark.parametrize(
    ("solver", "way"), [(icnn.Bundle(), "auto"), (icnn.ProjectedGradient(), "implicit")]
)
def test_an_active_bound_holds_the_answer(solver: Any, way: str):
    x, low = tensor([1.3, 0.4, -2.0]), tensor([0.0, 0.0, 0.0])
    box = icnn.Box(low, torch.ones(3, dtype=D))
    y = icnn.argmin(bowl, x, box, entropy=0, solver=solver, gradient=way).y
    by_x, by_low = torch.autograd.grad(y.sum(), (x, low))
    torch.testing.assert_close(by_x, tensor([0.0, 1.0, 0.0]).detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(by_low, tensor([0.0, 0.0, 1.0]).detach(), atol=1e-6, rtol=0)


def mixed(weight: float) -> icnn.Sum:
    """Relu units, and a quadratic that is there or not; answers lie inside, on bounds and kinks."""
    net = icnn.PICNN(2, 4, (6,), positivity="softplus")
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.7)
    return icnn.Sum(net, icnn.Quadratic(nn.Linear(2, 4), weight) if weight else net).double()


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize(
    ("solver", "way", "weight"),
    [
        (icnn.Bundle(400, 1e-9), "auto", 0.0),
        (icnn.Bundle(400, 1e-9), "auto", 1.0),
        (icnn.Bundle(400, 1e-6), "auto", 0.0),
        (icnn.Bundle(400, 1e-6), "auto", 1.0),
        (icnn.LinearProgram(), "auto", 0.0),
        (icnn.Bundle(master="lp"), "cuts", 0.0),
    ],
)
def test_kinks_curvature_and_bounds_without_entropy(
    solver: Any, way: str, weight: float, simplex: bool
):
    """Against differences of answers that a bundle found to 1e-12."""
    torch.manual_seed(2)
    energy = mixed(weight)
    x = torch.randn(6, 2, dtype=D, requires_grad=True)
    domain = icnn.Simplex() if simplex else icnn.Box(-0.5, 0.5)
    v, ray = torch.randn(6, 4, dtype=D), torch.randn(6, 2, dtype=D)

    def answer(x: Tensor, solver: Any, way: str) -> icnn.Solution:
        return icnn.argmin(energy, x, domain, entropy=0, solver=solver, gradient=way)

    solution = answer(x, solver, way)
    slopes = [
        torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        for out in (v * solution.y, solution.value)
    ]
    found = [(slope * ray).sum(dim=1) for slope in slopes]
    tight, step = icnn.Bundle(600, 1e-13), 1e-4
    with torch.no_grad():
        ends = [answer(x + s * step * ray, tight, "auto") for s in (1, -1)]
    differences = [(v * (ends[0].y - ends[1].y)).sum(dim=1), ends[0].value - ends[1].value]
    for slope, difference in zip(found, differences, strict=True):
        close = (slope - difference / (2 * step)).abs() < 0.02 * (1 + slope.abs())
        # A kink may lie within the step of one of the rows.
        assert close.sum() >= 5, (slope, difference / (2 * step))


def test_a_flat_minimum_does_not_move():
    """Where the energy has no slope at all."""
    x = tensor([0.3, 0.2])
    flat = lambda x, y: (y - x).relu().sum(dim=1) + (x - 0.1 - y).relu().sum(dim=1)  # noqa: E731
    y = icnn.argmin(
        flat, x, icnn.Box(-1, 1), entropy=0, solver=icnn.Bundle(), start=x.detach() - 0.05
    ).y
    assert torch.equal(gradient(y, x), torch.zeros(1, 2, dtype=D))


def test_a_narrow_box_is_as_good_as_a_wide_one():
    for width in (1e-4, 1.0, 1e4):
        x = (width * tensor([0.3, 2.0])).detach().requires_grad_()
        box = icnn.Box(torch.zeros(2, dtype=D), torch.full((2,), width, dtype=D))
        scaled = lambda x, y, w=width: bowl(x / w, y / w)  # noqa: E731
        y = icnn.argmin(scaled, x, box, entropy=0, solver=icnn.Bundle()).y
        torch.testing.assert_close(gradient(y, x), tensor([1.0, 0.0]).detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_what_else_is_in_the_batch_does_not_matter(weight: float, entropy: float):
    energy = mixed(weight)
    x = torch.randn(8, 2, dtype=D, requires_grad=True)
    solver: Any = icnn.BundleEntropy(100, 1e-9) if entropy else icnn.Bundle(300, 1e-8)

    def slope(rows: Tensor) -> Tensor:
        y = icnn.argmin(energy, rows, icnn.Box(-1, 1), entropy=entropy, solver=solver).y
        return gradient(y.square(), rows)

    together = slope(x)
    for row in range(8):
        alone = x[row : row + 1].detach().requires_grad_()
        torch.testing.assert_close(slope(alone)[0], together[row], atol=1e-5, rtol=1e-5)


def test_a_corner_of_planes_moves_with_its_planes():
    """Two planes and a bound meet in the answer: it is the solution of a linear system."""
    slopes = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [0.5, -3.0]], dtype=D)
    x = tensor([0.1, -0.2, 0.3])

    def energy(x: Any, y: Tensor) -> Tensor:
        return (y @ slopes.t() + x).amax(dim=1)

    y = icnn.argmin(energy, x, icnn.Box(-1, 1), entropy=0, solver=icnn.Bundle(tol=1e-12),
                    start=torch.zeros(1, 2, dtype=D)).y  # fmt: skip
    # y and t solve slopes y + x = t.
    inverse = torch.linalg.inv(torch.cat([slopes, -torch.ones(3, 1, dtype=D)], dim=1))
    for i in range(2):
        slope = torch.autograd.grad(y[0, i], x, retain_graph=True)[0]
        torch.testing.assert_close(slope[0], -inverse[i], atol=1e-7, rtol=0)


def test_a_domain_of_a_user_has_gradients():
    x = (3 * torch.randn(4, 5, dtype=D)).requires_grad_()
    v, start = torch.randn(4, 5, dtype=D), torch.zeros(4, 5, dtype=D)

    def half_distance(x: Any, y: Tensor) -> Tensor:
        return bowl(x, y) / 2

    for entropy, solver, shrink in ((0.0, icnn.Bundle(tol=1e-12), 1), (1.0, None, 2)):
        y = icnn.argmin(
            half_distance, x, Budget(2.0), entropy=entropy, solver=solver, start=start
        ).y
        expected = gradient(v * Budget(2.0).project(x / shrink), x)
        torch.testing.assert_close(gradient(v * y, x), expected, atol=1e-5, rtol=0)
