"""Features as networks and kernels like them, whatever they are: words, or measurements."""

from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

POWER = 0.5  # of the inverse document frequency
# Non-negative numbers are counts where few entries are there, and no column is much larger.
SPARSE, LARGER = 0.3, 20.0


class Features:
    """Counts are weighted by how rare they are, and rows brought to one length; else standardised.

    Args:
        X: Training data, dense or sparse.
    """

    def __init__(self, X: Any):
        seen = np.asarray((X != 0).sum(axis=0)).ravel()
        most = X.max(axis=0)
        most = most.toarray().ravel() if sparse.issparse(most) else np.asarray(most)
        even = most.max() <= LARGER * np.median(most[seen > 0]) if seen.any() else True
        self.counts = bool(X.min() >= 0 and seen.mean() < SPARSE * X.shape[0] and even)
        if self.counts:
            self.scale = (np.log((1 + X.shape[0]) / (1 + seen)) + 1) ** POWER
        else:
            X = X.toarray() if sparse.issparse(X) else X
            self.mean = X.mean(axis=0)
            deviation = X.std(axis=0)
            self.scale = 1 / np.where(deviation > 1e-12 * (1 + np.abs(X).max(axis=0)), deviation, 1)

    def __call__(self, X: Any) -> Any:
        """A sparse matrix for counts, else an array: float32, for `tensor` to take rows of."""
        if not self.counts:
            X = X.toarray() if sparse.issparse(X) else X
            return ((X - self.mean) * self.scale).astype(np.float32)
        X = sparse.csr_array(X, dtype=np.float64) * self.scale[None]
        X = sparse.csr_array(X)
        length = np.sqrt(np.asarray((X * X).sum(axis=1)).ravel())
        lengths = sparse.dia_array(
            (1 / np.where(length > 0, length, 1)[None], [0]), (len(length),) * 2
        )
        return sparse.csr_array(lengths @ X).astype(np.float32)


def tensor(X: Any, rows: Any = slice(None)) -> Tensor:
    """Rows as a tensor."""
    part = X[rows]
    return torch.from_numpy(part.toarray() if sparse.issparse(part) else part)
