"""Projected gradient steps: the paper's baseline for inference, batched and certified."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from icnn.checks import check_choice, check_count, check_number
from icnn.kernels.dual import Model, solve
from icnn.solvers.domains import Box, total
from icnn.solvers.problem import Problem, Record, Tangent, rows

MARGIN = {torch.float64: 1e-12, torch.float32: 1e-6}  # how far inside points stay
KEPT = 30  # cuts for the bound: the last ones
OFTEN = 10  # steps from one full bound to the next, where a tolerance asks for them
STAGES = 6  # of the search for the best mixture of cuts without entropy
SQUARES = 0.999  # Adam's memory of squared gradients
MEMORY, DESCENT, TRIES = 10, 1e-4, 5  # the line search of Birgin, Martinez and Raydan
SHORTEST, LONGEST = 1e-10, 1e10  # spectral steps
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class ProjectedGradient:
    """Gradient steps, each projected onto the domain; any entropy, also none.

    Steps act on `y` itself, in the units of its domain, as in the paper: a box that is twice as
    wide wants a step that is four times as long. Gradient steps do not go down every time, so that
    `y` is the best of the points that were evaluated and not the last. The bound is the best
    mixture of the last 30 cuts, or a cheaper one of a single step.

    With `tol=0` all examples take all steps, and the loop never waits for the device. An example
    stops early only where its gap is a matter of rounding.

    Args:
        max_steps: Passes for a value and a gradient. Each is a step, also one that a line search
            then takes back: there are no other passes, but for one value of the last point.
        step_size: The length of a step, in multiples of the gradient ("adam": of each coordinate).
            "spectral" measures its own, but for the first and after a line search that failed.
        momentum: The share of the last move that is added to a step ("adam": the memory of the
            mean gradient, often 0.9; "spectral" has none).
        rule: "momentum", Polyak's heavy ball; "spectral", the step of Barzilai and Borwein with
            the non-monotone line search of Birgin, Martinez and Raydan; or "adam".
        decay: Step k (from 0) has length `step_size / (1 + k)**decay`; kinks want 0.5 to 1.
        tol: The gap at which an example is done, relative to `max(1, |value|)`.
        unrolled: Through how many of the last steps gradients go; by default through all.
    """

    max_steps: int = 30
    step_size: float = 0.1
    momentum: float = 0.3
    rule: str = "momentum"
    decay: float = 0.0
    tol: float = 0.0
    unrolled: int | None = None

    def __post_init__(self):
        check_count("max_steps", self.max_steps)
        if not check_number("step_size", self.step_size) > 0:
            raise ValueError(f"`step_size` must be positive, got {self.step_size!r}")
        if not 0 <= check_number("momentum", self.momentum) < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum!r}")
        check_choice("rule", self.rule, list(RULES))
        check_number("decay", self.decay, 0.0)
        check_number("tol", self.tol, 0.0)
        if self.unrolled is not None:
            check_count("unrolled", self.unrolled)

    def check(self, problem: Problem) -> None:
        """Every problem will do."""

    def solve(self, problem: Problem) -> Record:
        """Steps, then the best bound that their cuts give."""
        record, cuts = Record(problem, self.tol), Cuts(problem, min(self.max_steps, KEPT))
        live = problem.gradient == "unroll"
        with torch.no_grad():
            best, last = self.descend(problem, record, cuts)
        if not (self.tol and not bool(record.active.any())):
            lower = cuts.bound(record, best.objective.detach())
            record.look(best.y, best.tangent, lower, self.max_steps, fresh=False)
        if live:
            with torch.enable_grad():
                # The same points, with the steps that led there; or where the best one came before
                # the steps that are unrolled, with the steps that led to the last.
                near = best.y.detach() + (last - last.detach())
                record.y = torch.where(rows(best.live, near), best.y, near)
        return record

    def descend(self, problem: Problem, record: Record, cuts: "Cuts") -> "tuple[Best, Tensor]":
        """The loop. Without `tol` it is free of synchronisation: a CUDA graph can hold it."""
        live = problem.gradient == "unroll"
        first = 0 if self.unrolled is None else max(0, self.max_steps - self.unrolled)
        with torch.set_grad_enabled(live):
            region = Region(problem)
            y = region.inside(problem.start.double())
        rule, best = RULES[self.rule](region, self.momentum), Best(problem)
        settled = torch.zeros_like(record.active)
        for step in range(self.max_steps):
            if live and step == first:
                torch.set_grad_enabled(True)  # until the end
                y = y if y.requires_grad and not step else y.detach().clone().requires_grad_()
                if step:
                    # Who is done goes on, for the gradient only.
                    settled = ~record.active & best.objective.isfinite()
                    best.live = torch.zeros_like(best.live)
            point = y.to(problem.start.dtype)
            tangent = problem.tangent(point)
            if not step and not problem.live:
                live = False  # nothing to go back to
                torch.set_grad_enabled(False)
                y, point, tangent = y.detach(), point.detach(), tangent.plain
            active, objective = self.note(best, record, cuts, point, tangent, step)
            rate = self.step_size / (1 + step) ** self.decay
            moved = rule.step(y, objective, region.gradient(y, tangent), rate)
            y = torch.where(rows(active | settled, y), moved, y)
            if step + 1 < self.max_steps:  # the last step is looked at when its bound is known
                with torch.no_grad():
                    full = self.tol and (step + 1) % OFTEN == 0
                    lower = cuts.bound(record, best.objective) if full else record.lower
                    record.look(best.y, best.tangent, lower, step + 1, fresh=False)
                if self.tol and not bool((record.active | settled).any()):
                    return best, y.to(problem.start.dtype)
        point = y.to(problem.start.dtype)
        # No cut is made here: the slope tells only whether the last one was finite.
        best.see(point, Tangent(problem.evaluate(point), best.tangent.slope), record.active)
        return best, point

    def note(
        self, best: "Best", record: Record, cuts: "Cuts", y: Tensor, tangent: Tangent, step: int
    ) -> tuple[Tensor, Tensor]:
        """What a point adds to the record; who goes on from it, and the objective there."""
        plain = tangent.plain
        with torch.no_grad():
            if not step:
                record.look(y, plain, record.lower, 0)
            active = record.active & plain.finite
            lower = cuts.add(y, plain, step, active)
            record.lower = torch.where(active, torch.fmax(record.lower, lower), record.lower)
            record.rounding = torch.where(
                active, torch.fmax(record.rounding, rounding(y, plain)), record.rounding
            )
        best.see(y, plain, active)
        return active, tangent.value - best.problem.bend(y)


class Region:
    """The domain as gradient steps see it: points inside of it, and gradients there."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.center = problem.domain.center(problem.start.double())
        self.margin = MARGIN.get(problem.start.dtype, 1e-6) if problem.entropy else 0.0

    def inside(self, y: Tensor) -> Tensor:
        """The nearest point; with entropy a little inside, where the slope of `H` is finite."""
        # Twice: where the first point is far away, the nearest one has lost digits.
        y = self.problem.domain.project(self.problem.domain.project(y))
        if not self.margin:
            return y
        mixed = (1 - self.margin) * y + self.margin * self.center
        # Far from zero the margin is below the spacing of the numbers.
        mixed = torch.where(mixed == y, y + (torch.nextafter(y, self.center) - y).detach(), mixed)
        free = self.problem.free
        return mixed if free is None else torch.where(free, mixed, y)

    def gradient(self, y: Tensor, tangent: Tangent) -> Tensor:
        """The gradient of the energy minus that of `entropy * H`."""
        slope = tangent.slope.reshape(y.shape)
        if not self.problem.entropy:
            return slope
        live = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            y = y if live else y.detach().clone().requires_grad_()
            (bend,) = torch.autograd.grad(self.problem.bend(y).sum(), y, create_graph=live)
        # Infinite only where there is no room to move, as for coordinates that are given.
        return slope - bend.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class Best:
    """The best point of each example so far."""

    def __init__(self, problem: Problem):
        self.problem, self.y = problem, problem.start
        nothing = problem.start.new_full(problem.start.shape[:1], torch.inf, dtype=torch.float64)
        slope = torch.zeros_like(problem.start, dtype=torch.float64).flatten(start_dim=1)
        self.objective, self.tangent = nothing, Tangent(nothing, slope)
        self.live = torch.ones_like(nothing, dtype=torch.bool)  # whether its steps are unrolled

    def see(self, y: Tensor, tangent: Tangent, active: Tensor) -> None:
        """Keep the point where it is better, and what is not finite wherever it is met."""
        with torch.no_grad():
            objective = tangent.value - self.problem.bend(y)
            better = active & (objective < self.objective)
            self.objective = torch.where(better, objective, self.objective)
            value, slope = self.tangent
            self.tangent = Tangent(
                torch.where(better | ~tangent.value.isfinite(), tangent.value, value),
                torch.where((better | ~tangent.finite)[:, None], tangent.slope, slope),
            )
        self.y, self.live = torch.where(rows(better, y), y, self.y), self.live | better


def rounding(y: Tensor, tangent: Tangent) -> Tensor:
    """What rounding does to a cut: see `Record`, which knows only the best point."""
    size = tangent.value.abs() + (tangent.slope * y.flatten(start_dim=1)).abs().sum(dim=1)
    return 32 * torch.finfo(y.dtype).eps * size


class Cuts:
    """The last cuts of each example, and the mean of all of them."""

    def __init__(self, problem: Problem, most: int):
        self.problem = problem
        batch, n = problem.start.shape[0], math.prod(problem.start.shape[1:])
        self.slopes = problem.start.new_zeros(batch, most, n, dtype=torch.float64)
        self.offsets = self.slopes.new_zeros(batch, most)
        self.alive = torch.zeros_like(self.offsets, dtype=torch.bool)
        self.sum = Tangent(self.slopes.new_zeros(batch), self.slopes.new_zeros(batch, n))
        self.count = self.slopes.new_zeros(batch)

    def add(self, y: Tensor, tangent: Tangent, step: int, where: Tensor) -> Tensor:
        """A cut in the place of the oldest; the better bound of the cut and of the mean."""
        slope = torch.where(where[:, None], tangent.slope, 0.0)
        offset = torch.where(where, self.problem.offset(y, tangent), 0.0)
        slot = step % self.slopes.shape[1]
        for old, new in ((self.slopes, slope), (self.offsets, offset), (self.alive, where)):
            old[:, slot] = torch.where(rows(where, new), new, old[:, slot])
        self.sum = Tangent(self.sum.value + offset, self.sum.slope + slope)
        self.count = self.count + where
        count = self.count.clamp(min=1)
        mean = self.problem.bound(self.sum.slope / count[:, None], self.sum.value / count)
        return torch.fmax(self.problem.bound(slope, offset), mean)

    def bound(self, record: Record, objective: Tensor) -> Tensor:
        """Weak duality: any mixture of cuts bounds the optimum, and the dual finds a good one.

        Without entropy the dual is solved with a little: `e H` changes the bound by at most
        `e H(center)`, here a tenth of the gap, and the mixture found bounds the bare energy as any
        other does. Where that helps, again with less.
        """
        problem, lower, active = self.problem, record.lower, record.active
        share = self.alive.double() / self.alive.sum(dim=1, keepdim=True).clamp(min=1)
        center = problem.domain.center(problem.start.double())
        most = problem.domain.entropy(center).clamp(min=TINY)
        for _ in range(1 if problem.entropy else STAGES):
            gap = torch.maximum(objective - lower, record.rounding).clamp(min=TINY)
            entropy = 0.1 * gap / most
            if problem.entropy:
                entropy = torch.full_like(gap, problem.entropy)
            # Who is done has one cut, and so nothing to solve.
            alive = self.alive & active[:, None]
            alive[:, 0] |= ~alive.any(dim=1)
            one = torch.zeros_like(share)
            one[:, 0] = 1
            share = torch.where(active[:, None] & (share.sum(dim=1, keepdim=True) > 0), share, one)
            shape = problem.start.shape
            model = Model(problem.domain, self.slopes, self.offsets, alive, entropy, shape)
            share = torch.where(active[:, None], solve(model, share, active).lam, share)
            slope = (share[:, None, :] @ self.slopes).squeeze(1)
            found = problem.bound(slope, (share * self.offsets).sum(dim=1))
            lower = torch.where(active, torch.fmax(lower, found), lower)
            active = active & (objective - lower < 0.9 * gap)
        return lower


class Rule(Protocol):
    """Where to go next. State is per example: what else is in the batch does not matter."""

    def __init__(self, region: Region, momentum: float): ...

    def step(self, y: Tensor, value: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The point after `y`, at which the objective and its gradient are given."""
        ...


class HeavyBall:
    """Polyak's: `y' = P(y - rate * gradient + momentum * (y - y_before))`."""

    def __init__(self, region: Region, momentum: float):
        self.region, self.momentum = region, momentum
        self.before: Tensor | None = None

    def step(self, y: Tensor, value: Tensor, gradient: Tensor, rate: float) -> Tensor:
        before = y if self.before is None else self.before
        self.before = y
        return self.region.inside(y - rate * gradient + self.momentum * (y - before))


class Adam:
    """A step by the mean gradient over the root of its mean square.

    In a box each coordinate has its own mean square. Elsewhere an example has one for all of them:
    steps of different lengths in different coordinates, then a projection that mixes them, would
    come to rest in the wrong place.
    """

    def __init__(self, region: Region, momentum: float):
        self.region, self.momentum, self.count = region, momentum, 0
        self.mean = self.square = torch.zeros_like(region.center)

    def step(self, y: Tensor, value: Tensor, gradient: Tensor, rate: float) -> Tensor:
        self.count += 1
        self.mean = self.momentum * self.mean + (1 - self.momentum) * gradient
        square = gradient**2
        if not isinstance(self.region.problem.domain, Box):
            square = square.mean(dim=tuple(range(1, y.ndim)), keepdim=True)
        self.square = SQUARES * self.square + (1 - SQUARES) * square
        # Both started from zero.
        mean = self.mean / (1 - self.momentum**self.count)
        square = self.square / (1 - SQUARES**self.count)
        # The root of zero has no slope.
        return self.region.inside(y - rate * mean / (square.clamp(min=TINY).sqrt() + 1e-8))


class Search(NamedTuple):
    """Where the line search of each example stands: `origin + length * direction`."""

    origin: Tensor
    value: Tensor  # (B,), at the origin, as the gradient
    gradient: Tensor
    direction: Tensor
    along: Tensor  # (B,): gradient . direction
    length: Tensor  # (B,)
    tries: Tensor  # (B,)
    recent: Tensor  # (B, MEMORY): values at the last origins


class Spectral:
    """The spectral projected gradient method of Birgin, Martinez and Raydan (2000).

    The direction is `P(y - a * gradient) - y`, with `a = s.s / s.t` for the last move `s` and the
    change `t` of the gradient. A point along it is taken if it is below the worst of the last 10
    values, by a little; else the next pass tries a shorter move. So every pass tries one point for
    each example, some of them a new direction and some an old one.

    At a kink no length may be short enough. After 5 tries the point is taken as it is, and the
    next direction is that of a plain step.
    """

    def __init__(self, region: Region, momentum: float):
        self.region = region
        self.search: Search | None = None

    def aim(
        self, y: Tensor, value: Tensor, gradient: Tensor, step: Tensor | float, recent: Tensor
    ) -> Search:
        """A new direction from a point that was taken."""
        direction = self.region.inside(y - step * gradient) - y
        along, one = total(gradient * direction), torch.ones_like(value)
        return Search(y, value, gradient, direction, along, one, torch.zeros_like(value), recent)

    def step(self, y: Tensor, value: Tensor, gradient: Tensor, rate: float) -> Tensor:
        old = self.search
        if old is None:
            new = self.aim(y, value, gradient, rate, value[:, None].expand(-1, MEMORY))
        else:
            noise = torch.finfo(self.region.problem.start.dtype).eps * value.abs()
            allowed = old.recent.amax(dim=1) + DESCENT * old.length * old.along + noise
            lower = value <= allowed
            taken = lower | (old.tries >= TRIES)

            move, turn = y - old.origin, gradient - old.gradient
            bend = total(move * turn)
            length = total(move**2) / torch.where(bend > 0, bend, 1.0)
            spectral = torch.where(bend > 0, length, LONGEST)
            spectral = torch.where(lower, spectral.clamp(SHORTEST, LONGEST), rate)
            recent = torch.cat([old.recent[:, 1:], value[:, None]], dim=1)
            aimed = self.aim(y, value, gradient, rows(spectral, y), recent)

            # The minimum of the parabola through both values and the first slope.
            rise = value - old.value - old.length * old.along
            middle = -old.along * old.length**2 / (2 * torch.where(rise > 0, rise, 1.0))
            middle = torch.where(rise > 0, middle, torch.inf)
            shorter = torch.minimum(torch.maximum(middle, 0.1 * old.length), 0.5 * old.length)
            held = old._replace(length=shorter, tries=old.tries + 1)
            new = Search(
                *(torch.where(rows(taken, a), a, b) for a, b in zip(aimed, held, strict=True))
            )
        self.search = new
        return new.origin + rows(new.length, y) * new.direction


RULES: dict[str, type[Rule]] = {"momentum": HeavyBall, "spectral": Spectral, "adam": Adam}
