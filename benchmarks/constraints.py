"""Limits that come after training: what do they cost, and are they kept?

Agents that `icnn reproduce control` has made act under limits that they never saw: each action
within a quarter of its range, or a budget for the sum of all. ICNNQ takes the best action of what
is left. Its rivals have one answer, which is cut down to what is allowed: the nearest action, or
the same one, smaller.

    icnn reproduce control --task HalfCheetah --task Hopper --algo ICNNQ --algo SAC
    python -m benchmarks.constraints --runs icnn-control
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
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


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("icnn-control"), help="where agents are")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the numbers")
    parser.add_argument("--steps", type=int, default=100_000, help="of all agents together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[report.Row] = []
    for task in ("HalfCheetah", "Hopper"):
        ours, theirs = (
            sorted((options.runs / "agents").glob(f"{task}-{name}"))
            for name in ("ICNNQ-*.pt", "SAC-*.zip")
        )
        if not ours or not theirs:
            raise SystemExit(f"`--runs` must hold agents of ICNNQ and SAC for {task}: {__doc__}")
        models: dict[str, list[Any]] = {
            "ICNNQ": [model_of(path, gym.make(f"{task}-v5")) for path in ours],
            "SAC": [SAC.load(path, device="cpu") for path in theirs],
        }
        for name, limit in {"none": None, **LIMITS}.items():
            ways: dict[str, tuple[str, Domain | None, Cut]] = {
                algo: (algo, limit and limit.domain, np.asarray)
                for algo in models if limit is None or algo == "ICNNQ"
            }  # fmt: skip
            if limit is not None:
                for algo in models:
                    ways[f"{algo}, nearest action"] = algo, None, nearest(limit.domain)
                    ways[f"{algo}, smaller action"] = algo, None, limit.smaller
            for way, (algo, domain, cut) in ways.items():
                means, broken, count = [], 0, 0
                for i, model in enumerate(track(models[algo], f"{task}, {name}: {way}")):
                    if algo == "ICNNQ":
                        model.constrain(domain)
                    share = -(-options.steps // len(models[algo]))
                    returns, actions = played(model, task, share, cut, 10**7 * (i + 1))
                    means.append(np.mean(returns))
                    taken = np.concatenate(actions)
                    count += len(taken)
                    if limit is not None:
                        broken += int((limit.excess(taken) > 0).sum())
                spread = f" ± {np.std(means, ddof=1):.4g}" if len(means) > 1 else ""
                rows.append({
                    "task": task, "limit": name, "agent": way,
                    "return": f"{np.mean(means):.5g}{spread}", "agents": len(means),
                    "steps": count, "violations": "" if limit is None else str(broken),
                })  # fmt: skip
    print(report.table(rows))
    report.write("control-constraints", {"steps": options.steps}, rows, options.out)


if __name__ == "__main__":
    main()
