"""`icnn.Imputer` in tables: exact answers of its energy, what it says to bad input."""

import pickle
import re
from typing import Any

import cvxpy as cp
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given as suppose
from hypothesis import settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import icnn
from icnn.estimators.gaussian import PRIOR, fit_gaussian, given, most_likely


@parametrize_with_checks([icnn.Imputer(random_state=0)])
def test_scikit_learn(estimator: Any, check: Any):
    check(estimator)


NOISE = 0.6


def table(rows: int = 80, columns: int = 5, gaps: float = 0.3, seed: int = 0) -> np.ndarray:
    """Rows of two factors and some noise."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(rows, 2)) @ random.normal(size=(2, columns))
    X = 10 + 3 * X + NOISE * random.normal(size=X.shape)
    X[random.uniform(size=X.shape) < gaps] = np.nan
    return X


@pytest.fixture(scope="module")
def fitted() -> icnn.Imputer:
    return icnn.Imputer(random_state=0).fit(table())


def some_gaussian(seed: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return root[0], root @ root.T + 0.1 * torch.eye(columns, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@suppose(seed=st.integers(0, 1000), columns=st.integers(2, 6))
def test_what_a_gaussian_says_of_gaps(seed: int, columns: int):
    mean, S = some_gaussian(seed, columns)
    random = np.random.default_rng(seed)
    Z, known = torch.from_numpy(random.normal(size=(4, columns))), random.uniform(size=(4, columns))
    known = torch.from_numpy(known < 0.6)
    found = given(Z, known, mean, S)

    def expected(row: int, o: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pulls = S[:, o] @ torch.linalg.inv(S[o][:, o])
        return mean + pulls @ (Z[row, o] - mean[o]), S - pulls @ S[o]

    for row in range(4):
        o = known[row]
        filled, left = expected(row, o)
        torch.testing.assert_close(found.filled[row], torch.where(o, Z[row], filled))
        torch.testing.assert_close(S - found.pulls[row] @ S, left, atol=1e-9, rtol=1e-7)
        for j in range(columns):
            without = o.clone()
            without[j] = False
            filled, left = expected(row, without)
            torch.testing.assert_close(found.alone[row, j], filled[j])
            torch.testing.assert_close(found.variance[row, j], left[j, j])
            other = torch.where(without, Z[row], filled)
            torch.testing.assert_close(found.without(torch.tensor([row]), j)[0], other)


def test_the_gaussian_of_rows_without_gaps_is_their_own():
    Z = torch.from_numpy(table(gaps=0))
    Z = (Z - Z.mean(dim=0)) / Z.std(dim=0)
    mean, S = fit_gaussian(Z, torch.ones_like(Z, dtype=torch.bool))
    expected = (Z.T @ Z + PRIOR * torch.eye(5, dtype=torch.float64)) / (len(Z) + PRIOR)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-12, rtol=0)
    torch.testing.assert_close(S, expected)


def test_a_start_is_the_free_minimum(fitted: icnn.Imputer):
    mean, S = (part.numpy() for part in some_gaussian(1, 4))
    P, weight = np.linalg.inv(S), np.array([0.5, 1.0, 2.0, 3.0])
    random = np.random.default_rng(0)
    Z, center = random.normal(size=(6, 4)), random.normal(size=(6, 4))
    known = random.uniform(size=(6, 4)) < 0.5
    wide = np.full(4, 1e6)
    y = most_likely(Z, known, mean, P, center, weight, -wide, wide)
    slope = (y - mean) @ P + weight * (y - center)
    np.testing.assert_allclose(slope[~known], 0, atol=1e-9)
    np.testing.assert_array_equal(y[known], Z[known])


def test_answers_are_the_minimum_of_the_energy(fitted: icnn.Imputer):
    """A solver for quadratic programs says the same, bounds included."""
    X = table(seed=3)[:12]
    X[0] = [25, np.nan, np.nan, np.nan, np.nan]  # far out: bounds hold
    found = fitted.solve(X)
    assert bool(found.converged.all())
    known, Z = ~np.isnan(X), fitted._standardised(X)
    center, model = fitted.model_(Z, known), fitted.model_
    ends = [(end - fitted.mean_) / fitted.scale_ for end in (fitted.low_, fitted.high_)]
    held = 0
    for i in range(len(X)):
        y, gaps = cp.Variable(5), np.flatnonzero(~known[i])
        rules = [y[known[i]] == Z[i, known[i]], y[gaps] >= ends[0][gaps], y[gaps] <= ends[1][gaps]]
        energy = cp.quad_form(y - model.mean, cp.psd_wrap(model.precision)) / 2
        pull = cp.multiply(np.sqrt(model.weight), y - center[i])
        problem = cp.Problem(cp.Minimize(energy + cp.sum_squares(pull) / 2), rules)
        problem.solve(solver=cp.CLARABEL)
        value = float(problem.value)  # pyright: ignore
        assert float(found.lower[i]) <= value + 1e-6 * max(1, value)
        assert float(found.value[i]) == pytest.approx(value, rel=1e-5, abs=1e-5)
        best = np.asarray(y.value)
        expected = best * fitted.scale_ + fitted.mean_
        np.testing.assert_allclose(found.y[i].numpy(), expected, atol=0.02)
        held += sum(min(abs(float(best[j]) - end[j]) for end in ends) < 1e-4 for j in gaps)
    assert held, "some bound was reached"


def test_what_is_known_stays_and_the_rest_is_in_range(fitted: icnn.Imputer):
    X = table(seed=5)
    X[2] = np.nan
    X[3, 0] = 1e5  # out of the range of the training
    filled = fitted.transform(X)
    known = ~np.isnan(X)
    np.testing.assert_array_equal(filled[known], X[known])
    assert np.isfinite(filled).all()
    inside = (filled >= fitted.low_) & (filled <= fitted.high_)
    assert inside[~known].all()
    np.testing.assert_array_equal(fitted.solve(X).y.numpy(), filled)
    answers = fitted.answers(X)
    np.testing.assert_array_equal(answers[known], X[known])
    assert not np.array_equal(answers, filled), "the Gaussian couples what machines say"
    complete = table(gaps=0)
    found = fitted.solve(complete)
    assert float(found.gap.max()) == 0
    np.testing.assert_array_equal(fitted.transform(complete), complete)


def test_better_than_a_gaussian_and_than_means():
    X, _ = load_wine(return_X_y=True)
    random = np.random.default_rng(0)
    gaps = random.uniform(size=X.shape) < 0.3
    holes = np.where(gaps, np.nan, X)
    model = icnn.Imputer(random_state=0).fit(holes)
    Z = model._standardised(holes)
    columns: Any = model.model_
    (found,) = columns._given(Z, ~gaps)
    gaussian = found.filled.numpy() * model.scale_ + model.mean_

    def error(filled: np.ndarray) -> float:
        return float(np.sqrt(np.square((filled - X) / X.std(axis=0))[gaps].mean()))

    ours, other, mean = map(
        error, (model.transform(holes), gaussian, np.where(gaps, model.mean_, X))
    )
    assert ours < other < 0.85 * mean


def test_rows_do_not_depend_on_others(fitted: icnn.Imputer):
    X = table(seed=7)[:20]
    whole = fitted.transform(X)
    for i in (0, 7, 19):
        np.testing.assert_allclose(fitted.transform(X[[i]])[0], whole[i], rtol=1e-6)


def test_the_same_again_and_pickled(fitted: icnn.Imputer):
    X = table(seed=2)
    again = icnn.Imputer(random_state=0).fit(table())
    np.testing.assert_array_equal(again.transform(X), fitted.transform(X))
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.transform(X), fitted.transform(X))
    same: Any = clone(fitted)
    assert same.random_state == 0
    assert icnn.check_convexity(fitted.energy_, torch.zeros(2, 5, dtype=torch.float64)).proved


def test_learns_from_complete_rows():
    whole = table(gaps=0)
    model = icnn.Imputer(random_state=0).fit(whole)
    holes = whole.copy()
    holes[::2, 1] = np.nan
    wrong = model.transform(holes)[::2, 1] - whole[::2, 1]
    assert np.sqrt(np.square(wrong).mean()) < 1.3 * NOISE


def test_data_frames_and_two_valued_columns():
    X = pd.DataFrame(table(), columns=list("abcde"))
    X["yes"] = (X["a"] > 10).astype(float).where(X["a"].notna())
    model = icnn.Imputer(binary=["yes"], random_state=0).set_output(transform="pandas")
    filled = model.fit_transform(X)
    assert isinstance(filled, pd.DataFrame)
    assert list(filled.columns) == list(X.columns)
    assert set(filled["yes"]) == {0.0, 1.0}
    assert model.binary_.tolist() == [False] * 5 + [True]
    between = model.solve(X).y[:, 5]
    assert bool(((between > 0) & (between < 1)).any()), "the solution itself is not rounded"
    np.testing.assert_array_equal(
        icnn.Imputer(binary="auto", random_state=0).fit(X).binary_, model.binary_
    )
    assert list(model.get_feature_names_out()) == list(X.columns)
    X["yes"] = X["yes"].where(X["yes"] == 1)  # as may come in a part of the rows
    assert set(icnn.Imputer(binary=["yes"]).fit_transform(X)[:, 5]) == {1.0}


def test_in_a_pipeline():
    X, y = load_wine(return_X_y=True)
    X[np.random.default_rng(0).uniform(size=X.shape) < 0.2] = np.nan
    model = make_pipeline(icnn.Imputer(random_state=0), LogisticRegression(max_iter=5000))
    assert model.fit(X[::2], y[::2]).score(X[1::2], y[1::2]) > 0.8


def test_progress(capsys: pytest.CaptureFixture[str]):
    icnn.Imputer(random_state=0, progress=True).fit(table(30, 3))
    assert "4 of 4: column 3" in capsys.readouterr().err


def test_large_tables_are_drawn_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("icnn.estimators.columns.ROWS", 30)
    X = table()
    X[:79, 2] = np.nan
    X[79, 2] = 5.0  # a value that is not among those drawn
    for seed in range(3):
        filled = icnn.Imputer(random_state=seed).fit_transform(X)
        np.testing.assert_array_equal(filled[:, 2], 5.0)


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e-13, 1e12])
def test_units_do_not_matter(size: float):
    X, units = table(), np.array([1.0, size, 1.0, 1 / size, size])
    whole = icnn.Imputer(random_state=0).fit_transform(X)
    np.testing.assert_allclose(
        icnn.Imputer(random_state=0).fit_transform(X * units) / units, whole, rtol=1e-4
    )


def test_what_is_given_may_lie_far_out(fitted: icnn.Imputer):
    rows = np.full((4, 5), np.nan)
    rows[:, 0] = 1e3, 1e9, 1e100, -1e300
    found = fitted.solve(rows)
    assert bool(found.converged.all())
    assert float(found.gap.max()) < 1e-2
    filled = fitted.transform(rows)
    np.testing.assert_array_equal(filled[:, 0], rows[:, 0])
    assert (filled[:, 1:] >= fitted.low_[1:]).all()
    assert (filled[:, 1:] <= fitted.high_[1:]).all()


def test_answers_are_copies(fitted: icnn.Imputer):
    whole = table(gaps=0)
    assert not np.shares_memory(fitted.transform(whole), whole)


def test_wide_tables():
    X = np.random.default_rng(0).normal(size=(30, 1)) + np.zeros(60)
    X[::3, ::7] = np.nan
    filled = icnn.Imputer(random_state=0).fit_transform(X)
    within = np.clip(X[:, [1]], np.nanmin(X, axis=0), np.nanmax(X, axis=0))
    np.testing.assert_allclose(filled, within, atol=0.1)
    with pytest.raises(ValueError, match="at most 1000 columns, got 1001"):
        icnn.Imputer().fit(np.zeros((3, 1001)))


BAD = [
    (lambda X: X[:1], {}, "minimum of 2 is required"),
    (lambda X: np.where(np.arange(5) == 3, np.nan, X), {}, "got none in column 3: drop it"),
    (lambda X: np.where(np.arange(5) == 1, np.inf, X), {}, "infinity"),
    (lambda X: X, {"binary": "yes"}, "`binary` must be a list of columns or 'auto', got 'yes'"),
    (lambda X: X, {"binary": 3}, "`binary` must be a list of columns or 'auto', got 3"),
    (lambda X: X, {"binary": [9]}, "`binary` must be columns of X, which has 5, got 9"),
    (lambda X: X, {"binary": [2]}, "`binary` must name columns of two values, got column 2 with"),
    (lambda X: X, {"device": "toaster"}, "`device` must be a device"),
    (lambda X: X, {"symmetric": True}, "`symmetric` must be left out of tables"),
    (lambda X: X, {"symmetric": "no"}, "`symmetric` must be one of True, False, got 'no'"),
]


@pytest.mark.parametrize(("change", "options", "told"), BAD)
def test_bad_input(change: Any, options: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=re.escape(told)):
        icnn.Imputer(**options).fit(change(table()))


def test_bad_rows(fitted: icnn.Imputer):
    with pytest.raises(ValueError, match="5 features"):
        fitted.transform(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="infinity"):
        fitted.transform(np.full((1, 5), np.inf))


def test_columns_that_say_nothing():
    X = table()
    X[:, 1] = 7.0
    X[::3, 1] = np.nan
    X[0, 2], X[1:, 2] = 5.0, np.nan  # one value
    filled = icnn.Imputer(random_state=0).fit_transform(X)
    np.testing.assert_array_equal(filled[:, 1], 7.0)
    np.testing.assert_array_equal(filled[:, 2], X[0, 2])
