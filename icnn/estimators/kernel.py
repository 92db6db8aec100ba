"""Least squares with a Gaussian kernel: what it says of examples, and would say without them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from scipy.linalg.blas import dsymm  # pyright: ignore
from scipy.linalg.lapack import dpotrf, dpotri  # pyright: ignore

from icnn.estimators.features import ROOM

FEW = 2500  # examples, on which parameters are chosen
ALONE = 64  # rows, for which a full table of all others would take longest
TABLE = 2e7  # distances at once
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # in units of one over the median squared distance
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Kernel:
    """A kernel machine; its parameters are those that are best when each example is left out.

    Args:
        X: Features.
        Y: Labels.
        score: Of answers and labels, to choose by.
        random: What to draw examples from, where there are many.
        few: On how many of them parameters are chosen.
        ridges: What is added to the diagonal, one of them.

    Attributes:
        held_out: What it would say of each example from all others (but for the mean of labels,
            which is that of all).
    """

    def __init__(
        self, X: Any, Y: np.ndarray, score: Callable[[np.ndarray, np.ndarray], float],
        random: np.random.RandomState, few: int = FEW, ridges: Sequence[float] = RIDGES,
    ):  # fmt: skip
        self.X, self.mean = X, Y.mean(axis=0)
        rows = np.sort(random.permutation(len(Y))[:few])
        apart, some = distances(X[rows], X[rows]), Y[rows]
        other = apart[apart > 1e-9 * apart.max()]  # twins say nothing of how far examples lie apart
        unit = 1 / float(np.median(other)) if len(other) else 1.0
        best = -np.inf
        self.width, ridge = unit, ridges[0]
        for width in WIDTHS:
            near = np.exp(-width * unit * apart)
            for own in ridges:
                worth = score(self._solved(near.copy("F"), some, own)[1], some)
                if worth > best:
                    best, self.width, ridge = worth, width * unit, own
        if len(rows) < len(Y):
            apart = distances(X, X)
        near = np.asfortranarray(np.exp(-self.width * apart))
        self.weights, self.held_out = self._solved(near, Y, ridge)

    def __call__(self, X: Any) -> np.ndarray:
        """What it says of other examples."""
        step = max(1, int(TABLE / len(self.weights)))
        parts = [
            np.exp(-self.width * distances(X[i : i + step], self.X)) @ self.weights
            for i in range(0, X.shape[0], step)
        ]
        return self.mean + np.concatenate(parts)

    def _solved(
        self, near: np.ndarray, Y: np.ndarray, ridge: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weights of the examples; and the answers to each from all others.

        With `C = (K + ridge)^-1` and weights `a = C y`, leaving out example i moves the answer
        there by `a_i / C_ii - y_i`, to `y_i - a_i / C_ii`.
        """
        near[np.diag_indices_from(near)] += ridge
        factor, bad = dpotrf(near, lower=True, overwrite_a=True)
        if bad:
            raise np.linalg.LinAlgError("the kernel is not positive definite")
        inverse, _ = dpotri(factor, lower=True, overwrite_c=True)
        weights = dsymm(1.0, inverse, Y - self.mean, lower=True)
        return weights, Y - weights / inverse.diagonal()[:, None]


class LabelKernel(Kernel):
    """The same for labels: scores about between 0 and 1."""

    def __init__(self, *about: Any, **options: Any):
        super().__init__(*about, **options)
        # Where answers above 1 are common, cutting them off would lose which label comes first.
        self.most = max(1.0, float(np.quantile(self.held_out.max(axis=1), 0.99)))
        self.held_out = self.held_out / self.most

    def __call__(self, X: Any) -> np.ndarray:
        return super().__call__(X) / self.most


def distances(a: Any, b: Any) -> np.ndarray:
    """Squared, of each row to each."""
    # Products of sparse rows are hardly ever zero: as full ones they are made much faster.
    small = a.shape[0] > ALONE and max(np.prod(a.shape), np.prod(b.shape)) <= ROOM
    a, b = (part.toarray() if small and sparse.issparse(part) else part for part in (a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    product = a @ b.T
    product = product.toarray() if sparse.issparse(product) else product
    sizes = [np.asarray((part * part).sum(axis=1)).ravel() for part in (a, b)]
    return np.maximum(sizes[0][:, None] + sizes[1] - 2 * product, 0.0)
