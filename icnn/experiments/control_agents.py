"""Agents that an experiment has kept, as models of Stable-Baselines3."""

from pathlib import Path
from typing import Any

import torch

from icnn.rl import ICNNQ


def model_of(path: Path, env: Any) -> ICNNQ:
    """A model that predicts as the agent did; it can be constrained, saved, and trained further."""
    kept = torch.load(path, weights_only=False)
    model = ICNNQ("MlpPolicy", env, device="cpu", **kept["training"].options())
    model.policy.agent.load_state_dict(kept["agent"])
    return model
