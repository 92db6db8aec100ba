"""`argmin` for more data than memory holds: batch after batch, each answer before the next one."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from icnn.checks import check_callable
from icnn.extras import require
from icnn.solvers.argmin import Solver, argmin
from icnn.solvers.domains import Domain
from icnn.solvers.solution import Solution


def stream(
    energy: Callable[[Any, Tensor], Tensor],
    batches: Iterable[Any],
    domain: Domain,
    *,
    entropy: float = 1.0,
    solver: Solver | None = None,
    progress: bool | None = None,
) -> Iterator[Solution]:
    """Minimise over `y` for batches that come one after another; memory is that of one of them.

    The next batch is read when the answer to the last one has been taken. Batches go to the device
    of the energy, and answers come back to where the batch was. No gradients are kept.

    Args:
        energy: As for `icnn.argmin`.
        batches: Batches of `x`: a generator, a list, a `DataLoader`. A list or tuple of one tensor,
            as `TensorDataset` gives it, counts as the tensor.
        domain: As for `icnn.argmin`, for all batches.
        entropy: As for `icnn.argmin`.
        solver: As for `icnn.argmin`.
        progress: Whether a bar shows how far it is, with the worst gap and the share of examples
            that converged; by default on a terminal only.

    Examples:
        >>> energy = icnn.PICNN(dim_x=3, dim_y=2)
        >>> batches = (torch.rand(100, 3) for _ in range(10))
        >>> answers = torch.cat([found.y for found in icnn.stream(energy, batches, icnn.Box())])
        >>> answers.shape
        torch.Size([1000, 2])
    """
    check_callable("energy", energy)
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise ValueError(
            "`batches` must give batches of x one after another, as `X.split(1000)` does, got "
            f"{type(batches).__name__}"
        )
    return answers(energy, batches, domain, entropy, solver, progress)


def answers(
    energy: Callable[[Any, Tensor], Tensor],
    batches: Iterable[Any],
    domain: Domain,
    entropy: float,
    solver: Solver | None,
    progress: bool | None,
) -> Iterator[Solution]:
    """The generator behind `stream`, whose arguments are looked at when it is called."""
    parts = () if not isinstance(energy, nn.Module) else (energy.parameters(), energy.buffers())
    own = next(chain(*parts), None)
    with bar(progress, batches) as note:
        for batch in batches:
            x = batch[0] if isinstance(batch, list | tuple) and len(batch) == 1 else batch
            tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
            home = tensors[0].device if tensors else None
            if own is not None:
                x = pytree.tree_map_only(Tensor, lambda t: t.to(own.device, non_blocking=True), x)
            with torch.no_grad():
                found = argmin(energy, x, domain, entropy=entropy, solver=solver)
            found = found if home is None else found.to(home)
            note(found)
            yield found
            del batch, x, tensors, found  # before the next one is read


def bar(progress: bool | None, batches: Iterable[Any]) -> Any:
    """A context that takes note of each answer, on a bar of Rich where that is wanted."""
    quiet = not sys.stderr.isatty() or find_spec("rich") is None
    if progress is False or (progress is None and quiet):
        return nullcontext(lambda found: None)
    try:
        total = len(batches)  # pyright: ignore
    except TypeError:  # also where a DataLoader has a dataset without a length
        total = None
    return Bar(total)


class Bar:
    """Batches, examples, the worst gap so far and the share of examples that converged."""

    def __init__(self, total: int | None):
        rich = require("rich.progress", "cli")
        console = require("rich.console", "cli").Console(stderr=True)
        self.progress = rich.Progress(
            rich.SpinnerColumn(),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.description}"),
            rich.TimeRemainingColumn() if total else rich.TimeElapsedColumn(),
            console=console,
        )
        self.task = self.progress.add_task("", total=total)
        self.count, self.converged, self.worst = 0, 0, 0.0

    def __enter__(self) -> Callable[[Solution], None]:
        self.progress.start()
        return self.note

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def note(self, found: Solution) -> None:
        """One more answer."""
        self.count += len(found.gap)
        self.converged += int(found.converged.sum())
        self.worst = max(self.worst, float(found.gap.max())) if len(found.gap) else self.worst
        told = f"{self.count} examples, {self.converged / max(1, self.count):.1%} converged"
        self.progress.update(
            self.task, advance=1, description=f"{told}, worst gap {self.worst:.2g}"
        )
