"""What the benchmark of imputers hides is what it says."""

import numpy as np
import pytest

from benchmarks.imputation import KINDS, RATES, error, hidden, rows_of, table


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", RATES)
def test_what_is_hidden(kind: str, rate: float):
    X = table("breast_cancer")
    gaps = hidden(X, kind, rate, seed=0)
    np.testing.assert_array_equal(gaps, hidden(X, kind, rate, seed=0))
    assert (gaps != hidden(X, kind, rate, seed=1)).any()
    assert gaps.mean() == pytest.approx(rate, abs=0.02)
    assert not gaps.all(axis=0).any()
    assert not gaps.all(axis=1).any()


def test_how_gaps_depend_on_values():
    X = np.random.default_rng(0).normal(size=(5000, 6))

    def related(kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Correlations of whether a column is missing with each column."""
        gaps = hidden(X, kind, 0.3, seed=0)
        some = np.asarray(gaps.any(axis=0))
        return np.corrcoef(gaps[:, some].T, X.T)[: some.sum(), some.sum() :], some

    chance, every = related("MCAR")
    assert every.all()
    assert np.abs(chance).max() < 0.06
    own, every = related("MNAR")
    assert every.all()
    assert np.abs(np.diag(own)).min() > 0.3
    assert np.abs(own - np.diag(np.diag(own))).max() < 0.06
    # By columns that stay known, and by none that do not.
    given, gone = related("MAR")
    assert (~gone).sum() == 2
    assert np.abs(given[:, gone]).max() < 0.06
    assert np.abs(given[:, ~gone]).max(axis=1).min() > 0.1


def test_errors_and_ranks():
    X = np.array([[0.0, 10.0], [2.0, 30.0]])
    gaps = np.array([[True, False], [False, True]])
    filled = np.array([[1.0, 10.0], [2.0, 10.0]])  # wrong by one and by two standard deviations
    assert error(filled, X, gaps) == pytest.approx(np.sqrt((1 + 4) / 2))
    cells = [("iris", "MCAR", 0.3, seed) for seed in range(2)]
    found = {(cells[0], "a"): (1.0, 3.0), (cells[0], "b"): (2.0, 1.0)}
    found |= {(cells[1], "a"): (3.0, 5.0), (cells[1], "b"): (2.0, 1.0)}
    assert rows_of(found, ["a", "b"]) == [
        {"data": "iris", "missing": "MCAR 30%", "a": "2.000", "b": "2.000"},
        {"data": "mean rank", "missing": "2 runs", "a": "1.50", "b": "1.50"},
        {"data": "mean time, s", "missing": "", "a": "4.00", "b": "1.00"},
    ]
