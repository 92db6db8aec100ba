"""Products of stacks: both ways are the same, gradients included."""

import pytest
import torch

from icnn.kernels import products
from icnn.kernels.products import LARGE, product

pytestmark = pytest.mark.skipif(not products.KNOWN, reason="a build of PyTorch without oneDNN")
SIZES = [(2, 256, 256, 136), (2, 128, 17, 24), (1, 512, 128, 64), (3, 256, 128, 128)]


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "THERE", True)


@pytest.mark.parametrize("rows", ["none", "one", "all"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(size: tuple[int, int, int, int], rows: str):
    g, m, k, n = size
    a, w = torch.randn(g, m, k), torch.randn(g, k, n)
    bias = None if rows == "none" else torch.randn(g, 1 if rows == "one" else m, n)
    given = [t.requires_grad_() for t in (a, w, bias) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in given]
    out = product(bias, a, w)
    expected = exact[0] @ exact[1] + (exact[2] if bias is not None else 0)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), given)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for ours, theirs in zip((out, *grads), (expected, *wanted), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-3)


def test_transposed_and_partly_frozen():
    a, w = torch.randn(2, 256, 256).mT, torch.randn(2, 128, 256).mT.requires_grad_()
    out = product(None, a, w)
    torch.testing.assert_close(out, torch.bmm(a, w), rtol=1e-4, atol=1e-3)
    (ours,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(ours, a.mT @ torch.ones_like(out), rtol=1e-4, atol=1e-3)


def test_second_derivatives():
    """Those of `g(x, w) = |d/dx sum(tanh(x w))|^2`, beside doubles, which PyTorch multiplies."""
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, 256, 256, generator=random) / 16 for _ in range(2))

    def found(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = x.requires_grad_(), w.requires_grad_()
        (slope,) = torch.autograd.grad(product(None, x, w).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, w))

    for ours, exact in zip(found(x, w), found(x.double(), w.double()), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-5)


def test_transforms_of_functions():
    a, w = torch.randn(2, 256, 256), torch.randn(2, 256, 128)
    slope = torch.func.grad(lambda a: product(None, a, w).sum())(a)
    torch.testing.assert_close(slope, w.sum(dim=2)[:, None].expand_as(a))


def test_the_same_twice_and_by_itself():
    a, w = torch.randn(3, 256, 256), torch.randn(3, 256, 136)
    both = product(None, a, w)
    assert torch.equal(both, product(None, a, w))
    assert torch.equal(both[1:2], product(None, a[1:2], w[1:2]))


def test_small_ones_doubles_and_other_builds_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(products, "times", never)
    a, w = torch.randn(1, 256, 256), torch.randn(1, 256, 64)
    assert a.shape[1] * 256 * 64 == LARGE
    for left, right in ((a[:, 1:], w), (a.double(), w.double())):
        assert torch.equal(product(None, left, right), torch.bmm(left, right))
    monkeypatch.setattr(products, "THERE", False)
    assert torch.equal(product(None, a, w), torch.bmm(a, w))
