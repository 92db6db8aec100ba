"""Products of stacks of matrices: `bias + a @ w`, as `torch.baddbmm`, on some CPUs twice as fast.

`torch.bmm` goes to MKL, which leaves wide registers of processors that are not its maker's alone.
oneDNN, which PyTorch has for its layers, does not; both compute in the precision of the tensors.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LARGE = 2**22  # multiplications in a matrix; below, what a call costs counts for more
KNOWN = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # by this build of PyTorch


def pays() -> bool:
    """Whether this processor is of that kind."""
    told = Path("/proc/cpuinfo")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and told.exists() and "AuthenticAMD" in told.read_text()


THERE = KNOWN and pays()


def product(bias: Tensor | None, a: Tensor, w: Tensor) -> Tensor:
    """`bias + a @ w`: `(g, 1 or m, n), (g, m, k), (g, k, n) -> (g, m, n)`."""
    large = a.shape[1] * w.shape[1] * w.shape[2] >= LARGE
    if (
        THERE and large and a.device.type == "cpu" and a.dtype == w.dtype == torch.float32
        and not torch._C._are_functorch_transforms_active()
    ):  # fmt: skip
        return Large.apply(bias, a, w)  # pyright: ignore
    return torch.bmm(a, w) if bias is None else torch.baddbmm(bias, a, w)


class Large(torch.autograd.Function):
    """By oneDNN; as often differentiable as one likes."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, a: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(a, w)
        ctx.row = bias is None or bias.shape[1] == 1
        if bias is None or ctx.row:
            return times(a, w, bias)
        return times(a, w).add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,), (a, w) = gradients, ctx.saved_tensors
        for_bias, for_a, for_w = ctx.needs_input_grad
        return (
            (g.sum(dim=1, keepdim=True) if ctx.row else g) if for_bias else None,
            product(None, g, w.mT) if for_a else None,
            product(None, a.mT, g) if for_w else None,
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
