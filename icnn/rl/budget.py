"""A limit on the sum of all actions."""

import torch
from torch import Tensor

from icnn.checks import check_nonnegative, check_number
from icnn.solvers.domains import positive


class Budget:
    """All `y` with `sum |y| <= total` and `|y| <= high`. Its entropy is `H(y) = -|y|^2 / 2`.

    Args:
        total: What all coordinates may use together.
        high: What each may use: a number, or a tensor that broadcasts to `(B, n)`.
    """

    def __init__(self, total: float, high: float | Tensor = 1.0):
        self.total = check_number("total", total, minimum=0)
        self.high = (
            check_nonnegative("high", high)
            if isinstance(high, Tensor)
            else check_number("high", high, minimum=0)
        )

    def __repr__(self) -> str:
        return f"Budget({self.total:g})"

    def limit(self, like: Tensor) -> Tensor:
        """Of each coordinate."""
        return torch.as_tensor(self.high, dtype=like.dtype, device=like.device).expand_as(like)

    def center(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def contains(self, y: Tensor) -> Tensor:
        slack = 1 + 64 * torch.finfo(y.dtype).eps
        size = y.abs()
        return (size <= slack * self.limit(y)).all(dim=1) & (size.sum(dim=1) <= slack * self.total)

    def project(self, y: Tensor) -> Tensor:
        # min(max(|y| - t, 0), high), with the level t that leaves the total. The sum falls with t
        # in straight pieces, from one of these levels to the next.
        size, high = y.abs(), self.limit(y)
        levels = torch.cat([torch.zeros_like(size[:, :1]), size, (size - high).clamp(min=0)], dim=1)
        levels = levels.sort(dim=1).values

        def spent(t: Tensor) -> Tensor:
            left = (size[:, None, :] - t[:, :, None]).clamp(min=0)
            return torch.minimum(left, high[:, None, :]).sum(dim=2)

        sums = spent(levels)
        # The last level at which too much is spent, and the next; all is well if there is none.
        last = ((sums > self.total).sum(dim=1, keepdim=True) - 1).clamp(min=0)
        after = (last + 1).clamp(max=levels.shape[1] - 1)
        (a, b), (s, e) = ((v.gather(1, last), v.gather(1, after)) for v in (levels, sums))
        share = ((s - self.total) / torch.where(s > e, s - e, 1.0)).clamp(0, 1)
        level = torch.where(s > self.total, a + share * (b - a), torch.zeros_like(a))
        found = torch.minimum((size - level).clamp(min=0), high)
        # What rounding has left above the total goes.
        used = found.double().sum(dim=1, keepdim=True)
        less = (1 - 4 * torch.finfo(y.dtype).eps) * self.total / used.clamp(min=self.total)
        return y.sign() * torch.where(used > self.total, found * less.to(y.dtype), found)

    def entropy(self, y: Tensor) -> Tensor:
        return -y.square().sum(dim=1) / 2

    def minimise(self, slope: Tensor, entropy: float | Tensor) -> Tensor:
        if positive(entropy):
            return self.project(-slope / entropy)
        # The steepest coordinates take what they may, until all is spent.
        order = slope.abs().argsort(dim=1, descending=True)
        high = self.limit(slope).gather(1, order)
        before = high.cumsum(dim=1) - high
        take = torch.minimum((self.total - before).clamp(min=0), high)
        return -slope.sign() * torch.zeros_like(slope).scatter(1, order, take)
