"""Projected gradient: right answers, true bounds, examples on their own, no synchronisation."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import icnn
from icnn.solvers.gradient import Cuts, ProjectedGradient
from icnn.solvers.problem import Problem, Record

B = 4
RULES = ("momentum", "spectral", "adam")
LONG = {
    "momentum": ProjectedGradient(400, 0.1, decay=0.2),
    "spectral": ProjectedGradient(300, rule="spectral"),
    "adam": ProjectedGradient(600, 0.1, rule="adam", decay=0.4),
}
F = Callable[[object, Tensor], Tensor]


def quadratic(center: Tensor, weight: Tensor | float = 1.0) -> F:
    return lambda x, y: (0.5 * weight * (y - center) ** 2).flatten(start_dim=1).sum(dim=1)


def max_affine(slopes: Tensor, offsets: Tensor) -> F:
    return lambda x, y: (torch.einsum("bkn,bn->bk", slopes, y) + offsets).amax(dim=1)


def log_sum_exp(slopes: Tensor, offsets: Tensor) -> F:
    return lambda x, y: (torch.einsum("bkn,bn->bk", slopes, y) + offsets).logsumexp(dim=1)


def planes(n: int, k: int = 8, batch: int = B) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, k, n).double(), torch.randn(batch, k).double()


def optimum(slopes: Tensor, offsets: Tensor, simplex: bool) -> Tensor:
    """`min_y max_k (a_k . y + b_k)` by HiGHS, on [0, 1]^n or the simplex."""
    k, n = slopes.shape[1:]
    cost = np.append(np.zeros(n), 1.0)
    total = {"A_eq": np.append(np.ones(n), 0.0)[None], "b_eq": [1.0]} if simplex else {}
    found = []
    for a, b in zip(slopes.numpy(), offsets.numpy(), strict=True):
        rows = np.hstack([a, -np.ones((k, 1))])
        answer = linprog(cost, rows, -b, bounds=[(0, 1)] * n + [(None, None)], **total)
        found.append(answer.fun)
    return torch.tensor(found, dtype=torch.float64)


def objective(energy: F, domain: icnn.Box | icnn.Simplex, entropy: float, y: Tensor) -> Tensor:
    return energy(None, y) - entropy * domain.entropy(y)


def centred(*shape: int) -> Tensor:
    """A start for boxes that are numbers."""
    return torch.full((B, *shape), 0.5, dtype=torch.float64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quadratics_are_clipped_to_the_box(rule: str, dtype: torch.dtype):
    low, high = torch.linspace(-1, 0, 5, dtype=dtype), torch.linspace(0.5, 3, 5, dtype=dtype)
    center = 2 * torch.randn(B, 5, dtype=dtype)
    energy, exact = quadratic(center), center.clamp(low, high)
    s = icnn.argmin(energy, None, icnn.Box(low, high), entropy=0, solver=LONG[rule],
                    start=((low + high) / 2).expand(B, 5))  # fmt: skip
    assert s.y.dtype == dtype
    near = 2e-2 if rule == "adam" else 2e-3 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(s.y, exact, atol=near, rtol=0)
    best = energy(None, exact).double()
    slack = 1e-4 if dtype == torch.float32 else 1e-12
    assert (s.lower <= best + slack).all()
    assert (s.gap < (1e-2 if rule == "adam" else 1e-3)).all()
    assert s.steps.max() <= LONG[rule].max_steps
    assert s.gaps.shape == (LONG[rule].max_steps, B)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("entropy", [0.1, 1.0])
def test_with_entropy_as_bundle_entropy(rule: str, simplex: bool, entropy: float):
    domain = icnn.Simplex() if simplex else icnn.Box(torch.full((6,), -1.0).double(), 1.0)
    start = torch.full((B, 6), 1 / 6 if simplex else 0.0, dtype=torch.float64)
    slopes, offsets = planes(6)
    energy = log_sum_exp(slopes, offsets)
    tight = icnn.argmin(energy, None, domain, entropy=entropy, start=start,
                        solver=icnn.BundleEntropy(300, 1e-11))  # fmt: skip
    s = icnn.argmin(energy, None, domain, entropy=entropy, solver=LONG[rule], start=start)
    # On the simplex the curvature of H grows without bound towards its corners.
    near = (1e-2 if simplex else 1e-4) if rule == "spectral" else 5e-3
    assert (s.value - tight.lower <= near).all()
    assert (s.lower <= tight.value + 1e-12).all()
    assert (s.gap <= 2 * near).all()
    assert domain.contains(s.y).all()
    if simplex:
        assert ((s.y - tight.y).abs().sum(dim=1) <= s.radius + tight.radius + 1e-9).all()


@pytest.mark.parametrize("simplex", [False, True])
def test_decay_makes_steps_converge_at_kinks(simplex: bool):
    domain = icnn.Simplex() if simplex else icnn.Box()
    slopes, offsets = planes(5)
    exact, energy = optimum(slopes, offsets, simplex), max_affine(slopes, offsets)
    start = torch.full((B, 5), 0.2, dtype=torch.float64)

    def excess(**options) -> Tensor:
        solver = ProjectedGradient(1000, 0.5, 0.0, **options)
        s = icnn.argmin(energy, None, domain, entropy=0, solver=solver, start=start)
        assert (s.lower <= exact + 1e-9).all()
        return s.value - exact

    plain, less = excess().mean(), excess(decay=0.8).mean()
    assert less < 1e-2
    assert less < plain / 3
    assert excess(rule="adam", decay=0.8).mean() < 1e-2


def test_spectral_steps_see_the_curvature():
    weight = torch.logspace(0, 3, 12).double()
    center = torch.rand(B, 12).double() * 1.4 - 0.2
    energy, exact = quadratic(center, weight), center.clamp(0, 1)
    best = energy(None, exact)

    def excess(**options) -> Tensor:
        solver = ProjectedGradient(300, **options)
        s = icnn.argmin(energy, None, icnn.Box(), entropy=0, solver=solver, start=centred(12))
        return (s.value - best).mean()

    # The best step without momentum is below 2 / 1000; a larger one does not converge.
    spectral, momentum = excess(rule="spectral"), excess(step_size=1e-3)
    assert spectral < 1e-6
    assert spectral < 1e-3 * momentum
    assert spectral < 1e-6 * excess()


def test_max_steps_counts_every_pass():
    """K passes for a value and a gradient, backtracking included, and one for a value."""
    calls = {True: 0, False: 0}
    center, weight = torch.rand(B, 6).double(), torch.logspace(0, 4, 6).double()

    def energy(x: object, y: Tensor) -> Tensor:
        calls[y.requires_grad] += 1
        return quadratic(center, weight)(x, y)

    for rule in RULES:
        calls.update({True: 0, False: 0})
        solver = ProjectedGradient(17, 1.0, rule=rule)
        s = icnn.argmin(energy, None, icnn.Box(), entropy=0, solver=solver, start=centred(6))
        assert calls == {True: 17, False: 1}
        assert (s.steps == 17).all()
        assert (s.status == icnn.Status.MAX_STEPS).all()


def test_the_answer_is_the_best_point_seen():
    seen: list[Tensor] = []
    energy = quadratic(torch.full((B, 2), 0.3).double())

    def watched(x: object, y: Tensor) -> Tensor:
        seen.append(energy(x, y).detach())
        return energy(x, y)

    solver = ProjectedGradient(9, 1.99, 0.5)  # it overshoots for ever
    s = icnn.argmin(watched, None, icnn.Box(), entropy=0, solver=solver, start=centred(2))
    torch.testing.assert_close(s.value, torch.stack(seen).amin(dim=0), atol=0, rtol=0)
    torch.testing.assert_close(energy(None, s.y), s.value, atol=0, rtol=0)
    assert (s.gaps.diff(dim=0) <= 0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("entropy", [0.0, 0.5])
def test_bounds_are_true_and_not_idle(rule: str, simplex: bool, entropy: float):
    domain = icnn.Simplex() if simplex else icnn.Box()
    slopes, offsets = planes(4, batch=6)
    start = torch.full((6, 4), 0.25).double()
    points = torch.rand(1000, 6, 4).double()
    points = points / points.sum(dim=-1, keepdim=True) if simplex else points
    ratios = []
    for energy in (max_affine(slopes, offsets), log_sum_exp(3 * slopes, offsets)):
        solver = ProjectedGradient(15, 0.1, rule=rule, decay=0.3)
        s = icnn.argmin(energy, None, domain, entropy=entropy, solver=solver, start=start)
        around = torch.stack([objective(energy, domain, entropy, y) for y in points])
        assert (s.lower <= around.amin(dim=0) + 1e-12).all()
        assert (s.status != icnn.Status.NONCONVEX).all()
        better = ProjectedGradient(600, 0.2, rule="adam", decay=0.8)
        tight = icnn.argmin(energy, None, domain, entropy=entropy, solver=better, start=s)
        assert (s.lower <= tight.value + 1e-12).all()
        ratios.append(s.gap / (s.value - tight.lower).clamp(min=1e-9))
    assert torch.cat(ratios).median() < 10


def test_images():
    center = 2 * torch.randn(B, 2, 3, 4).double()
    solver = ProjectedGradient(60, rule="spectral")
    box = icnn.argmin(
        quadratic(center), None, icnn.Box(), entropy=0, solver=solver, start=centred(2, 3, 4)
    )
    torch.testing.assert_close(box.y, center.clamp(0, 1))
    start = torch.full((B, 2, 3, 4), 0.25).double()
    simplex = icnn.argmin(lambda x, y: -(y * center).flatten(start_dim=1).sum(dim=1), None,
                          icnn.Simplex(), solver=solver, start=start)  # fmt: skip
    apart = (simplex.y - center.softmax(dim=-1)).flatten(start_dim=1).abs().sum(dim=1)
    assert (apart <= simplex.radius).all()
    assert (simplex.gap < 0.1).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entropy", [0.0, 1.0])
def test_given_coordinates_come_back_to_the_bit(rule: str, dtype: torch.dtype, entropy: float):
    mask = torch.rand(B, 5) < 0.5
    mask[0], mask[1] = True, False
    center = torch.randn(B, 5, dtype=dtype)
    solver = ProjectedGradient(30, 0.3, rule=rule)
    values = 3 * torch.randn(B, 5, dtype=dtype)  # outside, too
    s = icnn.argmin(quadratic(center), None, icnn.Box(-1 / 3, 0.7), entropy=entropy,
                    solver=solver, fixed=(mask, values))  # fmt: skip
    assert torch.equal(s.y[mask], values[mask])
    assert s.steps[0] == 0
    assert s.gap[0] == 0
    assert (s.gap[1:] < 0.1).all()
    values = torch.full((B, 5), 0.2, dtype=dtype)
    s = icnn.argmin(quadratic(center), None, icnn.Simplex(), entropy=entropy, solver=solver,
                    fixed=(mask, values))  # fmt: skip
    assert torch.equal(s.y[mask], values[mask])
    torch.testing.assert_close(s.y.sum(dim=1), torch.ones(B, dtype=dtype))
    assert s.value.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_keeps_points_inside(rule: str, offset: float, dtype: torch.dtype):
    """A start in a corner, slopes that push into it, and a box far from zero."""
    low = torch.full((3,), offset, dtype=dtype)
    push = torch.tensor([50.0, -50.0, 0.5], dtype=dtype)
    s = icnn.argmin(lambda x, y: ((y - offset) * push).sum(dim=1), None, icnn.Box(low, low + 1),
                    solver=ProjectedGradient(200, 0.05, rule=rule, decay=0.3),
                    start=low.expand(B, 3).clone())  # fmt: skip
    assert s.gap.isfinite().all()
    # Far from zero, float32 has rounding of that size in the cuts themselves.
    assert ((s.gap < 0.05) | (s.status == icnn.Status.STALLED)).all()
    if not offset:
        assert (s.y > 0).all()
        assert (s.y < 1).all()


def test_start_saves_steps():
    energy = log_sum_exp(*planes(6))
    solver = ProjectedGradient(200, rule="spectral", tol=1e-6)
    cold = icnn.argmin(energy, None, icnn.Box(), solver=solver, start=centred(6))
    warm = icnn.argmin(energy, None, icnn.Box(), solver=solver, start=cold)
    assert cold.converged.all()
    assert warm.converged.all()
    assert (warm.steps < cold.steps).all()
    assert (warm.value <= cold.value + 1e-12).all()


@pytest.mark.parametrize("entropy", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_who_is_done_stops(rule: str, entropy: float):
    weight = torch.tensor([0.5, 1.0, 3.0, 5.0]).double()[:, None]
    energy = quadratic(torch.rand(B, 4).double(), weight)
    solver = ProjectedGradient(300, 0.1, rule=rule, decay=0.1, tol=1e-3)
    s = icnn.argmin(energy, None, icnn.Box(), entropy=entropy, solver=solver, start=centred(4))
    assert s.converged.all()
    assert (s.gap <= 1e-3 * s.value.abs().clamp(min=1)).all()
    assert len(s.gaps) == s.steps.max() < 300
    for i in range(B):  # an example that is done keeps its last gap
        assert (s.gaps[s.steps[i] - 1 :, i] == s.gap[i]).all()


@pytest.mark.parametrize("tol", [0.0, 1e-4])
@pytest.mark.parametrize("entropy", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_what_else_is_in_the_batch_does_not_matter(rule: str, entropy: float, tol: float):
    slopes, offsets = planes(5)
    scale = torch.tensor([0.1, 1.0, 5.0, 20.0]).double()
    slopes = slopes * scale[:, None, None]
    solver = ProjectedGradient(12, 0.1, rule=rule, tol=tol)

    def run(rows: list[int]) -> icnn.Solution:
        energy = log_sum_exp(slopes[rows], offsets[rows])
        return icnn.argmin(energy, None, icnn.Box(), entropy=entropy, solver=solver,
                           start=centred(5)[rows])  # fmt: skip

    together, order = run([0, 1, 2, 3]), [2, 0, 3, 1]
    permuted = run(order)
    for i in range(B):
        alone, place = run([i]), order.index(i)
        for one, j in ((alone, 0), (permuted, place)):
            assert (one.y[j] - together.y[i]).abs().max() <= 1e-12
            assert (one.value[j] - together.value[i]).abs() <= 1e-12
            # The dual of cuts that are almost the same stops where rounding says.
            assert one.lower[j] <= together.value[i] + 1e-12
            assert one.steps[j] == together.steps[i]


@pytest.mark.parametrize("entropy", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_row_leaves_the_others_alone(rule: str, entropy: float):
    slopes, offsets = planes(5)
    solver = ProjectedGradient(10, rule=rule)

    def run(bad: float) -> icnn.Solution:
        changed = offsets.clone()
        changed[1, 0] = bad
        return icnn.argmin(log_sum_exp(slopes, changed), None, icnn.Box(), entropy=entropy,
                           solver=solver, start=centred(5))  # fmt: skip

    good = run(0.3)
    for bad in (run(torch.nan), run(torch.inf)):
        assert bad.status[1] == icnn.Status.NONFINITE
        assert bad.value[1].isnan()
        assert bad.gap[1].isinf()
        for name in ("y", "value", "lower", "gap", "steps", "status"):
            assert torch.equal(getattr(bad, name)[[0, 2, 3]], getattr(good, name)[[0, 2, 3]])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_rows_that_break_on_the_way(steps: int):
    """Finite at the start, not after a step; also at the very last point."""

    def energy(x: object, y: Tensor) -> Tensor:
        return (-y).sum(dim=1) + torch.where(y[:, 0] > 0.55, torch.nan, 0.0)

    solver = ProjectedGradient(steps)
    s = icnn.argmin(energy, None, icnn.Box(), entropy=0, solver=solver, start=centred(2))
    assert (s.status == icnn.Status.NONFINITE).all()
    assert s.gap.isinf().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_energies_that_are_not_convex_are_told(rule: str, entropy: float):
    start = torch.full((B, 3), 0.45).double()
    s = icnn.argmin(lambda x, y: -4 * ((y - 0.5) ** 2).sum(dim=1), None, icnn.Box(),
                    solver=ProjectedGradient(40, rule=rule), entropy=entropy,
                    start=start)  # fmt: skip
    assert (s.status == icnn.Status.NONCONVEX).all()


class NoSynchronisation(TorchDispatchMode):
    """Raises where the host would wait to read a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if any(part in name for part in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")):
            raise AssertionError(f"{name} waits for the device")
        if name.startswith("aten::index.Tensor") or "masked_select" in name:
            raise AssertionError(f"{name} has a shape that depends on numbers")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("entropy", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_the_loop_is_free_of_synchronisation(rule: str, entropy: float, simplex: bool):
    domain = icnn.Simplex() if simplex else icnn.Box()
    energy = log_sum_exp(*planes(4))
    problem = Problem(lambda y: energy(None, y), domain, entropy, torch.full((B, 4), 0.25).double())
    solver = ProjectedGradient(35, rule=rule, decay=0.2)
    record, cuts = Record(problem, 0.0), Cuts(problem, 30)
    with torch.no_grad(), NoSynchronisation():
        solver.descend(problem, record, cuts)
    assert len(record.gaps) == 34
    assert record.lower.isfinite().all()
    with NoSynchronisation(), pytest.raises(AssertionError, match="waits"):
        bool(record.active.any())


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 0},
        {"max_steps": 2.5},
        {"step_size": -0.1},
        {"step_size": 0.0},
        {"step_size": float("nan")},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"rule": "newton"},
        {"decay": -1.0},
        {"tol": -1e-3},
    ],
)
def test_bad_arguments_are_refused(options: dict):
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}`"):
        ProjectedGradient(**options)


def test_a_fixed_number_of_steps_is_one_cuda_graph():
    """Capture fails at the first synchronisation. Without a GPU there is nothing to hold."""
    for device in ["cuda"] if torch.cuda.is_available() else []:
        for rule in RULES:
            energy = icnn.PICNN(4, 6).to(device)
            x = torch.randn(8, 4, device=device)
            solver = ProjectedGradient(10, rule=rule)
            start = torch.full((8, 6), 0.5, device=device)
            with torch.no_grad():
                problem = Problem(energy.at(x), icnn.Box(), 1.0, start)

            def steps(problem: Problem = problem, solver: ProjectedGradient = solver) -> Tensor:
                record, cuts = Record(problem, 0.0), Cuts(problem, 10)
                return solver.descend(problem, record, cuts)[0].objective

            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                expected = steps()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = steps()
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(found, expected)
