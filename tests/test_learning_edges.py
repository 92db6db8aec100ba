"""Gradients at the edges: the value, rows that are special, PyTorch's graph, devices."""

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
from tests.learning import D, Once, absolute, bowl, gradient, half, tensor
from tests.networks import DEVICES

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
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for i in range(4):
        y = icnn.argmin(energy, x, icnn.Box(), solver=solver).y
        if i % 2:
            y.sum().backward()
        del y
        if i == 1:
            before = tensors()
    assert tensors() <= before  # pyright: ignore


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
