"""Long runs of Stable-Baselines3 that can be stopped: they go on to the same end."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

NORMALISED = ("obs_rms", "ret_rms")  # what `VecNormalize` has learned


class Checkpoint(BaseCallback):
    """Keeps an algorithm now and then, at the end of an episode, with all that it needs to go on.

    A run that was stopped and goes on by `resume` ends as one that was not stopped: to the last bit
    on the same machine. For that, the environment is reset with a seed at each checkpoint.

    Args:
        path: The file.
        every: Steps between two checkpoints, at least.
    """

    def __init__(self, path: str | Path, every: int = 10_000):
        super().__init__()
        self.path, self.every, self.next, self.ended = Path(path), every, every, False

    def _init_callback(self) -> None:
        if self.model.n_envs != 1:
            raise ValueError(
                f"`env` must be one environment, got {self.model.n_envs}: their episodes do not "
                "end together"
            )
        self.next = self.model.num_timesteps + self.every

    def _on_step(self) -> bool:
        self.ended = bool(np.all(self.locals["dones"]))
        return True

    def _on_rollout_start(self) -> None:
        # Here the last step has been learned from.
        if self.num_timesteps < self.next or not self.ended:
            return
        self.next = self.model.num_timesteps + self.every
        model: Any = self.model
        # As it was before the new episode: going on begins it once more.
        normaliser = model.get_vec_normalize_env()
        normalised = {} if normaliser is None else {n: getattr(normaliser, n) for n in NORMALISED}
        normalised = pickle.dumps(normalised)
        begin(model)
        kept = {
            "normalised": normalised, "replay_buffer": model.replay_buffer,
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002
            "torch": torch.get_rng_state(),
            "space": model.action_space.np_random.bit_generator.state,
        }  # fmt: skip
        if torch.cuda.is_available():
            kept["cuda"] = torch.cuda.get_rng_state_all()
        model.save(file := io.BytesIO())
        part = self.path.with_suffix(".part")
        part.write_bytes(pickle.dumps(kept | {"model": file.getvalue()}))
        part.replace(self.path)  # at once: half a file is none


def begin(model: Any) -> None:
    """A new episode, which depends on the step alone."""
    model.env.seed((model.seed or 0) + model.num_timesteps)
    model._last_obs = model.env.reset()
    if model._vec_normalize_env is not None:
        model._last_original_obs = model._vec_normalize_env.get_original_obs()


def resume(algorithm: type[OffPolicyAlgorithm], path: str | Path, env: Any, **options: Any) -> Any:
    """An algorithm as `Checkpoint` has kept it; then `learn(rest, reset_num_timesteps=False)`."""
    kept = pickle.loads(Path(path).read_bytes())
    env = maybe_make_env(env, 0)
    model: Any = algorithm.load(io.BytesIO(kept["model"]), env=env, force_reset=False, **options)
    made, model.replay_buffer = model.replay_buffer, kept["replay_buffer"]
    model.replay_buffer.device = model.device
    if isinstance(model.replay_buffer, NStepReplayBuffer):
        # Transitions are those of single steps: sums of them are made when they are drawn.
        like = made if isinstance(made, NStepReplayBuffer) else model
        model.replay_buffer.n_steps, model.replay_buffer.gamma = like.n_steps, like.gamma
    for name, value in pickle.loads(kept["normalised"]).items():
        setattr(model.get_vec_normalize_env(), name, value)
    begin(model)
    random.setstate(kept["python"])
    np.random.set_state(kept["numpy"])  # noqa: NPY002
    torch.set_rng_state(kept["torch"])
    if "cuda" in kept and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(kept["cuda"])
    model.action_space.np_random.bit_generator.state = kept["space"]
    return model
