"""Features as networks and kernels like them, whatever they are: words, or measurements."""

from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

POWER = 0.5  # of the inverse document frequency
# Non-negative numbers are counts where few entries are there, and no column is much larger.
SPARSE, LARGER = 0.3, 20.0
ROOM = 1e8  # numbers in a full table


class Features:
    """Counts are weighted by how rare they are, and rows brought to one length; else standardised.

    Rows that have one length already are left as they are: somebody has weighted them. Sparse
    features that are no counts, and too many for a full table, keep their zeros.

    Args:
        X: Training data, dense or sparse.
    """

    def __init__(self, X: Any):
        X = sparse.csr_array(X) if sparse.issparse(X) else X
        seen = np.asarray((X != 0).sum(axis=0)).ravel()
        most = X.max(axis=0)
        most = most.toarray().ravel() if sparse.issparse(most) else np.asarray(most)
        even = most.max() <= LARGER * np.median(most[seen > 0]) if seen.any() else True
        self.counts = bool(X.min() >= 0 and seen.mean() < SPARSE * X.shape[0] and even)
        self.mean = None
        if self.counts:
            length = lengths(X)
            weighted = np.allclose(length[length > 0], 1, atol=1e-3)
            rare = (np.log((1 + X.shape[0]) / (1 + seen)) + 1) ** POWER
            self.scale = np.ones(X.shape[1]) if weighted else rare
        elif sparse.issparse(X) and np.prod(X.shape, dtype=float) > ROOM:
            size = np.sqrt(np.asarray((X * X).mean(axis=0)).ravel())
            self.scale = 1 / np.where(size > 0, size, 1)
        else:
            X = X.toarray() if sparse.issparse(X) else X
            self.mean = X.mean(axis=0)
            deviation = X.std(axis=0)
            self.scale = 1 / np.where(deviation > 1e-12 * (1 + np.abs(X).max(axis=0)), deviation, 1)

    def __call__(self, X: Any) -> Any:
        """An array of standardised features, else a sparse one: float32, for `tensor`."""
        if self.mean is not None:
            X = X.toarray() if sparse.issparse(X) else X
            return ((X - self.mean) * self.scale).astype(np.float32)
        X = sparse.csr_array(sparse.csr_array(X, dtype=np.float64) * self.scale[None])
        if self.counts:
            length = lengths(X)
            X.data /= np.repeat(np.where(length > 0, length, 1), np.diff(X.indptr))
        return X.astype(np.float32)


def lengths(X: Any) -> np.ndarray:
    """Of rows."""
    return np.sqrt(np.asarray((X * X).sum(axis=1)).ravel())


def tensor(X: Any, rows: Any = slice(None)) -> Tensor:
    """Rows as a tensor."""
    part = X[rows]
    return torch.from_numpy(part.toarray() if sparse.issparse(part) else part)
