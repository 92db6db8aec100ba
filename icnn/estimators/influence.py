"""Which labels pull which: a small heat map."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from icnn.extras import require

LEAST = 5e-4  # what is worth a word


@dataclass(frozen=True)
class Influence:
    """How labels move when one of them is decided, in one example.

    Attributes:
        labels: Their names.
        answers: How much each is one, all being free.
        moves: In row j and column k, the answer of label k when j is held at 1, minus the one
            when j is held at 0.
    """

    labels: list[str]
    answers: np.ndarray
    moves: np.ndarray

    def report(self, count: int = 5) -> str:
        """The strongest pulls, a line each."""
        others = self.moves * (1 - np.eye(len(self.labels)))
        lines = []
        for place in np.argsort(-np.abs(others), axis=None)[:count]:
            j, k = np.unravel_index(place, others.shape)
            if abs(others[j, k]) > LEAST:
                lines.append(f"{self.labels[j]!r} moves {self.labels[k]!r} by {others[j, k]:+.3f}")
        return "\n".join(lines) or "no label moves another"

    def plot(self, path: str | Path) -> Path:
        """Draw it: rows are decided, columns move."""
        others = np.where(np.eye(len(self.labels), dtype=bool), np.nan, self.moves)
        most = np.nanmax(np.abs(others)) if len(self.labels) > 1 else 1.0
        size = 2.5 + 0.35 * len(self.labels)
        figure = require("matplotlib.figure", "viz").Figure(
            figsize=(size + 1, size), layout="constrained"
        )
        axes: Any = figure.add_subplot()
        shown = axes.imshow(others, cmap="RdBu_r", vmin=-most or -1, vmax=most or 1)
        names = [f"{n} ({a:.2f})" for n, a in zip(self.labels, self.answers, strict=True)]
        axes.set_xticks(range(len(names)), self.labels, rotation=90)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("moves")
        axes.set_ylabel("held (its answer when free)")
        figure.colorbar(shown, label="answer when held at 1, minus that at 0", shrink=0.8)
        figure.savefig(path, dpi=150)
        return Path(path)
