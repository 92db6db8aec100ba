"""Control: Stable-Baselines3 algorithms whose greedy action is a convex problem."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from icnn.extras import require
from icnn.rl.budget import Budget
from icnn.rl.critics import Form
from icnn.rl.learning import Rules
from icnn.rl.quadratics import Quadratics

if TYPE_CHECKING:
    from icnn.rl.algorithm import ICNNQ, NAF, PAPER

__all__ = ["ICNNQ", "NAF", "PAPER", "Budget", "Form", "Quadratics", "Rules"]


def __getattr__(name: str) -> Any:
    """Algorithms need packages that the rest does not."""
    if name not in ("ICNNQ", "NAF", "PAPER"):
        raise AttributeError(f"module 'icnn.rl' has no attribute {name!r}")
    for module in ("gymnasium", "stable_baselines3"):
        require(module, "rl")
    return getattr(import_module("icnn.rl.algorithm"), name)
