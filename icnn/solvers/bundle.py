"""The bundle method for the bare energy, held back by the entropy of the domain."""

from dataclasses import dataclass

import torch
from torch import Tensor

from icnn.checks import check_choice, check_count, check_number
from icnn.kernels.choice import KERNELS
from icnn.solvers.bundle_entropy import BundleEntropy, Cuts
from icnn.solvers.cutting_planes import cutting_planes
from icnn.solvers.domains import Box, Simplex, steepness
from icnn.solvers.problem import Problem, Record, Tangent, rows

TAKEN, GREAT = 0.1, 0.5  # shares of the promised descent that move the centre, and loosen the rein
HELD = 0.5  # a promise of less of the gap loosens it too


@dataclass(frozen=True)
class Bundle:
    """Minimise the energy's cuts near the best point so far, and cut again where that leads.

    Cuts alone jump from corner to corner, so that the next point stays near a centre `v`, the best
    point so far: with B the Bregman divergence of the domain's `-H`,

        y = argmin_y  max_i (c_i + G_i . y) + w B(y, v).

    That is a bundle entropy step with the tilt `w grad H(v)`, and the same batched dual solves it.
    The centre moves where the energy falls by a part of what the cuts promised. `w` falls where it
    does so well, or where steps get short, and rises where cuts turn out far from the energy. The
    answer is the best point seen; its bound is that of the bare cuts. For `entropy == 0`.

    In an `icnn.Sum` with an `icnn.Quadratic` of positive weights, on a box, the quadratic takes the
    place of `w B(y, v)`, and only the rest of the energy is cut: few cuts are enough then. The
    answer is the minimiser of the cuts, as that of `icnn.BundleEntropy`.

    Args:
        max_steps: Cuts at most, each a pass for a value and a gradient.
        tol: The gap at which an example is done, relative to `max(1, |value|)`. In float32 rounding
            may end a search before 1e-6: 1e-4 is a better choice there.
        master: `"proximal"`, or `"lp"` for the method of the paper's supplement C to the letter:
            cuts alone, one linear program for each example and step, with HiGHS.
        kernel: What computes the dual of a step: see `icnn.BundleEntropy`.
    """

    max_steps: int = 200
    tol: float = 1e-6
    master: str = "proximal"
    kernel: str = "auto"

    def __post_init__(self):
        check_count("max_steps", self.max_steps)
        check_number("tol", self.tol, 0.0)
        check_choice("master", self.master, ["proximal", "lp"])
        check_choice("kernel", self.kernel, KERNELS)

    def check(self, problem: Problem) -> None:
        """Refuse what this solver is not for."""
        if problem.entropy:
            raise ValueError(
                f"`entropy` must be 0 for Bundle, got {problem.entropy:g}: pass entropy=0, or use "
                "icnn.BundleEntropy()"
            )

    def solve(self, problem: Problem) -> Record:
        """Cuts near a centre, or cuts alone."""
        if problem.entropy:  # a quadratic, which holds them back
            return BundleEntropy(self.max_steps, self.tol, self.kernel).solve(problem)
        if self.master == "lp":
            return cutting_planes(problem, self.max_steps, self.tol)
        record = Record(problem, self.tol, keep_best=True)
        cuts = Cuts(problem, self.max_steps, self.kernel)
        self.search(problem, record, cuts)
        record.pieces = cuts.pieces()
        return record

    def search(self, problem: Problem, record: Record, cuts: Cuts) -> None:
        """The loop."""
        y, lower = problem.start, record.lower
        tangent = problem.tangent(y)
        center = Center(problem, tangent)
        for step in range(self.max_steps):
            if step:
                tangent = problem.tangent(y)
                center.judge(y, tangent, center.level - lower)
            record.look(y, tangent, lower, step)
            if not bool(record.active.any()):
                return
            cuts.add(y, tangent, record.active & tangent.finite)
            tilt = center.weight[:, None] * center.steepness
            found = cuts.minimise(center.weight, record.active, tilt)
            # Weak duality: the same mixture of cuts bounds the bare energy.
            slope = cuts.mixture(found.lam)
            offset = (found.lam * cuts.offsets).sum(dim=1)
            lower = torch.maximum(lower, problem.bound(slope, offset))
            y = found.y.to(problem.start.dtype)
            # All cuts that share in it are equally high there, and the others below.
            level = offset + (slope * found.y.flatten(start_dim=1)).sum(dim=1)
            center.ahead = (slope + tilt) / center.weight[:, None]
            center.promised = (center.level - level).clamp(min=0)
        record.look(y, Tangent(problem.evaluate(y), tangent.slope), lower, self.max_steps)


class Center:
    """The point that each example stays near, and how firmly: `weight`."""

    def __init__(self, problem: Problem, tangent: Tangent):
        self.problem, self.steep = problem, isinstance(problem.domain, Box | Simplex)
        self.y = problem.start.double()
        self.level, self.promised = tangent.value, torch.zeros_like(tangent.value)
        # The slope of `H` there. Where a step leads, it is the one that the step balances: `ahead`.
        self.ahead = self.steepness = steepness(problem.domain, self.y)
        # Half of how far the first cut falls over the domain, for each of its ways to fall.
        slope = tangent.slope.nan_to_num().reshape(self.y.shape)
        ends = (problem.domain.minimise(s, 0.0) for s in (slope, -slope))
        low, high = ((slope * end).flatten(start_dim=1).sum(dim=1) for end in ends)
        ways = 1 + tangent.slope.shape[1] ** 0.5
        self.weight = ((high - low) / (2 * ways)).clamp(min=1e-12)
        self.most = 10 * self.weight
        self.misses = torch.zeros_like(self.weight)

    def judge(self, y: Tensor, tangent: Tangent, gap: Tensor) -> None:
        """Move to `y` where that is worth it, and choose the next weight; `gap` is that before."""
        y = y.double()
        fall = self.level - tangent.value
        taken = tangent.finite & (fall >= TAKEN * self.promised)
        self.misses = torch.where(taken, 0.0, self.misses + 1)
        # How far below the energy the new cut is at the centre.
        away = (tangent.slope * (self.y - y).flatten(start_dim=1)).sum(dim=1)
        wrong = (fall - away > self.promised) & (self.misses > 1)
        great = fall >= GREAT * self.promised
        weight = torch.where(great, self.weight / 4, torch.where(wrong, 1.5, 1.0) * self.weight)
        # If a step promises little of the gap, the rein keeps the bound of the bare cuts low.
        held = self.promised < HELD * gap
        weight = torch.where(held, torch.minimum(weight, self.weight / 2), weight)
        self.weight = torch.minimum(weight, self.most).clamp(min=1e-12)
        self.y = torch.where(rows(taken, y), y, self.y)
        self.level = torch.where(taken, tangent.value, self.level)
        # Of an `H` that is not steep at the edge, `ahead` may be the slope of a point far beyond,
        # and the search would stay in a corner.
        ahead = self.ahead if self.steep else steepness(self.problem.domain, y)
        self.steepness = torch.where(taken[:, None], ahead, self.steepness)
