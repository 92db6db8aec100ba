"""Whether two methods differ, on the examples that both have seen."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """A mean difference, between which values 95 % of resamples have it, and how sure its sign is.

    Attributes:
        mean: Over examples.
        low: Below it lie 2.5 % of resamples.
        high: Above it lie 2.5 %.
        p: Of a difference of zero, two-sided.
    """

    mean: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, draws: int = 10_000, seed: int = 0
) -> Difference:
    """Of scores of two methods, example by example.

    Args:
        a: A score for each example.
        b: Those of the other method, for the same examples.
        draws: How many resamples.
        seed: For the same ones again.
    """
    apart = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    random = np.random.default_rng(seed)
    means = np.array([random.choice(apart, len(apart)).mean() for _ in range(draws)])
    low, high = np.quantile(means, [0.025, 0.975])
    beyond = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1.0, 2 * float(beyond + 1) / (draws + 1))
    return Difference(float(apart.mean()), float(low), float(high), p)
