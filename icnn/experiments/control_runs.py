"""Runs of control tasks: ours many at a time, those of Stable-Baselines3 one by one."""

import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from icnn import report
from icnn.experiments.control_algorithms import GAMMAS, training
from icnn.rl.lockstep import BLOCK, TESTS, Lockstep, run
from icnn.rl.stack import Stack

KEEP = 300  # seconds, after which unfinished runs are kept
SIDE = {"cuda": 12, "cpu": 1}  # stacks side by side


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    algo: str
    seed: int
    steps: int = 100_000
    every: int = 1000
    episodes: int = 10

    def __str__(self) -> str:
        return f"{self.task}-{self.algo}-{self.seed}"


def made_by(kept: dict[str, Any], job: Job, own: Any = None) -> bool:
    """Whether a file holds that run; with these settings, if there are any to compare."""
    wanted = json.loads(json.dumps(asdict(job) | (asdict(own) if own else {})))
    return all(kept["settings"].get(name) == value for name, value in wanted.items())


def told(
    job: Job, settings: Any, tests: Any, final: Any, seconds: float, sizes: Any,
    device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """A run, as it is kept; of some side by side, its share of the time that they took."""
    made = report.result({**asdict(job), **settings}, [])
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "seconds": round(seconds),
    }
    return {
        "settings": made["settings"], "made": made["made"] | machine,
        "sizes": list(sizes), "final": [round(float(x), 2) for x in final],
        "tests": [[int(t[0]), *(round(float(x), 2) for x in t[1:])] for t in tests],
    }  # fmt: skip


def together(
    jobs: Sequence[Job], out: Path, fast: bool, done: Callable[[int], None], workers: int = 0,
    kind: type[Lockstep] = Stack, settings: Callable[[str, str, bool], Any] = training,
) -> None:  # fmt: skip
    """Agents with the same settings in a stack, some stacks side by side in this process.

    Args:
        jobs: The runs.
        out: A file for each comes here, and in `agents` the agent.
        fast: Whether to make small networks.
        done: Is told how many steps were made, of all runs together.
        workers: Processes for the environments of each stack; 0 for none.
        kind: What agents they are.
        settings: Of a task and an algorithm.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds: dict[Any, list[Job]] = {}
    for job in jobs:
        # On a GPU fewer and larger stacks are faster, on a CPU it is as well not to compute zeros.
        key = settings("", job.algo, fast), "" if device == "cuda" else job.task
        kinds.setdefault(key, []).append(job)
    groups, before = list(kinds.items()), 0
    for i in range(0, len(groups), SIDE[device]):
        group = groups[i : i + SIDE[device]]
        side_by_side(
            group, out, lambda steps, before=before: done(before + steps), device, workers, kind
        )
        before += sum(mine[0].steps * len(mine) for _, mine in group)


def side_by_side(
    group: Sequence[tuple[Any, list[Job]]], out: Path, done: Callable[[int], None], device: str,
    workers: int, kind: type[Lockstep],
) -> None:  # fmt: skip
    """Some stacks, from where they were stopped to their end."""
    stacks: list[tuple[Lockstep, list[Job], Path]] = []
    spent: dict[Path, float] = {}  # before they were stopped
    for (settings, _), mine in group:
        agents = [(f"{job.task}-v5", job.seed) for job in mine]
        gammas = {f"{task}-v5": gamma for task, gamma in GAMMAS.items()}
        stack = kind(agents, settings, mine[0].steps, mine[0].every, device, workers, gammas)
        name = sha256(repr(agents).encode()).hexdigest()[:12]
        path = out / "unfinished" / f"{mine[0].algo}-{name}.pt"
        if path.exists():
            kept = torch.load(path, map_location=device, weights_only=False)
            if kept["settings"] == stack.settings:  # else it is of another run
                stack.restore(kept)
                spent[path] = kept["seconds"]
        stacks.append((stack, mine, path))
    begun = kept_at = time.perf_counter()

    def share(stack: Lockstep, path: Path) -> float:
        """Of the time, what a stack has taken."""
        part = stack.count / sum(other.count for other, _, _ in stacks)
        return spent.get(path, 0.0) + part * (time.perf_counter() - begun)

    def after() -> None:
        nonlocal kept_at
        done(sum(stack.step * stack.count for stack, _, _ in stacks))
        # Those that were stopped may stand at other steps than the rest.
        due = [(s, p) for s, _, p in stacks if s.saved < s.step < s.total and s.step % BLOCK == 0]
        if not due or time.perf_counter() < kept_at + KEEP:
            return
        for stack, path in due:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            torch.save(stack.kept() | {"seconds": share(stack, path)}, part)
            part.replace(path)
        kept_at = time.perf_counter()

    try:
        run([stack for stack, _, _ in stacks], after)
        (out / "agents").mkdir(parents=True, exist_ok=True)
        for stack, mine, path in stacks:
            final = stack.finish(mine[0].episodes)
            seconds = share(stack, path) / stack.count
            for i, job in enumerate(mine):
                kept = told(
                    job, asdict(stack.own_training(i)) | {"engine": "stack"}, stack.tests[i],
                    final[i], seconds, stack.sizes[i], device,
                )  # fmt: skip
                torch.save(stack.one(i), out / "agents" / f"{job}.pt")
                report.store(str(job), kept, out)
            path.unlink(missing_ok=True)
    finally:
        for stack, _, _ in stacks:
            stack.worlds.close()


def rival(job: Job, out: Path, fast: bool, done: Callable[[int], None]) -> dict[str, Any]:
    """An algorithm of Stable-Baselines3, as it comes."""
    import gymnasium as gym
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise

    from icnn.rl.checkpoint import Checkpoint, resume

    algorithm = getattr(stable_baselines3, job.algo)
    env, test = (gym.make(f"{job.task}-v5") for _ in range(2))
    path = out / "unfinished" / f"{job}-{job.steps}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    tests: list[tuple[int, float]] = []
    spent, begun, device = 0.0, time.perf_counter(), "cpu"

    def episode(model: Any, seed: int) -> float:
        state, _ = test.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(state, deterministic=True)
            state, reward, terminated, truncated, _ = test.step(action)
            total, over = total + float(reward), terminated or truncated
        return total

    class Tests(BaseCallback):
        """A test episode every so often; between a step and the learning from it, as for ours."""

        def _on_step(self) -> bool:
            step = self.num_timesteps - 1
            if step % job.every == 0:
                tests.append((step, episode(self.model, TESTS + step // job.every)))
                part = path.with_suffix(".part-of-tests")
                seconds = spent + time.perf_counter() - begun
                part.write_bytes(pickle.dumps((tests, seconds)))
                part.replace(path.with_suffix(".tests"))
            done(self.num_timesteps)
            return True

    if path.exists():
        model = resume(algorithm, path, env, device=device)
        before, spent = pickle.loads(path.with_suffix(".tests").read_bytes())
        tests += [t for t in before if t[0] < model.num_timesteps]
    else:
        options: dict[str, Any] = {"gamma": GAMMAS.get(job.task, 0.99), "buffer_size": job.steps}
        if job.algo != "SAC":  # as in the documentation of both; by default they do not explore
            n = int(np.prod(env.action_space.shape or ()))
            options["action_noise"] = NormalActionNoise(np.zeros(n), 0.1 * np.ones(n))
        if fast:
            options |= {"policy_kwargs": {"net_arch": [16]}, "batch_size": 16}
        model = algorithm("MlpPolicy", env, seed=job.seed, device=device, **options)
    model.learn(
        job.steps - model.num_timesteps, [Tests(), Checkpoint(path)], reset_num_timesteps=False
    )
    final = [episode(model, TESTS + 10**6 + i) for i in range(job.episodes)]
    kept = told(
        job, {"gamma": model.gamma, "engine": "Stable-Baselines3"}, tests, final,
        spent + time.perf_counter() - begun,
        [int(np.prod(s.shape or ())) for s in (env.observation_space, env.action_space)],
    )  # fmt: skip
    (out / "agents").mkdir(exist_ok=True)
    model.save(out / "agents" / f"{job}.zip")
    for suffix in (".zip", ".tests"):
        path.with_suffix(suffix).unlink(missing_ok=True)
    return kept
