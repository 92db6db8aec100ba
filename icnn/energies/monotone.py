"""Energies that rise, or fall, in coordinates of `y`: the signs of all slopes on their way."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_choice
from icnn.energies.layers import clip_straight_through
from icnn.energies.passes import Dense


def check_monotone(
    value: Any, dim_y: int, positivity: str | None = "project"
) -> tuple[int, ...] | None:
    """One sign for each coordinate, or `None`."""
    if value is None:
        return None
    if positivity is None:
        raise ValueError("`monotone` must be None with positivity=None, which constrains nothing")
    signs = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * dim_y
    if len(signs) != dim_y:
        raise ValueError(f"`monotone` must be a sign, or one of each of {dim_y}, got {value!r}")
    return tuple(int(check_choice("monotone", sign, (-1, 0, 1))) for sign in signs)


def signed(layer: Dense, signs: tuple[int, ...] | None) -> Dense:
    """A layer whose slope in each coordinate has its sign.

    All that follows a passthrough is non-decreasing: activations, and weights and gates of `z`. So
    the energy rises in `y_j` if each `Wy` has no negative number in column j, nor a gate there.
    """
    if signs is None:
        return layer
    sign = torch.tensor(signs, dtype=layer.wy.dtype, device=layer.wy.device)
    bound, gate = sign != 0, layer.gate_y
    wy = torch.where(bound, sign * clip_straight_through(sign * layer.wy), layer.wy)
    gate = None if gate is None else torch.where(bound, F.relu(gate), gate)
    return layer._replace(wy=wy, gate_y=gate)


@torch.no_grad()
def clip_(weight: Tensor, signs: tuple[int, ...] | None) -> None:
    """Store a `Wy` as it is read."""
    if signs is not None:
        sign = weight.new_tensor(signs)
        weight.copy_(torch.where(sign != 0, sign * (sign * weight).clamp(min=0), weight))


@torch.no_grad()
def turn_(linear: nn.Linear, signs: tuple[int, ...] | None) -> None:
    """Start with the right signs: else half of the weights would be zero."""
    if signs is not None:
        sign = linear.weight.new_tensor(signs)
        linear.weight.copy_(torch.where(sign != 0, sign * linear.weight.abs(), linear.weight))
