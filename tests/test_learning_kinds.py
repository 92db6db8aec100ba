"""Energies of all kinds: auto finds the right way; answers at bounds, cuts that are alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import icnn
from tests.learning import D, Once, absolute, bowl, gradient, half, tensor


def directional(
    energy: Callable[[Any, Tensor], Tensor], x: Tensor, step: float, **options: Any
) -> tuple[float, float]:
    """The derivative of the answers along a random way, as a gradient and as a difference."""
    options = {"solver": icnn.BundleEntropy(300, 1e-14), "start": half(*x.shape)} | options
    x = x.detach().clone().requires_grad_()
    v, way = torch.randn(2, *x.shape, dtype=D)
    slope = gradient(v * icnn.argmin(energy, x, icnn.Box(), **options).y, x)
    with torch.no_grad():
        ends = [icnn.argmin(energy, x + s * step * way, icnn.Box(), **options).y for s in (1, -1)]
    return float((slope * way).sum()), float((v * (ends[0] - ends[1])).sum() / (2 * step))


# Energies of all kinds.


def copied(x: Tensor, y: Tensor) -> Tensor:
    z = (10 * (y - x)).clone()
    z[:, :2].relu_()
    return z.sum(dim=1) - 5 * y.sum(dim=1)


def branches(x: Tensor, y: Tensor) -> Tensor:
    """Kinks that leave no trace in a graph."""
    rise = torch.zeros_like(y[:, 0])
    for i in range(y.shape[1]):
        side = (y[:, i] > x[:, i]).nonzero().squeeze(1)
        rise = rise.index_add(0, side, 6 * (y[side, i] - x[side, i]))
    return rise - 3 * y.sum(dim=1)


ENERGIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "absolute": absolute,
    "bowl": lambda x, y: 3 * bowl(x, y),
    "smooth l1": lambda x, y: 3 * F.smooth_l1_loss(y, x, reduction="none").sum(dim=1),
    "huber": lambda x, y: 3 * F.huber_loss(y, x, reduction="none").sum(dim=1),
    "in place": copied,
    "branches": branches,
    "norm": lambda x, y: 3 * (y - x).norm(dim=1),
    "sorted": lambda x, y: ((y - x).sort(dim=1).values * torch.arange(-1, 2)).sum(dim=1),
    "where": lambda x, y: torch.where(y > x, 2 * (y - x), 3 * (x - y)).sum(dim=1),
    "einsum": lambda x, y: torch.einsum("bi,bi->b", y - x, y - x),
    "log-sum-exp": lambda x, y: (4 * (y - x)).logsumexp(dim=1) - y.sum(dim=1),
    "softplus": lambda x, y: (F.softplus(8 * (y - x)) - 4 * y).sum(dim=1),
    "kinked and curved": lambda x, y: absolute(x, y) / 3 + bowl(x.roll(1, 1), y),
    "no second derivative, kinked": lambda x, y: 3 * Once.apply(y - x, "abs").sum(dim=1),  # pyright: ignore
    "no second derivative, smooth": lambda x, y: 3 * Once.apply(y - x, "").sum(dim=1),  # pyright: ignore
    "distances": lambda x, y: 3 * torch.cdist(y[:, None], x[:, None])[:, 0, 0],
    "compiled": torch.compile(lambda x, y: F.softplus(4 * (y - x)).sum(dim=1) - 2 * y.sum(dim=1),
                              backend="aot_eager"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENERGIES)
def test_auto_finds_the_right_way_for_energies_of_a_user(name: str):
    # Curved ones are known less well: a gap d fixes an answer to its root.
    x = 0.2 + 0.6 * torch.rand(2, 3, dtype=D)
    slope, difference = directional(ENERGIES[name], x, 1e-3)
    assert abs(slope - difference) < 1e-3 * max(1, abs(difference))


@pytest.mark.parametrize("smooth", [True, False])
def test_an_energy_may_declare_that_it_is_smooth(smooth: bool):
    class Declared:
        y_shape = (1,)

        def __call__(self, x: Tensor, y: Tensor) -> Tensor:
            return 3 * Once.apply(y - x, "").sum(dim=1)  # pyright: ignore

    energy = Declared()
    energy.__dict__["smooth"] = smooth
    slope, difference = directional(energy, half(1, 1) - 0.2, 1e-3, start=None)
    # Cuts of a smooth energy pin the answer: the pitfall of Proposition 3.
    assert (abs(slope - difference) < 1e-3) == smooth


def test_cuts_of_a_smooth_energy_are_wrong_and_implicit_is_right():
    x = tensor([0.2])
    options = {"solver": icnn.BundleEntropy(tol=1e-9), "start": half(1, 1)}

    def steep(x: Any, y: Tensor) -> Tensor:
        return 10 * bowl(x, y)

    found = {
        way: float(gradient(icnn.argmin(steep, x, icnn.Box(), gradient=way, **options).y, x))
        for way in ("cuts", "implicit")
    }
    y = float(icnn.argmin(steep, x, icnn.Box(), **options).y.detach())
    assert abs(found["implicit"] - 20 / (20 + 1 / (y * (1 - y)))) < 1e-4
    assert abs(found["cuts"] - found["implicit"]) > 0.1


def test_many_coordinates_use_conjugate_gradients():
    n = 40
    root = torch.randn(n, n, dtype=D) / 3
    x = torch.rand(1, n, dtype=D, requires_grad=True)

    def energy(x: Any, y: Tensor) -> Tensor:
        return 0.5 * ((y - x) @ root).square().sum(dim=1)

    y = icnn.argmin(
        energy, x, icnn.Box(), start=half(1, n), solver=icnn.BundleEntropy(400, 1e-10)
    ).y
    v = torch.randn(n, dtype=D)
    hessian, bend = root @ root.T, torch.diag(y[0].detach() * (1 - y[0].detach()))
    # dy = (I + J H)^-1 J H dx
    expected = torch.linalg.solve(torch.eye(n, dtype=D) + bend @ hessian, bend @ hessian).T @ v
    torch.testing.assert_close(gradient(y[0] @ v, x)[0], expected, atol=1e-9, rtol=1e-9)


def test_a_gradient_that_was_not_found_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("icnn.solvers.adjoint.ITERATIONS", 2)
    n = 40
    x = torch.rand(1, n, dtype=D, requires_grad=True)
    weight = torch.logspace(0, 6, n, dtype=D)

    def energy(x: Any, y: Tensor) -> Tensor:
        return (weight * (y - x).square()).sum(dim=1)

    y = icnn.argmin(energy, x, icnn.Box(), start=half(1, n), solver=icnn.BundleEntropy(5)).y
    with pytest.warns(RuntimeWarning, match="1 of 1 examples is rough: 2 conjugate gradients"):
        y.sum().backward()


# Near a bound, and cuts that depend on each other.


@pytest.mark.parametrize("steep", [20.0, 1e3])
def test_answers_at_a_bound_have_finite_and_right_gradients(steep: float):
    """At 1e-9 from a bound, and closer than numbers can tell."""
    x = tensor([0.3, 0.6])

    def energy(x: Any, y: Tensor) -> Tensor:
        return steep * (y * (1 + x)).sum(dim=1) + absolute(x, y)

    y = icnn.argmin(energy, x, icnn.Box(), start=half(1, 2)).y
    assert y.max() < 1e-8
    # y = sigmoid(-slope), with the slope of the piece below x.
    expected = gradient(torch.sigmoid(-(steep * (1 + x) - 3)), x)
    torch.testing.assert_close(gradient(y, x), expected, atol=1e-300, rtol=1e-6)


@pytest.mark.parametrize("apart", [0.0, 1e-15, 1e-12, 1e-9, 1e-6])
def test_cuts_that_are_almost_the_same(apart: float):
    slopes = torch.tensor([[2.0, 1.0], [-2.0, 1.0], [-2.0, 1.0]], dtype=D)
    slopes[2, 1] += apart
    offsets = tensor([0.0, 1.6, 1.6])

    def energy(x: Any, y: Tensor) -> Tensor:
        return (y @ slopes.t() + offsets).amax(dim=1)

    y = icnn.argmin(
        energy, None, icnn.Box(), solver=icnn.BundleEntropy(50, 1e-14), start=half(1, 2)
    ).y
    slope = torch.autograd.grad(y[0, 0], offsets)[0][0]
    # 4 y_0 = offsets_1 - offsets_0, whichever of the two twins it is.
    torch.testing.assert_close(slope[0], tensor(-0.25)[0].detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(slope[1] + slope[2], tensor(0.25)[0].detach(), atol=1e-5, rtol=0)


# What is refused.


def test_ways_that_do_not_go_with_a_solver_are_refused():
    energy, x = icnn.PICNN(3, 2), torch.randn(4, 3)
    for way in ("unroll", "backprop"):
        with pytest.raises(ValueError, match="`gradient` must be"):
            icnn.argmin(energy, x, icnn.Box(), gradient=way)
    once = ENERGIES["no second derivative, smooth"]
    options = {"start": half(1, 2), "solver": icnn.ProjectedGradient()}
    with pytest.raises(ValueError, match="`gradient` must be"):
        icnn.argmin(once, tensor([0.3, 0.8]), icnn.Box(), **options)
