"""A domain as compiled kernels read it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Ground(NamedTuple):
    """A box, or simplices over the last dimension: see `icnn.solvers.domains`."""

    low: Tensor  # (B or 1, n), float64: lower bounds; on the simplex the values that are given
    width: Tensor  # the same: above 0 where a coordinate is free
    group: int  # coordinates of each simplex; 0 for a box


def ground(low: float | Tensor, width: float | Tensor, group: int, like: Tensor) -> Ground:
    """Bounds for points like `(B, *y_shape)`; one row where all examples share them."""
    bounds = [
        torch.as_tensor(bound, dtype=torch.float64, device=like.device).detach()
        for bound in (low, width)
    ]
    shared = all(b.ndim < like.ndim or b.shape[0] == 1 for b in bounds)
    shape = like[:1].shape if shared else like.shape
    low, width = (b.broadcast_to(shape).flatten(start_dim=1).contiguous() for b in bounds)
    return Ground(low, width, group)
