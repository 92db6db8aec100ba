"""Networks for states and actions of other lengths: what they have in common, and zeros.

So agents of several tasks are in one stack. A state that is shorter than others is followed by
zeros, and so is an action. Weights of what is always zero start at zero and stay there: they get
no gradient, and no action moves along them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Parts(NamedTuple):
    """Of the matrix of each network, `(networks, sum of rows, sum of columns)`."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def fitted(weight: Tensor, own: Parts, other: Parts) -> Tensor:
    """A weight with the parts of another: each has zeros added at its end, or is cut off there."""
    rows = zip(weight.split(own.rows, dim=1), other.rows, strict=True)
    weight = torch.cat([F.pad(part, (0, 0, 0, n - part.shape[1])) for part, n in rows], dim=1)
    columns = zip(weight.split(own.columns, dim=2), other.columns, strict=True)
    return torch.cat([F.pad(part, (0, n - part.shape[2])) for part, n in columns], dim=2)


def all_fitted(
    weights: Mapping[str, Tensor], own: Mapping[str, Parts], other: Mapping[str, Parts]
) -> dict[str, Tensor]:
    """All weights of critics, by the names that their module has for them."""
    found = {}
    for key, weight in weights.items():
        name = key.rpartition(".")[2]
        found[key] = fitted(weight, own[name], other[name])
    return found
