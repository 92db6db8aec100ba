"""How fast `icnn.rl.ICNNQ` learns beside Stable-Baselines3's SAC: environment steps a second.

One thread, interleaved; networks of the state are as wide as SAC's. The ratio is of medians.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import SAC

from icnn import report
from icnn.rl import ICNNQ, NAF


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the numbers")
    parser.add_argument("--steps", type=int, default=400, help="in each of the rounds")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[report.Row] = []
    for task in ("Hopper-v5", "HalfCheetah-v5", "Ant-v5"):
        models: dict[str, Any] = {
            algorithm.__name__: algorithm(
                "MlpPolicy", task, learning_starts=100, seed=0, device="cpu", buffer_size=10_000
            )
            for algorithm in (SAC, ICNNQ, NAF)
        }
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
            **{f"{n} / SAC": f"{medians[n] / medians['SAC']:.2f}" for n in ("ICNNQ", "NAF")},
        })  # fmt: skip
    print(report.table(rows))
    report.write("control-speed", {"steps": options.steps, "rounds": options.rounds}, rows,
                 options.out)  # fmt: skip


if __name__ == "__main__":
    main()
