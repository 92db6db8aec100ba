"""Losses: the structured hinge against all corners, F1 against scikit-learn."""

import itertools
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

import icnn
from icnn.losses import max_margin, soft_f1
from tests.learning import D, along

X = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(3))


def labels(simplex: bool) -> Tensor:
    picks = torch.tensor([0, 2, 1, 3])
    return (
        torch.eye(4, dtype=D)[picks] if simplex else (torch.arange(16).reshape(4, 4) % 3 == 0) * 1.0
    )


def corners(simplex: bool) -> Tensor:
    if simplex:
        return torch.eye(4, dtype=D)
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=D)


@pytest.mark.parametrize("margin", ["hamming", "one-hot"])
@pytest.mark.parametrize("simplex", [False, True])
def test_of_a_linear_energy_it_is_the_hinge_over_all_corners(simplex: bool, margin: str):
    energy = icnn.Score(nn.Linear(3, 4)).double()
    y_true = labels(simplex).double()
    domain = icnn.Simplex() if simplex else icnn.Box()
    options: Any = {"margin": margin, "scale": 0.7, "solver": icnn.Bundle()}
    found = max_margin(energy, X, y_true, domain, reduction="none", **options)
    rivals = corners(simplex)
    for row in range(4):
        away = (rivals - y_true[row]).abs() if margin == "hamming" else y_true[row] * (1 - rivals)
        values = energy(X[row : row + 1].expand(len(rivals), -1), rivals)
        own = energy(X[row : row + 1], y_true[row : row + 1])
        expected = (own - values + 0.7 * away.sum(dim=1)).max()
        assert abs(float((found[row] - expected).detach())) < 1e-5
    total = max_margin(energy, X, y_true, domain, reduction="sum", **options)
    torch.testing.assert_close(found.sum(), total)
    mean = max_margin(energy, X, y_true, domain, **options)
    torch.testing.assert_close(4 * mean, total)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_it_is_the_true_minimum_and_has_its_gradient(activation: str, entropy: float):
    """No corner need be the worst rival of a network; kinks are where the rival likes to be."""
    energy = icnn.PICNN(3, 4, (8, 8), activation=activation, positivity="softplus").double()
    for weight in energy.parameters():
        nn.init.normal_(weight, std=0.7)
    low, high = torch.full((4,), -1.0, dtype=D), torch.ones(4, dtype=D)
    y_true = 2 * labels(False).double() - 1
    solver: Any = icnn.BundleEntropy(200, 1e-12) if entropy else icnn.Bundle(300, 1e-11)
    x = X.clone().requires_grad_()

    def loss() -> Tensor:
        domain = icnn.Box(low, high)
        return max_margin(energy, x, y_true, domain, entropy=entropy, scale=0.4, solver=solver)

    value = loss()
    points = 2 * torch.rand(4000, 4, dtype=D) - 1
    with torch.no_grad():
        for row in range(4):
            u, target = (points + 1) / 2, (y_true[row] + 1) / 2
            here = energy(X[row : row + 1].expand(4000, -1), points)
            bend = -(u * u.log() + (1 - u) * (1 - u).log()).sum(dim=1)
            rival = here - entropy * bend - 0.4 * (u - target).abs().sum(dim=1)
            hinge = energy(X[row : row + 1], y_true[row : row + 1]) - rival.min()
            each = max_margin(energy, X, y_true, icnn.Box(low, high), entropy=entropy, scale=0.4,
                              solver=solver, reduction="none")  # fmt: skip
            assert each[row] >= hinge - 1e-6
    leaves = [*energy.parameters(), x]
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    for _ in range(3):
        ways = [torch.randn_like(leaf) for leaf in leaves]
        slope = sum(float((g * w).sum()) for g, w in zip(found, ways, strict=True) if g is not None)
        assert abs(slope - along(loss, leaves, ways, 1e-5)) < 1e-4 * max(1, abs(slope))


def test_it_learns_with_projection_and_weight_decay():
    torch.manual_seed(1)
    x = torch.randn(64, 3)
    y_true = (x[:, :2] + 0.5 * x[:, 1:] > 0).float()
    energy = icnn.PICNN(3, 2, (16,))
    optimizer = torch.optim.SGD(energy.parameters(), lr=0.05, weight_decay=1e-3)
    icnn.keep_convex(energy, optimizer)
    losses = []
    for _ in range(60):
        loss = max_margin(energy, x, y_true, icnn.Box(), solver=icnn.Bundle(30, 1e-3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.4 * losses[0]
    best = icnn.argmin(energy, x, icnn.Box(), entropy=0, solver=icnn.Bundle())
    assert ((best.y > 0.5) == (y_true > 0.5)).float().mean() > 0.9
    report = icnn.check_convexity(energy)
    assert report.proved


def test_a_broken_row_and_a_search_that_did_not_converge():
    energy, x = icnn.PICNN(3, 4), torch.randn(4, 3)
    x[1] = torch.nan
    with pytest.warns(RuntimeWarning, match="1 of 4"):
        loss, rival = max_margin(
            energy, x, labels(False).float(), icnn.Box(), reduction="none", return_rival=True,
            solver=icnn.Bundle(1, 1e-9),
        )  # fmt: skip
    assert loss[1] == 0
    assert "0 of 4 converged" in rival.report()
    loss.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in energy.parameters())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"y_true": torch.tensor([[0.0, 1.5]])}, r"`y_true` must lie in .* example 0"),
        ({"y_true": torch.tensor([[0.0, 0.4]])}, r"`y_true` must be at corners"),
        ({"y_true": torch.tensor([[0.0, torch.nan]])}, r"`y_true` must lie in"),
        ({"y_true": torch.tensor([[0, 1]])}, r"`y_true`"),
        ({"y_true": [[0.0, 1.0]]}, r"`y_true`"),
        ({"y_true": torch.tensor([1.0])}, r"`y_true` must have shape .*one_hot"),
        ({"y_true": torch.tensor([[0.0, 1.0, 1.0]])}, r"`y_true` must have shape"),
        ({"domain": None}, r"`domain` must be a Box or a Simplex"),
        ({"domain": icnn.Simplex(), "y_true": torch.tensor([[1.0, 1.0]])}, r"`y_true` must lie in"),
        ({"margin": "l2"}, r"`margin`"),
        ({"scale": -1.0}, r"`scale`"),
        ({"entropy": -1.0}, r"`entropy`"),
        ({"reduction": "max"}, r"`reduction`"),
        ({"energy": None}, r"`energy`"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], match: str):
    given: dict[str, Any] = {
        "energy": icnn.PICNN(3, 2), "x": torch.zeros(1, 3), "y_true": torch.tensor([[0.0, 1.0]]),
        "domain": icnn.Box(),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=match):
        max_margin(**given)


def test_soft_f1_of_hard_labels_is_that_of_scikit_learn():
    y, y_true = (torch.rand(2, 30, 7) > 0.6).double()
    y[3], y_true[3] = 0, 0  # 0/0
    for average, known in (("examples", "samples"), ("labels", "macro")):
        expected = 1 - f1_score(y_true.numpy(), y.numpy(), average=known, zero_division=0)  # pyright: ignore
        assert abs(float(soft_f1(y, y_true, average=average)) - expected) < 1e-12


def test_soft_f1_has_finite_gradients():
    y, y_true = torch.rand(5, 4, dtype=D, requires_grad=True), torch.zeros(5, 4)
    y_true[1:, 0] = 1
    assert torch.autograd.gradcheck(lambda y: soft_f1(y, y_true), y)
    nothing = torch.zeros(5, 4, requires_grad=True)
    soft_f1(nothing, torch.zeros(5, 4, dtype=torch.bool)).backward()
    assert nothing.grad is not None
    assert nothing.grad.isfinite().all()
    for bad in ({"y_true": torch.zeros(5, 3)}, {"average": "micro"}, {"y": torch.zeros(5)}):
        with pytest.raises(ValueError, match=f"`{next(iter(bad))}`"):
            soft_f1(**({"y": torch.rand(5, 4), "y_true": torch.zeros(5, 4)} | bad))  # pyright: ignore


def test_the_losses_of_torch_work_on_the_answer():
    energy, x = icnn.PICNN(3, 4), torch.randn(6, 3)
    target = (torch.rand(6, 4) > 0.5).float()
    for loss in (nn.functional.binary_cross_entropy, nn.functional.mse_loss, soft_f1):
        energy.zero_grad()
        loss(icnn.argmin(energy, x, icnn.Box()).y, target).backward()
        assert any(p.grad is not None and p.grad.any() for p in energy.parameters())
    y = icnn.argmin(energy, x, icnn.Simplex()).y
    nn.functional.nll_loss(y.log(), torch.randint(4, (6,))).backward()
    # A target outside of the box is as good as any for a loss on the answer.
    nn.functional.mse_loss(icnn.argmin(energy, x, icnn.Box()).y, target + 5).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in energy.parameters())
