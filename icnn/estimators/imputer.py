"""Missing values: those that are most likely given the rest of their row."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn import get_config
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from icnn.checks import check_choice, check_device, check_widths
from icnn.energies.compose import Quadratic, Sum
from icnn.energies.gaussian import Gaussian
from icnn.estimators.columns import MOST as MOST_COLUMNS
from icnn.estimators.columns import Columns
from icnn.estimators.gaussian import most_likely
from icnn.estimators.names import NamedColumns
from icnn.estimators.pixels import MOST, PARTS, Pixels
from icnn.estimators.portable import Portable
from icnn.estimators.threads import threads
from icnn.learning.progress import parts_done
from icnn.solvers.argmin import argmin
from icnn.solvers.bundle import Bundle
from icnn.solvers.domains import Box
from icnn.solvers.solution import Solution

Array = NDArray[np.floating[Any]]
ArrayLike = Any  # as scikit-learn takes it: arrays, data frames, lists

ROWS = 4096  # answered at once
FLAT = 1e-12  # a standard deviation, in units of the largest number, that is rounding
FAR = 10.0  # standard deviations beyond the range: what is given there counts as no farther


class Imputer(NamedColumns, OneToOneFeatureMixin, TransformerMixin, Portable):
    """Fill in missing values (NaN) by minimising an energy over them, whichever they are.

        f(x, y) = |factor (y - mean)|^2 / 2 + sum(weight (y - x)^2) / 2

    over rows `y`, whose known values are given. The first term is a Gaussian of all columns, fitted
    to rows with gaps; it couples the values that are missing. In the second, `x` are answers to
    each missing value by machines that learn what the Gaussian leaves over: a kernel and trees. The
    sum is convex; its minimum within the range that each column had is found with a certificate: of
    the minimum, and not of how near that is to the truth.

    For pictures, `image_shape` makes rows of pixels: covariances count less with the distance, and
    the answers `x` come from kernel machines that look at known pixels nearby, made for whatever is
    missing. Any part of a picture can be, also one that never was in training.

    Args:
        image_shape: Height and width of pictures, and colours if there are; `X` then has a row of
            pixels for each picture, or is an array of pictures. At most 5,000 pixels.
        symmetric: Whether left and right of pictures are alike, as in faces.
        binary: Columns that hold two values, by number or name, or "auto" for all that do: what is
            missing there becomes one of the two. Elsewhere any number in the range may come.
        device: Where to minimise, and where machines for pictures compute, as PyTorch calls it.
        random_state: A seed, for the same result again.
        progress: Whether a bar shows how far `fit` is.

    Attributes:
        energy_: The energy, of rows standardised by `mean_` and `scale_`.
        low_: The least value of each column in `fit`, and `high_` the largest: answers lie between.
        binary_: Which columns hold two values.

    Examples:
        >>> X = np.random.default_rng(0).normal(size=(100, 1)) @ [[1.0, 2.0, -1.0]]
        >>> X[0, 1] = np.nan
        >>> filled = icnn.Imputer(random_state=0).fit_transform(X)
        >>> bool(abs(filled[0, 1] - 2 * X[0, 0]) < 0.1)
        True
    """

    energy_: Sum
    n_features_in_: int

    def __init__(
        self,
        *,
        image_shape: Sequence[int] | None = None,
        symmetric: bool = False,
        binary: Sequence[int | str] | str = (),
        device: str = "cpu",
        random_state: Any = None,
        progress: bool = False,
    ):
        self.image_shape = image_shape
        self.symmetric = symmetric
        self.binary = binary
        self.device = device
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: ArrayLike, y: Any = None, groups: ArrayLike | None = None) -> "Imputer":
        """Learn from rows, with gaps or without.

        Args:
            X: Rows of numbers; NaN is a gap.
            y: Ignored.
            groups: Which pictures belong together, one name or number each: settings that are
                chosen for pictures of some people shall be good for others. For `image_shape`.
        """
        self.device_ = check_device("device", self.device)
        check_choice("symmetric", self.symmetric, (True, False))
        if self.image_shape is None and (groups is not None or self.symmetric):
            named = "`symmetric`" if groups is None else "`groups`"
            raise ValueError(f"{named} must be left out of tables: pictures have an `image_shape`")
        X = self._read(X, reset=True)
        if self.image_shape is None and X.shape[1] > MOST_COLUMNS:
            raise ValueError(
                f"`X` must have at most {MOST_COLUMNS} columns, got {X.shape[1]}: fill in some of "
                "them at a time"
            )
        known = ~np.isnan(X)
        empty = np.flatnonzero(~known.any(axis=0))
        if len(empty):
            what = (
                "drop it" if self.image_shape is None else "crop the pictures, or put a value there"
            )
            raise ValueError(
                f"`X` must have a value in each column, got none in {self._name(int(empty[0]))}: "
                f"{what}"
            )
        self.low_, self.high_ = np.nanmin(X, axis=0), np.nanmax(X, axis=0)
        if self.image_shape is not None:  # all pixels are measured alike
            self.low_[:], self.high_[:] = self.low_.min(), self.high_.max()
        most = np.maximum(np.abs(self.low_), np.abs(self.high_))
        most[most == 0] = 1.0
        part = X / most  # whose squares do not overflow
        alike = None if self.image_shape is not None else 0
        mean = np.broadcast_to(np.nanmean(part, axis=alike), most.shape)
        scale = np.broadcast_to(np.nanstd(part, axis=alike), most.shape)
        self.mean_, self.scale_ = mean * most, np.where(scale > FLAT, scale, 1.0) * most
        self.binary_ = self._two_valued(X, known)
        random = check_random_state(self.random_state)
        Z = self._standardised(X)
        if self.image_shape is None:
            small, bar = threads(X.size * len(X)), parts_done(self.progress, X.shape[1] + 1)
            with small, bar as done:
                self.model_ = Columns(Z, known, random, done)
        else:
            groups = self._together(groups, len(X))
            about = (self._shape(), bool(self.symmetric), groups, random, self.device_)
            with parts_done(self.progress, PARTS) as done:
                self.model_ = Pixels(Z, known, *about, done)
        factor = np.ascontiguousarray(np.linalg.cholesky(self.model_.precision).T)
        parts = (torch.from_numpy(part) for part in (self.model_.mean, factor))
        pull = Quadratic(nn.Identity(), torch.from_numpy(self.model_.weight))
        self.energy_ = Sum(Gaussian(*parts), pull).to(self.device_)
        return self

    def transform(self, X: ArrayLike) -> Array:
        """Rows without gaps: what was known stays as it was, to the bit."""
        check_is_fitted(self)
        given, X = X, self._read(X)
        gaps, filled = np.isnan(X), X.copy()
        if gaps.any():
            found = self._solved(X).y.numpy()
            for j in np.flatnonzero(self.binary_):
                middle = self.low_[j] / 2 + self.high_[j] / 2
                found[:, j] = np.where(found[:, j] > middle, self.high_[j], self.low_[j])
            filled[gaps] = found[gaps]
        own = getattr(self, "_sklearn_output_config", {})
        framed = own.get("transform", get_config()["transform_output"]) != "default"
        if self.image_shape is None or framed:
            return filled
        return filled.reshape(np.asarray(given).shape)  # pictures stay pictures

    def solve(self, X: ArrayLike) -> Solution:
        """The answers with their certificates: `y` in units of the data, the rest as of `energy_`.

        There is a row of `y` for each row or picture. Where nothing is missing, there are no steps
        and the gap is 0.
        """
        check_is_fitted(self)
        return self._solved(self._read(X))

    def answers(self, X: ArrayLike) -> Array:
        """What machines say of each gap, before the Gaussian couples them: the `x` of `energy_`.

        In units of the data; they may lie outside of the range.
        """
        check_is_fitted(self)
        X = self._read(X)
        known = ~np.isnan(X)
        with threads(X.size * X.shape[1]):
            found = self.model_(self._standardised(X), known)
        return np.where(known, X, found * self.scale_ + self.mean_)

    def _solved(self, X: Array) -> Solution:
        with threads(X.size * X.shape[1]):
            return Solution.joined([self._part(X[i : i + ROWS]) for i in range(0, len(X), ROWS)])

    def _part(self, X: Array) -> Solution:
        known, Z = ~np.isnan(X), self._standardised(X)
        low, high = ((end - self.mean_) / self.scale_ for end in (self.low_, self.high_))
        wide = np.where(high > low, high, low + 1)  # a column of one value has it as its mean too
        center = self.model_(Z, known)
        start = most_likely(
            Z, known, self.model_.mean, self.model_.precision, center, self.model_.weight, low, wide
        )
        given, x, first, *ends = (
            torch.from_numpy(part).to(self.device_) for part in (Z, center, start, low, wide)
        )
        mask = torch.from_numpy(known).to(self.device_)
        with torch.no_grad():
            found = argmin(
                self.energy_, x, Box(*ends), entropy=0, solver=Bundle(), start=first,
                fixed=(mask, given),
            ).to("cpu")  # fmt: skip
        y = np.clip(found.y.numpy() * self.scale_ + self.mean_, self.low_, self.high_)
        return replace(found, y=torch.from_numpy(np.where(known, X, y)))

    def _read(self, X: Any, reset: bool = False) -> Array:
        """Rows of numbers; pictures become rows."""
        if self.image_shape is None:
            if len(got := getattr(X, "shape", ())) > 2:
                raise ValueError(
                    f"`X` must be rows, got {got}: pictures have an `image_shape`, as in "
                    f"Imputer(image_shape={tuple(got[1:])})"
                )
        else:
            shape, count = self._shape(), int(np.prod(self._shape()))
            if not hasattr(X, "columns") and not sparse.issparse(X):
                X = np.asarray(X)
                X = X.reshape(len(X), -1) if X.shape[1:] == shape else X
            if len(X.shape) != 2 or X.shape[1] != count:
                raise ValueError(
                    f"`X` must be pictures of shape {shape}, (n, {', '.join(map(str, shape))}) or "
                    f"(n, {count}), got {X.shape}" + ": one is X[None]" * (X.shape == shape)
                )
        return validate_data(  # pyright: ignore
            self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan",
            ensure_min_samples=2 if reset else 1,
        )  # fmt: skip

    def _shape(self) -> tuple[int, ...]:
        """That of pictures."""
        told = self.image_shape
        told = told.tolist() if isinstance(told, np.ndarray) else told
        if isinstance(told, Sequence) and not isinstance(told, str) and len(told) in (2, 3):
            shape = check_widths("image_shape", told)
            if np.prod(shape) <= MOST:
                return shape
        raise ValueError(
            "`image_shape` must be (height, width) or (height, width, colours), with at most "
            f"{MOST} numbers, got {self.image_shape!r}"
        )

    def _together(self, groups: Any, count: int) -> NDArray[Any]:
        """A group for each picture; by default its own."""
        if groups is None:
            return np.arange(count)
        groups = np.asarray(groups)
        if groups.shape != (count,):
            raise ValueError(f"`groups` must be {count} names or numbers, got {groups.shape}")
        try:
            return np.unique(groups, return_inverse=True)[1]
        except TypeError:
            raise ValueError("`groups` must be names or numbers, got some of both") from None

    def _standardised(self, X: Array) -> Array:
        """Gaps become zeros. Numbers far out would drown all others, and do not say much."""
        low, high = self.low_ - FAR * self.scale_, self.high_ + FAR * self.scale_
        return np.nan_to_num((np.clip(X, low, high) - self.mean_) / self.scale_, nan=0.0)

    def _two_valued(self, X: Array, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which columns hold two values: the named ones must."""
        ends = np.equal(X, self.low_) | np.equal(X, self.high_)
        two = np.asarray((ends | ~known).all(axis=0))
        if isinstance(self.binary, str):
            if self.binary != "auto":
                got = f"{self.binary!r}: try [{self.binary!r}]"
                raise ValueError(f"`binary` must be a list of columns or 'auto', got {got}")
            return two & (self.low_ < self.high_)
        if not isinstance(self.binary, Iterable):
            raise ValueError(f"`binary` must be a list of columns or 'auto', got {self.binary!r}")
        found = np.zeros(X.shape[1], dtype=bool)
        for column in self.binary:
            place = self._place("binary", column)
            if not two[place]:
                raise ValueError(
                    f"`binary` must name columns of two values, got {self._name(place)} with "
                    f"{len(np.unique(X[known[:, place], place]))}"
                )
            found[place] = True
        return found

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags
