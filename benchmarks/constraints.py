"""Limits that come after training: what do they cost, and are they kept?

Agents that `icnn reproduce control` has made act under limits that they never saw: each action
within a quarter of its range, or a budget for the sum of all. ICNNQ takes the best action of what
is left. Its rivals have one answer, which is cut down to what is allowed: the nearest action, or
the same one, smaller.

    icnn reproduce control --task HalfCheetah --task Hopper --algo ICNNQ --algo SAC
    python -m benchmarks.constraints --runs icnn-control
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from stable_baselines3 import SAC

import icnn
from icnn import report
from icnn.experiments.control_agents import model_of
from icnn.rl import Budget
from icnn.solvers.domains import Domain

Cut = Callable[[np.ndarray], np.ndarray]


class Limit(NamedTuple):
    """What is allowed, and what counts as too much: 0 at most."""

    domain: Domain
    excess: Callable[[np.ndarray], np.ndarray]
    smaller: Cut


TASKS = ("HalfCheetah", "Hopper")
LIMITS = {
    "each in [-0.25, 0.25]": Limit(
        icnn.Box(-0.25, 0.25),
        lambda a: np.abs(a).max(axis=1) - 0.25,
        lambda a: 0.25 * a,
    ),
    "sum of sizes at most 1": Limit(
        Budget(1.0),
        lambda a: np.abs(a).sum(axis=1, dtype=np.float64) - 1,
        lambda a: a / np.maximum(np.abs(a).sum(axis=1, keepdims=True) * (1 + 1e-6), 1),
    ),
}


def played(model: Any, task: str, steps: int, cut: Cut, seed: int) -> tuple[list[float], list[Any]]:
    """Returns of whole episodes, ten side by side, until there are enough steps; their actions."""
    envs = [gym.make(f"{task}-v5") for _ in range(10)]
    returns, actions = [], []
    while sum(map(len, actions)) < steps:
        states = {i: env.reset(seed=seed + i)[0] for i, env in enumerate(envs)}
        seed, totals = seed + len(envs), np.zeros(len(envs))
        while states:
            chosen = cut(model.predict(np.stack(list(states.values())), deterministic=True)[0])
            actions.append(chosen)
            for i, action in zip(list(states), chosen, strict=True):
                states[i], reward, terminated, truncated, _ = envs[i].step(action)
                totals[i] += float(reward)
                if terminated or truncated:
                    del states[i]
        returns += totals.tolist()
    return returns, actions


def nearest(domain: Domain) -> Cut:
    """The nearest actions that are allowed."""
    return lambda actions: domain.project(torch.from_numpy(actions)).numpy()


class Way(NamedTuple):
    """Agents that keep a limit in one way."""

    task: str
    limit: str
    name: str
    models: list[Any]
    domain: Domain | None
    cut: Cut


def ways(task: str, runs: Path) -> Iterator[Way]:
    """All of a task."""
    ours, theirs = (
        sorted((runs / "agents").glob(f"{task}-{name}"))
        for name in ("ICNNQ-[0-9]*.pt", "SAC-[0-9]*.zip")
    )
    if not ours or not theirs:
        raise SystemExit(f"`--runs` must hold agents of ICNNQ and SAC for {task}: {__doc__}")
    models: dict[str, list[Any]] = {
        "ICNNQ": [model_of(path, gym.make(f"{task}-v5")) for path in ours],
        "SAC": [SAC.load(path, device="cpu") for path in theirs],
    }
    for algo, those in models.items():
        yield Way(task, "none", algo, those, None, np.asarray)
    for name, limit in LIMITS.items():
        yield Way(task, name, "ICNNQ", models["ICNNQ"], limit.domain, np.asarray)
        for algo, those in models.items():
            yield Way(task, name, f"{algo}, nearest action", those, None, nearest(limit.domain))
            yield Way(task, name, f"{algo}, smaller action", those, None, limit.smaller)


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("icnn-control"), help="where agents are")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the numbers")
    parser.add_argument("--steps", type=int, default=100_000, help="of all agents together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[report.Row] = []
    every = [way for task in TASKS for way in ways(task, options.runs)]
    for way in track(every, "Under limits", console=Console(stderr=True)):
        means, taken = [], []
        for i, model in enumerate(way.models):
            if isinstance(model, icnn.rl.ICNNQ):
                model.constrain(way.domain)
            share = -(-options.steps // len(way.models))
            returns, actions = played(model, way.task, share, way.cut, 10**7 * (i + 1))
            means.append(np.mean(returns))
            taken += actions
        every_action, limit = np.concatenate(taken), LIMITS.get(way.limit)
        spread = f" ± {np.std(means, ddof=1):.4g}" if len(means) > 1 else ""
        rows.append({
            "task": way.task, "limit": way.limit, "agent": way.name,
            "return": f"{np.mean(means):.5g}{spread}", "agents": len(means),
            "steps": len(every_action),
            "violations": "" if limit is None else str((limit.excess(every_action) > 0).sum()),
        })  # fmt: skip
    print(report.table(rows))
    report.write("control-constraints", {"steps": options.steps}, rows, options.out)


if __name__ == "__main__":
    main()
