"""Rivals of ICNNQ in stacks, as `benchmarks.actors` has them: runs, and do they agree?

    python -m benchmarks.control_rivals --check
    python -m benchmarks.control_rivals --task Hopper --algo SAC --seeds 3 --workers 8

The first tells how far updates on this machine's GPU are from those on its CPU; the second
makes the runs that are missing in `--out`, and with `--beside` a table of them and those that
Stable-Baselines3 itself has made there (`icnn reproduce control --algo SAC --out ...`): returns in
parts of a run and at its end, and the difference of both with 95 % of its resamples.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.actors import ALGORITHMS, Actors, ActorStack
from icnn import report
from icnn.experiments.control_algorithms import GAMMAS, TASKS
from icnn.experiments.control_runs import Job, made_by, together
from icnn.experiments.control_tables import apart, cell
from icnn.rl.lockstep import run
from icnn.rl.memory import PARTS


def settings(task: str, algo: str, fast: bool = False) -> Actors:
    """Of an algorithm; a task may have another discount."""
    return replace(ALGORITHMS[algo], gamma=GAMMAS.get(task, 0.99))


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


def weights_of(stack: ActorStack) -> torch.Tensor:
    """All of them, in a row."""
    return torch.cat([w.detach().cpu().flatten() for w in stack.agent.parameters()])


def checked() -> list[report.Row]:
    """Updates as they are recorded on a GPU, beside the same on a CPU; and a run that goes on."""
    agents, rows = [("Hopper-v5", 0), ("Swimmer-v5", 1)], []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for algo in ALGORITHMS:
        make = partial(ActorStack, agents, settings("", algo), device=device)
        here, there = make(500, device="cpu"), make(500)
        torch.manual_seed(0)
        for name in PARTS:
            here.memory.get_buffer(name)[:, :300].uniform_(-1, 1)
        here.memory.size.fill_(300)
        here.memory.rest[..., 1:].gt_(0.8)
        there.memory.load_state_dict(here.memory.state_dict())
        start = weights_of(here)
        for update in range(1, 9):
            for name in ("picks", "eps", "state", "jitter"):
                numbers = getattr(here, name)
                numbers.uniform_() if name == "picks" else numbers.normal_()
                getattr(there, name).copy_(numbers)
            for stack in (here, there):
                (stack.alone if update % stack.training.delay else stack.full)()
                stack._copy(1)
                stack.act()
        moved, other = weights_of(here) - start, weights_of(there) - start
        actions = (here.action - there.action.cpu()).abs().max()
        stopped, again = make(500), make(750)
        run([stopped])
        again.restore(stopped.kept())
        run([again])
        rows.append({
            "algorithm": algo, "device": device,
            "difference of eight updates, relative": float((moved - other).norm() / moved.norm()),
            "largest difference of actions": float(actions),
            "finite": bool(np.isfinite(again.finish(1)).all()),
        })  # fmt: skip
    return rows


def main() -> None:
    """Make runs; compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="a GPU beside the CPU, and no more")
    parser.add_argument("--task", action="append", choices=TASKS, help="may be given several times")
    parser.add_argument("--algo", action="append", choices=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=0, help="processes for environments")
    parser.add_argument("--out", type=Path, default=Path("icnn-control-stacked"), help="of runs")
    parser.add_argument("--beside", type=Path, help="runs of Stable-Baselines3, to compare with")
    parser.add_argument("--tables", type=Path, default=report.RESULTS, help="of the comparison")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        print(report.table(checked()))
        return
    jobs = [
        Job(task, algo, seed, options.steps)
        for algo in options.algo or ALGORITHMS for task in options.task or ("Hopper", "Reacher")
        for seed in range(options.seeds)
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    missing = [
        job for job in jobs
        if not any(made_by(one, job, settings(job.task, job.algo))
                   for one in runs_in(options.out, job.task, job.algo, job.steps))
    ]  # fmt: skip
    console = Console(stderr=True)
    console.print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are there already.")
    with Progress(console=console) as bar:
        task = bar.add_task(f"{len(missing)} runs", total=sum(job.steps for job in missing))
        together(
            missing, options.out, False, lambda steps: bar.update(task, completed=steps),
            options.workers, ActorStack, settings,
        )  # fmt: skip
    if options.beside:
        rows = agreement(options.out, options.beside, options.steps)
        if not rows:
            raise SystemExit(f"`--beside` must hold runs of {options.steps} steps to compare with")
        print(report.table(rows))
        report.write("control-agreement", {"steps": options.steps}, rows, options.tables)


if __name__ == "__main__":
    main()
