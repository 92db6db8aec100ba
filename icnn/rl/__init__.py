"""Control: Stable-Baselines3 algorithms whose greedy action is a convex problem."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from icnn.extras import require
from icnn.rl.budget import Budget
from icnn.rl.critics import Form
from icnn.rl.learning import PAPER as TRAINING
from icnn.rl.learning import Rules
from icnn.rl.quadratics import Quadratics

if TYPE_CHECKING:
    from icnn.rl.algorithm import ICNNQ, NAF
    from icnn.rl.checkpoint import Checkpoint, resume

__all__ = [
    "ICNNQ",
    "NAF",
    "PAPER",
    "Budget",
    "Checkpoint",
    "Form",
    "Quadratics",
    "Rules",
    "resume",
]

PAPER = TRAINING.options()
ROOMS = {"Checkpoint": "checkpoint", "resume": "checkpoint"} | dict.fromkeys(
    ("ICNNQ", "NAF"), "algorithm"
)


def __getattr__(name: str) -> Any:
    """Algorithms need packages that the rest does not."""
    if name not in ROOMS:
        raise AttributeError(f"module 'icnn.rl' has no attribute {name!r}")
    for module in ("gymnasium", "stable_baselines3"):
        require(module, "rl")
    return getattr(import_module(f"icnn.rl.{ROOMS[name]}"), name)
