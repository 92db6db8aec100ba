"""Gradients through the steps of a projected gradient method."""

import pytest
import torch
from torch import Tensor, nn

import icnn
from tests.learning import D, along, gradient


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
    slope = sum(float((g * w).sum()) for g, w in zip(found, ways, strict=True) if g is not None)
    difference = along(loss, leaves, ways, 1e-6)
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
