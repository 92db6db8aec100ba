"""The bundle entropy method: section 4.2 and supplement D of the paper, batched and certified."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from icnn.checks import check_choice, check_count, check_number
from icnn.kernels.choice import KERNELS, chosen
from icnn.kernels.dual import MOST_CUTS, Dual, Model, solve
from icnn.solvers.problem import Pieces, Problem, Record, Tangent, rows

ROOM = 32  # cuts that there is room for at first
INEXACT = 0.1  # of the gap that is left: how fine the dual of a step is solved


@dataclass(frozen=True)
class BundleEntropy:
    """Minimise the energy's cuts and the entropy together, and cut again where they touch.

    After k cuts `y` is the one minimiser of `max_i (c_i + G_i . y) - entropy * H(y)`, and the
    minimum is a lower bound on the optimum. For `entropy > 0`. Compiled steps before the last stop
    at a tenth of the gap that is left, unless gradients are to come: bounds hold all the same.

    Args:
        max_steps: Cuts at most, each a pass for a value and a gradient.
        tol: The gap at which an example is done, relative to `max(1, |value|)`.
        kernel: What computes a step besides the energy: "numba" (on a CPU) or "triton" (on a GPU),
            compiled at the first call, or "torch"; "auto" takes what there is.
    """

    max_steps: int = 100
    tol: float = 1e-4
    kernel: str = "auto"

    def __post_init__(self):
        check_count("max_steps", self.max_steps)
        check_number("tol", self.tol, 0.0)
        check_choice("kernel", self.kernel, KERNELS)

    def check(self, problem: Problem) -> None:
        """Refuse what this solver is not for."""
        if not problem.entropy > 0:
            raise ValueError(
                "`entropy` must be positive for BundleEntropy, got 0: use icnn.Bundle() for the "
                "bare energy"
            )

    def solve(self, problem: Problem) -> Record:
        """Cuts at the minimiser of the cuts so far."""
        record, cuts = Record(problem, self.tol), Cuts(problem, self.max_steps, self.kernel)
        if chosen(self.kernel, problem.domain, problem.start) == "torch":
            self.search(problem, record, cuts)
        else:
            from icnn.solvers.search import search  # which knows this file

            search(problem, record, cuts, self.max_steps)
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

    No more than n + 1 cuts can count at once, but for cuts that depend on each other, and few of
    them do. Slopes are kept in the precision that they come in: a cut is as large as `y`.
    """

    def __init__(self, problem: Problem, max_steps: int, kernel: str = "auto"):
        self.problem, self.kernel, self.count = problem, kernel, 0
        start = problem.start
        batch, n = start.shape[0], math.prod(start.shape[1:])
        self.most = min(max_steps, n + 20)
        if chosen(kernel, problem.domain, start) == "triton":
            self.most = min(self.most, MOST_CUTS)
        self.near = start.flatten(start_dim=1)
        room = min(self.most, ROOM)

        def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(batch, room, *shape, dtype=dtype, device=start.device)

        self.slots: dict[str, Tensor] = {
            "slopes": empty(n, dtype=start.dtype),
            "offsets": empty(),
            "lam": empty(),
            "alive": empty(dtype=torch.bool),
            "idle": empty(),  # for how many steps its share has been zero
            "points": empty(n if problem.gradient else 0, dtype=start.dtype),
        }

    def grow(self) -> None:
        """Room for more cuts."""
        for name, old in self.slots.items():
            room = min(self.most, 2 * old.shape[1])
            new = old.new_zeros(old.shape[0], room, *old.shape[2:])
            new[:, : old.shape[1]] = old
            self.slots[name] = new

    @property
    def room(self) -> dict[str, Tensor | int]:
        """All slots, for a compiled step."""
        names = ("slopes", "offsets", "lam", "idle", "points")
        return {"slots": self.slots["lam"].shape[1], **{name: self.slots[name] for name in names}}

    def __getattr__(self, name: str) -> Tensor:
        # The cuts so far, of all the room that there is.
        try:
            return self.__dict__["slots"][name][:, : self.count]
        except KeyError:
            raise AttributeError(name) from None

    def add(self, y: Tensor, tangent: Tangent, where: Tensor) -> None:
        """`c + G . y'` with `G` the slope and `c = f(y) - G . y`, for the examples `where`."""
        flat = y.to(self.problem.start.dtype).flatten(start_dim=1)
        slope = torch.where(where[:, None], tangent.slope, 0.0).to(flat.dtype)
        offset = torch.where(where, self.problem.offset(y, tangent), 0.0)
        if self.count < self.most:
            if self.count == self.slots["lam"].shape[1]:
                self.grow()
            self.count += 1
            slot = torch.full_like(where, self.count - 1, dtype=torch.int64)
        else:
            # The one that has been idle for longest; if none is, the one with the least share.
            slot = (self.idle - self.lam).masked_fill(~self.alive, torch.inf).argmax(dim=1)
        every = torch.arange(len(slot), device=slot.device)
        new = {"slopes": slope, "offsets": offset, "lam": 0.0, "idle": 0.0, "alive": True}
        new = {**new, "points": flat} if self.problem.gradient else new
        for name, value in new.items():
            old = self.slots[name][every, slot]
            value = torch.as_tensor(value, dtype=old.dtype, device=old.device)
            self.slots[name][every, slot] = torch.where(rows(where, old), value, old)
        self.near = torch.where(where[:, None], flat, self.near)
        # Examples without a cut have one that is flat: their answers are not looked at.
        self.alive[:, 0] = True
        total = self.lam.sum(dim=1, keepdim=True)
        fresh = torch.zeros_like(self.lam).scatter(1, slot[:, None], where[:, None].double())
        fresh[:, 0] = torch.where(where, fresh[:, 0], 1.0)
        shares = torch.where(total > 0, self.lam / total.clamp(min=1e-300), fresh)
        self.lam.copy_(shares)

    def pieces(self) -> Pieces | None:
        """The cuts that share in the minimiser found last."""
        if not self.problem.gradient:
            return None
        return Pieces(self.points, self.lam, self.mixture(self.lam), self.slopes)

    def mixture(self, lam: Tensor) -> Tensor:
        """`G^T lam`, in float64."""
        return (lam[:, None, :] @ self.slopes.double()).squeeze(1)

    def minimise(self, entropy: Tensor, active: Tensor, tilt: Tensor | None = None) -> Dual:
        """The minimiser of the model; shares start from those of the step before.

        Those of an example that is done stay as they were when its answer was found.
        """
        model = Model(
            self.problem.domain,
            self.slopes,
            self.offsets,
            self.alive,
            entropy,
            self.problem.start.shape,
            tilt,
            self.near.double(),
        )
        found = solve(model, self.lam, active, self.kernel)
        self.lam.copy_(torch.where(active[:, None], found.lam, self.lam))
        self.idle.copy_(torch.where(self.lam > 0, 0.0, self.idle + 1))
        return found
