"""Compiled steps against plain PyTorch, where tensors come in unusual shapes and places."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learning_gradients import CASES
from torch import Tensor

import icnn
from icnn.kernels import choice
from icnn.kernels.dual import Model, reference, solve
from icnn.solvers.solution import Status

pytest.importorskip("numba", exc_type=ImportError)

KERNELS = ("torch", "numba")


def solved(energy: Any, x: Any, domain: Any, **options: Any) -> list[icnn.Solution]:
    """By both, to a tolerance that leaves no doubt."""
    solver = icnn.BundleEntropy(tol=1e-9, max_steps=60)
    return [
        icnn.argmin(energy, x, domain, solver=replace(solver, kernel=kernel), **options)
        for kernel in KERNELS
    ]


def agree(energy: Any, x: Any, domain: Any, **options: Any) -> None:
    plain, compiled = solved(energy, x, domain, **options)
    scale = plain.value.abs().clamp(min=1)
    near = 1e-4 if plain.y.dtype == torch.float32 else 1e-7
    assert ((plain.value - compiled.value).abs() <= near * scale).all()
    assert (compiled.gap <= 10 * plain.gap.clamp(min=near)).all()
    assert not (compiled.status == int(Status.NONCONVEX)).any()


SLOPES = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def transposed(x: Tensor, y: Tensor) -> Tensor:
    return (SLOPES.to(y.dtype) @ y.t().contiguous() - x.t()).square().sum(0)


def strided(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.softplus((y + x) @ SLOPES.to(y.dtype)[:, :2])[:, 0]


def expanded(x: Tensor, y: Tensor) -> Tensor:
    return -5 * y.sum(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("energy", [transposed, strided, expanded])
def test_values_and_slopes_of_any_layout(energy: Callable, dtype: torch.dtype):
    x = torch.randn(5, 4, dtype=dtype)
    agree(energy, x, icnn.Box(torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)))


@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_own_gradients_of_another_dtype(own: torch.dtype):
    class Bowl:
        y_shape = (3,)

        def at(self, x: Tensor) -> "Bowl":
            return self

        def __call__(self, *points: Tensor) -> Tensor:
            return points[-1].square().sum(dim=1)

        def value_and_gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
            return self(y).to(own), 2 * y.to(own)

    other = torch.float64 if own == torch.float32 else torch.float32
    agree(Bowl(), torch.zeros(2, 1, dtype=other), icnn.Box(-1, 1), start=torch.rand(2, 3).to(other))


def test_a_simplex_that_is_given_whole():
    mask = torch.tensor([[[True, True], [False, False]]])
    values = torch.tensor([[[0.4, 0.599995], [0, 0]]])
    agree(
        lambda x, y: (y - 0.2).square().flatten(1).sum(1), None, icnn.Simplex(),
        fixed=(mask, values),
    )  # fmt: skip


def test_a_box_with_another_entropy_is_another_domain():
    class Half(icnn.Box):
        def entropy(self, y: Tensor) -> Tensor:
            return 0.1 * super().entropy(y)

        def minimise(self, slope: Tensor, entropy: Any) -> Tensor:
            return super().minimise(slope, 0.1 * entropy)

        def curvature(self, y: Tensor, entropy: Any, slopes: Tensor) -> Tensor:
            return super().curvature(y, 0.1 * entropy, slopes)

    box, x = Half(torch.zeros(4), torch.ones(4)), torch.randn(5, 4)
    energy = lambda x, y: (y - x).abs().sum(1)  # noqa: E731
    plain = icnn.argmin(energy, x, box, solver=icnn.BundleEntropy(kernel="torch"))
    assert torch.equal(icnn.argmin(energy, x, box).value, plain.value)
    mask = torch.zeros(5, 4, dtype=torch.bool)
    mask[:, 0] = True
    held = icnn.argmin(energy, x, box, fixed=(mask, x))  # still of its own kind
    torch.testing.assert_close(held.value[0], one_by_one(energy, x[:1], mask[:1], box))
    with pytest.raises(ValueError, match='`kernel` must be "auto" or "torch" here, got \'numba\''):
        icnn.argmin(energy, x, box, solver=icnn.BundleEntropy(kernel="numba"))


def one_by_one(energy: Any, x: Tensor, mask: Tensor, box: Any) -> Tensor:
    """The objective at the best of many points."""
    u = torch.linspace(0, 1, 100_001, dtype=torch.float64)[1:-1]
    total = torch.zeros((), dtype=torch.float64)
    for j in range(x.shape[1]):
        if mask[0, j]:
            continue
        bend = -0.1 * (u * u.log() + (1 - u) * (1 - u).log())
        total = total + ((u - x[0, j]).abs() - bend).min()
    return total


@pytest.mark.parametrize("kernel", ["numba", "triton"])
def test_a_kernel_that_cannot_be_had(kernel: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "present", lambda package: False)
    energy, x = icnn.FICNN(2), torch.rand(3, 1)
    assert icnn.argmin(energy, x, icnn.Box()).converged.all()
    with pytest.raises(ValueError, match="`kernel` must be"):
        icnn.argmin(energy, x, icnn.Box(), solver=icnn.BundleEntropy(kernel=kernel))
    with pytest.raises(ValueError, match="`kernel` must be one of"):
        icnn.BundleEntropy(kernel="cuda")


def test_without_a_place_for_what_is_compiled(tmp_path: Path):
    """Numba finds no folder that it may write to: then it compiles anew in every process."""
    code = """
from numba.core import caching

def nowhere(*arguments):
    raise RuntimeError("cannot cache function: no locator available for file")

kind = "CacheImpl" if hasattr(caching, "CacheImpl") else "_CacheImpl"
getattr(caching, kind).__init__ = nowhere

import icnn

solver = icnn.BundleEntropy(kernel="numba")
assert icnn.argmin(icnn.FICNN(2), None, icnn.Box(), solver=solver).converged.all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=300)


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("entropy", [1.0, 1e-2, 1e-4])
def test_the_dual_against_its_reference(simplex: bool, entropy: float):
    """The same maximum, or a better one; and a minimiser that goes with it."""
    generator = torch.Generator().manual_seed(1)
    batch, k, n = 20, 12, 7
    slopes = torch.randn(batch, k, n, generator=generator, dtype=torch.float64)
    slopes[5:] = slopes[5:, :1] + 1e-3 * slopes[5:]  # nearly dependent
    slopes[10:, 6:] = slopes[10:, :6]  # twice the same
    offsets = torch.randn(batch, k, generator=generator, dtype=torch.float64)
    domain = icnn.Simplex() if simplex else icnn.Box(-1, 2)
    alive = torch.ones(batch, k, dtype=torch.bool)
    alive[15:, 3] = False
    entropies = torch.full((batch,), entropy, dtype=torch.float64)
    model = Model(domain, slopes, offsets, alive, entropies, torch.Size((batch, n)))
    start = alive.double() / alive.sum(dim=1, keepdim=True)
    every = torch.ones(batch, dtype=torch.bool)
    plain, compiled = reference(model, start), solve(model, start, every, "numba")
    size = 1 + plain.value.abs()
    assert (compiled.value >= plain.value - 1e-10 * size).all()
    # Strong duality: D at lam is at most the model at any point, here at its own minimiser.
    y = compiled.y
    planes = offsets + (slopes @ y[:, :, None]).squeeze(2)
    above = planes.masked_fill(~alive, -torch.inf).amax(dim=1) - entropy * domain.entropy(y)
    assert (above >= compiled.value - 1e-12 * size).all()
    assert (above <= compiled.value + 1e-8 * size).all()
    assert (compiled.lam[~alive] == 0).all()


def test_threads_and_numbers_of_threads():
    """The same to the last bit, and nobody else's setting is changed."""
    import numba

    torch.manual_seed(0)
    energy, x = icnn.PICNN(4, 20, (30,)), torch.randn(300, 4)
    before, mine = numba.get_num_threads(), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(icnn.argmin(energy, x, icnn.Box(), entropy=0.01).lower)
    finally:
        torch.set_num_threads(mine)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    assert numba.get_num_threads() == before


def test_memory_does_not_grow_with_steps_that_are_not_made():
    solver = icnn.BundleEntropy(max_steps=10**9)
    found = icnn.argmin(icnn.FICNN(2), None, icnn.Box(), solver=solver)
    assert found.gaps.shape == (int(found.steps.max()), 1)
    few = icnn.argmin(
        icnn.FICNN(40), None, icnn.Box(), entropy=1e-3, solver=icnn.BundleEntropy(70, tol=0)
    )
    assert few.gaps.shape[0] == int(few.steps.max())
    assert np.isfinite(few.gaps.numpy()).all()


def test_a_start_at_a_bound_that_is_no_binary_number():
    box, x = icnn.Box(0.0, 0.7), torch.zeros(3, 2, dtype=torch.float64)
    energy = lambda x, y: -50 * y.sum(1)  # noqa: E731
    start = torch.full((3, 2), 0.3, dtype=torch.float64)
    first = icnn.argmin(energy, x, box, start=start)
    assert icnn.argmin(energy, x, box, start=first).converged.all()


def test_compiled_by_pytorch():
    energy, x = icnn.PICNN(5, 4, (8,)), torch.randn(6, 5)
    step = torch.compile(lambda x: icnn.argmin(energy, x, icnn.Box()).y.sum(), backend="eager")
    torch.testing.assert_close(step(x), icnn.argmin(energy, x, icnn.Box()).y.sum())


def test_the_reference_does_not_stop_where_more_is_to_gain():
    # Near this example Newton's steps promise nothing while the gap is still rough.
    case = next(case for case in CASES if case.name == "relu and quadratic")
    setting = case.setting()
    low, high = (bound.detach() for bound in setting.bounds)
    x = setting.x.detach()[2:].repeat(20, 1)
    x = x + 1e-9 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    solver = icnn.BundleEntropy(max_steps=120, tol=1e-14, kernel="torch")
    with torch.no_grad():
        box = icnn.Box(low, high[2:].repeat(20, 1))
        found = icnn.argmin(setting.energy, x, box, entropy=case.entropy, solver=solver)
    assert found.gap.max() < 1e-9
