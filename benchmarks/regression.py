"""Is `ConvexRegressor` as good as the convex least-squares fit of CVXPY, and how much faster?

500 noisy values of a convex function, in 2, 5 and 10 dimensions. The rival is max-affine
regression by the quadratic program with one piece for each point (Boyd and Vandenberghe, section
6.5.5), solved by OSQP, which is CVXPY's choice for it and may end at its limit of iterations, and
by Clarabel, which solves it to the end. R^2 is on 2,000 fresh points without noise. One thread.

The other problem is that of LPCF (Schaller, Bemporad, Boyd): a convex piecewise linear function of
one variable with four parameters, 50 points for each of 2,000 of them; R^2 on fresh parameters.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import r2_score

import icnn
from benchmarks.options import options
from icnn import report

SETTINGS: dict[str, Any] = {"seed": 0, "points": 500, "noise": 0.1, "threads": 1}
SOLVERS = ("OSQP", "CLARABEL")


def quadratic(y: np.ndarray) -> np.ndarray:
    """A smooth one."""
    return (y**2).sum(axis=1)


def planes(y: np.ndarray) -> np.ndarray:
    """One with kinks: the largest of ten."""
    random = np.random.default_rng(5)
    slopes, offsets = random.normal(size=(10, y.shape[1])), 0.3 * random.normal(size=10)
    return (y @ slopes.T + offsets).max(axis=1)


def max_affine(y: np.ndarray, values: np.ndarray, solver: str) -> tuple[Any, str]:
    """The largest of as many planes as points, by CVXPY: how it predicts, and how it ended."""
    import cvxpy as cp

    v, g = cp.Variable(len(y)), cp.Variable(y.shape)
    below = [v >= v[i] + (y - y[i]) @ g[i] for i in range(len(y))]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(v - values)), below)
    problem.solve(solver=solver)
    slopes: Any = g.value
    offsets = v.value - (slopes * y).sum(axis=1)  # pyright: ignore
    return (lambda new: (new @ slopes.T + offsets).max(axis=1)), problem.status


def contest(function: Any, dim: int) -> list[report.Row]:
    """Both on the same data."""
    random = np.random.default_rng(SETTINGS["seed"])
    y, fresh = random.uniform(-1, 1, (SETTINGS["points"], dim)), random.uniform(-1, 1, (2000, dim))
    noise = SETTINGS["noise"] * function(fresh).std() * random.normal(size=len(y))
    values, seconds, rows = function(y) + noise, [], []
    for seed in range(3):
        begin = time.perf_counter()
        model = icnn.ConvexRegressor(random_state=seed).fit(y, values)
        seconds.append(time.perf_counter() - begin)
        score = r2_score(function(fresh), model.predict(fresh))
        rows.append(score)
    own, score = float(np.median(seconds)), float(np.median(rows))
    proved = bool(icnn.check_convexity(model.energy_).proved)  # pyright: ignore
    found: list[report.Row] = []
    for solver in SOLVERS:
        begin = time.perf_counter()
        predict, status = max_affine(y, values, solver)
        rival = time.perf_counter() - begin
        found.append(
            {
                "function": function.__name__,
                "dimensions": dim,
                "rival": f"CVXPY + {solver} ({status})",
                "R2 icnn": score,
                "R2 rival": float(r2_score(function(fresh), predict(fresh))),
                "icnn, s": own,
                "rival, s": rival,
                "times": rival / own,
                "proved convex": "yes" if proved else "no",
            }
        )
        print(report.table(found[-1:]).splitlines()[2], flush=True)
    return found


def lpcf(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`f = s+ max(x - m, 0) + s- max(m - x, 0) + v`: columns s+, s-, m, v, x, and values."""
    parameters = random.uniform(-1, 1, (4 * count, 4))
    parameters = parameters[parameters[:, 0] + parameters[:, 1] >= 0][:count]
    x = random.uniform(-1, 1, (count * 50, 1))
    table = np.hstack([np.repeat(parameters, 50, axis=0), x])
    up, down, m, v, x = table.T
    return table, up * np.maximum(x - m, 0) + down * np.maximum(m - x, 0) + v


def piecewise(count: int, folder: Path | None) -> list[report.Row]:
    """The problem of LPCF, and a picture of what was learned."""
    random = np.random.default_rng(SETTINGS["seed"])
    table, values = lpcf(random, count)
    begin = time.perf_counter()
    model = icnn.ConvexRegressor(x_columns=[0, 1, 2, 3], random_state=0).fit(table, values)
    seconds = time.perf_counter() - begin
    fresh, truth = lpcf(random, count)
    x = torch.randn(4, 4)
    row: report.Row = {
        "examples": len(table),
        "R2, training": model.score(table, values),
        "R2, fresh parameters": model.score(fresh, truth),
        "seconds": seconds,
        "proved convex": "yes" if icnn.check_convexity(model.energy_, x).proved else "no",
    }
    if folder is not None:
        draw(model, folder / "regression.png")
    return [row]


def draw(model: icnn.ConvexRegressor, path: Path) -> None:
    """Left: one dimension, convex and not. Right: the piecewise linear family, and its minima."""
    from matplotlib.figure import Figure
    from sklearn.neural_network import MLPRegressor

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    random, grid = np.random.default_rng(3), np.linspace(-2.6, 2.6, 300)[:, None]
    y = random.uniform(-2, 2, (40, 1))
    values = np.maximum(np.abs(y[:, 0]) - 0.5, 0) + 0.25 * random.normal(size=40)
    plain = MLPRegressor(
        hidden_layer_sizes=(48, 48), solver="lbfgs", max_iter=3000, alpha=0, random_state=0
    )
    plain.fit(y, values)
    left.plot(y, values, "k.", ms=4)
    left.plot(grid, plain.predict(grid), color="gray", label="feed-forward network")
    left.plot(grid, icnn.ConvexRegressor(random_state=0).fit(y, values).predict(grid),
              label="ConvexRegressor")  # fmt: skip
    left.set_ylim(-1, 3)
    left.set_title("convex, whatever the noise")
    left.legend(frameon=False)
    y = random.uniform(0, 4, (80, 1))
    values = np.log1p(3 * y[:, 0]) + 0.2 * random.normal(size=80)
    both = icnn.ConvexRegressor(concave=True, monotone=1, random_state=0).fit(y, values)
    grid = np.linspace(0, 4, 200)[:, None]
    middle.plot(y, values, "k.", ms=4)
    middle.plot(grid, np.log1p(3 * grid[:, 0]), color="gray", label="truth")
    middle.plot(grid, both.predict(grid), label="concave=True, monotone=1")
    middle.set_title("concave and rising")
    middle.legend(frameon=False)
    x = np.linspace(-1, 1, 200)[:, None]
    for i, (up, down, m, v) in enumerate(
        [(0.8, 0.4, 0.3, 0.2), (0.9, -0.3, -0.2, -0.4), (0.2, 0.9, -0.4, 0.6)]
    ):
        table = np.hstack([np.tile([up, down, m, v], (200, 1)), x])
        truth = up * np.maximum(x - m, 0) + down * np.maximum(m - x, 0) + v
        right.plot(x, truth, color="gray", lw=3, alpha=0.5)
        right.plot(x, model.predict(table), color=f"C{i}")
        best = model.minimize([[up, down, m, v]])
        at = model.predict(np.hstack([[[up, down, m, v]], best]))
        right.plot(best, at, "o", color=f"C{i}")
    right.set_title("$f(x, y)$ for three $x$, and minimize(x)")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, write `results/regression.json` and `regression-lpcf.json`, draw."""
    arguments = options(__doc__)
    SETTINGS["seed"] = arguments.seed
    torch.set_num_threads(1)
    if arguments.fast:
        SETTINGS["points"] = 60
    pictures = None if arguments.fast else Path("docs/images")
    rows = piecewise(100 if arguments.fast else 2000, pictures)
    print(report.table(rows))
    if not arguments.fast:
        print(report.write("regression-lpcf", SETTINGS, rows, arguments.out))
    rows = [row for d in (2, 5, 10) for f in (quadratic, planes) for row in contest(f, d)]
    print(report.table(rows))
    if not arguments.fast:
        print(report.write("regression", SETTINGS, rows, arguments.out))


if __name__ == "__main__":
    main()
