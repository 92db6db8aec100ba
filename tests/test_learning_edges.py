"""Gradients where something is special: no entropy, no kinks to see, broken rows, odd energies."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import icnn
from tests.networks import DEVICES
from tests.test_solvers_domains import Budget

D = torch.float64


def half(*shape: int) -> Tensor:
    return torch.full(shape, 0.5, dtype=D)


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=D, requires_grad=True)


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), leaf)[0]


def absolute(x: Tensor, y: Tensor) -> Tensor:
    return 3 * (y - x).abs().sum(dim=1)


def bowl(x: Tensor, y: Tensor) -> Tensor:
    return (y - x).square().sum(dim=1)


class Once(torch.autograd.Function):
    """A function whose derivative PyTorch cannot look into."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(z)
        ctx.kind = kind
        return z.abs() if kind == "abs" else z.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        slope = z.detach().sign() if ctx.kind == "abs" else 2 * z.detach()
        return gradients[0] * slope, None


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


# The closed form.


def test_softmax_and_sigmoid_have_their_known_gradients():
    scores, v = torch.randn(2, 6, 4, dtype=D)
    for domain, known in ((icnn.Simplex(), lambda c: c.softmax(1)), (icnn.Box(), torch.sigmoid)):
        c = scores.clone().requires_grad_()
        energy = icnn.Score(lambda x: x)
        found = icnn.argmin(energy, c, domain, start=domain.center(c.detach()))
        expected = gradient(v * known(c), c)
        torch.testing.assert_close(gradient(v * found.y, c), expected, atol=1e-12, rtol=1e-9)


# The value.


def test_the_value_has_the_gradient_of_the_envelope_theorem_at_kinks():
    x = tensor([0.3, 0.8])
    found = icnn.argmin(
        absolute, x, icnn.Box(), solver=icnn.BundleEntropy(tol=1e-13), start=half(1, 2)
    )
    torch.testing.assert_close(gradient(found.value, x), (x / (1 - x)).log(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("entropy", [0.0, 0.5])
@pytest.mark.parametrize("energy", [absolute, bowl])
def test_the_value_moves_with_the_bounds(energy: Any, entropy: float):
    low, high, x = tensor([-0.5, 0.45]), tensor([0.2, 1.0]), tensor([0.3, 0.3])
    solver = icnn.BundleEntropy(tol=1e-12) if entropy else icnn.Bundle(tol=1e-12)
    leaves = (low, high, x)

    def value() -> Tensor:
        return icnn.argmin(energy, x, icnn.Box(low, high), entropy=entropy, solver=solver).value

    found = torch.autograd.grad(value().sum(), leaves)
    for leaf, slope in zip(leaves, found, strict=True):
        for i in range(2):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    leaf[0, i] += sign * 1e-5
                    ends.append(float(value()))
                    leaf[0, i] -= sign * 1e-5
            assert abs((ends[0] - ends[1]) / 2e-5 - float(slope[0, i])) < 1e-4


# Without entropy.


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


# Rows that are special.


class Dropping(nn.Module):
    """Random masks, drawn once for each `at`."""

    y_shape = (2,)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 20), nn.Dropout(0.5), nn.Linear(20, 2)).double()

    def at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        center = self.net(x)
        return lambda y: 3 * bowl(center, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.at(x)(y)


@pytest.mark.parametrize("solver", [icnn.BundleEntropy(), icnn.ProjectedGradient()])
@pytest.mark.parametrize("make", [Dropping, lambda: icnn.PICNN(3, 2).double()])
def test_a_broken_row_has_no_gradient_and_leaves_the_others_alone(make: Any, solver: Any):
    energy, x = make(), torch.randn(3, 3, dtype=D)
    found = []
    for broken in (False, True):
        z = x.clone()
        z[1] = torch.nan if broken else z[1]
        z.requires_grad_()
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solution = icnn.argmin(energy, z, icnn.Box(), solver=solver)
        told = [str(w.message) for w in caught]
        assert told == (["1 of 3 examples are not finite: they get no gradient"] if broken else [])
        leaves = [z, *energy.parameters()]
        others = solution.y[0].sum() + solution.y[2].sum() + solution.value[0]
        found.append(torch.autograd.grad(others, leaves, retain_graph=True, allow_unused=True))
        if broken:
            row = torch.autograd.grad(solution.y[1].sum(), leaves, allow_unused=True)
            assert all(g is None or not g.any() for g in row)
    for whole, with_hole in zip(*found, strict=True):
        assert (whole is None) == (with_hole is None)
        if whole is not None:
            torch.testing.assert_close(with_hole, whole)


def test_a_batch_that_is_broken_throughout():
    energy = icnn.PICNN(3, 2)
    with pytest.warns(RuntimeWarning, match="2 of 2 examples"):
        solution = icnn.argmin(energy, torch.full((2, 3), torch.nan), icnn.Box())
    (solution.y.sum() + solution.value.sum()).backward()
    assert all(p.grad is None for p in energy.parameters())


def test_a_batch_of_one_and_of_none():
    energy, x = icnn.PICNN(3, 2).double(), torch.randn(4, 3, dtype=D)
    together = icnn.argmin(energy, x, icnn.Box()).y
    weight = energy.get_parameter("layers.0.wy.weight")
    alone = icnn.argmin(energy, x[:1], icnn.Box()).y
    torch.testing.assert_close(gradient(alone, weight), gradient(together[0], weight))
    icnn.argmin(energy, x[:0], icnn.Box()).y.sum().backward()


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_rows_that_did_not_converge_have_finite_gradients(activation: str, steps: int):
    energy = icnn.Scale(icnn.PICNN(3, 6, activation=activation), 30.0)
    solver = icnn.BundleEntropy(steps, tol=1e-9)
    solution = icnn.argmin(energy, torch.randn(8, 3), icnn.Box(-3, 3), solver=solver)
    late = int((~solution.converged).sum())
    assert late
    assert f"{8 - late} of 8 converged" in solution.report()
    solution.y.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in energy.parameters())


def test_all_coordinates_given():
    values = torch.rand(2, 2, requires_grad=True)
    energy, mask = icnn.PICNN(3, 2), torch.ones(2, 2, dtype=torch.bool)
    solution = icnn.argmin(energy, torch.randn(2, 3), icnn.Box(), fixed=(mask, values))
    assert torch.equal(gradient(solution.y, values), torch.ones(2, 2))


@pytest.mark.parametrize("opaque", [False, True])
def test_given_values_have_gradients_without_second_derivatives(opaque: bool):
    mix, mask = torch.randn(4, 4, dtype=D), torch.tensor([[True, False, False, True]])
    values = tensor([0.3, 0.0, 0.0, 0.6])
    square = (lambda z: Once.apply(z, "")) if opaque else torch.square

    def energy(x: Any, y: Tensor) -> Tensor:
        return square(y @ mix).sum(dim=1)  # pyright: ignore

    solver = icnn.BundleEntropy(tol=1e-12)
    y = icnn.argmin(energy, None, icnn.Box(), fixed=(mask, values), solver=solver).y
    hessian, bend = 2 * mix @ mix.T, torch.diag((y * (1 - y)).detach()[0, 1:3])
    system = torch.eye(2, dtype=D) + bend @ hessian[1:3, 1:3]
    moved = torch.linalg.solve(system, -bend @ hessian[1:3][:, [0, 3]])
    expected = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=D)
    expected[[0, 3]] += moved.sum(dim=0)
    torch.testing.assert_close(gradient(y, values)[0], expected, atol=1e-5, rtol=0)


# The graph.


def test_an_encoder_that_the_loss_uses_elsewhere_too():
    encoder, energy = nn.Linear(4, 3), icnn.PICNN(3, 2)
    raw = torch.randn(5, 4)

    def loss() -> Tensor:
        x = encoder(raw)
        solution = icnn.argmin(energy, x, icnn.Box())
        return x.square().mean() + solution.y.square().sum() + solution.value.sum()

    loss().backward()
    total = encoder.weight.grad
    assert total is not None
    torch.testing.assert_close(gradient(loss(), encoder.weight), total)


def test_two_backward_passes_and_none_of_second_order():
    x = tensor([0.3, 0.8])
    for energy in (absolute, bowl):
        solution = icnn.argmin(energy, x, icnn.Box(), start=half(1, 2))
        for out in (solution.y, solution.value):
            first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
            second = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
            assert torch.equal(first, second)
            with pytest.raises(RuntimeError, match="first order only"):
                torch.autograd.grad(second.sum(), x, retain_graph=True)


def test_a_loss_on_rounded_answers_has_a_sensible_gradient():
    """In float32 a label that is all but certain rounds to 1, where cross-entropy is very steep."""
    for steep in (5.0, 15.0, 18.0, 25.0, 60.0):
        x = torch.tensor([[-steep]], requires_grad=True)
        y = icnn.argmin(
            lambda x, y: (x * y).sum(dim=1), x, icnn.Box(), start=torch.full((1, 1), 0.5)
        ).y
        slope = gradient(F.binary_cross_entropy(y, torch.zeros(1, 1)), x)
        assert -2 < float(slope) <= 0


def test_no_gradients_where_none_are_asked_for():
    energy, x = icnn.PICNN(3, 2), torch.randn(4, 3)
    with torch.no_grad():
        assert not icnn.argmin(energy, x, icnn.Box()).y.requires_grad
    energy.requires_grad_(False)
    for solver in (icnn.BundleEntropy(), icnn.ProjectedGradient()):
        found = icnn.argmin(energy, x, icnn.Box(), solver=solver)
        assert not found.y.requires_grad
        assert not found.value.requires_grad


class OnceDropping(Dropping):
    """The same, of what PyTorch cannot look into."""

    def at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        center = self.net(x)
        return lambda y: 3 * Once.apply(y - center, "").sum(dim=1)  # pyright: ignore


def test_differences_see_the_same_dropout_masks():
    plain, opaque = Dropping(), OnceDropping()
    opaque.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, dtype=D, requires_grad=True)
    slopes = []
    for energy in (plain, opaque):
        torch.manual_seed(3)
        y = icnn.argmin(energy, x, icnn.Box(), gradient="implicit").y
        torch.rand(1)
        slopes.append(gradient(y, x))
    torch.testing.assert_close(*slopes, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("solver", [icnn.BundleEntropy(5), icnn.ProjectedGradient(5)])
def test_nothing_is_left_behind(solver: Any):
    energy, x = icnn.PICNN(3, 2), torch.randn(4, 3)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    for i in range(4):
        y = icnn.argmin(energy, x, icnn.Box(), solver=solver).y
        if i % 2:
            y.sum().backward()
        del y
        if i == 1:
            before = tensors()
    assert tensors() <= before  # pyright: ignore


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


# Unrolled.


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("rule", ["momentum", "spectral", "adam"])
def test_unrolled_gradients_are_those_of_the_steps(rule: str, simplex: bool, entropy: float):
    energy = icnn.PICNN(2, 4, (8, 8), activation="softplus", positivity="softplus").double()
    x = torch.randn(3, 2, dtype=D, requires_grad=True)
    low, high = -torch.ones(4, dtype=D), torch.ones(3, 4, dtype=D)
    values = torch.rand(3, 4, dtype=D) / 4
    mask = torch.tensor([False, True, False, False])
    leaves = [*energy.parameters(), x, values] + ([] if simplex else [low, high])
    for leaf in leaves:
        leaf.requires_grad_()
    solver, v = icnn.ProjectedGradient(8, 0.05, rule=rule), torch.randn(3, 4, dtype=D)

    def loss() -> Tensor:
        domain = icnn.Simplex() if simplex else icnn.Box(low, high)
        options = {"entropy": entropy, "solver": solver, "fixed": (mask, values)}
        return (v * icnn.argmin(energy, x, domain, **options).y).sum()

    found = torch.autograd.grad(loss(), leaves, allow_unused=True)
    ways = [torch.randn_like(leaf) for leaf in leaves]
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for leaf, way in zip(leaves, ways, strict=True):
                leaf.add_(way, alpha=sign * 1e-6)
            ends.append(float(loss()))
            for leaf, way in zip(leaves, ways, strict=True):
                leaf.sub_(way, alpha=sign * 1e-6)
    slope = sum(float((g * w).sum()) for g, w in zip(found, ways, strict=True) if g is not None)
    difference = (ends[0] - ends[1]) / 2e-6
    assert abs(slope - difference) < 1e-6 * max(1, abs(difference))


def test_truncated_steps_come_near_the_whole():
    energy = icnn.PICNN(2, 4, (8, 8), activation="softplus").double()
    nn.init.normal_(energy.get_parameter("layers.0.wyu.weight"))
    x = torch.randn(5, 2, dtype=D, requires_grad=True)

    def slope(unrolled: int | None) -> Tensor:
        solver = icnn.ProjectedGradient(60, 0.1, unrolled=unrolled)
        return gradient(icnn.argmin(energy, x, icnn.Box(), solver=solver).y, x)

    whole = slope(None)
    errors = [float((slope(steps) - whole).norm() / whole.norm()) for steps in (1, 3, 10, 60)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 1
    assert errors[2] < 0.05
    assert errors[3] < 1e-9
    with pytest.raises(ValueError, match="`unrolled`"):
        icnn.ProjectedGradient(unrolled=0)


# Devices.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("kind", ["relu", "softplus", "both", "unroll", "bare", "opaque"])
def test_every_device_and_float32_give_the_same_gradients(kind: str, simplex: bool, device: str):
    """Against float64 on the CPU; with bounds, given values and a broken row."""
    torch.manual_seed(7)
    net = icnn.PICNN(3, 4, (8,), activation="softplus" if kind == "softplus" else "relu")
    nn.init.normal_(net.get_parameter("layers.0.wyu.weight"))
    energy: Any = icnn.Sum(net, icnn.Quadratic(nn.Linear(3, 4))) if kind == "both" else net
    if kind == "opaque":
        once = lambda x, y: Once.apply(y - x[:, :1], "").sum(dim=1)  # noqa: E731  # pyright: ignore
        energy = icnn.Sum(once, icnn.Score(nn.Linear(3, 4)))
    x, mask = torch.randn(5, 3), torch.tensor([False, True, False, False])
    x[2] = torch.nan
    values, low, high = torch.rand(5, 4) / 4, -torch.ones(4), torch.ones(5, 4)
    solvers: dict[str, Any] = {
        "unroll": icnn.ProjectedGradient(6, 0.05), "bare": icnn.Bundle(50, 1e-5)
    }  # fmt: skip

    def gradients(device: str, dtype: torch.dtype) -> list[Tensor]:
        model = copy.deepcopy(energy).to(device, dtype)
        given = [t.to(device, dtype).requires_grad_() for t in (x, values, low, high)]
        domain = icnn.Simplex() if simplex else icnn.Box(*given[2:])
        with pytest.warns(RuntimeWarning, match="1 of 5"):
            found = icnn.argmin(
                model, given[0], domain, fixed=(mask.to(device), given[1]),
                entropy=0 if kind == "bare" else 0.5,
                solver=solvers.get(kind, icnn.BundleEntropy(60, 1e-6)),
            )  # fmt: skip
        leaves = [*model.parameters(), *given[: 2 if simplex else 4]]
        loss = found.y.square().sum() + found.value[[0, 1, 3, 4]].sum()
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return [slope.cpu().double() for slope in slopes]

    exact = gradients("cpu", torch.float64)
    for found, expected in zip(gradients(device, torch.float32), exact, strict=True):
        size = max(float(t.abs().max()) for t in exact)
        torch.testing.assert_close(found, expected, atol=0.01 * size, rtol=0)
    if device != "cpu":
        for found, expected in zip(gradients(device, torch.float64), exact, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
