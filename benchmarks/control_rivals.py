"""Rivals of ICNNQ in stacks, as `benchmarks.actors` has them: runs, and do they agree?

    python -m benchmarks.control_rivals --task Hopper --algo SAC --seeds 3 --workers 8

makes the runs that are missing in `--out`, and with `--beside` a table of them and those that
Stable-Baselines3 itself has made there (`icnn reproduce control --algo SAC --out ...`): returns in
parts of a run and at its end, and the difference of both with 95 % of its resamples.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.actors import ALGORITHMS, Actors, ActorStack
from icnn import report
from icnn.experiments.control import apart, cell
from icnn.experiments.control_algorithms import TASKS
from icnn.experiments.control_runs import Job, together


def settings(task: str, algo: str, fast: bool = False) -> Actors:
    """The same for all tasks; discounts belong to agents."""
    return ALGORITHMS[algo]


def runs_in(folder: Path, task: str, algo: str, steps: int) -> list[dict[str, Any]]:
    """Runs of that length, by seeds."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}-{algo}-*.json"))]
    return [run for run in found if run["settings"]["steps"] == steps]


def over(run: dict[str, Any], begin: float, end: float) -> float:
    """The mean return of tests in a part of a run."""
    steps = run["settings"]["steps"]
    return float(np.mean([t[1] for t in run["tests"] if begin * steps <= t[0] < end * steps]))


def agreement(ours: Path, theirs: Path, steps: int) -> list[report.Row]:
    """A line for each task and algorithm of which there are both."""
    parts = {
        "first half": lambda run: over(run, 0, 0.5),
        "second half": lambda run: over(run, 0.5, 1),
        "at the end": lambda run: float(np.mean(run["final"])),
    }
    rows: list[report.Row] = []
    for task in TASKS:
        for algo in ALGORITHMS:
            both = [runs_in(folder, task, algo, steps) for folder in (ours, theirs)]
            if not all(both):
                continue
            for name, of in parts.items():
                stacked, plain = (np.array([of(run) for run in runs]) for runs in both)
                rows.append({
                    "task": task, "algorithm": algo, "mean return": name,
                    "in stacks": cell(stacked), "Stable-Baselines3": cell(plain),
                    "difference": apart(stacked, plain),
                })  # fmt: skip
    return rows


def main() -> None:
    """Make runs; compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append", choices=TASKS, help="may be given several times")
    parser.add_argument("--algo", action="append", choices=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=0, help="processes for environments")
    parser.add_argument("--out", type=Path, default=Path("icnn-control-stacked"), help="of runs")
    parser.add_argument("--beside", type=Path, help="runs of Stable-Baselines3, to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        Job(task, algo, seed, options.steps)
        for algo in options.algo or ALGORITHMS for task in options.task or ("Hopper", "Reacher")
        for seed in range(options.seeds)
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    there = {str(job) for job in jobs if any(
        run["settings"]["seed"] == job.seed
        for run in runs_in(options.out, job.task, job.algo, job.steps)
    )}  # fmt: skip
    missing = [job for job in jobs if str(job) not in there]
    console = Console(stderr=True)
    console.print(f"{len(there)} of {len(jobs)} runs are there already.")
    with Progress(console=console) as bar:
        task = bar.add_task(f"{len(missing)} runs", total=sum(job.steps for job in missing))
        together(
            missing, options.out, False, lambda steps: bar.update(task, completed=steps),
            options.workers, ActorStack, settings,
        )  # fmt: skip
    if options.beside:
        rows = agreement(options.out, options.beside, options.steps)
        print(report.table(rows))
        report.write("control-agreement", {"steps": options.steps}, rows)


if __name__ == "__main__":
    main()
