"""Networks that score labels one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from icnn import losses
from icnn.energies.compose import Score
from icnn.estimators.features import tensor
from icnn.learning.batches import whole
from icnn.learning.fit import fit

DROP_IN, DROP = 0.1, 0.8
CROSS = 5.0  # the weight of the cross entropy beside the F1
BATCH = 128
LEAST = 30  # steps of an optimiser for each epoch that is asked for, however few the examples
ROOM = 8e6  # numbers in the first layer
ROWS = 1024  # answered at once

Loss = Callable[[Tensor, Tensor], Tensor]


def mixed(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy and F1: the first to know all labels, the second to decide between them."""
    cross = F.binary_cross_entropy_with_logits(logits, y)
    return CROSS * cross + losses.soft_f1(logits.sigmoid(), y)


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Rows of features and labels, many at once."""

    def __init__(self, X: Any, Y: Tensor):
        self.X, self.Y = X, Y

    def __len__(self) -> int:
        return len(self.Y)

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        return tensor(self.X, rows), self.Y[rows]


def network(features: int, labels: int, widths: Sequence[int], rate: Tensor) -> nn.Sequential:
    """A plain network with much dropout, which starts from how often labels occur."""
    layers: list[nn.Module] = [nn.Dropout(DROP_IN)]
    before = features
    for width in widths:
        width = max(8, min(width, int(ROOM / before)))
        layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(DROP)]
        before = width
    last = nn.Linear(before, labels)
    nn.init.zeros_(last.weight)
    with torch.no_grad():
        last.bias.copy_(rate.clamp(1e-3, 1 - 1e-3).logit())
    return nn.Sequential(*layers, last)


def train_network(
    X: Any, Y: Tensor, widths: Sequence[int], loss: Loss, epochs: int, rate: float,
    device: torch.device, start: nn.Module | None,
) -> nn.Sequential:  # fmt: skip
    """A network of these examples."""
    net = network(X.shape[1], Y.shape[1], widths, Y.mean(dim=0)).to(device)
    go_on(net, start)
    size = min(BATCH, len(Y))
    # A last batch of one example has no statistics.
    loader = DataLoader(Examples(X, Y), size, shuffle=True, collate_fn=whole, drop_last=True)
    epochs = max(epochs, -(-LEAST * epochs // len(loader)))
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=device.type in ("cpu", "cuda"))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=epochs * len(loader) + 1, pct_start=0.1
    )

    def objective(energy: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(energy.net(x), y)

    fit(
        Score(net), loader, objective, epochs=epochs, optimizer=optimizer, schedule=schedule,
        progress=False, parallel=False,
    )  # fmt: skip
    return net


def go_on(module: nn.Module, old: nn.Module | None) -> None:
    """Start from the weights of another, if it is of the same form."""
    if old is not None:
        own, other = module.state_dict(), old.state_dict()
        if {name: w.shape for name, w in own.items()} == {n: w.shape for n, w in other.items()}:
            module.load_state_dict(other)


@torch.no_grad()
def logits(nets: Sequence[nn.Module], X: Any, device: torch.device) -> Tensor:
    """The mean of what networks say."""
    total = torch.zeros(())
    for net in nets:
        say = of_sparse(net, device) if sparse.issparse(X) else of_dense(net, device)
        parts = [say(X[begin : begin + ROWS]) for begin in range(0, X.shape[0], ROWS)]
        total = total + torch.cat(parts).cpu()
    return total / len(nets)


def of_dense(net: nn.Module, device: torch.device) -> Callable[[Any], Tensor]:
    """What one network says."""
    return lambda rows: net(torch.from_numpy(rows).to(device))


def of_sparse(net: Any, device: torch.device) -> Callable[[Any], Tensor]:
    """The same for sparse rows, of which the first layer sees only what is there."""
    _, first, *others = net
    weight = first.weight.T.contiguous()

    def say(rows: Any) -> Tensor:
        index, starts, values = (
            torch.from_numpy(part).to(device)
            for part in (rows.indices, rows.indptr[:-1], rows.data)
        )
        h = F.embedding_bag(index, weight, starts, mode="sum", per_sample_weights=values)
        h = h + first.bias
        for layer in others:
            h = layer(h)
        return h

    return say
