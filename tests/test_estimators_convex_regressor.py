"""Convex regression: convex whatever the data are, and at home in scikit-learn."""

import pickle
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

import icnn


@parametrize_with_checks([icnn.ConvexRegressor(max_steps=300, random_state=0)])
def test_scikit_learn(estimator: Any, check: Any):
    check(estimator)


@pytest.mark.slow
def test_scikit_learn_with_default_arguments():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(icnn.ConvexRegressor())


def kinks(count: int = 400, columns: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    y = np.random.default_rng(seed).uniform(-2, 3, (count, columns))
    return y, 5 + 20 * np.abs(y - np.linspace(0.2, 0.8, columns)).sum(axis=1)


def made(**options: Any) -> icnn.ConvexRegressor:
    usual: dict[str, Any] = {"max_steps": 800, "random_state": 0}
    return icnn.ConvexRegressor(**usual | options)


def midpoints(model: Any, convex: np.ndarray, rest: np.ndarray | None = None) -> np.ndarray:
    """How far the fit lies below its chords, at random: never negative for a convex one."""
    order = np.random.default_rng(1).permutation(len(convex))
    ends = [convex, convex[order], (convex + convex[order]) / 2]
    if rest is not None:
        ends = [np.hstack([rest, end]) for end in ends]
    a, b, middle = map(model.predict, ends)
    return (a + b) / 2 - middle


def test_it_fits_and_finds_the_minimum():
    model = made(max_steps=2000).fit(*kinks(2000))
    assert model.score(*kinks(seed=1)) > 0.999
    np.testing.assert_allclose(model.minimize(), [0.2, 0.8], atol=0.15)
    found = model.solve()
    assert found.converged.all()
    np.testing.assert_allclose(found.value, model.predict(found.y.numpy()), rtol=1e-3)
    # A certificate in units of the data: nowhere in the box is the fit below the bound.
    grid = np.stack(np.meshgrid(*(np.linspace(-2, 3, 60),) * 2), axis=-1).reshape(-1, 2)
    assert model.predict(grid).min() >= float(found.lower) - 1e-3
    assert icnn.check_convexity(model.energy_).proved


def test_bounds_of_the_search():
    y, values = kinks()
    model = made().fit(y, values)
    best = model.minimize(low=[1.0, -2.0], high=[2.0, 0.0])
    np.testing.assert_allclose(best, [1.0, 0.0], atol=1e-6)
    assert model.minimize(low=1.0, high=2.0) == pytest.approx([1.0, 1.0], abs=1e-6)


def test_convex_whatever_the_data_are():
    y = np.random.default_rng(0).normal(size=(300, 2))
    model = made().fit(y, np.cos(3 * y).sum(axis=1))
    assert midpoints(model, y).min() > -1e-5
    assert icnn.check_convexity(model.energy_).proved


def test_concave():
    y, values = kinks(2000)
    model = made(concave=True, max_steps=2000).fit(y, -values)
    assert model.score(y, -values) > 0.999
    assert midpoints(model, y).max() < 1e-4
    np.testing.assert_allclose(model.maximize(), [0.2, 0.8], atol=0.15)
    found = model.solve()
    assert model.predict(y).max() <= float(found.lower) + 1e-3  # an upper bound here
    with pytest.raises(ValueError, match="use `maximize`"):
        model.minimize()
    with pytest.raises(ValueError, match="use `minimize`"):
        made(max_steps=1).fit(y, values).maximize()


@pytest.mark.parametrize("concave", [False, True])
@pytest.mark.parametrize("columns", [(), (0,)])
def test_monotone(concave: bool, columns: tuple[int, ...]):
    # Data that want to rise and fall: the fit rises in one column and falls in another.
    random = np.random.default_rng(0)
    X = random.uniform(-1, 1, (300, 4))
    values = (X[:, -3:] ** 2).sum(axis=1) * (-1 if concave else 1)
    signs = (1, -1, 0) if columns else (0, 1, -1, 0)
    model = made(concave=concave, monotone=signs, x_columns=columns).fit(X, values)
    higher = X.copy()
    higher[:, -3] += random.uniform(0, 1, 300)
    assert (model.predict(higher) - model.predict(X)).min() > -1e-5
    higher = X.copy()
    higher[:, -2] += random.uniform(0, 1, 300)
    assert (model.predict(higher) - model.predict(X)).max() < 1e-5
    assert model.score(X, values) > 0.4  # one column is free


def test_some_columns_of_any_form():
    random = np.random.default_rng(0)
    x, y = random.uniform(-1, 1, (2000, 1)), random.uniform(-1, 1, (2000, 1))
    values = np.abs(y - np.sin(3 * x)).ravel()
    model = made(x_columns=[0], max_steps=1500).fit(np.hstack([x, y]), values)
    assert model.score(np.hstack([x, y]), values) > 0.98
    assert midpoints(model, y, x).min() > -1e-5
    at = np.linspace(-0.9, 0.9, 7)[:, None]
    np.testing.assert_allclose(model.minimize(at), np.sin(3 * at), atol=0.15)
    assert icnn.check_convexity(model.energy_, torch.randn(5, 1)).proved


def test_names_of_columns():
    y, values = kinks(columns=3)
    frame = pd.DataFrame(y, columns=["a", "b", "c"])
    named = made(x_columns=["b"]).fit(frame, values)
    numbered = made(x_columns=[1]).fit(y, values)
    np.testing.assert_allclose(named.predict(frame), numbered.predict(y), rtol=1e-5)
    found = named.minimize(pd.DataFrame({"b": [0.0, 1.0]}))
    np.testing.assert_allclose(found, numbered.minimize([[0.0], [1.0]]), atol=1e-5)


def test_bounds_of_some_columns_and_of_each_row():
    y, values = kinks(columns=3)
    model = made(x_columns=["a"]).fit(pd.DataFrame(y, columns=["a", "b", "c"]), values)
    x = [[0.0], [0.1], [0.2]]
    low, high = np.tile(model.low_, (3, 1)), np.tile(model.high_, (3, 1))
    low[:, 1], high[:, 1] = [-0.5, 0.8, 0.9], [-0.4, 0.85, 0.95]
    rows = model.minimize(x, low, high)
    assert (rows >= low).all()
    assert (rows <= high).all()
    for i in range(3):
        named = model.minimize(x[i : i + 1], {"c": low[i, 1]}, {2: high[i, 1]})
        np.testing.assert_allclose(named[0], rows[i], atol=1e-6)


def test_columns_with_one_value_and_frames_in_another_order():
    y, values = kinks(300, columns=3)
    y[:, 2] = 1.0
    frame = pd.DataFrame(y, columns=["a", "b", "c"])
    model = made(x_columns=["b"], max_steps=200).fit(frame, values)
    x = pd.DataFrame({"c": [0.0], "b": [0.4]})
    found = model.minimize(x)
    assert found[0, 1] == pytest.approx(1.0)
    np.testing.assert_array_equal(found, model.minimize([[0.4]]))
    assert model.minimize(x, low=[0.7, 1], high=[0.7, 1])[0, 0] == pytest.approx(0.7)
    with pytest.raises(ValueError, match=r"`x` must have the columns \['b'\], got none of"):
        model.minimize(pd.DataFrame({"d": [0.0]}))


def test_among_others_of_its_kind():
    y, values = kinks(200)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), made(max_steps=500)),
        {"convexregressor__hidden": [(8,), (32, 32)]},
        cv=2,
    )
    search.fit(y, values)
    assert search.best_score_ > 0.9
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict(y), search.predict(y))


def test_the_same_again_and_nobody_elses_numbers():
    y, values = kinks(100)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = made(max_steps=100).fit(y, values).predict(y)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again: Any = clone(made(max_steps=100))
    np.testing.assert_array_equal(again.fit(y, values).predict(y), a)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"x_columns": [2]}, "`x_columns` must be columns of X, which has 2, got 2"),
        ({"x_columns": ["a"]}, "`x_columns` must be numbers, as X had no names in `fit`, got 'a'"),
        ({"x_columns": "a"}, r"`x_columns` must be a list of columns, got 'a': try \['a'\]"),
        ({"x_columns": 0}, r"`x_columns` must be a list of columns, got 0: try \[0\]"),
        ({"hidden": 5}, "`hidden` must be a non-empty sequence of widths, got 5"),
        ({"device": "nowhere"}, "`device` must be a device, got 'nowhere'"),
        ({"x_columns": [0, 1]}, "`x_columns` must leave a column to be convex in"),
        ({"x_columns": [0, 0]}, "`x_columns` must differ"),
        ({"x_columns": [True]}, "`x_columns` must be numbers or names of columns, got True"),
        ({"batch_size": 0}, "`batch_size` must be an integer of at least 1"),
        ({"monotone": [1]}, "`monotone` must be a sign, or one of each of 2"),
        ({"monotone": 2}, "`monotone` must be one of -1, 0, 1, got 2"),
        ({"activation": "tanh"}, "`activation` must be convex"),
        ({"max_steps": 0}, "`max_steps` must be an integer of at least 1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be above 0"),
    ],
)
def test_bad_options(options: Any, told: str):
    with pytest.raises(ValueError, match=told):
        made(**options).fit(*kinks(20))


def test_bad_questions():
    model = made(max_steps=5, x_columns=[0]).fit(*kinks(20))
    with pytest.raises(ValueError, match="`x` must have 1 columns, got none"):
        model.minimize()
    with pytest.raises(ValueError, match="`x` must have 1 columns, got 2"):
        model.minimize([[1.0, 2.0]])
    with pytest.raises(ValueError, match="`low` must be a number, 1 numbers, or 1 rows of them"):
        model.minimize([[1.0]], low=[0.0, 1.0])
    with pytest.raises(ValueError, match="`low` must be at most `high`, got 2 and 1 for column 1"):
        model.minimize([[1.0]], low=2.0, high=1.0)
    with pytest.raises(ValueError, match="`low` must be finite numbers"):
        model.minimize([[1.0]], low=np.inf)
    with pytest.raises(ValueError, match="`high` must bound other columns than `x_columns`, got 0"):
        model.minimize([[1.0]], high={0: 2.0})
    with pytest.raises(ValueError, match="NaN"):
        model.minimize([[np.nan]])
