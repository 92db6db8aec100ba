"""The door of `argmin`: sizes, given coordinates, starts, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import icnn
from icnn import Box, Bundle, BundleEntropy, LinearProgram, ProjectedGradient, Simplex, Status

DOUBLE = torch.float64
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture
def energy() -> icnn.PICNN:
    return icnn.PICNN(4, 3, (16, 16))


def bowl(x: object, y: Tensor) -> Tensor:
    return (y - 0.3).square().flatten(start_dim=1).sum(dim=1)


def test_a_users_function():
    found = icnn.argmin(bowl, None, Box(), entropy=0, solver=Bundle(), start=torch.rand(4, 2, 3))
    assert found.converged.all()
    torch.testing.assert_close(found.y, torch.full((4, 2, 3), 0.3), atol=1e-2, rtol=0)
    assert found.value.dtype == found.lower.dtype == found.gap.dtype == DOUBLE


def test_a_score_is_a_sigmoid_and_a_softmax():
    net = nn.Linear(4, 3)
    with torch.no_grad():
        found = icnn.argmin(icnn.Score(net), X, Box(torch.zeros(3), 1.0))
        torch.testing.assert_close(found.y, torch.sigmoid(net(X)))
        found = icnn.argmin(icnn.Score(net), X, Simplex(), start=torch.full((5, 3), 1 / 3))
        torch.testing.assert_close(found.y, torch.softmax(net(X), dim=1))
    assert (found.steps == 1).all()


@pytest.mark.parametrize("where", ["start", "y_shape", "bounds", "fixed"])
def test_where_the_shape_of_y_comes_from(where: str):
    def f(x: object, y: Tensor) -> Tensor:
        return bowl(x, y)

    options, domain = {}, Box()
    if where == "start":
        options["start"] = torch.rand(5, 3)
    elif where == "y_shape":
        f.y_shape = (3,)  # type: ignore[attr-defined]
    elif where == "bounds":
        domain = Box(torch.zeros(3), torch.ones(3))
    else:
        options["fixed"] = (torch.zeros(5, 3, dtype=torch.bool), torch.rand(5, 3))
    assert icnn.argmin(f, X, domain, **options).y.shape == (5, 3)
    batch = 5 if where in ("start", "fixed") else 1
    assert icnn.argmin(f, None, domain, **options).y.shape == (batch, 3)


def test_bounds_for_each_example(energy):
    low = torch.linspace(-1, 0, 5)[:, None].expand(5, 3)
    found = icnn.argmin(energy, X, Box(low, 1.0), solver=BundleEntropy(tol=1e-6))
    for i in range(5):
        alone = icnn.argmin(energy, X[i : i + 1], Box(low[i], 1.0), solver=BundleEntropy(tol=1e-6))
        torch.testing.assert_close(alone.y[0], found.y[i], atol=1e-3, rtol=0)


@pytest.mark.parametrize("solver", [BundleEntropy(), ProjectedGradient()], ids=repr)
@pytest.mark.parametrize("domain", [Box(-1.0, 2.0), Simplex()], ids=repr)
def test_fixed_coordinates(energy, domain, solver):
    mask = torch.tensor([[True, False, False], [True, True, True], [False, False, False],
                         [False, True, True], [False, False, True]])  # fmt: skip
    values = torch.full((5, 3), math.nan)
    values[mask] = 0.25 if isinstance(domain, Simplex) else 7.0
    values[1] = 1 / 3
    found = icnn.argmin(energy, X, domain, fixed=(mask, values), solver=solver)
    assert torch.equal(found.y[mask], values[mask])
    assert found.y.isfinite().all()
    assert int(found.steps[1]) == 0
    assert float(found.gap[1]) == 0
    assert int(found.status[1]) == Status.CONVERGED
    if isinstance(domain, Simplex):
        torch.testing.assert_close(found.y.sum(dim=1), torch.ones(5))
    # The objective counts the entropy of the free coordinates alone.
    free = torch.where(mask, 0.0, found.y.double())
    if isinstance(domain, Simplex):
        bend = -torch.xlogy(free, free).sum(dim=1)
    else:
        u = (found.y.double() + 1) / 3
        each = -torch.xlogy(u, u) - torch.xlogy(1 - u, 1 - u)
        bend = torch.where(mask, 0.0, each).sum(dim=1)
    with torch.no_grad():
        torch.testing.assert_close(found.value, energy(X, found.y).double() - bend)


def test_fixed_is_the_problem_in_fewer_coordinates():
    f = icnn.FICNN(4, (16, 16)).double()
    mask, values = torch.tensor([True, False, False, True]), torch.tensor([0.9, 0, 0, -0.5])
    solver = BundleEntropy(tol=1e-12)
    whole = icnn.argmin(f, None, Box(), fixed=(mask[None], values[None].double()), solver=solver)

    def rest(x: object, y: Tensor) -> Tensor:
        held = values.double().expand(y.shape[0], 4)
        return f(None, torch.cat([held[:, :1], y, held[:, 3:]], dim=1))

    part = icnn.argmin(rest, None, Box(), start=torch.full((1, 2), 0.5).double(), solver=solver)
    torch.testing.assert_close(whole.y[:, 1:3], part.y, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole.value, part.value)


def test_a_warm_start(energy):
    solver = BundleEntropy(tol=1e-5)
    steep = icnn.Scale(energy, 30.0)
    cold = icnn.argmin(steep, X, Box(), solver=solver)
    warm = icnn.argmin(steep, X, Box(), solver=solver, start=cold)
    assert warm.steps.sum() < cold.steps.sum()
    torch.testing.assert_close(warm.value, cold.value, atol=1e-3, rtol=1e-3)


def test_parameters_and_start_stay_as_they_are(energy):
    before = {name: value.clone() for name, value in energy.state_dict().items()}
    start = torch.rand(5, 3)
    kept = start.clone()
    found = icnn.argmin(energy, X, Box(), start=start)
    assert torch.equal(start, kept)
    assert all(torch.equal(value, before[name]) for name, value in energy.state_dict().items())
    assert all(p.grad is None for p in energy.parameters())
    assert found.y.data_ptr() != start.data_ptr()


def test_under_inference_mode(energy):
    with torch.inference_mode():
        found = icnn.argmin(energy, X, Box())
    assert found.converged.all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_dtype_and_device(energy, device: str, dtype: torch.dtype):
    energy, x = energy.to(device, dtype), X.to(device, dtype)
    cases = [(BundleEntropy(), 1.0), (Bundle(), 0.0), (LinearProgram(), 0.0),
             (Bundle(master="lp"), 0.0), (ProjectedGradient(rule="spectral"), 1.0)]  # fmt: skip
    for solver, entropy in cases:
        for domain in (Box(torch.zeros(3, device=device, dtype=dtype), 1.0), Simplex()):
            found = icnn.argmin(energy, x, domain, entropy=entropy, solver=solver)
            assert found.y.dtype == dtype
            assert found.y.device == found.gap.device == found.status.device == x.device
            assert domain.contains(found.y).all()


def test_a_report_says_what_happened(energy):
    x = X.clone()
    x[2] = math.nan
    found = icnn.argmin(energy, x, Box())
    assert "4 of 5 converged" in found.report()
    assert "1 NONFINITE" in found.report()
    assert repr(found).startswith("<Solution, y (5, 3): 4 of 5 converged; worst gap ")
    assert "\n" not in repr(found)
    assert found.value.isnan().tolist() == [False, False, True, False, False]
    assert found.gap[2] == math.inf
    assert found.y.isfinite().all()
    few = icnn.argmin(icnn.Scale(energy, 100.0), X, Box(), solver=BundleEntropy(1))
    assert "MAX_STEPS: the gap is above tol: raise max_steps or tol" in few.report()
    assert found.gaps.shape[1] == 5


def test_a_plot_of_the_gaps(energy):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = icnn.argmin(icnn.Scale(energy, 30.0), X, Box()).plot()
    assert axes.get_ylabel() == "gap"
    assert len(axes.lines) >= 5


@pytest.mark.parametrize("solver", [BundleEntropy(), ProjectedGradient()], ids=repr)
def test_energies_that_are_not_convex_are_found_out(solver):
    def cap(x: object, y: Tensor) -> Tensor:
        return -4 * (y - 0.4).square().sum(dim=1)

    found = icnn.argmin(cap, None, Box(), solver=solver, start=torch.rand(6, 3))
    assert (found.status == Status.NONCONVEX).all()
    assert (found.gap < 0).all()
    assert not found.converged.any()
    assert (found.radius == math.inf).all()
    assert "it is not convex" in found.report()


def raises(match: str):
    return pytest.raises(ValueError, match=match)


def test_bad_input(energy):
    box, start = Box(), torch.full((5, 3), 0.5)
    with raises("`entropy` must be positive for BundleEntropy, got 0: use icnn.Bundle"):
        icnn.argmin(energy, X, box, entropy=0)
    with raises("`entropy` must be 0 for Bundle, got 1: pass entropy=0, or use icnn.BundleEntropy"):
        icnn.argmin(energy, X, box, solver=Bundle())
    with raises("`entropy` must be"):
        icnn.argmin(energy, X, box, solver=LinearProgram())
    with raises("softplus"):
        smooth = icnn.PICNN(4, 3, activation="softplus")
        icnn.argmin(smooth, X, box, entropy=0, solver=LinearProgram())
    with raises("`entropy` must be a finite number of at least 0, got -1"):
        icnn.argmin(energy, X, box, entropy=-1)
    with raises(r"`start` must lie in Box\(.*\), got example 1 outside of it"):
        outside = start.clone()
        outside[1, 2] = 1.5
        icnn.argmin(energy, X, box, start=outside)
    with raises(r"`start` must lie in Simplex\(\), got example 0 outside of it"):
        icnn.argmin(energy, X, Simplex(), start=start)
    with raises(r"`start` must have shape \(B, 3\)"):
        icnn.argmin(energy, X, box, start=torch.rand(5, 4))
    with raises("`start` must hold as many examples as the others, 5, got 4"):
        icnn.argmin(energy, X, box, start=torch.rand(4, 3))
    with raises(r"`start` must have shape \(B, \*y_shape\)"):
        icnn.argmin(energy, X, box, start=torch.rand(3))
    with raises("`domain` must be a domain such as icnn.Box"):
        icnn.argmin(energy, X, (0, 1))  # type: ignore[arg-type]
    with raises("`energy` must be a module or a function"):
        icnn.argmin(3, X, box)  # type: ignore[arg-type]
    with raises("nothing tells the shape of y"):
        icnn.argmin(bowl, X, box)
    with raises(r"`low` and `high` must broadcast to \(5, 3\)"):
        icnn.argmin(energy, X, Box(torch.zeros(4), 1.0))


def test_bad_boxes():
    with raises("`low` must be below `high` everywhere, got high - low = 0"):
        Box(1.0, 1.0)
    with raises("`low` must be below `high`"):
        Box(torch.tensor([0.0, 2.0]), 1.0)
    for low in (-math.inf, math.nan):
        with raises("`low` must be a finite number"):
            Box(low, 1.0)
    with raises("`high` must be finite: every solver needs a bounded domain"):
        Box(0.0, torch.tensor([1.0, math.inf]))


def test_bad_fixed(energy):
    mask = torch.zeros(5, 3, dtype=torch.bool)
    values = torch.zeros(5, 3)
    with raises("`fixed` must leave room on the simplex"):
        icnn.argmin(energy, X, Simplex(), fixed=(~mask & (torch.arange(3) < 2), values + 0.8))
    with raises(r"`fixed` must be a pair \(mask, values\)"):
        icnn.argmin(energy, X, Box(), fixed=mask)  # type: ignore[arg-type]
    with raises("`fixed` must have a mask that is a tensor of bool"):
        icnn.argmin(energy, X, Box(), fixed=(mask.float(), values))
    with raises("`fixed` must have finite values where the mask is true"):
        icnn.argmin(energy, X, Box(), fixed=(~mask, values * math.nan))
    with raises("fixed"):
        icnn.argmin(energy, X, Box(), fixed=(mask[:, :2], values))


def test_energies_that_are_none():
    start = torch.rand(5, 3)
    wrong: list[Any] = [lambda x, y: y.square(), lambda x, y: y.sum(), lambda x, y: 1.0]
    for f in wrong:
        with raises("must be one value per example"):
            icnn.argmin(f, None, Box(), start=start)
    for f in (lambda x, y: torch.zeros(5), lambda x, y: torch.ones(5, requires_grad=True)):
        with raises("`energy` must depend on y"):
            icnn.argmin(f, None, Box(), start=start)


@pytest.mark.parametrize("make", [BundleEntropy, Bundle, ProjectedGradient])
def test_bad_solvers(make):
    with raises("`max_steps` must be an integer of at least 1"):
        make(max_steps=0)
    with raises("`tol` must be a finite number of at least 0"):
        make(tol=-1.0)
    with raises("`master` must be one of"):
        Bundle(master="qp")


@pytest.mark.parametrize("solver", [Bundle(), Bundle(master="lp"), ProjectedGradient()], ids=repr)
def test_bounds_of_a_narrower_type(solver):
    """The box is the one of the bounds as they are, and its bound is true."""
    low, high = -torch.ones(3), torch.full((3,), 1e-9)
    start = torch.full((1, 3), -0.5, dtype=DOUBLE)
    found = icnn.argmin(
        lambda x, y: -3 * y.sum(dim=1), None, Box(low, high), entropy=0, solver=solver, start=start
    )
    exact = -3 * float(high.double().sum())
    assert float(found.lower) <= exact + 1e-14
    assert int(found.status) != Status.NONCONVEX


def test_a_start_that_is_outside_by_rounding():
    w = torch.tensor([10.0, 6.0, 5.0], dtype=DOUBLE)
    start = torch.tensor([[0, 0, 1 - 9e-6]], dtype=DOUBLE)
    for solver, entropy in ((Bundle(), 0.0), (BundleEntropy(), 1.0)):
        found = icnn.argmin(lambda x, y: (y * w).sum(dim=1), None, Simplex(), entropy=entropy,
                            solver=solver, start=start)  # fmt: skip
        assert found.converged.all()
        assert float(found.y.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    "solver", [BundleEntropy(), ProjectedGradient(rule="spectral")], ids=lambda s: type(s).__name__
)
def test_an_empty_batch(energy, solver):
    found = icnn.argmin(energy, X[:0], Box(), solver=solver)
    assert found.y.shape == (0, 3)
    assert found.report() == "0 of 0 converged"


def test_bounds_broadcast_together(energy):
    found = icnn.argmin(energy, X, Box(torch.zeros(5, 1), torch.ones(3)))
    assert found.y.shape == (5, 3)
    mask = torch.tensor([True, False, False])
    assert icnn.argmin(bowl, None, Box(), fixed=(mask, torch.rand(5, 3))).y.shape == (5, 3)


def test_classes_and_words_are_no_solvers_and_no_domains(energy):
    wrong: list[Any] = [BundleEntropy, "bundle", 3]
    for solver in wrong:
        with raises("`solver` must be a solver such as icnn.BundleEntropy"):
            icnn.argmin(energy, X, Box(), solver=solver)
    kind: Any = Simplex
    with raises("`domain` must be a domain such as icnn.Box"):
        icnn.argmin(energy, X, kind)
    with raises("`y` must be float32 or float64"):
        icnn.argmin(bowl, None, Box(), start=torch.rand(5, 3).half())
    with raises("`high` - `low` must be finite"):
        Box(-1e308, 1e308)


@pytest.mark.parametrize("solver", [icnn.BundleEntropy(), icnn.Bundle(), icnn.ProjectedGradient()])
def test_tensors_may_lie_in_memory_as_they_like(solver: Any):
    """A data frame's columns are one after the other, and so are those of what is made from it."""
    entropy = float(isinstance(solver, icnn.BundleEntropy))
    energy = icnn.Sum(icnn.FICNN(4, (8,)), icnn.Quadratic(nn.Identity(), torch.rand(4))).double()
    x, start = (torch.rand(4, 9, dtype=torch.float64).T for _ in range(2))
    mask, values = (torch.rand(4, 9).T > 0.7), torch.rand(4, 9, dtype=torch.float64).T
    low = -torch.rand(4, 9, dtype=torch.float64).T
    about = {"entropy": entropy, "solver": solver}
    found, other = (
        icnn.argmin(
            energy, form(x), icnn.Box(form(low), 1.0), start=form(start),
            fixed=(form(mask), form(values)), **about,
        ).y
        for form in (lambda t: t, torch.Tensor.contiguous)
    )  # fmt: skip
    assert torch.equal(found, other)
