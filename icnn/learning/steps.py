"""Parts of a training run: a loss as a module, sums over an epoch, what a batch holds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from icnn.solvers.solution import Solution


class Step(nn.Module):
    """The loss as a module, so that whatever it does with the energy counts as a pass of it."""

    def __init__(self, energy: nn.Module, loss: Callable[..., Any]):
        super().__init__()
        self.energy, self.loss = energy, loss
        self.solution: Any = None

    def forward(self, batch: Any) -> Tensor:
        parts = batch if isinstance(batch, list | tuple) else (batch,)
        found = self.loss(self.energy, *parts)
        value, self.solution = found if isinstance(found, tuple) else (found, None)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = (
                f"{tuple(value.shape)}: take the mean" if isinstance(value, Tensor) else repr(value)
            )
            raise ValueError(f"`loss` must give one number, as a tensor, got {got}")
        return value.reshape(())


@dataclass
class Sums:
    """Of the examples of an epoch."""

    loss: float = 0.0
    count: int = 0
    gap: float = -math.inf
    solved: int = 0
    converged: int = 0

    def add(self, loss: float, examples: int, gap: float = -math.inf, solved: int = 0,
            converged: float = 0) -> None:  # fmt: skip
        """One more batch."""
        self.loss += loss * examples
        self.count += examples
        self.gap = max(self.gap, gap)
        self.solved += solved
        self.converged += int(converged)

    def row(self) -> dict[str, float]:
        """The mean loss, and what is known of answers."""
        found = {"loss": self.loss / self.count if self.count else math.nan}
        if self.solved:
            found |= {"gap": self.gap, "converged": self.converged / self.solved}
        return found


def snapshot(module: nn.Module) -> dict[str, Any]:
    """A copy of its weights."""
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }


def examples(batch: Any) -> int:
    """How many there are in a batch: as many as in its first tensor."""
    parts = batch if isinstance(batch, list) else pytree.tree_leaves(batch)
    leaves = (leaf for leaf in parts if isinstance(leaf, Tensor) and leaf.ndim)
    return next((len(leaf) for leaf in leaves), 1)


def length(loader: Any) -> int | None:
    """How many batches there are, where that is known."""
    try:
        return len(loader)
    except TypeError:
        return None


def told(solution: Any) -> list[Tensor]:
    """The worst gap of a batch, and how many of its examples converged, if there are any."""
    if not isinstance(solution, Solution) or not len(solution.gap):
        return []
    return [solution.gap.max().double(), solution.converged.sum().double()]
