"""What is likely in the gaps of a table: a Gaussian, and machines that mend its answers."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.model_selection import KFold, cross_val_predict

from icnn.estimators.gaussian import TABLE, Given, fit_gaussian, given
from icnn.estimators.kernel import Kernel

MOST = 1000  # columns, all of which are coupled
ROWS, ROOM = 2000, 3e8  # to learn from, of larger tables; their number times columns squared
FEW = 400  # of them, on which a kernel's parameters are chosen
LEAST = 10  # known values of a column, to learn more of it than its Gaussian
HIDDEN = 0.3  # of a table without gaps, to learn what to do where there are some
COMPLETE = 0.01  # missing values are fewer in a table that counts as one without
RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PULL = 10.0  # the weight of the answers beside the Gaussian's own, in units of its precision


class Columns:
    """A Gaussian of all columns, and for each column what can be said beyond its mean there.

    For each known value the Gaussian tells a mean from all other known values of its row. From the
    row as it would be filled without that value, which is what they see where it is missing, a
    kernel machine learns what that mean leaves over, and trees learn the value.

    Args:
        Z: Standardised columns; numbers count where
        known: says so.
        random: What to draw from.
        done: Told the name of each part as it begins.

    Attributes:
        mean: Of the Gaussian, and
        precision: the inverse of its covariance.
        weight: Of the answers, for `icnn.Quadratic`.
    """

    def __init__(
        self, Z: np.ndarray, known: np.ndarray, random: np.random.RandomState,
        done: Callable[[str], None],
    ):  # fmt: skip
        most = max(LEAST, min(ROWS, int(ROOM / Z.shape[1] ** 2)))
        rows = np.sort(random.permutation(len(Z))[:most])
        Z, known = Z[rows], known[rows]
        done("a Gaussian")
        seen = known
        if (~known).mean() <= COMPLETE:
            seen = known & (random.uniform(size=known.shape) > HIDDEN)
        self.gaussian = fit_gaussian(torch.from_numpy(Z), torch.from_numpy(known))
        self.mean = self.gaussian[0].numpy()
        self.precision = np.linalg.inv(self.gaussian[1].numpy())
        parts = list(self._given(Z, seen))
        found = Given(*(torch.cat([getattr(p, n) for p in parts]) for n in Given.__annotations__))
        self.machines: list[Machine | None] = []
        self.weight = np.ones(Z.shape[1])
        for j in range(Z.shape[1]):
            done(f"column {j + 1}")
            own = torch.from_numpy(np.flatnonzero(known[:, j]))
            # Of a large table no value of a rare column may have been drawn.
            variance = found.variance[own, j] if len(own) else found.variance[:, j]
            self.weight[j] = PULL / float(variance.mean())
            values, rows = Z[known[:, j], j], found.without(own, j).numpy()
            enough = len(own) >= LEAST and np.std(values - rows[:, j]) > 1e-6
            self.machines.append(Machine(rows, values, j, random) if enough else None)

    def __call__(self, Z: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Rows with an answer in each gap."""
        filled = torch.cat([part.filled for part in self._given(Z, known)]).numpy()
        answers = filled.copy()
        for j, machine in enumerate(self.machines):
            gaps = ~known[:, j]
            if machine is not None and gaps.any():
                answers[gaps, j] = machine(filled[gaps])
        return answers

    def _given(self, Z: np.ndarray, known: np.ndarray) -> Iterator[Given]:
        """What the Gaussian says of rows, some at a time."""
        step = max(1, int(TABLE / Z.shape[1] ** 2))
        for i in range(0, len(Z), step):
            rows, seen = (torch.from_numpy(part[i : i + step]) for part in (Z, known))
            yield given(rows, seen, *self.gaussian)


class Machine:
    """A kernel machine, added to what column `j` of a row says already, and trees.

    The first is better where columns are smooth functions of others, trees where rows are of
    several kinds. How much each counts is chosen by what they say of rows that they have not seen,
    and half of the way only: the Gaussian below the machine has seen all rows.
    """

    def __init__(self, X: np.ndarray, y: np.ndarray, j: int, random: np.random.RandomState):
        self.j = j
        self.kernel = Kernel(X, (y - X[:, j])[:, None], worth, random, FEW, RIDGES)
        trees = ExtraTreesRegressor(
            50, min_samples_leaf=3, max_features=0.5, random_state=random.randint(2**31)
        )
        folds = KFold(3, shuffle=True, random_state=random.randint(2**31))
        unseen = np.asarray(cross_val_predict(trees, X, y, cv=folds))
        self.trees = trees.fit(X, y)
        # The least of sum (y - s k - (1 - s) t)^2 over s
        apart = X[:, j] + self.kernel.held_out[:, 0] - unseen
        best = ((y - unseen) @ apart) / max(apart @ apart, 1e-12)
        self.share = (float(np.clip(best, 0, 1)) + 0.5) / 2

    def __call__(self, X: np.ndarray) -> np.ndarray:
        kernel = X[:, self.j] + self.kernel(X)[:, 0]
        return self.share * kernel + (1 - self.share) * self.trees.predict(X)


def worth(answers: np.ndarray, true: np.ndarray) -> float:
    """Of a kernel's answers: the less they are wrong, the more."""
    return -float(np.square(answers - true).mean())
