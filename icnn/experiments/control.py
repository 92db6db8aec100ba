"""Section 6.4 and supplements E and H of the paper: control without an actor, `-Q` convex in `a`.

Each run has 100,000 steps, a test episode every 1,000, and ten at the end. Two tables: the mean of
the ten, and the maximum over the test episodes of training, which is what the paper reports.

Where it differs from the paper:

1. Tasks are Gymnasium's v5, the paper's were v1: states of some have other sizes, and rewards other
   terms. Sizes stand in the table beside the paper's.
2. The paper's ICNN is its Algorithm 3 with the entropy in loss and target alike, 30 projected Adam
   steps, and targets that are not clipped; batches of 256, exploration by normal noise of 0.1 and
   5,000 random steps at the beginning are ours.
3. ICNNQ has two networks with layer norms along the state, each of which chooses actions in half of
   the targets; targets are bounded, lie between the mean and the least Q, a quarter of them sums up
   three steps. States are standardised, there is no entropy, and in tests slow copies act: see
   `icnn.rl`.
4. A swimmer's discount is 0.9999, for all algorithms; 0.99 elsewhere.
5. Algorithms of Stable-Baselines3 are as they come; TD3 and DDPG have the noise of its documents.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from icnn import report
from icnn.experiments.control_algorithms import ABLATION, OURS, RIVALS, TABLE, TASKS, training
from icnn.experiments.control_runs import Job, made_by, rival, together
from icnn.experiments.control_tables import PUBLISHED, numbers
from icnn.extras import require


@dataclass(frozen=True)
class Settings:
    """Which runs, and where to keep them."""

    tasks: tuple[str, ...] = ("HalfCheetah", "Hopper", "Swimmer")
    algos: tuple[str, ...] = ("ICNNQ",)
    seed: int = 0
    seeds: int = 5
    steps: int = 100_000
    engine: str = "stack"
    workers: int = 0
    film: bool = False
    table: bool = False
    out: Path = Path("icnn-control")
    fast: bool = False

    def __post_init__(self):
        for name, given, known in (
            ("--task", self.tasks, TASKS), ("--algo", self.algos, (*OURS, *RIVALS, *ABLATION)),
            ("--engine", [self.engine], ("stack", "ray")),
        ):  # fmt: skip
            for value in given:
                if value not in known:
                    raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {value!r}")
        if self.film and all(algo in RIVALS for algo in self.algos):
            raise ValueError(
                f"`--film` needs one of {', '.join(OURS)}, got {', '.join(self.algos)}"
            )

    def runs(self) -> list[tuple[str, str, int]]:
        """Task, algorithm and seed of each; in the order in which they are made."""
        if self.table:
            return [(task, algo, self.seed + i) for algo, seeds in TABLE.items()
                    for task in TASKS for i in range(seeds)]  # fmt: skip
        return [(task, algo, self.seed + i) for i in range(self.seeds)
                for algo in self.algos for task in self.tasks]  # fmt: skip


def run(settings: Settings) -> dict[str, Any]:
    """Make the runs that are missing; then tables, curves and a page of all that are there."""
    for module, extra in (("gymnasium", "rl"), ("mujoco", "rl"), ("rich", "cli"),
                          ("matplotlib", "viz")):  # fmt: skip
        require(module, extra)
    from rich.console import Console

    console = Console()
    steps, episodes, every = settings.steps, 10, 1000
    if settings.fast:
        console.print("A smoke test: a few hundred steps. Its numbers mean nothing.")
        steps, episodes, every = 500, 2, 250
    jobs = [Job(*one, steps, every, episodes) for one in settings.runs()]
    settings.out.mkdir(parents=True, exist_ok=True)
    missing = [job for job in jobs if read(settings.out / f"{job}.json", job, settings) is None]
    console.print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are there already.")
    if missing:
        (spread if settings.engine == "ray" else here)(missing, settings)
    unfinished = settings.out / "unfinished"
    if unfinished.exists() and not list(unfinished.iterdir()):
        unfinished.rmdir()
    runs = all_runs(settings, jobs[0])
    told: dict[str, Any] = report.result(report.shown(settings), []) | numbers(
        runs, TABLE if settings.table else {}
    )
    pictures = [drawn(settings.out, runs)]
    tables = {
        "Mean return of ten test episodes at the end; mean and spread over seeds.": told["rows"],
        "The maximum over the test episodes of training, as in the paper.": told["maxima"],
        "What ICNNQ has more at the end, and where 95 % of resamples have it.": told["lead"],
        "Median of Q at the end, least and largest of all seeds.": told["values"],
        "Improvements one by one.": told["changes"],
        "What a run has cost; of those in a stack, its share.": told["cost"],
    }
    parts: list[Any] = [__doc__ or "", *pictures]
    for title, rows in tables.items():
        if rows and len(rows[0]) > 1:
            parts += [title, rows]
            console.print(title)
            print(report.table(rows))
    paths = report.publish("control", "Control", told, parts, settings.out, reading=False)
    for name in ("maxima", "lead", "values", "changes", "cost"):
        if told[name]:  # by itself, for documents
            report.write(name, told["settings"], told[name], settings.out)
    console.print(f"Look at [bold]{paths[-1]}[/]; the numbers are in {paths[0].name}")
    if settings.film:  # last: a machine that cannot draw has its tables
        from icnn.experiments.control_films import films

        for path in films(settings.tasks, runs, settings.out):
            console.print(f"Look at [bold]{path}[/]")
    return told


def read(path: Path, job: Job, settings: Settings) -> dict[str, Any] | None:
    """A run, if the file is there and holds that one, with the settings that it would have now."""
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    own = None if job.algo in RIVALS else training(job.task, job.algo, settings.fast)
    return kept if made_by(kept, job, own) else None


def all_runs(settings: Settings, like: Job) -> list[dict[str, Any]]:
    """Those that are there, of all tasks, algorithms and seeds."""
    found = []
    for path in sorted(settings.out.glob("*-*-*.json")):
        told = json.loads(path.read_text())["settings"]
        if told["task"] in TASKS and told["algo"] in (*OURS, *RIVALS, *ABLATION):
            job = replace(like, task=told["task"], algo=told["algo"], seed=told["seed"])
            if (kept := read(path, job, settings)) is not None:
                found.append(kept)
    return found


def here(missing: list[Job], settings: Settings) -> None:
    """All runs in this process: ours side by side, others one by one; a table, by algorithms."""
    from rich.console import Console
    from rich.progress import Progress, TimeRemainingColumn

    kinds = [[algo] for algo in TABLE] if settings.table else [[*OURS, *ABLATION], [*RIVALS]]
    rounds = [[job for job in missing if job.algo in algos] for algos in kinds]
    columns = (
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for jobs in rounds:
            own = [job for job in jobs if job.algo not in RIVALS]
            if own:
                name = f"{len(own)} runs{f' of {own[0].algo}' if settings.table else ''}"
                task = bar.add_task(name, total=sum(job.steps for job in own))
                together(
                    own, settings.out, settings.fast,
                    lambda steps, task=task: bar.update(task, completed=steps), settings.workers,
                )  # fmt: skip
            for job in jobs[len(own) :]:
                task = bar.add_task(str(job), total=job.steps)
                kept = rival(
                    job, settings.out, settings.fast,
                    lambda step, task=task: bar.update(task, completed=step),
                )  # fmt: skip
                report.store(str(job), kept, settings.out)


def spread(missing: list[Job], settings: Settings) -> None:
    """Runs as tasks of Ray, a core each: on this machine, or on the cluster that it belongs to.

    On a cluster agents, and runs that were stopped, stay in that folder of the machine they ran on.
    """
    ray: Any = require("ray", "rl")
    from icnn.learning.progress import parts_done

    ray.init(
        ignore_reinit_error=True, log_to_driver=False, include_dashboard=False,
        logging_level="ERROR",
    )  # fmt: skip
    out = settings.out.resolve()

    @ray.remote(num_cpus=1, max_calls=1)  # what one has compiled is of no use to the next
    def one(job: Job) -> tuple[Job, dict[str, Any] | None]:
        import torch

        torch.set_num_threads(1)
        if job.algo in RIVALS:
            return job, rival(job, out, settings.fast, lambda step: None)
        together([job], out, settings.fast, lambda step: None)
        return job, json.loads((out / f"{job}.json").read_text())

    try:
        waiting = [one.remote(job) for job in missing]
        with parts_done(True, len(missing)) as done:
            while waiting:
                ready, waiting = ray.wait(waiting)
                job, kept = ray.get(ready[0])
                report.store(str(job), kept, settings.out)
                done(str(job))
    finally:
        ray.shutdown()


def drawn(out: Path, runs: list[dict[str, Any]]) -> Path:
    """Test returns over steps: mean and spread over seeds, of the last ten tests each."""
    from matplotlib.figure import Figure

    tasks = [t for t in TASKS if any(r["settings"]["task"] == t for r in runs)]
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.1 * lines), layout="constrained")
    for i, task in enumerate(tasks):
        axes = figure.add_subplot(lines, columns, i + 1, title=task)
        for k, algo in enumerate((*OURS, *RIVALS)):
            mine = [
                r["tests"] for r in runs
                if (r["settings"]["task"], r["settings"]["algo"]) == (task, algo)
            ]  # fmt: skip
            if not mine:
                continue
            length = min(map(len, mine))
            steps = [t[0] for t in mine[0][:length]]
            returns = np.array([[t[1] for t in tests[:length]] for tests in mine])
            window = min(10, max(1, length // 4))
            smooth = np.array([np.convolve(r, np.ones(window) / window, "valid") for r in returns])
            mean, spread = smooth.mean(axis=0), smooth.std(axis=0, ddof=min(1, len(smooth) - 1))
            at = steps[window - 1 :]
            axes.plot(at, mean, color=f"C{k}", label=f"{algo} ({len(mine)})")
            axes.fill_between(at, mean - spread, mean + spread, color=f"C{k}", alpha=0.2, lw=0)
        axes.axhline(PUBLISHED[task][2], color="gray", ls=":", lw=1, label="paper's ICNN, maximum")
        axes.ticklabel_format(axis="x", scilimits=(0, 0))
        axes.legend(fontsize=7)
    figure.supxlabel("steps of the environment", fontsize=10)
    figure.supylabel("return of test episodes", fontsize=10)
    path = out / "control.png"
    figure.savefig(path, dpi=130)
    return path
