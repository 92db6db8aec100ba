"""Tables of control runs: final returns, the best ones, values, single improvements, and costs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from icnn import report
from icnn.experiments.control_algorithms import (
    ABLATION,
    CHANGES,
    OURS,
    RIVALS,
    TASKS,
    WHAT,
)

Runs = list[dict[str, Any]]

# Table 3 and supplement H: DDPG, NAF, ICNN; sizes of states and actions.
PUBLISHED = {
    "Ant": (1000.0, 999.03, 1056.29, 111, 8),
    "HalfCheetah": (2909.77, 2575.16, 3822.99, 17, 6),
    "Hopper": (1501.33, 1100.43, 831.0, 11, 3),
    "Humanoid": (524.09, 5000.68, 433.38, 376, 17),
    "HumanoidStandup": (134265.96, 116399.05, 141217.38, 376, 17),
    "InvertedDoublePendulum": (9358.81, 9359.59, 9359.41, 11, 1),
    "InvertedPendulum": (1000.0, 1000.0, 1000.0, 4, 1),
    "Reacher": (-6.1, -6.31, -5.08, 11, 2),
    "Swimmer": (49.79, 69.71, 64.89, 8, 2),
    "Walker2d": (1604.18, 1007.25, 298.21, 17, 6),
}


def values(runs: Runs, task: str, algo: str, best: bool = False) -> np.ndarray:
    """Of each seed: the mean of final returns, or the best return of all tests."""
    mine = [r for r in runs if (r["settings"]["task"], r["settings"]["algo"]) == (task, algo)]
    mine = sorted(mine, key=lambda r: r["settings"]["seed"])
    return np.array([max(t[1] for t in r["tests"]) if best else np.mean(r["final"]) for r in mine])


def cell(found: np.ndarray, wanted: int = 0) -> str:
    """Mean and spread over seeds, and how many there are; and of how many, if some are missing."""
    if not len(found):
        return "missing" if wanted else ""
    more = f" ± {short(found.std(ddof=1))}" if len(found) > 1 else ""
    of = f" of {wanted}" if len(found) < wanted else ""
    return f"{short(found.mean())}{more} ({len(found)}{of})"


def short(number: float) -> str:
    """Four digits, or as many as stand before the point."""
    return f"{number:.0f}" if abs(number) >= 1e4 else f"{number:.4g}"


def apart(ours: np.ndarray, theirs: np.ndarray) -> str:
    """A difference of means, and where 95 % of resamples of both have it."""
    if min(len(ours), len(theirs)) < 2:
        return ""
    random = np.random.default_rng(0)
    means = [random.choice(x, (10_000, len(x))).mean(axis=1) for x in (ours, theirs)]
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975])
    return f"{signed(ours.mean() - theirs.mean())} [{signed(low)}, {signed(high)}]"


def signed(number: float) -> str:
    """The same, with its sign."""
    return ("+" if number >= 0 else "") + short(number)


def numbers(runs: Runs, wanted: Mapping[str, int] | None = None) -> dict[str, list[report.Row]]:
    """All tables, of all runs that are there; some say what is missing, if so many are wanted."""
    wanted = wanted or {}
    sizes = {r["settings"]["task"]: r["sizes"] for r in runs}
    tasks = [task for task in TASKS if task in sizes]
    return {
        "rows": returns(runs, sizes, wanted, best=False),
        "maxima": returns(runs, sizes, wanted, best=True), "lead": lead(runs, tasks),
        "values": last_values(runs, tasks), "changes": changes(runs, tasks), "cost": costs(runs),
    }  # fmt: skip


def returns(
    runs: Runs, sizes: dict[str, Any], wanted: Mapping[str, int], best: bool
) -> list[report.Row]:
    """Mean and spread over seeds, beside what is published."""
    algos, rows = algorithms(runs) | set(wanted), []
    for task in (task for task in TASKS if task in sizes):
        *published, states, actions = PUBLISHED[task]
        rows.append({
            "task": task,
            "state, action (paper)": "{}, {} ({}, {})".format(*sizes[task], states, actions),
            **{a: cell(values(runs, task, a, best), wanted.get(a, 0))
               for a in (*OURS, *RIVALS) if a in algos},
            **{
                f"paper: {name}": f"{value:g}"
                for name, value in zip(("DDPG", "NAF", "ICNN"), published, strict=True)
            },
        })  # fmt: skip
    return rows


def lead(runs: Runs, tasks: list[str]) -> list[report.Row]:
    """What ICNNQ has more than others, in tasks where there are some."""
    others = [a for a in (*OURS, *RIVALS) if a in algorithms(runs) - {"ICNNQ"}]
    rows = [
        {f"than {algo}": apart(*(values(runs, task, a) for a in ("ICNNQ", algo)))
         for algo in others}
        for task in tasks
    ]  # fmt: skip
    return [{"task": t} | row for t, row in zip(tasks, rows, strict=True) if any(row.values())]


def last_values(runs: Runs, tasks: list[str]) -> list[report.Row]:
    """The mean of Q over a batch, when the last test began: of each run, then over seeds."""
    algos, rows = algorithms(runs), []
    for task in tasks:
        last = {
            algo: [r["tests"][-1][2] for r in runs
                   if (r["settings"]["task"], r["settings"]["algo"]) == (task, algo)]
            for algo in OURS if algo in algos
        }  # fmt: skip
        rows.append({"task": task} | {
            algo: f"{short(float(np.median(q)))} ({short(min(q))} ... {short(max(q))})" if q else ""
            for algo, q in last.items()
        })  # fmt: skip
    return rows


def changes(runs: Runs, tasks: list[str]) -> list[report.Row]:
    """Single improvements, if there are runs of any."""
    algos = algorithms(runs)
    return [
        {"algorithm": algo, "with (+) or without (-)": WHAT.get(algo.partition("+")[2]) or
         WHAT.get(algo.partition("-")[2], ""),
         **{task: cell(values(runs, task, algo)) for task in tasks}}
        for algo in CHANGES if algo in algos and algos & set(ABLATION)
    ]  # fmt: skip


def costs(runs: Runs) -> list[report.Row]:
    """Minutes, by algorithm, engine and device."""
    rows: list[report.Row] = []
    for algo in (*OURS, *RIVALS):
        spent: dict[tuple[str, str], list[float]] = {}
        for r in runs:
            if r["settings"]["algo"] == algo:
                where = r["settings"]["engine"], r["made"]["device"]
                spent.setdefault(where, []).append(r["made"]["seconds"] / 60)
        rows += [
            {"algorithm": algo, "engine": engine, "device": device, "runs": len(minutes),
             "minutes each": told(minutes)}
            for (engine, device), minutes in spent.items()
        ]  # fmt: skip
    return rows


def told(minutes: list[float]) -> str:
    """The least and the most."""
    low, high = (f"{end:.2g}" for end in (min(minutes), max(minutes)))
    return low if low == high else f"{low} ... {high}"


def algorithms(runs: Runs) -> set[str]:
    """Of which there are runs."""
    return {r["settings"]["algo"] for r in runs}
