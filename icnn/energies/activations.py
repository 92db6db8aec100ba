"""Activations and what convexity needs to know of each.

A layer of the y-path keeps its output convex in `y` only if its activation is convex *and*
non-decreasing (Proposition 1 of the paper); the path along `x` may use any of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from icnn.checks import check_number


@dataclass(frozen=True)
class Activation:
    """A scalar function applied to each unit, with the facts that proofs and solvers rely on.

    Args:
        name: How error messages and representations call it.
        function: Maps a tensor to a tensor of the same shape, element by element.
        convex: Whether it is convex on the whole line.
        nondecreasing: Whether it is non-decreasing on the whole line.
        piecewise_linear: Whether it consists of finitely many straight pieces.
        smooth: Whether its derivative is continuous.
        reason: Where it fails to be convex or non-decreasing, for the error message.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    convex: bool
    nondecreasing: bool
    piecewise_linear: bool
    smooth: bool
    reason: str = ""

    def __call__(self, z: Tensor) -> Tensor:
        return self.function(z)


def identity() -> Activation:
    """`z`."""
    return Activation("identity", same, True, True, piecewise_linear=True, smooth=True)


def relu() -> Activation:
    """`max(z, 0)`."""
    return Activation("relu", F.relu, True, True, piecewise_linear=True, smooth=False)


def leaky_relu(slope: float = 0.01) -> Activation:
    """`max(z, slope * z)`: convex and non-decreasing for `0 <= slope <= 1`."""
    slope = check_number("slope", slope)
    return Activation(
        f"leaky_relu({slope:g})",
        partial(F.leaky_relu, negative_slope=slope),
        convex=slope <= 1,
        nondecreasing=slope >= 0,
        piecewise_linear=True,
        smooth=slope == 1,
        reason="its slope must lie between 0 and 1",
    )


def softplus(beta: float = 1.0) -> Activation:
    """`log(1 + exp(beta * z)) / beta`, for `beta > 0`."""
    if check_number("beta", beta) <= 0:
        raise ValueError(f"`beta` must be positive, got {beta!r}")
    return Activation(
        f"softplus({beta:g})",
        partial(smooth_plus, beta=beta),
        convex=True,
        nondecreasing=True,
        piecewise_linear=False,
        smooth=True,
    )


def elu(alpha: float = 1.0) -> Activation:
    """`z` above zero, `alpha * (exp(z) - 1)` below.

    It is convex and non-decreasing for `0 <= alpha <= 1`.
    """
    alpha = check_number("alpha", alpha)
    return Activation(
        f"elu({alpha:g})",
        partial(F.elu, alpha=alpha),
        convex=0 <= alpha <= 1,
        nondecreasing=alpha >= 0,
        piecewise_linear=alpha == 0,
        smooth=alpha == 1,
        reason="its alpha must lie between 0 and 1 (above 1 the slope drops at zero)",
    )


def same(z: Tensor) -> Tensor:
    """The identity."""
    return z


def smooth_plus(z: Tensor, beta: float = 1.0) -> Tensor:
    """Softplus without a step: PyTorch's default threshold of 20 drops the value by 2e-9 there.

    A function that falls is not non-decreasing, and in float64 Jensen's inequality notices.
    At 40 the difference is below rounding.
    """
    return F.softplus(z, beta=beta, threshold=40.0)


def _bent(name: str, function: Callable[[Tensor], Tensor], nondecreasing: bool, reason: str):
    """Make a smooth activation that the x-path may use and the y-path may not."""
    return lambda: Activation(name, function, False, nondecreasing, False, True, reason)


IDENTITY = identity()
"""Made once: compilers of older PyTorch cannot follow the making of one."""

ACTIVATIONS: dict[str, Callable[[], Activation]] = {
    "relu": relu,
    "leaky_relu": leaky_relu,
    "softplus": softplus,
    "elu": elu,
    "identity": identity,
    "tanh": _bent("tanh", torch.tanh, True, "it bends down for z > 0"),
    "sigmoid": _bent("sigmoid", torch.sigmoid, True, "it bends down for z > 0"),
    "gelu": _bent("gelu", F.gelu, False, "it falls for z < -0.75 and bends down for |z| > 1.41"),
    "silu": _bent("silu", F.silu, False, "it falls for z < -1.28 and bends down for |z| > 2.40"),
}


CONVEX = tuple(name for name, make in ACTIVATIONS.items() if make().convex and make().nondecreasing)


def any_activation(
    argument: str, activation: str | Activation, names: Iterable[str] = tuple(ACTIVATIONS)
) -> Activation:
    """Look up an activation by name, or take one that is already made."""
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"`{argument}` must be one of the names {', '.join(names)}, or an icnn.Activation "
            f"such as icnn.activations.leaky_relu(0.1), got {activation!r}"
        )
    return ACTIVATIONS[activation]()


def convex_activation(argument: str, activation: str | Activation) -> Activation:
    """The same, refusing what would break convexity in `y`."""
    found = any_activation(argument, activation, CONVEX)
    if found.convex and found.nondecreasing:
        return found
    lacks = " and ".join(
        word
        for word, holds in (("convex", found.convex), ("non-decreasing", found.nondecreasing))
        if not holds
    )
    raise ValueError(
        f"`{argument}` must be convex and non-decreasing, or the energy is not convex in y: "
        f"expected one of {', '.join(CONVEX)}, got {found.name!r}, which is not {lacks}"
        + (f" ({found.reason})" if found.reason else "")
    )
