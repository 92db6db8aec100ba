"""One batch of problems as solvers see it, and the record of a search."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icnn.energies.energy import EnergyAt, at
from icnn.solvers.bowl import Bowl, bent
from icnn.solvers.domains import Domain
from icnn.solvers.solution import Status

RUNNING = -1

Both = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Values and gradients at some points."""


class Tangent(NamedTuple):
    """The energy and its slope at a point, in float64: `value + slope . (y' - y) <= f(y')`."""

    value: Tensor  # (B,)
    slope: Tensor  # (B, n)

    @property
    def finite(self) -> Tensor:
        """Where both are numbers."""
        return self.value.isfinite() & self.slope.isfinite().all(dim=1)

    @property
    def plain(self) -> "Tangent":
        """Without a graph."""
        return Tangent(self.value.detach(), self.slope.detach())


class Pieces(NamedTuple):
    """The cuts of an answer: where they touch the energy, their shares, and their mixture."""

    points: Tensor  # (B, k, n)
    lam: Tensor  # (B, k)
    slope: Tensor  # (B, n): the answer minimises slope . y - entropy * H(y)
    slopes: Tensor  # (B, k, n)


@dataclass(frozen=True)
class Problem:
    """Minimise `energy(y) - entropy * H(y)` over a domain, for each example of a batch.

    Args:
        energy: Maps `y` to `(B,)`.
        domain: With the coordinates that are given at their values.
        entropy: The weight of `H`.
        start: A point of the domain, `(B, *y_shape)`; a search may write over it.
        free: Which coordinates are not given, `(B, *y_shape)`; `None` means all.
        source: What `energy` was made from, for solvers that look inside.
        x: Where `energy` stands.
        gradient: How the answer is to have gradients; `None` where it has none. Solvers with cuts
            keep their points then, and gradient steps that are unrolled keep their graph.
        noise: The states of the random generators that `energy` was made with, where known.
    """

    energy: EnergyAt
    domain: Domain
    entropy: float
    start: Tensor
    free: Tensor | None = None
    source: Any = None
    x: Any = None
    gradient: str | None = None
    noise: tuple[Tensor, ...] | None = None

    @property
    def live(self) -> bool:
        """Whether there is anything to carry gradients to, as far as is known."""
        return getattr(self.energy, "live", None) is not False or self.start.requires_grad

    def again(self, x: Any) -> tuple[EnergyAt, Domain]:
        """The energy at another `x`, with the dropout masks of this one, and the domain there."""
        device = self.start.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if self.noise is not None:
                torch.random.set_rng_state(self.noise[0])
                for state in self.noise[1:]:
                    torch.cuda.set_rng_state(state, device)
            f = at(self.source, x)
        found = bent(self.domain.box, f, self.start) if isinstance(self.domain, Bowl) else None
        return found or (f, self.domain)

    def evaluate(self, y: Tensor) -> Tensor:
        """The energy, without a gradient."""
        with torch.no_grad():
            return self.energy(y.to(self.start.dtype)).double().contiguous()

    def tangent(self, y: Tensor) -> Tangent:
        """The energy and its slope, by one pass forward and one back; with a graph if `y` has."""
        live = y.requires_grad
        if not live and self.own is not None:
            value, slope = self.passed(y)
            return Tangent(value, slope.double())
        with torch.inference_mode(False), torch.enable_grad():
            y = y.to(self.start.dtype) if live else y.to(self.start.dtype).clone().requires_grad_()
            value = self.energy(y)
            if not value.requires_grad:
                raise ValueError("`energy` must depend on y, got values without a gradient in y")
            (slope,) = torch.autograd.grad(value.sum(), y, allow_unused=True, create_graph=live)
            if slope is None:
                raise ValueError("`energy` must depend on y, got values without a gradient in y")
            if self.free is not None:
                slope = torch.where(self.free, slope, torch.zeros_like(slope))
            found = Tangent(value.double(), slope.flatten(start_dim=1).double())
        return found if live else found.plain

    @property
    def own(self) -> Both | None:
        """What gives values and gradients without PyTorch's graph, where the energy has it.

        The first pass has a graph where gradients are wanted: it tells whether there are any.
        """
        watching = self.gradient is not None and getattr(self.energy, "live", True) is None
        return None if watching else getattr(self.energy, "value_and_gradient", None)

    def passed(self, y: Tensor, own: Both | None = None) -> tuple[Tensor, Tensor]:
        """The same without a graph: values in float64, slopes as they come.

        Who makes many passes asks for `own` once.
        """
        own = self.own if own is None else own
        if own is None:
            value, slope = self.tangent(y)
            return value.contiguous(), slope.to(y.dtype).contiguous()
        with torch.no_grad():
            value, slope = own(y.to(self.start.dtype))
            slope = slope if self.free is None else torch.where(self.free, slope, 0.0)
        slope = slope.to(self.start.dtype).flatten(start_dim=1)
        return value.double().contiguous(), slope.contiguous()

    def offset(self, y: Tensor, tangent: Tangent) -> Tensor:
        """`c` of the cut `c + slope . y' <= f(y')` that touches at `y`.

        It is lowered by half of the rounding that certificates are promised up to: values and
        slopes of the energy's dtype are not exact, and a cut must not be above the energy.
        """
        product = tangent.slope * y.to(self.start.dtype).flatten(start_dim=1).double()
        eps = torch.finfo(self.start.dtype).eps
        rounding = 16 * eps * (tangent.value.abs() + product.abs().sum(dim=1))
        return tangent.value - product.sum(dim=1) - rounding

    def bend(self, y: Tensor) -> Tensor:
        """`entropy * H(y)`."""
        if not self.entropy:
            return torch.zeros(y.shape[0], dtype=torch.float64, device=y.device)
        return self.entropy * self.domain.entropy(y.double())

    def bound(self, slope: Tensor, offset: Tensor) -> Tensor:
        """Weak duality: `offset + slope . y <= f(y)` for all y bounds the optimum by its minimum.

        `(B, n), (B,) -> (B,)`
        """
        y = self.domain.minimise(slope.reshape(self.start.shape), self.entropy)
        level = (slope * y.flatten(start_dim=1)).sum(dim=1)
        return offset + level - self.bend(y)


class Record:
    """Where each example of a search stands. An example that is done does not change any more.

    Args:
        problem: What is searched.
        tol: The gap at which an example is done, relative to `max(1, |value|)`.
        keep_best: Whether the answer is the best point seen, or the last.
    """

    def __init__(self, problem: Problem, tol: float, keep_best: bool = False):
        self.problem, self.tol, self.keep_best = problem, tol, keep_best
        batch = problem.start.shape[0]
        nothing = problem.start.new_full((batch,), torch.nan, dtype=torch.float64)
        self.y = problem.start
        self.value, self.lower = nothing, torch.full_like(nothing, -torch.inf)
        self.steps = torch.zeros(batch, dtype=torch.int64, device=nothing.device)
        self.status = torch.full_like(self.steps, RUNNING)
        self.best, self.best_y = torch.full_like(nothing, torch.inf), problem.start
        self.rounding = torch.zeros_like(nothing)
        self.last: Tensor | None = None
        self.gaps: list[Tensor] | Tensor = []  # of all steps
        self.pieces: Pieces | None = None
        free = problem.free
        self.given = (
            torch.zeros_like(self.status, dtype=torch.bool)
            if free is None
            else ~free.flatten(start_dim=1).any(dim=1)
        )

    @property
    def active(self) -> Tensor:
        """Which examples go on."""
        return self.status == RUNNING

    def look(
        self, y: Tensor, tangent: Tangent, lower: Tensor, step: int, fresh: bool = True
    ) -> None:
        """Take note of a point `y`, reached after `step` cuts, and of a bound; stop who is done.

        `converged` means `gap <= tol * max(1, |value|)`. The gap may be negative by what rounding
        does to the values and slopes that made the bound; beyond that, the energy is not convex.
        """
        active, problem = self.active, self.problem
        y = y.to(problem.start.dtype)
        # A point that should be new and is not has the same tangent: no more is to be learned.
        again = torch.zeros_like(active)
        if fresh and step > 1 and self.last is not None:
            again = (y == self.last).flatten(start_dim=1).all(dim=1)
        self.last = y
        value = tangent.value - problem.bend(y)
        lower = torch.where(self.given, value, lower)
        size = value.abs() + (tangent.slope * y.flatten(start_dim=1)).abs().sum(dim=1)
        rounding = 32 * torch.finfo(y.dtype).eps * size
        self.rounding = torch.where(active, torch.maximum(self.rounding, rounding), self.rounding)
        finite = tangent.finite
        lower = torch.where(finite, torch.maximum(self.lower, lower), self.lower)

        better = active & finite & (value < self.best)
        self.best = torch.where(better, value, self.best)
        self.best_y = torch.where(rows(better, y), y, self.best_y)
        # A point of any step below a bound of any step is a proof against convexity.
        broken = active & finite & (self.best < lower - self.rounding)
        back = torch.ones_like(broken) if self.keep_best else broken | again
        value = torch.where(back & finite, self.best, value)
        y = torch.where(rows(back, y), self.best_y, y)

        gap = value - lower
        tol = self.tol * value.abs().clamp(min=1)
        self.y = torch.where(rows(active & finite, y), y, self.y)
        self.value = torch.where(active, value, self.value)
        self.lower = torch.where(active, lower, self.lower)
        self.steps = torch.where(active, step, self.steps)
        for where, status in (
            ((gap <= rounding) | again, Status.STALLED),
            (gap <= tol, Status.CONVERGED),
            (broken, Status.NONCONVEX),
            (~finite, Status.NONFINITE),
        ):
            self.status = torch.where(active & where, int(status), self.status)
        if step and isinstance(self.gaps, list):
            self.gaps.append(self.gap)

    @property
    def gap(self) -> Tensor:
        """`value - lower`, infinite where there is no value."""
        return (self.value - self.lower).nan_to_num(nan=torch.inf)


def rows(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of examples that broadcasts to `like`."""
    return mask.reshape(-1, *(1 for _ in like.shape[1:]))
