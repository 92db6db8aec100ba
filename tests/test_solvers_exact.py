"""The linear programs find the truth: on grids, by hand, against each other, and by certificate."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

import icnn
from icnn.energies.energy import at
from icnn.solvers.cutting_planes import cutting_planes
from icnn.solvers.exact import LinearProgram
from icnn.solvers.problem import Problem
from icnn.solvers.solution import Status

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
BATCH = 3


def exact(energy: Any, x: Any, domain: Any, **options: Any) -> icnn.Solution:
    return icnn.argmin(energy, x, domain, entropy=0.0, solver=LinearProgram(), **options)


def bent(energy: Any, by: float = 0.3) -> Any:
    """With weights moved at random, so that many kinks lie inside the domain."""
    with torch.no_grad():
        for weight in energy.parameters():
            weight.add_(by * torch.randn_like(weight) * weight.std(correction=0))
    return energy


def certified(energy: Any, x: Any, domain: Any, found: icnn.Solution) -> None:
    """The answer lies in the domain, its value is the energy's, and no point is below the bound."""
    f, y = at(energy, x), found.y
    single = y.dtype == torch.float32
    assert bool(domain.contains(y).all())
    with torch.no_grad():
        torch.testing.assert_close(found.value, f(y).double(), rtol=0, atol=0)
        size = found.value.abs().clamp(min=1)
        assert bool((found.gap.abs() <= (1e-5 if single else 1e-9) * size).all())
        assert set(found.status.tolist()) <= {Status.CONVERGED, Status.STALLED}
        assert single or bool(found.converged.all())
        for spread in (3.0, 0.3, 0.03, 0.003) * 20:
            other = domain.project(y + spread * torch.randn_like(y))
            assert bool((f(other) >= found.lower - (1e-5 if single else 1e-12) * size).all())


def sequential(*layers: nn.Module, y_shape: tuple[int, ...] | None = None) -> Any:
    return icnn.convexify(nn.Sequential(*layers), y_shape)


def olivetti(y_shape: tuple[int, ...], pool: str, **options: Any) -> Any:
    convs = ((3, 3, (2, 1)), (pool, (1, 2)), (4, 2, 1))
    return icnn.ConvPICNN((2, 9, 8), y_shape, convs, (5,), **options)


def composed() -> Any:
    """Every composition that a program can read, nested."""
    inner = icnn.Max(icnn.FICNN(4, (6,)), icnn.Scale(icnn.PICNN(4, 4, (6, 5)), 2.0))
    return icnn.Sum(
        icnn.Score(nn.Linear(4, 4)),
        icnn.Scale(icnn.Max(inner, icnn.Score(nn.Linear(4, 4))), nn.Parameter(torch.tensor(0.7))),
        icnn.FICNN(4, (5,), dim_x=4, activation="leaky_relu"),
    )


ENERGIES: dict[str, Callable[[], Any]] = {
    "ficnn": lambda: icnn.FICNN(4, (8, 7)),
    "ficnn of both": lambda: icnn.FICNN(4, (8, 7), dim_x=4),
    "picnn": lambda: icnn.PICNN(4, 4, (8, 7)),
    "deep picnn": lambda: icnn.PICNN(4, 4, (8, 7, 6, 5), x_norm="layer", positivity="softplus"),
    "leaky_relu": lambda: icnn.PICNN(4, 4, (8, 7), activation="leaky_relu"),
    "leaky_relu(0.5)": lambda: icnn.PICNN(
        4, 4, (8, 7), activation=icnn.activations.leaky_relu(0.5)
    ),
    "leaky_relu(1)": lambda: icnn.FICNN(4, (8,), activation=icnn.activations.leaky_relu(1.0)),
    "identity": lambda: icnn.PICNN(4, 4, (8, 7), activation="identity"),
    "elu(0)": lambda: icnn.PICNN(4, 4, (8, 7), activation=icnn.activations.elu(0.0)),
    "score": lambda: icnn.Score(nn.Linear(4, 4)),
    "score of images": lambda: icnn.Score(
        nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (1, 3, 4)))
    ),
    "composed": composed,
    "scaled by 0": lambda: icnn.Scale(icnn.FICNN(4, (5,)), 0.0),
    "image, max": lambda: olivetti((1, 9, 8), "max"),
    "image, avg": lambda: olivetti((1, 9, 8), "avg", activation="leaky_relu"),
    "image of another size": lambda: olivetti((2, 13, 5), "max", x_norm="layer"),
    "vector beside images": lambda: olivetti((6,), "max"),
    "vector, avg": lambda: olivetti((6,), "avg", x_norm="batch"),
    "convexified": lambda: sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1)
    ),
    "convexified, from y on": lambda: sequential(
        nn.ReLU(), nn.Linear(4, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1), y_shape=(4,)
    ),
    "convexified convolutions": lambda: sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1, padding=1),
        nn.Conv2d(3, 2, (2, 3), dilation=(2, 1), padding="valid"),
        nn.ELU(0.0),
        nn.AvgPool2d(2, stride=1, padding=1, ceil_mode=True, count_include_pad=False),
        nn.Flatten(),
        nn.Linear(32, 1),
        y_shape=(2, 8, 7),
    ),
    "convexified, adaptive": lambda: sequential(
        nn.AdaptiveMaxPool2d((5, 4)),
        nn.Conv2d(1, 3, 2),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.MaxPool2d(2, dilation=1, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(6, 1),
        y_shape=(1, 7, 6),
    ),
    "dropout": lambda: sequential(
        nn.Conv2d(1, 6, 2), nn.Dropout2d(), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
        nn.Linear(54, 1), y_shape=(1, 4, 4)
    ).train(),
}  # fmt: skip


# They do not know the shape of y.
SCORES = {"score": (4,), "score of images": (1, 3, 4)}


def inputs(energy: Any, dtype: torch.dtype) -> Tensor | None:
    if isinstance(energy, icnn.ConvPICNN):
        return torch.randn(BATCH, *energy.x_shape, dtype=dtype)
    return torch.randn(BATCH, 4, dtype=dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("name", ENERGIES)
def test_on_boxes_and_simplices_the_gap_closes(name: str, dtype: torch.dtype):
    for attempt in range(2 if dtype == torch.float64 else 1):
        energy = bent(ENERGIES[name](), 0.3 + attempt).to(dtype)
        if name != "dropout":
            energy.eval()
        x = inputs(energy, dtype)
        shape = energy.y_shape or SCORES[name]
        low = -torch.rand(shape, dtype=dtype)
        high = low + 0.1 + 3 * torch.rand(BATCH, *shape, dtype=dtype)
        like = torch.empty(BATCH, *shape, dtype=dtype)
        for domain in (icnn.Box(-2, 2), icnn.Box(low, high), icnn.Simplex()):
            options = {} if energy.y_shape else {"start": domain.center(like)}
            if name == "dropout":  # draws are those of one description
                found = exact(energy, x, domain, **options)
                assert bool(found.converged.all()) or dtype == torch.float32
                assert float(found.gap.abs().max()) <= 1e-5
                continue
            certified(energy, x, domain, exact(energy, x, domain, **options))


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "identity"])
@pytest.mark.parametrize("n", [1, 2])
def test_no_point_of_a_fine_grid_is_better(n: int, activation: str):
    steps = {1: 20001, 2: 401}[n]
    line = torch.linspace(-3, 2, steps, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * n).reshape(-1, n)
    for seed in range(5):
        torch.manual_seed(seed)
        energy = bent(icnn.PICNN(2, n, (9, 8), activation=activation), 1.0).double()
        x = torch.randn(1, 2, dtype=torch.float64)
        found = exact(energy, x, icnn.Box(-3, 2))
        with torch.no_grad():
            values = energy(x.expand(len(grid), 2), grid)
        # The slope between neighbours bounds what the grid can miss.
        steep = max(float(values.reshape([steps] * n).diff(dim=d).abs().max()) for d in range(n))
        best = float(values.min())
        assert best - n * steep - 1e-9 <= float(found.value) <= best + 1e-9
        assert float(found.lower) <= best + 1e-9


def test_a_sum_of_hinges_written_by_hand():
    generator = np.random.default_rng(0)
    slopes, offsets = generator.normal(size=(6, 3)), generator.normal(size=6)
    # f(y) = sum_i relu(a_i . y + b_i), then the program of supplement B in the paper's symbols.
    energy: Any = icnn.FICNN(3, (6,)).double()
    with torch.no_grad():
        first, last = energy.layers
        first.wy.weight.copy_(torch.from_numpy(slopes))
        first.wy.bias.copy_(torch.from_numpy(offsets))
        last.wz.set_(torch.ones(1, 6, dtype=torch.float64))
        last.wy.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
        last.wy.bias.fill_(0.5)
    found = exact(energy, None, icnn.Box(-1, 2))
    by_hand = scipy.optimize.linprog(
        np.concatenate([[0.3, -0.2, 0.1], np.ones(6)]),
        np.concatenate([slopes, -np.eye(6)], axis=1),
        -offsets,
        bounds=[(-1, 2)] * 3 + [(0, None)] * 6,
    )
    np.testing.assert_allclose(found.value.item(), by_hand.fun + 0.5, rtol=1e-6)
    np.testing.assert_allclose(found.lower.item(), by_hand.fun + 0.5, rtol=1e-6)
    assert int(found.steps) == 1


@DTYPES
def test_given_coordinates_stay_and_the_others_are_best(dtype: torch.dtype):
    energy = bent(icnn.PICNN(4, 5, (8, 7))).to(dtype)
    x = torch.randn(BATCH, 4, dtype=dtype)
    mask = torch.tensor([[True, False, False, True, False], [False] * 5, [True] * 5])
    values = torch.tensor(
        [[0.2, torch.nan, 7.0, 0.1, 0.0]] * 2 + [[0.2, 0.3, 0.1, 0.4, 0.0]], dtype=dtype
    )
    for domain in (icnn.Box(-1, 1), icnn.Simplex()):
        found = exact(energy, x, domain, fixed=(mask, values))
        assert bool((found.y == values)[mask].all())
        assert found.steps.tolist() == [1, 1, 0]
        assert float(found.gap[2]) == 0
        held = domain.restrict(mask, torch.where(mask, values, 0.0).double())
        certified(energy, x, held, found)
    outside = exact(energy, x, icnn.Box(-1, 1), fixed=(mask, values + 5))
    assert bool((outside.y == values + 5)[mask].all())
    assert float(outside.gap.abs().max()) <= 1e-5


def test_several_simplices_and_given_parts_of_them():
    energy = bent(icnn.Sum(olivetti((1, 3, 4), "max"), icnn.Scale(olivetti((1, 3, 4), "avg"), 3.0)))
    energy, x = energy.double(), torch.randn(BATCH, 2, 9, 8, dtype=torch.float64)
    mask = torch.rand(BATCH, 1, 3, 4) < 0.4
    mask[0, 0, 0] = True
    values = torch.full(mask.shape, 0.25, dtype=torch.float64)
    certified(energy, x, icnn.Simplex(), exact(energy, x, icnn.Simplex()))
    found = exact(energy, x, icnn.Simplex(), fixed=(mask, values))
    certified(energy, x, icnn.Simplex().restrict(mask, values), found)


@pytest.mark.parametrize("domain", [icnn.Box(-1, 1), icnn.Simplex()], ids=repr)
@pytest.mark.parametrize("n", [1, 2, 6, 17])
def test_cutting_planes_agree(n: int, domain: Any):
    energy = bent(icnn.PICNN(4, n, (20, 20))).double()
    x = torch.randn(BATCH, 4, dtype=torch.float64)
    found = exact(energy, x, domain)
    start = domain.center(torch.empty(BATCH, n, dtype=torch.float64))
    problem = Problem(at(energy, x), domain, 0.0, start)
    record = cutting_planes(problem, 300, 1e-9)
    assert record.status.tolist() == [Status.CONVERGED] * BATCH
    torch.testing.assert_close(record.value, found.value, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(record.lower, found.lower, rtol=1e-7, atol=1e-7)


def test_cutting_planes_have_a_true_bound_at_every_step_and_freeze_one_by_one():
    energy = bent(icnn.PICNN(4, 6, (20, 20))).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    x[3] = torch.nan
    best = exact(energy, x, icnn.Box())
    start = torch.full((8, 6), 0.5, dtype=torch.float64)
    problem = Problem(at(energy, x), icnn.Box(), 0.0, start)
    fine = torch.arange(8) != 3
    before = torch.full((8,), -torch.inf, dtype=torch.float64)
    for steps in (1, 2, 3, 5, 8):
        record = cutting_planes(problem, steps, 1e-9)
        assert bool((record.lower <= best.value + 1e-12)[fine].all())
        assert bool((record.value >= best.lower - 1e-12)[fine].all())
        assert bool((record.lower >= before)[fine].all())
        assert bool((record.steps <= steps).all())
        assert int(record.status[3]) == Status.NONFINITE
        before = record.lower
    done = cutting_planes(problem, 200, 1e-9)
    assert len(set(done.steps[fine].tolist())) > 1
    alone = cutting_planes(Problem(at(energy, x[:1]), icnn.Box(), 0.0, start[:1]), 200, 1e-9)
    assert int(alone.steps) == int(done.steps[0])


def test_cutting_planes_on_a_smooth_energy():
    energy = icnn.Quadratic(torch.tensor([0.2, 0.9, 2.0], dtype=torch.float64))
    problem = Problem(at(energy, None), icnn.Box(), 0.0, torch.full((1, 3), 0.5).double())
    record = cutting_planes(problem, 200, 1e-8)
    assert record.value.item() == pytest.approx(0.5, abs=1e-7)
    assert record.lower.item() <= 0.5 + 1e-12


def test_an_example_that_is_not_finite_leaves_the_others_alone():
    energy = bent(icnn.PICNN(4, 5, (8, 7))).double()
    x = torch.randn(BATCH, 4, dtype=torch.float64)
    whole = exact(energy, x, icnn.Box())
    x[1] = torch.nan
    found = exact(energy, x, icnn.Box())
    assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    assert torch.equal(found.y[[0, 2]], whole.y[[0, 2]])
    assert bool(found.value.isnan()[1])


def test_a_program_that_highs_cannot_solve_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def gives_up(*_: Any, **__: Any) -> scipy.optimize.OptimizeResult:
        return scipy.optimize.OptimizeResult(status=4, message="numerical difficulties")

    monkeypatch.setattr("icnn.solvers.cutting_planes.linprog", gives_up)
    with pytest.raises(RuntimeError, match="example 0: numerical difficulties"):
        exact(icnn.FICNN(2, (3,)), None, icnn.Box())


@pytest.mark.parametrize("name", ["ficnn", "leaky_relu", "composed", "image, max"])
def test_the_second_attempt_measures_units_by_their_size(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    calls = []

    def gives_up_once(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) % 2:
            return scipy.optimize.OptimizeResult(status=4, message="numerical difficulties")
        return scipy.optimize.linprog(*args, **options)

    energy = bent(ENERGIES[name]()).double()
    monkeypatch.setattr("icnn.solvers.cutting_planes.linprog", gives_up_once)
    x = inputs(energy, torch.float64)
    certified(energy, x, icnn.Box(-2, 2), exact(energy, x, icnn.Box(-2, 2)))
    assert calls


class Ball:
    """A domain that is no polytope."""

    def center(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def contains(self, y: Tensor) -> Tensor:
        return y.norm(dim=1) <= 1

    def project(self, y: Tensor) -> Tensor:
        return y / y.norm(dim=1, keepdim=True).clamp(min=1)

    def entropy(self, y: Tensor) -> Tensor:
        return -y.square().sum(dim=1)

    def minimise(self, slope: Tensor, entropy: Any) -> Tensor:
        return -slope / slope.norm(dim=1, keepdim=True)


class Steeper(icnn.FICNN):
    """Computes another thing than its layers."""

    def at(self, x: Any) -> Any:
        f = super().at(x)
        return lambda y: 2 * f(y) + 1


def function(x: Any, y: Tensor) -> Tensor:
    return y.abs().sum(dim=1)


def stairs(z: Tensor) -> Tensor:
    return z.relu() + (z - 1).relu()


STAIRS = icnn.Activation("stairs", stairs, True, True, piecewise_linear=True, smooth=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: icnn.FICNN(2, (3,), activation="softplus"), "softplus"),
        (lambda: icnn.PICNN(2, 2, (3,), activation="elu"), "elu"),
        (lambda: icnn.FICNN(2, (3,), activation=STAIRS), "stairs"),
        (lambda: sequential(nn.Linear(2, 3), nn.Softplus(), nn.Linear(3, 1)), "softplus"),
        (lambda: icnn.Quadratic(0.0), "Quadratic"),
        (lambda: function, "function"),
        (lambda: icnn.Sum(icnn.FICNN(2, (3,)), icnn.Scale(icnn.Quadratic(0.0), 2.0)), "Quadratic"),
        (lambda: icnn.Max(icnn.FICNN(2, (3,)), function), "Function"),
        (lambda: Steeper(2, (3,)), "its layers say"),
        (lambda: icnn.Score(nn.Sequential(nn.Linear(2, 2), nn.Dropout())), "eval"),
    ],
)
def test_energies_that_cannot_be_read_are_refused(make: Callable[[], Any], message: str):
    start = torch.tensor([[0.4, 0.7]] * 20)
    with pytest.raises(ValueError, match=message):
        exact(make(), torch.randn(20, 2), icnn.Box(), start=start)


def test_other_refusals():
    energy = icnn.FICNN(2, (3,))
    with pytest.raises(ValueError, match="`entropy` must be 0"):
        icnn.argmin(energy, None, icnn.Box(), solver=LinearProgram())
    with pytest.raises(ValueError, match="`domain` must be a Box or a Simplex"):
        exact(energy, None, Ball())
    relaxed: Any = icnn.FICNN(2, (3, 3), positivity=None)
    with torch.no_grad():
        relaxed.layers[1].wz.raw.fill_(-1.0)
    with pytest.raises(ValueError, match="positivity=None"):
        exact(relaxed, None, icnn.Box())
    with torch.no_grad():
        relaxed.layers[1].wz.raw.fill_(1.0)
        relaxed.layers[2].wz.raw.fill_(-1.0)
    with pytest.raises(ValueError, match="positivity=None"):
        exact(relaxed, None, icnn.Box())


def test_a_check_leaves_batch_statistics_alone():
    energy = icnn.PICNN(4, 3, (5, 5), x_norm="batch").train()
    x = torch.randn(BATCH, 4)
    problem = Problem(energy.at(x), icnn.Box(), 0.0, torch.full((BATCH, 3), 0.5), None, energy, x)
    before = {k: v.clone() for k, v in energy.state_dict().items()}
    LinearProgram().check(problem)
    assert all(torch.equal(v, before[k]) for k, v in energy.state_dict().items())
    assert bool(exact(energy, x, icnn.Box()).gap.abs().max() <= 1e-5)
