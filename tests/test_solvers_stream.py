"""Answers for batches that come one after another."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import icnn


@pytest.fixture
def energy() -> icnn.PICNN:
    torch.manual_seed(0)
    return icnn.PICNN(3, 2, (8,)).double()


def test_the_same_as_all_at_once(energy: icnn.PICNN):
    x = torch.randn(23, 3, dtype=torch.float64)
    solver = icnn.BundleEntropy(tol=1e-10)
    whole = icnn.argmin(energy, x, icnn.Box(), entropy=0.1, solver=solver)
    options = {"entropy": 0.1, "solver": solver}
    for batches in (x.split(5), DataLoader(TensorDataset(x), batch_size=7)):
        found = list(icnn.stream(energy, batches, icnn.Box(), **options))
        assert len(found) == len(batches)
        torch.testing.assert_close(torch.cat([f.y for f in found]), whole.y, rtol=0, atol=1e-6)
        assert not found[0].y.requires_grad


def test_one_batch_at_a_time(energy: icnn.PICNN):
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def batches() -> Iterator[Tensor]:
        nonlocal most
        for _ in range(20):
            most = max(most, sum(ref() is not None for ref in alive))
            x = torch.randn(50, 3, dtype=torch.float64)
            alive.append(weakref.ref(x))
            yield x
            del x

    results = icnn.stream(energy, batches(), icnn.Box())
    assert not alive  # nothing is read before it is asked for
    for found in results:
        assert found.converged.all()
        del found
    assert most == 0
    assert len(alive) == 20


def test_an_endless_stream(energy: icnn.PICNN):
    def forever() -> Iterator[Tensor]:
        while True:
            yield torch.randn(4, 3, dtype=torch.float64)

    found = icnn.stream(energy, forever(), icnn.Box())
    assert [next(found).y.shape for _ in range(3)] == [(4, 2)] * 3


def test_progress(energy: icnn.PICNN, capsys: pytest.CaptureFixture[str]):
    x = torch.randn(10, 3, dtype=torch.float64)
    list(icnn.stream(energy, x.split(5), icnn.Box(), progress=True))
    assert "10 examples, 100.0% converged, worst gap" in capsys.readouterr().err
    list(icnn.stream(energy, x.split(5), icnn.Box()))
    assert not capsys.readouterr().err  # not on a terminal


def test_without_x():
    def bowl(x: None, y: Tensor) -> Tensor:
        return y.square().sum(dim=1)

    (found,) = icnn.stream(bowl, [None], icnn.Box(low=torch.zeros(3)))
    assert found.y.shape == (1, 3)
    assert list(icnn.stream(bowl, [], icnn.Box())) == []


@pytest.mark.parametrize("batches", [torch.rand(5, 3), 3])
def test_what_is_not_a_stream(energy: icnn.PICNN, batches: object):
    with pytest.raises(ValueError, match="`batches` must give batches of x one after another"):
        icnn.stream(energy, batches, icnn.Box())  # pyright: ignore
