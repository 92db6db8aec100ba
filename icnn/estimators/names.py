"""Columns by number or name."""

from typing import Any

import numpy as np


class NamedColumns:
    """For estimators that are told of columns."""

    n_features_in_: int

    def _place(self, argument: str, column: Any) -> int:
        """The number of a column that is given by number or name."""
        names, count = list(getattr(self, "feature_names_in_", ())), self.n_features_in_
        if isinstance(column, str):
            if column in names:
                return names.index(column)
            had = f"columns of X, {names}" if names else "numbers, as X had no names in `fit`"
            raise ValueError(f"`{argument}` must be {had}, got {column!r}")
        if isinstance(column, bool | np.bool_) or not isinstance(column, int | np.integer):
            raise ValueError(f"`{argument}` must be numbers or names of columns, got {column!r}")
        if not -count <= column < count:
            raise ValueError(f"`{argument}` must be columns of X, which has {count}, got {column}")
        return int(column) % count

    def _name(self, place: int) -> str:
        """What messages call a column."""
        names = getattr(self, "feature_names_in_", None)
        return f"column {place}" if names is None else repr(str(names[place]))
