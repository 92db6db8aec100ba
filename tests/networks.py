"""The energies that tests range over, and the inequality that they must obey."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import icnn

DIM_X, DIM_Y = 4, 3
ACTIVATIONS = ("relu", "leaky_relu", "softplus", "elu", "identity")
POSITIVITIES = ("project", "softplus", "exp", "square", "abs")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)

Make = Callable[..., icnn.Energy]


def ficnn(**options) -> icnn.Energy:
    return icnn.FICNN(DIM_Y, (16, 16), **options)


def ficnn_of_both(**options) -> icnn.Energy:
    return icnn.FICNN(DIM_Y, (16, 16), dim_x=DIM_X, **options)


def picnn(**options) -> icnn.Energy:
    return icnn.PICNN(DIM_X, DIM_Y, (16, 16), **options)


def picnn_batch_norm(**options) -> icnn.Energy:
    return icnn.PICNN(DIM_X, DIM_Y, (16, 16, 16), x_norm="batch", **options)


def picnn_layer_norm(**options) -> icnn.Energy:
    return icnn.PICNN(
        DIM_X, DIM_Y, (8, 16), x_norm="layer", x_activation="tanh", x_hidden=(12, 10), **options
    )


def composed(**options) -> icnn.Energy:
    """Every composition, nested, with learned scales."""
    net = nn.Sequential(nn.Linear(DIM_X, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, DIM_Y))
    curved = icnn.Sum(ficnn(**options), icnn.Quadratic(nn.Linear(DIM_X, DIM_Y)))
    return icnn.Sum(
        icnn.Score(net),
        icnn.Scale(icnn.Max(picnn(**options), curved), nn.Parameter(torch.tensor(0.1))),
        icnn.Quadratic(
            nn.Parameter(torch.full((DIM_Y,), 0.5)), nn.Parameter(torch.full((DIM_Y,), 0.1))
        ),
        lambda x, y: y.abs().sum(dim=1),
    )


FAMILIES: tuple[Make, ...] = (
    ficnn,
    ficnn_of_both,
    picnn,
    picnn_batch_norm,
    picnn_layer_norm,
    composed,
)


EVERY_FAMILY = pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)


def batch(size: int, **options) -> tuple[Tensor, Tensor]:
    return torch.randn(size, DIM_X, **options), torch.randn(size, DIM_Y, **options)


def jensen(energy: icnn.Energy, pairs: int, jointly: bool = False, scale: float = 3.0) -> float:
    """The worst violation of f(t p + (1 - t) q) <= t f(p) + (1 - t) f(q), relative to 1 + |f|.

    `q` shares its x with `p`, unless the energy is said to be convex in x and y jointly.
    """
    (x, y), (x2, y2) = (batch(pairs, dtype=torch.float64) for _ in range(2))
    x, y, y2 = x * scale, y * scale, y2 * scale
    x2 = x2 * scale if jointly else x
    t = torch.rand(pairs, 1, dtype=torch.float64)
    with torch.no_grad():
        p, q = energy(x, y), energy(x2, y2)
        middle = energy(t * x + (1 - t) * x2 if jointly else x, t * y + (1 - t) * y2)
    t = t.squeeze(1)
    violation = middle - (t * p + (1 - t) * q)
    return float((violation / (1 + p.abs() + q.abs())).max())


def train_on_noise(
    energy: icnn.Energy, steps: int = 200, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Large steps on noise, by default of Adam and nothing projected: the worst one could do."""
    optimizer = optimizer or torch.optim.Adam(energy.parameters(), lr=0.03)
    energy.train()
    for _ in range(steps):
        x, y = batch(32, dtype=torch.float64)
        loss = (energy(x, y) - torch.randn(32, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    energy.eval()
