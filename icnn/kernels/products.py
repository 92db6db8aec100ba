"""Products of stacks of matrices: `bias + a @ w`, as `torch.baddbmm`, on a CPU twice as fast.

`torch.bmm` goes to MKL, which leaves the wide registers of some makers' processors alone. oneDNN,
which PyTorch has for its layers, does not; both compute in the precision that tensors have.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGE = 2**22  # multiplications in a matrix; below, what a call costs counts for more
# Whether this build of PyTorch has it, on a processor where it pays.
THERE = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)


def product(bias: Tensor | None, a: Tensor, w: Tensor) -> Tensor:
    """`bias + a @ w`: `(g, 1 or m, n), (g, m, k), (g, k, n) -> (g, m, n)`."""
    large = a.shape[1] * w.shape[1] * w.shape[2] >= LARGE
    if THERE and large and a.device.type == "cpu" and a.dtype == w.dtype == torch.float32:
        return Large.apply(bias, a, w)  # pyright: ignore
    return torch.bmm(a, w) if bias is None else torch.baddbmm(bias, a, w)


class Large(torch.autograd.Function):
    """By oneDNN, once differentiable."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, a: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(a, w)
        ctx.row = bias is None or bias.shape[1] == 1
        if bias is None or ctx.row:
            return times(a, w, bias)
        return times(a, w).add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore
        (g,), (a, w) = gradients, ctx.saved_tensors
        for_bias, for_a, for_w = ctx.needs_input_grad
        return (
            (g.sum(dim=1, keepdim=True) if ctx.row else g) if for_bias else None,
            times(g, w.mT) if for_a else None,
            times(a.mT, g) if for_w else None,
        )


def times(a: Tensor, w: Tensor, row: Tensor | None = None) -> Tensor:
    """`a @ w`, and a row for each if there is one, matrix by matrix."""
    f = torch.ops.icnn.times if torch.compiler.is_compiling() else one_by_one
    return f(a, w, row)


def one_by_one(a: Tensor, w: Tensor, row: Tensor | None) -> Tensor:
    """By what PyTorch has for linear layers on a CPU: it knows one matrix at a time."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    out = a.new_empty(len(a), a.shape[1], w.shape[2])
    for i in range(len(a)):
        out[i] = linear(a[i], w[i].T, None if row is None else row[i, 0], "none", [], "")
    return out


# A compiler knows it as one piece.
torch.library.custom_op("icnn::times", one_by_one, mutates_args=()).register_fake(
    lambda a, w, row: a.new_empty(len(a), a.shape[1], w.shape[2])
)
