"""The bundle entropy method: section 4.2 and supplement D of the paper, batched and certified."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from icnn.checks import check_count, check_number
from icnn.kernels.dual import Dual, Model, solve
from icnn.solvers.problem import Pieces, Problem, Record, Tangent


@dataclass(frozen=True)
class BundleEntropy:
    """Minimise the energy's cuts and the entropy together, and cut again where they touch.

    After k cuts `y` is the one minimiser of `max_i (c_i + G_i . y) - entropy * H(y)`, and the
    minimum is a lower bound on the optimum. For `entropy > 0`.

    Args:
        max_steps: Cuts at most, each a pass for a value and a gradient.
        tol: The gap at which an example is done, relative to `max(1, |value|)`.
    """

    max_steps: int = 100
    tol: float = 1e-4

    def __post_init__(self):
        check_count("max_steps", self.max_steps)
        check_number("tol", self.tol, 0.0)

    def check(self, problem: Problem) -> None:
        """Refuse what this solver is not for."""
        if not problem.entropy > 0:
            raise ValueError(
                "`entropy` must be positive for BundleEntropy, got 0: use icnn.Bundle() for the "
                "bare energy"
            )

    def solve(self, problem: Problem) -> Record:
        """Cuts at the minimiser of the cuts so far."""
        record, cuts = Record(problem, self.tol), Cuts(problem, self.max_steps)
        self.search(problem, record, cuts)
        record.pieces = cuts.pieces()
        return record

    def search(self, problem: Problem, record: Record, cuts: "Cuts") -> None:
        """The loop."""
        y = problem.start
        entropy = torch.full_like(record.value, problem.entropy)
        lower = record.lower
        tangent = problem.tangent(y)
        for step in range(self.max_steps):
            tangent = problem.tangent(y) if step else tangent
            record.look(y, tangent, lower, step)
            if not bool(record.active.any()):
                return
            cuts.add(y, tangent, record.active & tangent.finite)
            found = cuts.minimise(entropy, record.active)
            # D(lam) is a bound for any lam: the best one holds.
            lower = torch.maximum(lower, found.value)
            y = found.y.to(problem.start.dtype)
        value = problem.evaluate(y)
        record.look(y, Tangent(value, tangent.slope), lower, self.max_steps)


class Cuts:
    """The cuts of a batch, in slots. When all slots are taken, a cut that no longer counts goes.

    No more than n + 1 cuts can count at once, but for cuts that depend on each other.
    """

    def __init__(self, problem: Problem, max_steps: int):
        self.problem = problem
        start = problem.start
        batch, n = start.shape[0], math.prod(start.shape[1:])
        self.most = min(max_steps, n + 20)
        self.slopes = start.new_zeros(batch, 0, n, dtype=torch.float64)
        self.offsets = start.new_zeros(batch, 0, dtype=torch.float64)
        self.lam = torch.zeros_like(self.offsets)
        self.alive = torch.zeros_like(self.offsets, dtype=torch.bool)
        self.idle = torch.zeros_like(self.offsets)  # for how many steps its share has been zero
        self.near = start.flatten(start_dim=1).double()
        self.points = start.new_zeros(batch, 0, n if problem.gradient else 0)

    def add(self, y: Tensor, tangent: Tangent, where: Tensor) -> None:
        """`c + G . y'` with `G` the slope and `c = f(y) - G . y`, for the examples `where`."""
        if self.slopes.shape[1] < self.most:
            fields = (self.slopes, self.offsets, self.lam, self.alive, self.idle, self.points)
            self.slopes, self.offsets, self.lam, self.alive, self.idle, self.points = (
                torch.cat([old, old.new_zeros(old.shape[0], 1, *old.shape[2:])], dim=1)
                for old in fields
            )
            slot = torch.full_like(where, self.slopes.shape[1] - 1, dtype=torch.int64)
        else:
            # The one that has been idle for longest; if none is, the one with the least share.
            slot = (self.idle - self.lam).masked_fill(~self.alive, torch.inf).argmax(dim=1)
        slope = torch.where(where[:, None], tangent.slope, torch.zeros_like(tangent.slope))
        offset = torch.where(where, self.problem.offset(y, tangent), 0.0)
        place = torch.zeros_like(self.alive).scatter(1, slot[:, None], True) & where[:, None]
        self.slopes = torch.where(place[:, :, None], slope[:, None, :], self.slopes)
        self.offsets = torch.where(place, offset[:, None], self.offsets)
        self.lam = self.lam.masked_fill(place, 0)
        self.idle = self.idle.masked_fill(place, 0)
        self.alive = self.alive | place
        flat = y.to(self.problem.start.dtype).flatten(start_dim=1)
        self.near = torch.where(where[:, None], flat.double(), self.near)
        if self.problem.gradient:
            self.points = torch.where(place[:, :, None], flat[:, None, :], self.points)
        # Examples without a cut have one that is flat: their answers are not looked at.
        self.alive[:, 0] = True
        total = self.lam.sum(dim=1, keepdim=True)
        fresh = place.to(self.lam.dtype)
        fresh[:, 0] = torch.where(place.any(dim=1), fresh[:, 0], 1.0)
        self.lam = torch.where(total > 0, self.lam / total.clamp(min=1e-300), fresh)

    def pieces(self) -> Pieces | None:
        """The cuts that share in the minimiser found last."""
        if not self.problem.gradient:
            return None
        slope = (self.lam[:, None, :] @ self.slopes).squeeze(1)
        return Pieces(self.points, self.lam, slope, self.slopes)

    def model(self, y: Tensor) -> Tensor:
        """The largest cut at `y`, in float64."""
        cuts = self.offsets + (self.slopes @ y.flatten(start_dim=1)[:, :, None]).squeeze(2)
        return cuts.masked_fill(~self.alive, -torch.inf).amax(dim=1)

    def minimise(self, entropy: Tensor, active: Tensor, tilt: Tensor | None = None) -> Dual:
        """The minimiser of the model; shares start from those of the step before.

        Those of an example that is done stay as they were when its answer was found.
        """
        # All cuts from the last point, and the highest of them there at zero.
        offsets = self.offsets + (self.slopes @ self.near[:, :, None]).squeeze(2)
        level = offsets.masked_fill(~self.alive, -torch.inf).amax(dim=1)
        domain, shape = self.problem.domain, self.problem.start.shape
        offsets = torch.where(self.alive, offsets - level[:, None], 0.0)
        model = Model(domain, self.slopes, offsets, self.alive, entropy, shape, tilt, self.near)
        found = solve(model, self.lam)
        found = found._replace(value=found.value + level)
        self.lam = torch.where(active[:, None], found.lam, self.lam)
        self.idle = torch.where(self.lam > 0, 0.0, self.idle + 1)
        return found
