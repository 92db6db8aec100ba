"""Agents that an experiment has kept, as models of Stable-Baselines3."""

from pathlib import Path
from typing import Any

import torch

from icnn.rl import ICNNQ


def model_of(path: Path, env: Any) -> ICNNQ:
    """A model that predicts as the agent did; it can be constrained, saved, and trained further."""
    kept = torch.load(path, weights_only=False)
    t = kept["training"]
    model = ICNNQ(
        "MlpPolicy", env, learning_rate=t.learning_rate, tau=t.tau, gamma=t.rules.gamma,
        batch_size=t.batch_size, learning_starts=t.learning_starts, n_steps=t.n_steps,
        gradient_steps=t.gradient_steps, noise=t.noise, rules=t.rules, device="cpu",
        buffer_size=100_000,
        policy_kwargs={
            "form": t.form, "critics": t.critics, "standardised": t.standardised,
            "weight_decay": t.weight_decay,
        },
    )  # fmt: skip
    model.policy.agent.load_state_dict(kept["agent"])
    return model
