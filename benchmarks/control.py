"""How fast `icnn.rl.ICNNQ` learns: environment steps a second.

On one thread, beside Stable-Baselines3's SAC, interleaved, each with its defaults, and with convex
layers that are as wide as SAC's. The ratio is of medians.

With `--stacks`, many agents in one process, as in `icnn reproduce control`, on a GPU if there is
one: how long 100,000 steps of all of them take, from the median over parts of a run; capture of
CUDA graphs is told apart.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import SAC

from icnn import report
from icnn.experiments.control_algorithms import TASKS
from icnn.rl import ICNNQ, NAF, Form
from icnn.rl.learning import Training, adam_step, greedy
from icnn.rl.lockstep import run
from icnn.rl.stack import LONG, Stack

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SAC": (SAC, {}),
    "ICNNQ": (ICNNQ, {}),
    "ICNNQ, all of it 256 wide": (ICNNQ, {"form": Form(hidden=(256, 256))}),
    "NAF": (NAF, {}),
}
STACKS = {
    "Hopper, 5 seeds": ("Hopper",),
    "HalfCheetah, 5 seeds": ("HalfCheetah",),
    "ten tasks, 5 seeds each": TASKS,
}


def beside_sac(options: argparse.Namespace) -> list[report.Row]:
    """One agent at a time."""
    rows: list[report.Row] = []
    for task in ("Hopper-v5", "HalfCheetah-v5", "Ant-v5"):
        models: dict[str, Any] = {
            name: algorithm(
                "MlpPolicy", task, learning_starts=100, seed=0, device="cpu", buffer_size=10_000,
                policy_kwargs=form,
            )
            for name, (algorithm, form) in MODELS.items()
        }  # fmt: skip
        for model in models.values():
            model.learn(300)  # nothing is new any more
        rates: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(options.rounds):
            for name, model in models.items():
                begun = time.perf_counter()
                model.learn(options.steps, reset_num_timesteps=False)
                rates[name].append(options.steps / (time.perf_counter() - begun))
        medians = {name: float(np.median(values)) for name, values in rates.items()}
        rows.append({
            "task": task, "SAC, steps/s": f"{medians['SAC']:.0f}",
            **{f"{n} / SAC": f"{medians[n] / medians['SAC']:.2f}" for n in MODELS if n != "SAC"},
        })  # fmt: skip
    return rows


def in_stacks(options: argparse.Namespace) -> list[report.Row]:
    """Many agents at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[report.Row] = []
    for name, tasks in STACKS.items():
        begun, warm = time.perf_counter(), 250
        end = warm + options.rounds * options.steps
        stack = Stack(
            [(f"{task}-v5", seed) for task in tasks for seed in range(5)],
            Training(learning_starts=100), total=max(LONG, end),
            device=device, workers=options.workers,
        )  # fmt: skip
        made = time.perf_counter() - begun
        times = [time.perf_counter()]

        def told(stack: Stack = stack, times: list[float] = times, warm: int = warm) -> None:
            if stack.step >= warm and (stack.step - warm) % options.steps == 0:
                times.append(time.perf_counter())

        run([stack], told)
        stack.worlds.close()
        # On a GPU steps of the search are compiled: beside them, the reference.
        with torch.no_grad():
            f, rules = stack.agent.at(stack.memory.state[:, -256:]), stack.training.rules
            start = torch.zeros_like(stack.memory.action[:, -256:])
            one_way, other = (
                greedy(f, start, rules.steps, rules, step=step)
                for step in (stack.search, adam_step)
            )
            apart = float((one_way - other).abs().max())
        one = float(np.median(np.diff(times[1:]))) / options.steps
        rows.append({
            "stack": name, "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "a step of all agents, ms": 1000 * one, "100,000 steps, min": 1e5 * one / 60,
            "before the first, s": made, "actions differ from the reference's by": apart,
        })  # fmt: skip
    return rows


def main() -> None:
    """Print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the numbers")
    parser.add_argument("--steps", type=int, default=400, help="in each of the rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stacks", action="store_true", help="many agents in one process")
    parser.add_argument("--workers", type=int, default=0, help="processes for environments")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = in_stacks(options) if options.stacks else beside_sac(options)
    print(report.table(rows))
    settings = {name: getattr(options, name) for name in ("steps", "rounds", "workers")}
    name = "control-stacks" if options.stacks else "control-speed"
    report.write(name, settings, rows, options.out)


if __name__ == "__main__":
    main()
