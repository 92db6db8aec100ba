"""A domain as compiled kernels read it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Ground(NamedTuple):
    """A box, simplices over the last dimension, or a bowl: see `domains` and `bowl` in solvers."""

    low: Tensor  # (B or 1, n), float64: lower bounds; on the simplex the values that are given
    width: Tensor  # the same: above 0 where a coordinate is free
    group: int  # coordinates of each simplex; 0 for a box, -1 for a bowl
    bottom: Tensor | None = None  # of a bowl, as `low`
    weight: Tensor | None = None


def ground(
    low: float | Tensor, width: float | Tensor, group: int, like: Tensor, *bowl: Tensor
) -> Ground:
    """Bounds for points like `(B, *y_shape)`; one row where all examples share them."""
    n = math.prod(like.shape[1:])

    def flat(bound: float | Tensor, shape: torch.Size) -> Tensor:
        if not isinstance(bound, Tensor):
            return torch.full((1, n), bound, dtype=torch.float64, device=like.device)
        bound = bound.detach().to(like.device, torch.float64)
        return bound.broadcast_to(shape).reshape(shape[0], n).contiguous()

    tensors = [bound for bound in (low, width, *bowl) if isinstance(bound, Tensor)]
    shared = all(bound.ndim < like.ndim or bound.shape[0] == 1 for bound in tensors)
    shape = torch.Size((1, *like.shape[1:])) if shared else like.shape
    low, width, *rest = (
        flat(bound, shape).expand(shape[0], n).contiguous() for bound in (low, width, *bowl)
    )
    return Ground(low, width, group, *rest)
