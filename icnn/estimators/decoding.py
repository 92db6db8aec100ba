"""From answers between 0 and 1 to labels: a rule that is chosen on data held out."""

from dataclasses import dataclass

import numpy as np

METRICS = ("examples", "labels")
GRID = np.arange(0.05, 1.0, 0.025)


def f1_examples(found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The F1 score of each example; 0/0 counts as 0."""
    both = found.sum(axis=1) + true.sum(axis=1)
    return 2 * (found * true).sum(axis=1) / np.maximum(both, 1)


def f1_labels(found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The F1 score of each label; 0/0 counts as 0."""
    return f1_examples(found.T, true.T)


@dataclass(frozen=True)
class Decoding:
    """Which labels an example has.

    Attributes:
        threshold: Labels have it whose answer is at least as large.
        relative: Whether the threshold is a share of the largest answer of the example.
        top: Whether the label with the largest answer is always taken.
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


def choose(y: np.ndarray, true: np.ndarray, metric: str = "examples") -> tuple[Decoding, float]:
    """The rule that is best for answers whose labels are known, and its score."""
    score = f1_examples if metric == "examples" else f1_labels
    kinds = ((True, True), (False, True), (False, False))
    rules = [Decoding(float(t), *kind) for kind in kinds for t in GRID]
    scores = np.array([score(rule(y), true).mean() for rule in rules]).reshape(len(kinds), -1)
    # Of rules that are as good, the kind that gives fewer labels, and a threshold in the middle.
    kind = max(np.flatnonzero(scores.max(axis=1) == scores.max()))
    best = np.flatnonzero(scores[kind] == scores.max())
    return rules[kind * len(GRID) + best[len(best) // 2]], float(scores.max())


def worth(y: np.ndarray, true: np.ndarray, metric: str | None) -> float:
    """How good answers are, decoded well; with one label each if there is no metric."""
    score = f1_labels if metric == "labels" else f1_examples
    thresholds = (1.0,) if metric is None else (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    return max(float(score(Decoding(t)(y), true).mean()) for t in thresholds)
