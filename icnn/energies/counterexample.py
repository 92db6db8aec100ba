"""A search for a counterexample: Jensen's inequality along random segments."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

SEGMENTS, FLOPS = 48_000, 5e9  # at most, in one search
CLIMB = 20  # steps uphill from the worst of them
SCALES = (0.1, 1.0, 10.0)
TOLERANCE = {torch.float64: 1e-9}  # relative to 1 + |f|
COARSE = 1e-4  # the same in any other precision

EnergyLike = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Counterexample:
    """A chord below the curve: `f(t y + (1 - t) y2) = t f(y) + (1 - t) f(y2) + violation` at `x`.

    `x`, `y` and `y2` belong to one example, without the batch dimension.
    """

    x: Any
    y: Tensor
    y2: Tensor
    t: float
    violation: float

    def __str__(self) -> str:
        return (
            f"at t={self.t:.3g} the energy lies {self.violation:.3g} above the chord "
            f"from y={_short(self.y)} to y2={_short(self.y2)}"
        )


def search(
    energy: EnergyLike, x: Any, y: Tensor, domain: Any, made_up: bool, generator: torch.Generator
) -> Counterexample | None:
    """The worst violation of Jensen's inequality along random segments, if it is beyond rounding.

    First at the given `x`; if there is none, at random ones of the same shapes. An `x` without
    tensors has no rows to draw, and there is no search.
    """
    if x is not None and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(x)):
        return None
    energy, x, y = _in_double(energy, x, y)
    tolerance = TOLERANCE.get(y.dtype, COARSE)
    with FlopCounterMode(display=False) as counter:
        energy(x, y.clone())
    cost = 3 * counter.get_total_flops() / len(y) + 1000 * y[0].numel()  # of one segment
    kinds, rounds = len(SCALES) + 1, [True] if made_up else [False, True]
    batches = kinds * len(rounds)
    size = int(max(32, min(SEGMENTS, FLOPS / cost) // batches))
    climbers = int(max(1, min(32, FLOPS / cost // (3 * CLIMB * batches))))
    for drawn in rounds:
        best = []
        for kind in range(kinds):
            rows = _rows(x, size, SCALES[kind % len(SCALES)] if drawn else None, generator)
            ends = _segments(y, size, kind, generator)
            best.append(_worst(energy, rows, _inside(domain, ends), domain, climbers, tolerance))
        best = [found for found in best if found is not None]
        if best:
            return max(best, key=lambda found: found.violation)
    return None


def _in_double(energy: EnergyLike, x: Any, y: Tensor) -> tuple[EnergyLike, Any, Tensor]:
    """The same in float64 where the energy can follow."""

    def double(value: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, value
        )

    try:
        copied = copy.deepcopy(energy).double() if isinstance(energy, nn.Module) else energy
        if copied(double(x), y.double()).dtype == torch.float64:
            return copied, double(x), y.double()
    except (RuntimeError, TypeError, ValueError):  # tensors that `double` does not reach
        pass
    return energy, x, y


def _rows(x: Any, size: int, scale: float | None, generator: torch.Generator) -> Any:
    """Rows of `x`, drawn with replacement; with a scale, random numbers in their place."""
    batch = batch_size(x)
    chosen = torch.randint(batch, (size,), generator=generator)

    def draw(t: Tensor) -> Tensor:
        if not t.ndim or t.shape[0] != batch:
            return t
        rows = t[chosen.to(t.device)]
        if scale is None or not t.is_floating_point():
            return rows
        return scale * torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(rows)

    return pytree.tree_map_only(Tensor, draw, x)


def _segments(y: Tensor, size: int, kind: int, generator: torch.Generator) -> list[Tensor]:
    """End points: far apart, close together, or apart in some coordinates only; and `t`."""
    shape = (2, size, *y.shape[1:])
    if kind < len(SCALES):
        first, second = torch.randn(shape, generator=generator, dtype=torch.float64) * SCALES[kind]
    else:
        first, second = torch.rand(shape, generator=generator, dtype=torch.float64)
    step = torch.randint(3, (size,), generator=generator)[(...,) + (None,) * (y.ndim - 1)]
    some = torch.rand(shape[1:], generator=generator) < 0.5
    near = first + 0.1 * (second - first)
    second = torch.where(step == 0, second, torch.where(step == 1, near, second.where(some, first)))
    t = torch.rand(size, generator=generator, dtype=torch.float64)
    return [part.to(y) for part in (first, second, t)]


def _inside(domain: Any, segments: list[Tensor]) -> list[Tensor]:
    if domain is None:
        return segments
    return [domain.project(segments[0]), domain.project(segments[1]), segments[2]]


def _violation(energy: EnergyLike, x: Any, segments: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of Jensen's inequality, per row: absolute, and relative to 1 + |f|; -inf where not finite."""
    y, y2, t = segments
    share = t[(...,) + (None,) * (y.ndim - 1)]
    f, f2 = energy(x, y.clone()), energy(x, y2.clone())
    above = energy(x, share * y + (1 - share) * y2) - (t * f + (1 - t) * f2)
    relative = above / (1 + f.abs() + f2.abs())
    lowest = torch.full_like(above, -math.inf)
    return torch.where(above.isfinite(), above, lowest), relative.where(above.isfinite(), lowest)


def _worst(
    energy: EnergyLike,
    x: Any,
    segments: list[Tensor],
    domain: Any,
    climbers: int,
    tolerance: float,
) -> Counterexample | None:
    """The worst of a batch of segments after a few steps uphill, checked alone."""
    _, relative = _violation(energy, x, segments)
    top = relative.detach().topk(climbers).indices
    size = len(relative)

    def rows(t: Tensor) -> Tensor:
        return t[top] if t.ndim and t.shape[0] == size else t

    x, segments = pytree.tree_map_only(Tensor, rows, x), [part[top].detach() for part in segments]
    found = _evaluated(energy, x, segments, tolerance)
    try:
        climbed = _evaluated(energy, x, _climb(energy, x, segments, domain), tolerance)
    except RuntimeError:  # no gradient: in-place operators, numpy
        return found
    both = [c for c in (found, climbed) if c is not None]
    return max(both, key=lambda c: c.violation, default=None)


def _climb(energy: EnergyLike, x: Any, segments: list[Tensor], domain: Any) -> list[Tensor]:
    """Move the end points along the normalised gradient of the violation, with shrinking steps."""
    y, y2, t = segments
    flat = (y - y2).flatten(1).norm(dim=1).clamp(min=1e-3)
    length = flat[(...,) + (None,) * (y.ndim - 1)]
    for k in range(CLIMB):
        y, y2 = y.detach().requires_grad_(), y2.detach().requires_grad_()
        _, relative = _violation(energy, x, [y, y2, t])
        if not relative.requires_grad:
            return segments
        total = relative[relative.isfinite()].sum()
        slopes = torch.autograd.grad(total, (y, y2), allow_unused=True)
        moved = []
        for point, slope in zip((y, y2), slopes, strict=True):
            slope = torch.zeros_like(point) if slope is None else slope.nan_to_num(0.0, 0.0, 0.0)
            size = slope.flatten(1).norm(dim=1).clamp(min=1e-300)[(...,) + (None,) * (y.ndim - 1)]
            moved.append(point.detach() + 0.3 * length / (1 + k) * slope / size)
        y, y2, t = _inside(domain, [*moved, t])
    return [y.detach(), y2.detach(), t]


def _evaluated(
    energy: EnergyLike, x: Any, segments: list[Tensor], tolerance: float
) -> Counterexample | None:
    """The worst row as a counterexample, if it is one when nothing else is in its batch."""
    _, relative = _violation(energy, x, segments)
    size, row = len(relative), int(relative.argmax())

    def alone(t: Tensor) -> Tensor:
        return t[row : row + 1] if t.ndim and t.shape[0] == size else t

    x, segments = pytree.tree_map_only(Tensor, alone, x), [alone(part) for part in segments]
    above, relative = (v.item() for v in _violation(energy, x, segments))
    if not relative > tolerance:
        return None
    y, y2, t = (part[0].detach() for part in segments)
    x = pytree.tree_map_only(Tensor, lambda t: t[0] if t.ndim else t, x)
    return Counterexample(x, y.double(), y2.double(), float(t), above)


def _short(y: Tensor) -> str:
    numbers = ", ".join(f"{v:.3g}" for v in y.flatten()[:4].tolist())
    return f"[{numbers}{', ...' if y.numel() > 4 else ''}]"


def batch_size(x: Any) -> int:
    """The number of examples in `x`; two where it does not tell."""
    sizes = (t.shape[0] for t in pytree.tree_leaves(x) if isinstance(t, Tensor) and t.ndim)
    return next(sizes, 2)
