"""What `argmin` gives back: for each example an answer, a bound on its error and a status."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Status(IntEnum):
    """How the search for one example ended."""

    CONVERGED = 0
    MAX_STEPS = 1
    STALLED = 2
    NONFINITE = 3
    NONCONVEX = 4


ADVICE = {
    Status.CONVERGED: "the gap is within tol",
    Status.MAX_STEPS: "the gap is above tol: raise max_steps or tol",
    Status.STALLED: "no more progress in this precision, gap above tol: raise tol, or use float64",
    Status.NONFINITE: "the energy or its gradient is NaN or infinite: look at x and the weights",
    Status.NONCONVEX: "the energy is below a bound for convex ones: it is not convex, or is random",
}


@dataclass(frozen=True, eq=False)
class Solution:
    """The minimiser of each example, with a certificate.

    Attributes:
        y: The answers, `(B, *y_shape)`.
        value: The objective there, `(B,)`.
        lower: A lower bound on the optimum, `(B,)`.
        gap: `value - lower`: how far from the optimum `value` can be at most.
        radius: How far from the minimiser `y` can be at most, in the norm of the domain (the box:
            Euclidean, in units of its widths; the simplex: the sum of absolute values); infinite
            where the objective is not strongly convex.
        steps: Cuts, that is passes for a value and a gradient, that each example took.
        status: A `Status` for each example.
        converged: Where it is `Status.CONVERGED`.
        gaps: The gap at each step, `(steps, B)`; an example that is done keeps its last.
    """

    y: Tensor
    value: Tensor
    lower: Tensor
    gap: Tensor
    radius: Tensor
    steps: Tensor
    status: Tensor
    gaps: Tensor

    def __repr__(self) -> str:
        # Its tensors would flood a terminal.
        return f"<Solution, y {tuple(self.y.shape)}: {'; '.join(self.report().splitlines())}>"

    @property
    def converged(self) -> Tensor:
        return self.status == Status.CONVERGED

    def to(self, device: torch.device | str) -> "Solution":
        """The same on another device."""
        return replace(
            self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)}
        )

    @classmethod
    def joined(cls, parts: "Sequence[Solution]") -> "Solution":
        """Those of several batches as one."""
        most = max(len(part.gaps) for part in parts)
        long = [
            replace(part, gaps=torch.cat([part.gaps, *[part.gaps[-1:]] * (most - len(part.gaps))]))
            for part in parts
        ]
        whole = {
            name: torch.cat([getattr(part, name) for part in long], dim=int(name == "gaps"))
            for name in (field.name for field in fields(cls))
        }
        return cls(**whole)

    def report(self) -> str:
        """A few lines: how many examples ended how, the worst gap, the steps."""
        count = Counter(Status(code) for code in self.status.tolist())
        size = len(self.status)
        lines = [f"{count[Status.CONVERGED]} of {size} converged"]
        if size:
            steps = self.steps.double()
            lines.append(
                f"worst gap {float(self.gap.max()):.3g}, "
                f"steps {int(steps.median())} in the median, {int(steps.max())} at most"
            )
        for status, number in sorted(count.items()):
            if status != Status.CONVERGED:
                lines.append(f"{number} {status.name}: {ADVICE[status]}")
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Draw the gap of every example against the step, and their median; needs Matplotlib.

        Args:
            axes: Where to draw; a new figure by default.
        """
        from icnn.extras import require

        plt = require("matplotlib.pyplot", "viz")
        axes = plt.subplots(figsize=(6, 3.5), layout="constrained")[1] if axes is None else axes
        gaps = self.gaps.detach().cpu().clamp(min=1e-16)
        steps = range(1, len(gaps) + 1)
        axes.semilogy(steps, gaps, color="#1f5fa8", alpha=max(0.05, 1 / max(1, gaps.shape[1])))
        axes.semilogy(steps, gaps.nanmedian(dim=1).values, color="#1f5fa8", lw=2, label="median")
        axes.set(xlabel="step", ylabel="gap")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        return axes
