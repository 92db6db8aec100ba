"""From answers between 0 and 1 to labels: a rule that is chosen on data held out."""

from dataclasses import dataclass

import numpy as np

METRICS = ("examples", "labels")
GRID, COARSE = np.arange(0.05, 1.0, 0.025), np.arange(0.2, 0.8, 0.1)


def f1_examples(found: np.ndarray, true: np.ndarray, nothing: float = 0.0) -> np.ndarray:
    """The F1 score of each example; 0/0 counts as `nothing`."""
    found, true = found.astype(bool), true.astype(bool)
    both = found.sum(axis=1) + true.sum(axis=1)
    return np.where(both, 2 * (found & true).sum(axis=1) / np.maximum(both, 1), nothing)


def f1_labels(found: np.ndarray, true: np.ndarray, nothing: float = 0.0) -> np.ndarray:
    """The F1 score of each label; 0/0 counts as `nothing`."""
    return f1_examples(found.T, true.T, nothing)


@dataclass(frozen=True)
class Decoding:
    """Which labels an example has.

    Attributes:
        threshold: A label is given where its answer is at least this.
        relative: Whether the threshold is a share of the largest answer of the example.
        top: Whether the label with the largest answer is always given.
    """

    threshold: float = 1.0
    relative: bool = True
    top: bool = True

    def __call__(self, y: np.ndarray) -> np.ndarray:
        most = y.max(axis=1, keepdims=True)
        found = y >= self.threshold * (most if self.relative else 1.0)
        if self.top:
            found[np.arange(len(y)), y.argmax(axis=1)] = True
        return found.astype(np.int64)


def choose(
    y: np.ndarray, true: np.ndarray, metric: str = "examples", grid: np.ndarray = GRID
) -> tuple[Decoding, float]:
    """The rule that is best for answers whose labels are known, and its score.

    An example without labels that is given none counts as right: of such examples, too, the rule
    is to learn.
    """
    score, nothing = (f1_examples, 1.0) if metric == "examples" else (f1_labels, 0.0)
    kinds = ((True, True), (False, True), (False, False))
    rules = [Decoding(float(t), *kind) for kind in kinds for t in grid]
    scores = np.array([score(rule(y), true, nothing).mean() for rule in rules])
    scores = scores.reshape(len(kinds), -1)
    # Of rules that are as good, the kind that gives fewer labels, and a threshold in the middle.
    kind = max(np.flatnonzero(scores.max(axis=1) == scores.max()))
    best = np.flatnonzero(scores[kind] == scores.max())
    return rules[kind * len(grid) + best[len(best) // 2]], float(scores.max())


def worth(y: np.ndarray, true: np.ndarray, metric: str | None) -> float:
    """How good answers are, decoded well; with one label each if there is no metric."""
    if metric is None:
        return float(f1_examples(Decoding()(y), true).mean())
    return choose(y, true, metric, COARSE)[1]
