"""Where `y` lives: bounded sets on which a linear function is easy to minimise."""

import copy
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from icnn.checks import check_number, check_tensor
from icnn.kernels.ground import Ground, ground

INSIDE = 1e-12  # how far from its bounds a point must be for a slope of H that is finite


@runtime_checkable
class Domain(Protocol):
    """A bounded convex set with an entropy `H`: a strictly concave function of its points.

    All methods take and give tensors of shape `(B, *y_shape)`; each example is on its own. Where
    a domain has them, more methods are used: `restrict(mask, values)`, the domain with some
    coordinates given; `curvature(y, entropy, slopes)`, see `icnn.kernels.dual`;
    `radius(gap, entropy, shape)`, a bound on the distance of a point to the minimiser; and
    `carry(y)`, the same point as one that moves with the bounds, where they have gradients.
    Compiled steps are for domains that they know: `ground(like)` tells them which.
    """

    def center(self, like: Tensor) -> Tensor:
        """The point of the largest entropy."""
        ...

    def contains(self, y: Tensor) -> Tensor:
        """Whether each example lies in the set, up to rounding: `(B,)`."""
        ...

    def project(self, y: Tensor) -> Tensor:
        """The nearest point of the set."""
        ...

    def entropy(self, y: Tensor) -> Tensor:
        """`H(y)`: `(B,)`."""
        ...

    def minimise(self, slope: Tensor, entropy: float | Tensor) -> Tensor:
        """The point of the set with the smallest `sum(slope * y) - entropy * H(y)`.

        With `entropy` 0 any of them.
        """
        ...


def rounding(y: Tensor) -> float:
    """How far outside its set a point may lie and count as inside."""
    return 64 * torch.finfo(y.dtype).eps


def wide(bound: float | Tensor) -> float | Tensor:
    """A bound in the precision of the certificates."""
    return bound.double() if isinstance(bound, Tensor) else bound


def positive(entropy: float | Tensor) -> bool:
    """Whether there is an entropy: one number, or one above zero for each example."""
    return isinstance(entropy, Tensor) or entropy > 0


def above_zero(values: Tensor) -> Tensor:
    """Numbers that may be divided by."""
    return values.clamp(min=torch.finfo(values.dtype).tiny)


def total(values: Tensor) -> Tensor:
    """The sum of each example."""
    return values.flatten(start_dim=1).sum(dim=1)


def steepness(domain: Domain, y: Tensor) -> Tensor:
    """The slope of `H` at a point, or a little inside of it: `(B, n)`."""
    with torch.inference_mode(False), torch.enable_grad():
        inside = (1 - INSIDE) * y + INSIDE * domain.center(y)
        inside = inside.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(domain.entropy(inside).sum(), inside)
    # Infinite only where there is no room to move, as for coordinates that are given.
    return slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).flatten(start_dim=1)


@dataclass(frozen=True, eq=False)
class Box:
    """All `y` with `low <= y <= high`, coordinate by coordinate.

    Its entropy is the binary one of `u = (y - low) / (high - low)`, summed over coordinates.

    Args:
        low: A number, or a tensor that broadcasts to `(B, *y_shape)`.
        high: The same, above `low`.
    """

    low: float | Tensor = 0.0
    high: float | Tensor = 1.0

    def __post_init__(self):
        for name, bound in (("low", self.low), ("high", self.high)):
            if not isinstance(bound, Tensor):
                object.__setattr__(self, name, check_number(name, bound))
            elif not bool(check_tensor(name, bound).isfinite().all()):
                raise ValueError(f"`{name}` must be finite: every solver needs a bounded domain")
        width = self.width
        least = most = width
        if isinstance(width, Tensor):
            least, most = map(float, torch.aminmax(width.detach())) if width.numel() else (1.0, 1.0)
        if not math.isfinite(most):
            raise ValueError("`high` - `low` must be finite: every solver needs a bounded domain")
        if not least > 0:
            raise ValueError(
                f"`low` must be below `high` everywhere, got high - low = {least:g} somewhere: "
                "coordinates that are given go into `fixed`"
            )

    @property
    def width(self) -> float | Tensor:
        """`high - low`, in float64: a narrower type would make another box of it."""
        return wide(self.high) - wide(self.low)

    def restrict(self, mask: Tensor, values: Tensor) -> "Box":
        """The box whose coordinates under `mask` have no width, at `values`."""
        held = copy.copy(self)
        for name in ("low", "high"):
            bound = torch.as_tensor(getattr(self, name), dtype=values.dtype, device=values.device)
            object.__setattr__(held, name, torch.where(mask, values, bound))
        return held

    def unit(self, y: Tensor) -> Tensor:
        """`u`, between 0 and 1; 0 where the box has no width."""
        width = self.width
        if isinstance(width, Tensor):
            width = torch.where(width > 0, width, torch.ones_like(width))
        return ((y - wide(self.low)) / width).clamp(0, 1)

    def center(self, like: Tensor) -> Tensor:
        return (torch.zeros_like(like) + (wide(self.low) + self.width / 2)).to(like.dtype)

    def contains(self, y: Tensor) -> Tensor:
        low, high = wide(self.low), wide(self.high)
        size, width = (torch.as_tensor(b, dtype=torch.float64) for b in (low, self.width))
        slack = (rounding(y) * (size.abs() + width)).to(y.device)
        inside = (y >= low - slack) & (y <= high + slack)
        return inside.flatten(start_dim=1).all(dim=1)

    def project(self, y: Tensor) -> Tensor:
        if isinstance(self.low, Tensor) or isinstance(self.high, Tensor):
            low, high = (torch.as_tensor(b, dtype=y.dtype, device=y.device)
                         for b in (self.low, self.high))  # fmt: skip
            return torch.minimum(torch.maximum(y, low), high)
        return y.clamp(self.low, self.high)

    def carry(self, y: Tensor) -> Tensor:
        # y(u) = low + (high - low) u at its own u.
        return wide(self.low) + self.width * self.unit(y).detach()

    def entropy(self, y: Tensor) -> Tensor:
        u = self.unit(y)
        # Not quite zero, so that the logarithm and its slope are finite.
        v, u = above_zero(1 - u), above_zero(u)
        return -total(u * u.log() + v * v.log())

    def minimise(self, slope: Tensor, entropy: float | Tensor) -> Tensor:
        # The derivative of -H is log(u / (1 - u)), so that u = sigmoid(-width * slope / entropy).
        drop = -slope * self.width
        u = torch.sigmoid(drop / entropy) if positive(entropy) else (drop > 0).to(slope.dtype)
        return wide(self.low) + self.width * u

    def curvature(self, y: Tensor, entropy: float | Tensor, slopes: Tensor) -> Tensor:
        weight = (y - wide(self.low)) * (wide(self.high) - y) / entropy
        weight = weight.flatten(start_dim=1)
        return (slopes * weight[:, None, :]) @ slopes.mT

    def ground(self, like: Tensor) -> Ground:
        """The box as compiled kernels read it."""
        return ground(self.low, self.width, 0, like)

    def radius(self, gap: Tensor, entropy: float, shape: torch.Size) -> Tensor:
        """`|u - u*|_2 <= sqrt(gap / (2 entropy))`: -H is 4-strongly convex in `u`."""
        return (gap / (2 * entropy)).sqrt()


class Simplex:
    """All `y >= 0` whose last dimension sums to one. Its entropy is Shannon's."""

    def __init__(self):
        self.mask: Tensor | None = None
        self.values: Tensor | None = None

    def __repr__(self) -> str:
        return "Simplex()"

    def restrict(self, mask: Tensor, values: Tensor) -> "Simplex":
        """The simplex with the coordinates under `mask` at `values`; the others share the rest."""
        given = torch.where(mask, values, torch.zeros_like(values))
        mass, slack = 1 - given.sum(dim=-1), 1e-5  # they may have been float32
        bad = (given < -slack) | (mass < -slack)[..., None]
        bad |= (mask.all(dim=-1) & (mass > slack))[..., None]
        if bool(bad.any()):
            row = int(bad.flatten(start_dim=1).any(dim=1).nonzero()[0])
            raise ValueError(
                "`fixed` must leave room on the simplex: values of at least 0 that sum to at most "
                f"1, and to 1 where all are given, got values that sum to "
                f"{float((1 - mass)[row].max()):g} in example {row}"
            )
        held = Simplex()
        held.mask, held.values = mask, values
        return held

    def mass(self, like: Tensor) -> Tensor | float:
        """What the free coordinates sum to."""
        if self.mask is None or self.values is None:
            return 1.0
        given = torch.where(self.mask, self.values, torch.zeros_like(self.values))
        return (1 - given.sum(dim=-1, keepdim=True)).clamp(min=0).to(like.dtype)

    def fill(self, y: Tensor) -> Tensor:
        """`y` with the given coordinates in place."""
        if self.mask is None or self.values is None:
            return y
        return torch.where(self.mask, self.values.to(y.dtype), y)

    def open(self, scores: Tensor) -> Tensor:
        """Scores of which the given coordinates have none."""
        return scores if self.mask is None else scores.masked_fill(self.mask, -math.inf)

    def center(self, like: Tensor) -> Tensor:
        return self.minimise(torch.zeros_like(like), 1.0)

    def contains(self, y: Tensor) -> Tensor:
        slack = max(1e-5, rounding(y))  # as much as `restrict` allows
        inside = ((y.sum(dim=-1) - 1).abs() <= slack) & (y >= -slack).all(dim=-1)
        return inside.flatten(start_dim=1).all(dim=1) if inside.ndim > 1 else inside

    def project(self, y: Tensor) -> Tensor:
        # The largest t such that the parts of y above t sum to the mass.
        ordered = self.open(y).sort(dim=-1, descending=True).values
        count = torch.arange(1, y.shape[-1] + 1, device=y.device, dtype=y.dtype)
        finite = ordered.masked_fill(ordered == -math.inf, 0)
        level = (finite.cumsum(dim=-1) - self.mass(y)) / count
        kept = ((ordered > level).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        return self.fill((y - level.gather(-1, kept)).clamp(min=0))

    def carry(self, y: Tensor) -> Tensor:
        mass = self.mass(y)
        if not isinstance(mass, Tensor):
            return y
        share = y.detach() / above_zero(mass.detach())
        return self.fill(mass * share)

    def entropy(self, y: Tensor) -> Tensor:
        y = above_zero(y)
        if self.mask is not None:
            y = torch.where(self.mask, 1.0, y)
        return -total(y * y.log())

    def minimise(self, slope: Tensor, entropy: float | Tensor) -> Tensor:
        scores = self.open(-slope)
        if positive(entropy):
            y = torch.softmax(scores / entropy, dim=-1)
        else:
            best = scores.argmax(dim=-1, keepdim=True)
            y = torch.zeros_like(slope).scatter(-1, best, 1.0)
        return self.fill(self.mass(slope) * y)

    def curvature(self, y: Tensor, entropy: float | Tensor, slopes: Tensor) -> Tensor:
        # diag(y) - y y^T / mass, in every simplex apart.
        y = y if self.mask is None else y.masked_fill(self.mask, 0)
        rows = y.reshape(y.shape[0], 1, -1, y.shape[-1])
        mass = above_zero(rows.sum(dim=-1))
        parts = slopes.unflatten(2, rows.shape[2:]) * rows
        moments = parts.sum(dim=-1) / mass.sqrt()
        bend = parts.flatten(start_dim=2) @ slopes.mT - moments @ moments.mT
        return bend / (entropy.reshape(-1, 1, 1) if isinstance(entropy, Tensor) else entropy)

    def ground(self, like: Tensor) -> Ground:
        """The simplices as compiled kernels read them."""
        if self.mask is None or self.values is None:
            return ground(0.0, 1.0, like.shape[-1], like)
        given = torch.where(self.mask, self.values, torch.zeros_like(self.values))
        return ground(given, (~self.mask).double(), like.shape[-1], like)

    def radius(self, gap: Tensor, entropy: float, shape: torch.Size) -> Tensor:
        """`|y - y*|_1 <= sqrt(2 gap / entropy)` by Pinsker, for each simplex in `y`."""
        count = math.prod(shape[1:-1])
        return (2 * count * gap / entropy).sqrt()
