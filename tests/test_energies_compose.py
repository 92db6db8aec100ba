"""Compositions compute what they say, on vectors and on images."""

from typing import Any

import pytest
import torch
from torch import nn

import icnn

X, Y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, 5, dtype=torch.float64)


def net(x):
    return torch.stack([x[:, i % 3].exp() for i in range(10)], dim=1).view(-1, 2, 5)


def l1(x, y):
    return y.abs().sum(dim=(1, 2))


class L2(nn.Module):
    """A user's own module, without `at`."""

    def forward(self, x, y):
        return y.square().sum(dim=(1, 2)).sqrt()


def test_score():
    expected = -torch.einsum("bij,bij->b", Y, net(X))
    torch.testing.assert_close(icnn.Score(net)(X, Y), expected)


@pytest.mark.parametrize("center", [net, torch.full((2, 5), 0.3, dtype=torch.float64), 0.3])
@pytest.mark.parametrize("weight", [0.0, 2.5, torch.rand(2, 5).double(), torch.rand(5).double()])
def test_quadratic(center: Any, weight: Any):
    expected = torch.zeros(4, dtype=torch.float64)
    centers = net(X) if center is net else center
    for b, i, j in torch.cartesian_prod(torch.arange(4), torch.arange(2), torch.arange(5)).tolist():
        w = torch.as_tensor(weight, dtype=torch.float64).expand(2, 5)[i, j]
        c = torch.as_tensor(centers, dtype=torch.float64).expand(4, 2, 5)[b, i, j]
        expected[b] += 0.5 * w * (Y[b, i, j] - c) ** 2
    energy = icnn.Quadratic(center, weight)
    torch.testing.assert_close(energy(X, Y), expected)
    assert energy.y_shape == ((2, 5) if isinstance(center, torch.Tensor) else None)


def test_sum_max_scale_of_modules_and_functions():
    parts = [icnn.Score(net), L2(), l1]
    values = torch.stack([part(X, Y) for part in parts])
    torch.testing.assert_close(icnn.Sum(*parts)(X, Y), values.sum(dim=0))
    torch.testing.assert_close(icnn.Max(*parts)(X, Y), values.amax(dim=0))
    for c in (0, 0.1, torch.tensor(3.0), nn.Parameter(torch.tensor(3.0))):
        torch.testing.assert_close(icnn.Scale(l1, c)(X, Y), c * l1(X, Y))


def test_nesting():
    energy = icnn.Scale(icnn.Sum(icnn.Max(l1, icnn.Scale(L2(), 2.0)), icnn.Quadratic(0.0)), 0.5)
    expected = 0.5 * (torch.maximum(l1(X, Y), 2 * L2()(X, Y)) + 0.5 * Y.square().sum(dim=(1, 2)))
    torch.testing.assert_close(energy(X, Y), expected)
    torch.testing.assert_close(energy.at(X)(Y), expected)


def test_the_x_path_of_every_part_runs_once():
    calls = []

    def counted(x):
        calls.append(1)
        return net(x)

    energy = icnn.Sum(icnn.Max(icnn.Score(counted), icnn.Quadratic(counted)), icnn.Score(counted))
    f = energy.at(X)
    for _ in range(5):
        f(Y)
    assert len(calls) == 3


def test_a_learned_scale_that_became_negative_counts_as_zero():
    c, weight = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(5).double())
    energy = icnn.Sum(icnn.Scale(l1, c), icnn.Quadratic(0.0, weight))
    with torch.no_grad():
        c.fill_(-1)
        weight.fill_(-1)
    assert torch.equal(energy(X, Y), torch.zeros(4, dtype=torch.float64))
    assert {id(p) for p in energy.parameters()} == {id(c), id(weight)}


def test_constants_are_copies_and_move_with_the_module():
    center, weight = torch.zeros(2, 5, requires_grad=True), torch.ones(5)
    energy = icnn.Quadratic(center, weight)
    assert {key: value.shape for key, value in energy.state_dict().items()} == {
        "center": (2, 5),
        "weight.raw_project": (5,),
    }
    assert not list(energy.parameters())
    before = energy(None, Y.float())
    assert not before.requires_grad
    with torch.no_grad():
        center.add_(1)
        weight.add_(1)
    assert torch.equal(energy(None, Y.float()), before)
    torch.testing.assert_close(energy.double()(None, Y), before.double(), rtol=1e-6, atol=0)


def test_a_learned_scalar_center():
    center = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    energy = icnn.Sum(icnn.Quadratic(center), l1)
    torch.testing.assert_close(energy(X, Y), icnn.Sum(icnn.Quadratic(0.5), l1)(X, Y))
    assert list(energy.parameters()) == [center]


def test_representations_show_the_numbers():
    shown = repr(icnn.Scale(icnn.Sum(icnn.Quadratic(0.5, 2.0), l1), 0.1))
    assert all(part in shown for part in ("c=0.1", "center=0.5, weight=2", "l1"))
    assert len(repr(icnn.FICNN(3).at(None))) < 200


def test_an_energy_that_only_defines_forward():
    class Own(icnn.Energy):
        def forward(self, x, y):
            return l1(x, y)

    for energy in (Own(), icnn.Sum(Own())):
        torch.testing.assert_close(energy(X, Y), l1(X, Y))
        torch.testing.assert_close(energy.at(X)(Y), l1(X, Y))


def test_numbers_are_exact_in_every_dtype():
    """0.1 is not rounded to float32 on its way into a float64 energy."""
    torch.testing.assert_close(icnn.Scale(l1, 0.1)(X, Y), 0.1 * l1(X, Y), rtol=1e-15, atol=0)


def test_gaussian():
    mean, factor = torch.rand(2, 5, dtype=torch.float64), torch.rand(7, 10, dtype=torch.float64)
    energy = icnn.Gaussian(mean, factor)
    away = (Y - mean).flatten(start_dim=1)
    expected = 0.5 * torch.einsum("bi,ij,bj->b", away, factor.T @ factor, away)
    torch.testing.assert_close(energy(X, Y), expected)
    assert energy.y_shape == (2, 5)
    assert icnn.check_convexity(energy).proved
    assert not list(energy.parameters())
    learned = icnn.Gaussian(nn.Parameter(mean), nn.Parameter(factor))
    assert len(list(learned.parameters())) == 2
    assert repr(energy) == "Gaussian(y_shape=(2, 5), rank=7)"


@pytest.mark.parametrize(
    ("mean", "factor", "told"),
    [
        (torch.tensor(1.0), torch.eye(1), "`mean` must have the shape of `y`, got a single number"),
        (torch.zeros(2), torch.eye(3), r"`factor` must have shape \(B, 2\), got \(3, 3\)"),
        (torch.zeros(2), torch.eye(2).double(), "`factor` must have dtype torch.float32, got"),
        (torch.zeros(2), 3.0, "`factor` must be a tensor, got float"),
    ],
)
def test_gaussians_that_are_none(mean: Any, factor: Any, told: str):
    with pytest.raises(ValueError, match=told):
        icnn.Gaussian(mean, factor)
