r"""Does `Imputer` fill in gaps better than scikit-learn's imputers, and how long does it take?

Values are hidden in complete tables: each with the same chance (MCAR); by what other columns hold,
a third of which stay known (MAR); or by what they are themselves, so that large or small ones are
missing more often (MNAR). The error is the root of the mean square over hidden values, in standard
deviations of their columns. The rivals see standardised columns. Times are for `fit_transform`, one
thread each.

Cells that are done are kept in a folder `unfinished-...` until all are.

HyperImpute asks for packages older than ours, so that it has an environment of its own, made by

    python -m venv hyper
    hyper/bin/pip install torch==2.13.0 hyperimpute scikit-learn==1.5.2 "pandas<2.3" "numpy<2.3" \
        safetensors
    hyper/bin/python -m benchmarks.imputation --hyperimpute

(with newer ones it runs, and returns means). The last line adds it to the numbers of the others.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

DATA = ("diabetes", "wine", "breast_cancer", "digits", "iris")
WHOLE = DATA[:3]  # on which all of the grid is run
KINDS, RATES, SEEDS = ("MCAR", "MAR", "MNAR"), (0.1, 0.3, 0.5), 5
FRESH = (3, 4)  # seeds that nobody looked at while constants of `Imputer` were set
STEEP = 1.5  # how much the chance to be missing depends on values
METHODS = ("mean", "k-NN", "iterative, BayesianRidge", "iterative, ExtraTrees(50)", "icnn.Imputer")
HYPER = "HyperImpute"
Cell = tuple[str, str, float, int]


def cells(seeds: int) -> Iterator[Cell]:
    """All tables, mechanisms, rates and seeds."""
    for data in DATA:
        for kind in KINDS if data in WHOLE else KINDS[:1]:
            for rate in RATES if data in WHOLE else RATES[1:2]:
                for seed in range(seeds):
                    yield data, kind, rate, seed


def table(name: str) -> np.ndarray:
    """A complete table of scikit-learn."""
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")().data.astype(float)


def hidden(X: np.ndarray, kind: str, rate: float, seed: int) -> np.ndarray:
    """Which values are missing: about `rate` of all."""
    random = np.random.default_rng(seed)
    rows, columns = X.shape
    spread = X.std(axis=0)
    Z = (X - X.mean(axis=0)) / np.where(spread > 0, spread, 1)
    free = np.ones(columns, dtype=bool)
    if kind == "MCAR":
        gaps = random.uniform(size=X.shape) < rate
    else:
        if kind == "MAR":
            free[random.permutation(columns)[: max(1, columns // 3)]] = False
            mix = random.normal(size=((~free).sum(), columns)) / np.sqrt((~free).sum())
            level = STEEP * Z[:, ~free] @ mix
        else:
            level = STEEP * Z * random.choice([-1, 1], columns)
        gaps = np.zeros(X.shape, dtype=bool)
        for j in np.flatnonzero(free):
            chance = tilted(level[:, j], min(rate * columns / free.sum(), 0.9))
            gaps[:, j] = random.uniform(size=rows) < chance
    # No row and no column without any value.
    for i in np.flatnonzero(gaps.all(axis=1)):
        gaps[i, random.integers(columns)] = False
    for j in np.flatnonzero(gaps.all(axis=0)):
        gaps[random.integers(rows), j] = False
    return gaps


def tilted(level: np.ndarray, rate: float) -> np.ndarray:
    """Chances that rise with a level, with a given mean: by bisection."""
    low, high, chance = -30.0, 30.0, np.empty(0)
    for _ in range(60):
        middle = (low + high) / 2
        chance = 1 / (1 + np.exp(-level - middle))
        low, high = (middle, high) if chance.mean() < rate else (low, middle)
    return chance


def error(filled: np.ndarray, X: np.ndarray, gaps: np.ndarray) -> float:
    """In standard deviations of columns."""
    spread = X.std(axis=0)
    return float(np.sqrt(np.square((filled - X) / np.where(spread > 0, spread, 1))[gaps].mean()))


def made(method: str, seed: int) -> Any:
    """An imputer."""
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer
    from sklearn.linear_model import BayesianRidge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if method == HYPER:
        from hyperimpute.plugins.imputers import Imputers  # pyright: ignore

        return make_pipeline(StandardScaler(), Imputers().get("hyperimpute", random_state=seed))
    if method == METHODS[-1]:
        import icnn

        return icnn.Imputer(random_state=seed)
    trees = ExtraTreesRegressor(50, random_state=seed)
    rival: Any = {
        "mean": lambda: SimpleImputer(),
        "k-NN": lambda: KNNImputer(),
        "iterative, BayesianRidge": lambda: IterativeImputer(BayesianRidge(), random_state=seed),
        "iterative, ExtraTrees(50)": lambda: IterativeImputer(trees, random_state=seed),
    }[method]()
    return make_pipeline(StandardScaler(), rival)


def measured(cell: Cell, method: str) -> tuple[float, float]:
    """The error of a method in a cell, and its seconds."""
    import warnings

    import torch
    from threadpoolctl import threadpool_limits

    name, kind, rate, seed = cell
    X = table(name)
    gaps = hidden(X, kind, rate, seed)
    holes = np.where(gaps, np.nan, X)
    model = made(method, seed)
    torch.set_num_threads(1)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ten rounds are not enough
        begin = time.perf_counter()
        filled = np.asarray(model.fit_transform(holes))
        seconds = time.perf_counter() - begin
    if method != METHODS[-1]:
        filled = model[0].inverse_transform(filled)
    return error(np.where(gaps, filled, X), X, gaps), seconds


def rows_of(
    found: dict[tuple[Cell, str], tuple[float, float]], methods: Sequence[str]
) -> list[dict]:
    """Means over seeds, for each table, mechanism and rate; and the mean rank over all cells."""
    rows: list[dict] = []
    every = [cell for cell in cells(SEEDS) if (cell, methods[0]) in found]
    groups = list(dict.fromkeys(cell[:3] for cell in every))
    for group in groups:
        seeds = [cell for cell in every if cell[:3] == group]
        row: dict = {"data": group[0].replace("_", " "), "missing": f"{group[1]} {group[2]:.0%}"}
        for method in methods:
            row[method] = f"{np.mean([found[cell, method][0] for cell in seeds]):.3f}"
        rows.append(row)
    errors = np.array([[found[cell, method][0] for method in methods] for cell in every])
    ranks = np.array(
        [[(row < own).sum() + ((row == own).sum() + 1) / 2 for own in row] for row in errors]
    )
    seconds = np.array([[found[cell, method][1] for method in methods] for cell in every])
    fresh = np.array([cell[3] in FRESH for cell in every])
    for name, over, numbers in (
        ("mean rank", f"{len(every)} runs", ranks),
        ("mean rank", f"{fresh.sum()} runs, seeds 3 and 4", ranks[fresh]),
        ("mean time, s", "", seconds),
    ):
        if len(numbers):
            means = zip(methods, numbers.mean(axis=0), strict=True)
            row = {"data": name, "missing": over, **{m: f"{mean:.2f}" for m, mean in means}}
            if numbers is seconds and HYPER in row:
                row[HYPER] = ""  # from another run: not to be compared
            rows.append(row)
    return rows


def main() -> None:
    """Print the table, and write it."""
    from joblib import Memory, Parallel, delayed

    from icnn import report

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the numbers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at once")
    parser.add_argument("--fast", action="store_true", help="one seed of two small tables")
    parser.add_argument("--hyperimpute", action="store_true", help="add it to what was measured")
    settings = parser.parse_args()
    seeds = 1 if settings.fast else SEEDS
    wanted = [c for c in cells(seeds) if not settings.fast or c[0] in ("iris", "wine")]
    methods = (HYPER,) if settings.hyperimpute else METHODS
    folder = settings.out / f"unfinished-imputation-{report.code()}"
    kept: Any = Memory(folder, verbose=0).cache(measured)
    # The longest first, so that none is left over at the end.
    work = [(cell, method) for method in methods[::-1] for cell in wanted]
    work.sort(key=lambda part: (part[0][0] != "digits", part[1] != METHODS[3]))
    answers: Any = Parallel(settings.jobs, verbose=5)(delayed(kept)(*part) for part in work)
    found: Any = dict(zip(work, answers, strict=True))
    others: dict[str, Any] = {}
    if settings.hyperimpute:
        others = json.loads((settings.out / "imputation.json").read_text())
        for run in others["runs"]:
            cell = tuple(run[key] for key in ("data", "missing", "rate", "seed"))
            found[cell, run["method"]] = run["error"], run["seconds"]
        methods = (*METHODS[:-1], HYPER, METHODS[-1])
    rows = rows_of(found, methods)
    print(report.table(rows))
    every = [
        {"data": c[0], "missing": c[1], "rate": c[2], "seed": c[3], "method": method,
         "error": value, "seconds": seconds}
        for (c, method), (value, seconds) in found.items()
    ]  # fmt: skip
    told = report.result({"seeds": seeds, "steep": STEEP}, rows) | {"runs": every}
    if others:
        told["made"] = {**others["made"], HYPER: told["made"]}
    report.store("imputation", told, settings.out)
    rmtree(folder)


if __name__ == "__main__":
    main()
