"""Regression with functions that are convex by construction."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from icnn.checks import check_count, check_device, check_number, check_widths
from icnn.energies.ficnn import FICNN
from icnn.energies.monotone import check_monotone
from icnn.energies.picnn import PICNN
from icnn.estimators.names import NamedColumns
from icnn.estimators.portable import Portable
from icnn.estimators.threads import threads
from icnn.learning.batches import batches
from icnn.learning.fit import fit
from icnn.solvers.argmin import argmin
from icnn.solvers.bundle import Bundle
from icnn.solvers.domains import Box
from icnn.solvers.solution import Solution

Array = NDArray[np.floating[Any]]
ArrayLike = Any  # as scikit-learn takes it: arrays, data frames, lists


class ConvexRegressor(NamedColumns, RegressorMixin, Portable):
    """Least squares among convex functions: `f(y)`, or `f(x, y)` convex in `y` for each `x`.

    A `FICNN` or `PICNN` is fitted to values, so that the result is convex whatever the data are,
    and its minimum is found with a certificate. Columns and values are standardised inside.

    Args:
        x_columns: Columns of `X`, by number or name, in which the function may have any form. In
            all others it is convex.
        concave: Whether to fit a concave function instead.
        monotone: Whether it rises (1) or falls (-1) in the columns in which it is convex: a sign
            for all, or one of each; 0 is either.
        hidden: Widths of the network's layers.
        activation: "relu" for functions with kinks, "softplus" for smooth ones; or another convex
            activation.
        max_steps: Of the optimiser.
        learning_rate: Of Adam; it rises at first, and falls to zero.
        weight_decay: See `icnn.fit`; by default 30 times columns over examples, and at most 1.
        batch_size: Examples of a step; by default 64, or a fiftieth of all if that is more.
        device: Where to train, as PyTorch calls it.
        random_state: A seed, for the same result again.
        progress: Whether a bar shows how far `fit` is.

    Attributes:
        energy_: The network, a function of standardised columns.
        history_: What `icnn.fit` saw.
        low_: The least value of each column in which the function is convex, and `high_` the
            largest: where `minimize` looks by default.

    Examples:
        >>> y = np.random.default_rng(0).uniform(-1, 1, (500, 2))
        >>> model = icnn.ConvexRegressor(random_state=0).fit(y, np.abs(y - 0.3).sum(axis=1))
        >>> model.minimize().round(1).tolist()
        [0.3, 0.3]
    """

    energy_: FICNN | PICNN
    n_features_in_: int

    def __init__(
        self,
        *,
        x_columns: Sequence[int | str] = (),
        concave: bool = False,
        monotone: int | Sequence[int] | None = None,
        hidden: Sequence[int] = (48, 48),
        activation: Any = "relu",
        max_steps: int = 1500,
        learning_rate: float = 2e-2,
        weight_decay: float | None = None,
        batch_size: int | None = None,
        device: str = "cpu",
        random_state: Any = None,
        progress: bool = False,
    ):
        self.x_columns = x_columns
        self.concave = concave
        self.monotone = monotone
        self.hidden = hidden
        self.activation = activation
        self.max_steps = max_steps
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.device = device
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: ArrayLike, y: ArrayLike) -> "ConvexRegressor":
        """Fit to values.

        Args:
            X: One row for each example.
            y: The values there. (What the paper calls `y` are columns of `X`.)
        """
        check_count("max_steps", self.max_steps)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        if check_number("learning_rate", self.learning_rate) <= 0:
            raise ValueError(f"`learning_rate` must be above 0, got {self.learning_rate!r}")
        found: Any = validate_data(
            self, X, y, y_numeric=True, dtype=np.float64, ensure_min_samples=2
        )
        X, values = found
        self._split()
        free, signs = len(self.y_columns_), None
        if self.monotone is not None:
            signs = check_monotone(self.monotone, free)
            signs = tuple(-sign for sign in signs or ()) if self.concave else signs
        self.mean_, self.scale_ = X.mean(axis=0), spread(X, axis=0)
        self.value_mean_, self.value_scale_ = float(values.mean()), float(spread(values))
        self.low_, self.high_ = X[:, self.y_columns_].min(axis=0), X[:, self.y_columns_].max(axis=0)
        sign = -1.0 if self.concave else 1.0
        target = sign * (values - self.value_mean_) / self.value_scale_

        seed = check_random_state(self.random_state).randint(2**31)
        self.device_ = place = check_device("device", self.device)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            torch.manual_seed(int(seed))
            widths = check_widths("hidden", self.hidden)
            if len(self.x_columns_):
                energy = PICNN(len(self.x_columns_), free, widths, activation=self.activation,
                               monotone=signs)  # fmt: skip
            else:
                energy = FICNN(free, widths, activation=self.activation, monotone=signs)
            self.energy_ = energy.to(self.device_)
            columns = self._standardised(X)
            size = self.batch_size or max(64, len(X) // 50)
            loader = batches(*columns, torch.from_numpy(target).float(), size=min(size, len(X)))
            epochs = -(-self.max_steps // len(loader))
            decay = self.weight_decay
            if decay is None:  # the fewer examples there are of each column, the more of it
                decay = min(1.0, 30 * X.shape[1] / len(X))
            fused = place.type in ("cpu", "cuda")
            optimizer = torch.optim.Adam(
                self.energy_.parameters(), lr=self.learning_rate, betas=(0.9, 0.99), fused=fused
            )
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, self.learning_rate, total_steps=epochs * len(loader) + 1,
                pct_start=0.1, cycle_momentum=False,
            )  # fmt: skip
            with threads(min(size, len(X)) * max(widths) ** 2):
                self.history_ = fit(
                    self.energy_, loader, squares, epochs=epochs, optimizer=optimizer,
                    schedule=schedule, weight_decay=decay, progress=self.progress,
                    parallel=False,
                )  # fmt: skip
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The values of the fit."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        *x, y = self._standardised(X)
        with torch.no_grad():
            parts = zip(*(part.split(65536) for part in (*x, y)), strict=True)
            found = [self.energy_(part[0] if x else None, part[-1]).cpu() for part in parts]
        values = torch.cat(found).double().numpy()
        return self.value_mean_ + (-1 if self.concave else 1) * self.value_scale_ * values

    def solve(
        self, x: ArrayLike | None = None, low: ArrayLike | None = None,
        high: ArrayLike | None = None,
    ) -> Solution:  # fmt: skip
        """The minimum of the fit over a box, or the maximum of a concave one, with a bound.

        Args:
            x: The columns `x_columns`, one row for each problem, by name in a data frame; `None`
                where there are none.
            low: Lower bounds of the other columns: one for all, one of each, or rows of them, one
                for each problem; or of some, as `{column: bound}`. By default, the least values
                in training.
            high: Upper bounds, likewise; by default, the largest values.

        Returns:
            A `Solution` in units of the data. For a concave fit `lower` is an upper bound.
        """
        check_is_fitted(self)
        wide, count = self.y_columns_, len(self.x_columns_)
        if (x is None) == bool(count):
            raise ValueError(
                f"`x` must have {count} columns, got {'none' if x is None else 'some'}"
            )
        given = None
        if x is not None:
            if hasattr(x, "columns") and hasattr(self, "feature_names_in_"):
                names = list(self.feature_names_in_[self.x_columns_])  # pyright: ignore
                absent = [name for name in names if name not in x.columns]
                if absent:
                    raise ValueError(f"`x` must have the columns {names}, got none of {absent}")
                x = x[names]
            x = np.asarray(check_array(x, dtype="float64", input_name="x"))
            if x.shape[1] != count:
                raise ValueError(f"`x` must have {count} columns, got {x.shape[1]}")
            given = (x - self.mean_[self.x_columns_]) / self.scale_[self.x_columns_]
            given = torch.from_numpy(given).to(self.device_)
        mean, scale = (torch.from_numpy(part[wide]) for part in (self.mean_, self.scale_))
        rows = 1 if given is None else len(given)
        ends = [
            self._bound("low", low, self.low_, rows),
            self._bound("high", high, self.high_, rows),
        ]
        crossed = (ends[0] > ends[1]).nonzero()
        if len(crossed):
            row, j = crossed[0].tolist()
            got = f"{float(ends[0][row, j]):g} and {float(ends[1][row, j]):g} for "
            raise ValueError(f"`low` must be at most `high`, got {got}{self._name(int(wide[j]))}")
        # In double precision, for a certificate as fine as it can be.
        energy = deepcopy(self.energy_).double()
        with torch.no_grad():
            least, most = ((end - mean).div(scale).to(self.device_) for end in ends)
            held = least == most  # a column that has one value only is given
            box = Box(least, torch.where(held, least + 1, most))
            fixed = (held, least) if bool(held.any()) else None
            found = argmin(energy, given, box, entropy=0, solver=Bundle(), fixed=fixed)
        found = found.to("cpu")
        size, sign = self.value_scale_, -1 if self.concave else 1
        level = self.value_mean_
        return replace(
            found,
            y=(found.y * scale + mean).clamp(*ends),  # within them to the last bit
            value=level + sign * size * found.value,
            lower=level + sign * size * found.lower,
            gap=size * found.gap,
            gaps=size * found.gaps,
        )

    def minimize(
        self, x: ArrayLike | None = None, low: ArrayLike | None = None,
        high: ArrayLike | None = None,
    ) -> Array:  # fmt: skip
        """Where the fit is least, for each row of `x`: `solve(x, low, high).y` as an array.

        A concave fit has no such point inside: see `maximize`.
        """
        if self.concave:
            raise ValueError("`concave` must be False for `minimize`, got True: use `maximize`")
        return self._best(x, low, high)

    def maximize(
        self, x: ArrayLike | None = None, low: ArrayLike | None = None,
        high: ArrayLike | None = None,
    ) -> Array:  # fmt: skip
        """Where a concave fit is largest, for each row of `x`."""
        if not self.concave:
            raise ValueError("`concave` must be True for `maximize`, got False: use `minimize`")
        return self._best(x, low, high)

    def _best(self, x: Any, low: Any, high: Any) -> Array:
        found = self.solve(x, low, high).y.numpy()
        return found[0] if x is None else found

    def _split(self) -> None:
        """Which columns are which."""
        if isinstance(self.x_columns, str) or not isinstance(self.x_columns, Iterable):
            got = f"{self.x_columns!r}: try [{self.x_columns!r}]"
            raise ValueError(f"`x_columns` must be a list of columns, got {got}")
        places = [self._place("x_columns", column) for column in self.x_columns]
        if len(set(places)) < len(places):
            raise ValueError(f"`x_columns` must differ, got {list(self.x_columns)!r}")
        others = [j for j in range(self.n_features_in_) if j not in places]
        if not others:
            raise ValueError("`x_columns` must leave a column to be convex in, got all of them")
        self.x_columns_, self.y_columns_ = np.array(places, dtype=int), np.array(others)

    def _standardised(self, X: Array) -> list[Tensor]:
        """The columns as the network takes them: `x` if there is one, and `y`."""
        scaled = torch.from_numpy((X - self.mean_) / self.scale_).float().to(self.device_)
        y = scaled[:, self.y_columns_]
        return [scaled[:, self.x_columns_], y] if len(self.x_columns_) else [y]

    def _bound(self, argument: str, end: Any, usual: Array, rows: int) -> Tensor:
        """A bound for each row and column."""
        count, found = len(self.y_columns_), np.tile(usual, (rows, 1))
        if isinstance(end, Mapping):
            wide = list(self.y_columns_)
            for column, bound in end.items():
                place = self._place(argument, column)
                if place not in wide:
                    raise ValueError(
                        f"`{argument}` must bound other columns than `x_columns`, got {column!r}"
                    )
                found[:, wide.index(place)] = bound
        elif end is not None:
            end = np.asarray(end, dtype=np.float64)
            if end.shape not in ((), (1,), (count,), (rows, count), (rows, 1)):
                raise ValueError(
                    f"`{argument}` must be a number, {count} numbers, or {rows} rows of them, got "
                    f"shape {end.shape}"
                )
            found[:] = end
        if not np.isfinite(found).all():
            raise ValueError(f"`{argument}` must be finite numbers, got {end!r}")
        return torch.from_numpy(found)


def squares(energy: Any, *batch: Tensor) -> Tensor:
    """The mean squared error of a batch: `y` and values, after `x` if there is one."""
    *x, y, values = batch
    return (energy(x[0] if x else None, y) - values).square().mean()


def spread(values: Array, axis: int | None = None) -> Any:
    """The standard deviation, or one where there is none."""
    found = values.std(axis=axis)
    return np.where(found > 1e-12 * (1 + np.abs(values).max(axis=axis)), found, 1.0)
