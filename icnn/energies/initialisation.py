"""Weights to start from, so that signals neither die nor explode in deep energies.

Weights that must not be negative cannot cancel, so the usual draw around zero is not to be had.
Hoedt and Klambauer (2023) draw them log-normal and let the bias take their mean away:

    Var[w] = (1 - r) / (n E[g^2]),    b = -n E[w] E[g],    a share r of the variance from E[w] > 0

for n inputs g(a), a ~ N(0, 1). For relu and r = 1/2 such an E[w] is 1.9 / n: every layer amplifies
large positive signals, and with depth they explode. We have passthroughs, and let *them* bring the
share r. The weights from the layer below have

    E[w] = 1 / n,    Var[w] = (1 - r) / (n Var[g]),    b_i = -E[g] sum_j w_ij,

so that rows sum to about one, large signals pass as they are, and every unit is centred. The draw
is heavy-tailed: a unit listens to a few of those below. `benchmarks/initialisation.py` measures
ours against PyTorch's default; the shares below were chosen by trying a few on the same functions.
"""

import math
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from icnn.energies.activations import Activation
from icnn.energies.layers import NonNegative

L = TypeVar("L", nn.Linear, nn.Conv2d)

PASSED = 0.5
"""The share r of a unit's variance that its passthroughs bring; the layer below brings the rest."""

PASSED_CONV = 0.75
"""The same for convolutions, whose few weights realise less of the variance of a heavy tail."""


@lru_cache(maxsize=64)
def moments(activation: Activation) -> tuple[float, float]:
    """`E[g(a)]` and `E[g(a)^2]` for a standard normal `a`."""
    a = torch.linspace(-10, 10, 4001, dtype=torch.float64, device="cpu")
    density = torch.exp(-a.square() / 2)
    g = activation(a)
    return (
        float((density * g).sum() / density.sum()),
        float((density * g.square()).sum() / density.sum()),
    )


def nonnegative_weight(
    shape: tuple[int, ...], incoming: Activation, positivity: str | None
) -> tuple[NonNegative, Tensor]:
    """A weight for the outputs of `incoming`, and the bias that centres its units.

    Args:
        shape: `(out, in)` or `(out, in, *kernel)`.
        incoming: The activation of the layer below.
        positivity: See `NonNegative`; without it the weight is drawn around zero.
    """
    n, rest = math.prod(shape[1:]), 1 - (PASSED if len(shape) == 2 else PASSED_CONV)
    mean, square = moments(incoming)
    if positivity is None:
        weight = torch.empty(shape).normal_(std=math.sqrt(rest / (n * square)))
        return NonNegative(nn.Parameter(weight), None), torch.zeros(shape[0])
    variance = rest / (n * (square - mean**2))
    # A log-normal with mean 1 / n and that variance.
    log_variance = math.log1p(variance * n**2)
    weight = torch.empty(shape).log_normal_(
        -math.log(n) - log_variance / 2, math.sqrt(log_variance)
    )
    # Before the weight is handed over: NonNegative stores in the tensor that it is given.
    bias = -mean * weight.flatten(start_dim=1).sum(dim=1)
    return NonNegative(nn.Parameter(weight), positivity), bias


@torch.no_grad()
def spread_(linear: L, share: float, incoming: Activation | None = None) -> L:
    """Draw a free weight, and a bias, so that the outputs are centred and have variance `share`.

    Args:
        linear: What to draw.
        share: The variance of the outputs.
        incoming: The activation that the inputs come from; `None` for standardised data.
    """
    mean, square = (0.0, 1.0) if incoming is None else moments(incoming)
    n = linear.weight[0].numel()
    linear.weight.normal_(std=math.sqrt(share / (n * (square - mean**2))))
    if linear.bias is not None:
        linear.bias.copy_(-mean * linear.weight.flatten(start_dim=1).sum(dim=1))
    return linear


@torch.no_grad()
def open_gate_(linear: L) -> L:
    """Start a gate at one for every `x`, where a partially convex layer is a fully convex one."""
    linear.weight.zero_()
    assert linear.bias is not None, "a gate has a bias"
    linear.bias.fill_(1)
    return linear
