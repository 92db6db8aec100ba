"""What the tests of learning share: small energies, and differences to hold gradients against."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

D = torch.float64


def half(*shape: int) -> Tensor:
    return torch.full(shape, 0.5, dtype=D)


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=D, requires_grad=True)


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), leaf)[0]


def absolute(x: Tensor, y: Tensor) -> Tensor:
    return 3 * (y - x).abs().sum(dim=1)


def bowl(x: Tensor, y: Tensor) -> Tensor:
    return (y - x).square().sum(dim=1)


class Once(torch.autograd.Function):
    """A function whose derivative PyTorch cannot look into."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(z)
        ctx.kind = kind
        return z.abs() if kind == "abs" else z.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        slope = z.detach().sign() if ctx.kind == "abs" else 2 * z.detach()
        return gradients[0] * slope, None


def along(
    loss: Callable[[], Tensor], leaves: Sequence[Tensor], ways: Sequence[Tensor], step: float
) -> float:
    """The central difference of a loss as all leaves move, each its way."""
    ends = []
    with torch.no_grad():
        for sign in (1, -1):
            for leaf, way in zip(leaves, ways, strict=True):
                leaf.add_(way, alpha=sign * step)
            ends.append(float(loss()))
            for leaf, way in zip(leaves, ways, strict=True):
                leaf.sub_(way, alpha=sign * step)
    return (ends[0] - ends[1]) / (2 * step)
