"""A Gaussian of rows with gaps, and what it says of some columns given others."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PRIOR = 3.0  # rows that the identity counts for as covariance of standardised columns
ROUNDS = 20
STILL = 1e-2  # a change of the covariance that ends the search for it
TABLE = 2e7  # numbers in covariances of rows at once


@dataclass(frozen=True)
class Given:
    """Rows, seen by a Gaussian.

    Attributes:
        filled: The rows, with the mean of what is missing given what is known, `(B, n)`.
        alone: The mean of each column given all other known ones: the same where it is missing.
        variance: Of each column, given those.
        pulls: How much the mean of column i moves with the value of column j, `(B, n, n)`.
    """

    filled: Tensor
    alone: Tensor
    variance: Tensor
    pulls: Tensor

    def without(self, rows: Tensor, j: int) -> Tensor:
        """Rows as they would be filled if column j were missing too: it says nothing of itself."""
        known = self.filled[:, j] - self.alone[:, j]  # zero where it is missing
        return (self.filled - self.pulls[:, :, j] * known[:, None])[rows]


def given(Z: Tensor, known: Tensor, mean: Tensor, covariance: Tensor) -> Given:
    """What a Gaussian says of rows `Z`, whose numbers count where `known`."""
    # With S the covariance and o the known columns of a row, K has S_oo^-1 in its block o, else 0:
    # the block of o in S, and ones on the diagonal elsewhere, is inverted as a whole.
    kinds, of = torch.unique(known, dim=0, return_inverse=True)
    o = kinds.to(covariance.dtype)
    both = o[:, :, None] * o[:, None, :]
    K = (torch.linalg.inv(covariance * both + torch.diag_embed(1 - o)) * both)[of]
    away = torch.where(known, Z - mean, 0.0)
    # mean of m given o: mean_m + S_mo S_oo^-1 (z_o - mean_o);    covariance: S_mm - S_mo K S_om
    pulls = covariance @ K
    filled = torch.where(known, Z, mean + (pulls @ away[:, :, None])[:, :, 0])
    left = covariance.diagonal() - (pulls * covariance).sum(dim=2)
    # Without j among o:    z_j - [K (z - mean)]_j / K_jj, and its variance is 1 / K_jj.
    diagonal = K.diagonal(dim1=1, dim2=2)
    tight = torch.where(known, diagonal, 1.0)
    alone = torch.where(known, Z - (K @ away[:, :, None])[:, :, 0] / tight, filled)
    return Given(filled, alone, torch.where(known, 1 / tight, left), pulls)


def fit_gaussian(Z: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of rows with gaps: the most likely ones, drawn to the identity.

    Expectation maximisation: gaps are filled with their means given the rest, and what these leave
    open counts as covariance.
    """
    rows, columns = Z.shape
    mean, covariance = Z.new_zeros(columns), torch.eye(columns, dtype=Z.dtype)
    step = max(1, int(TABLE / columns**2))
    for _ in range(ROUNDS):
        filled, pulls = [], torch.zeros_like(covariance)
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            found = given(Z[part], known[part], mean, covariance)
            filled.append(found.filled)
            pulls += found.pulls.sum(dim=0)
        whole = torch.cat(filled)
        mean = whole.mean(dim=0)
        away = whole - mean
        before, left = covariance, rows * covariance - pulls @ covariance
        covariance = (away.T @ away + left + PRIOR * torch.eye(columns)) / (rows + PRIOR)
        if float((covariance - before).abs().max()) < STILL:
            break
    return mean, covariance


def most_likely(
    Z: np.ndarray, known: np.ndarray, mean: np.ndarray, precision: np.ndarray,
    center: np.ndarray, weight: np.ndarray, low: np.ndarray, high: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Where `(z - mean) P (z - mean) / 2 + sum(weight (z - center)^2) / 2` is least over the gaps.

    The free minimum, cut to the bounds: a start from which a search has little left to do.
    """
    found = np.where(known, Z, 0.0)
    patterns, of = np.unique(known, axis=0, return_inverse=True)
    for i, pattern in enumerate(patterns):
        m, o, rows = ~pattern, pattern, np.flatnonzero(of.ravel() == i)
        if not m.any():
            continue
        # (P_mm + W) z_m = P_mm mean_m - P_mo (z_o - mean_o) + W center_m
        matrix = precision[np.ix_(m, m)] + np.diag(weight[m])
        side = precision[np.ix_(m, m)] @ mean[m] + weight[m] * center[np.ix_(rows, m)]
        side -= (Z[np.ix_(rows, o)] - mean[o]) @ precision[np.ix_(o, m)]
        answer = np.linalg.solve(matrix, side.T).T
        found[np.ix_(rows, m)] = np.clip(answer, low[m], high[m])
    return found
