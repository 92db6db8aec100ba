"""What a training run has seen."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icnn.extras import require


@dataclass
class History:
    """A training run, epoch by epoch.

    Attributes:
        rows: One for each epoch: "epoch", "loss" (the mean over its examples), "validation" where
            there is one, "gap" (the worst) and "converged" (the share of examples) where the loss
            gives back its solutions, "rate" (of learning) and "seconds".
        best: The epoch whose weights the energy has: that of the least validation, else the last.
        stopped: Why it ended.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    best: int = 0
    stopped: str = ""

    def report(self) -> str:
        """A line or two."""
        if not self.rows:
            return "no epoch"
        row = self.rows[self.best - 1]
        told = [f"{name} {row[name]:.4g}" for name in ("loss", "validation", "gap") if name in row]
        if "converged" in row:
            told.append(f"{row['converged']:.1%} converged")
        epochs = "1 epoch" if len(self.rows) == 1 else f"{len(self.rows)} epochs"
        return f"{epochs} ({self.stopped}); of epoch {self.best}: {', '.join(told)}"

    def plot(self, path: str | Path) -> Path:
        """Draw loss and validation over epochs, and the worst gap where it is known."""
        figure = require("matplotlib.figure", "viz").Figure(figsize=(6, 3.5), layout="constrained")
        axes: Any = figure.add_subplot(xlabel="epoch", ylabel="loss")
        epochs = [row["epoch"] for row in self.rows]
        for name in ("loss", "validation", "gap"):
            if self.rows and name in self.rows[0]:
                style = {"ls": ":", "color": "gray"} if name == "gap" else {}
                values = [row[name] for row in self.rows]
                axes.plot(epochs, values, label="worst gap" if name == "gap" else name, **style)
        if self.rows and all(row[n] > 0 for row in self.rows for n in ("loss", "gap") if n in row):
            axes.set_yscale("log")
        axes.axvline(self.best, color="gray", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)
        return Path(path)
