"""Films of trained agents, and moments of them on one sheet."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from icnn.experiments.control_algorithms import RIVALS
from icnn.extras import require

FIXED = ("InvertedDoublePendulum", "InvertedPendulum", "Reacher")  # stay where they are
FRAMES = 130  # a fast agent runs off the floor that is drawn
MOMENTS = 6  # of a film, on the sheet


def films(tasks: Sequence[str], runs: list[dict[str, Any]], out: Path) -> list[Path]:
    """A short film of the best agent of each task, and a sheet with moments of all."""
    imageio: Any = require("imageio", "rl")
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # what MuJoCo takes by itself needs a screen
    paths, moments = [], {}
    for task in tasks:
        name = best(task, runs, out)
        if name is None:
            continue
        frames = filmed(task, out / "agents" / f"{name}.pt")
        paths.append(out / f"{name}.gif")
        imageio.mimsave(paths[-1], frames[::2], duration=50, loop=0)
        chosen = np.linspace(0, len(frames) - 1, MOMENTS).astype(int)
        moments[task] = [frames[i] for i in chosen]
    return [*paths, sheet(moments, out)] if paths else paths


def best(task: str, runs: list[dict[str, Any]], out: Path) -> str | None:
    """The run of the highest return, of ours whose agents are here."""
    found = {
        "{task}-{algo}-{seed}".format(**r["settings"]): float(np.mean(r["final"]))
        for r in runs if r["settings"]["task"] == task and r["settings"]["algo"] not in RIVALS
    }  # fmt: skip
    here = [name for name in found if (out / "agents" / f"{name}.pt").exists()]
    return max(here, key=lambda name: found[name], default=None)


def filmed(task: str, agent: Path) -> list[np.ndarray]:
    """Pictures of one episode, or of its beginning."""
    import gymnasium as gym

    from icnn.experiments.control_agents import model_of

    # A camera that follows, where a task has one.
    follows: dict[str, Any] = {"camera_name": "track"} if task not in FIXED else {}
    env = gym.make(f"{task}-v5", render_mode="rgb_array", width=240, height=240, **follows)
    model = model_of(agent, env)
    frames, (state, _), over = [], env.reset(seed=0), False
    while not over and len(frames) < FRAMES:
        action, _ = model.predict(state, deterministic=True)
        state, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        frames.append(env.render())
    env.close()
    return frames


def sheet(moments: dict[str, list[np.ndarray]], out: Path) -> Path:
    """A line for each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 * MOMENTS, 1.6 * len(moments)), layout="constrained")
    for i, (task, frames) in enumerate(moments.items()):
        axes = figure.add_subplot(len(moments), 1, i + 1)
        axes.imshow(np.concatenate(frames, axis=1))
        axes.set_title(task, fontsize=9, loc="left")
        axes.set_axis_off()
    path = out / "films.png"
    figure.savefig(path, dpi=100)
    return path
