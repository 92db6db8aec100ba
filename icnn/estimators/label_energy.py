"""Energies over labels, learned from scores of examples that the scores have not seen."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icnn import losses
from icnn.energies.compose import Scale, Score, Sum
from icnn.energies.energy import Energy, EnergyAt
from icnn.energies.picnn import PICNN
from icnn.estimators.networks import CROSS
from icnn.learning.batches import batches
from icnn.learning.fit import fit
from icnn.solvers.argmin import Solver, argmin
from icnn.solvers.bundle_entropy import BundleEntropy
from icnn.solvers.domains import Box, Simplex
from icnn.solvers.solution import Solution

MANY = 2048  # examples answered at once
SMALL = 0.1  # what the weights of a network over labels are multiplied by at first
BATCH, RATE, DECAY = 64, 2e-3, 0.1
EPOCHS, LEAST = 8, 100  # how often examples are seen, and steps made at least
# A step of training needs no better answer; prediction takes its time.
TRAINING, PREDICTION = BundleEntropy(max_steps=8, tol=1e-3), BundleEntropy(max_steps=50)
EXPLANATION = BundleEntropy(max_steps=200, tol=1e-6)  # where small differences are looked at


class Own(nn.Module):
    """Scores as they come, but for a factor and an offset of each label."""

    def __init__(self, labels: int):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(labels))
        self.offset = nn.Parameter(torch.zeros(labels))

    def forward(self, scores: Tensor) -> Tensor:
        return self.factor * scores + self.offset


class Pull(Energy):
    """What labels are to each other, given their scores: a small PICNN, which starts near zero."""

    def __init__(self, labels: int, hidden: Sequence[int]):
        super().__init__()
        self.y_shape = (labels,)
        self.network = PICNN(labels, labels, hidden, x_norm="layer")
        with torch.no_grad():
            for weight in self.network.parameters():
                if weight.ndim > 1:
                    weight.mul_(SMALL)

    def at(self, x: Tensor) -> EnergyAt:
        return self.network.at(3 * x.sigmoid())


def label_energy(labels: int, hidden: Sequence[int]) -> Sum:
    """`-y . score + pull(scores, y)`: each label for itself, and all together."""
    return Sum(Score(Own(labels)), Pull(labels, hidden))


def loss_of(y: Tensor, true: Tensor, domain: Box | Simplex) -> Tensor:
    """Cross entropy and F1 of answers; the first alone where there is one label each."""
    y = y.clamp(1e-6, 1 - 1e-6)
    if isinstance(domain, Simplex):
        return -(true * y.log()).sum(dim=1).mean()
    return CROSS * F.binary_cross_entropy(y, true) + losses.soft_f1(y, true)


Folds = Sequence[tuple[np.ndarray, np.ndarray]]  # rows to learn from, and the others


def cross_fit(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, folds: Folds, domain: Box | Simplex,
    entropy: float, steps: int, *, solver: Solver = TRAINING,
    done: Callable[[str], None] = lambda name: None,
) -> list[nn.Module]:  # fmt: skip
    """An energy for each fold."""
    energies = []
    for i, (rest, _) in enumerate(folds):
        done(f"energy {i + 1} of {len(folds)}")
        energies.append(make())
        train_energy(energies[-1], x[rest], y[rest], domain, entropy, steps, solver)
    return energies


@torch.no_grad()
def answers(
    energy: Any, x: Tensor, domain: Box | Simplex, entropy: float, solver: Solver = PREDICTION,
    device: torch.device | None = None,
) -> Solution:  # fmt: skip
    """Where the energy is least, a part of the examples after another."""
    parts = [
        argmin(energy, part.to(device), domain, entropy=entropy, solver=solver).to("cpu")
        for part in x.split(MANY)
    ]
    return Solution.joined(parts)


def unseen(
    energies: Sequence[nn.Module], x: Tensor, folds: Folds, domain: Box | Simplex, entropy: float,
    solver: Solver = PREDICTION,
) -> np.ndarray:  # fmt: skip
    """The answers of each energy to the examples that it has not seen."""
    parts = []
    for energy, (_, out) in zip(energies, folds, strict=True):
        place = next(energy.parameters()).device
        parts.append(answers(energy, x[out], domain, entropy, solver, place).y)
    rows = np.concatenate([out for _, out in folds])
    return torch.cat(parts)[np.argsort(rows)].numpy()


def mean(energies: Sequence[nn.Module]) -> Scale:
    """Of energies, which is convex as they are."""
    return Scale(Sum(*energies), 1 / len(energies))


def train_energy(
    energy: nn.Module, x: Tensor, y: Tensor, domain: Box | Simplex, entropy: float, steps: int,
    solver: Solver,
) -> None:  # fmt: skip
    """Learn through the argmin."""
    # A last batch of one example would have no statistics.
    loader = batches(x, y, size=min(BATCH, len(x)), drop_last=True)
    epochs = -(-min(steps, max(LEAST, EPOCHS * len(loader))) // len(loader))
    optimizer = torch.optim.Adam(energy.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=epochs * len(loader) + 1
    )

    def loss(energy: Any, x: Tensor, true: Tensor) -> tuple[Tensor, Solution]:
        found = argmin(energy, x, domain, entropy=entropy, solver=solver)
        return loss_of(found.y, true, domain), found

    fit(
        energy, loader, loss, epochs=epochs, optimizer=optimizer, schedule=schedule,
        weight_decay=DECAY, progress=False, parallel=False,
    )  # fmt: skip
