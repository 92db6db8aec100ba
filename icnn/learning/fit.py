"""One training loop: any loss on energies or on their answers; it can be stopped and continued."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from icnn.checks import check_callable, check_choice, check_count, check_instance, check_number
from icnn.energies.layers import keep_convex
from icnn.learning import checkpoints
from icnn.learning.decay import decay
from icnn.learning.history import History
from icnn.learning.parallel import Team, join, shard
from icnn.learning.progress import screens
from icnn.learning.run import Run

PRECISIONS = (None, torch.bfloat16, torch.float16)


def fit(
    energy: nn.Module,
    loader: Iterable[Any],
    loss: Callable[..., Any],
    *,
    epochs: int = 10,
    optimizer: Optimizer | None = None,
    schedule: LRScheduler | None = None,
    weight_decay: float = 0.0,
    clip: float | None = None,
    precision: torch.dtype | None = None,
    validation: Iterable[Any] | Callable[[Any], float] | None = None,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    every: int | None = None,
    resume: bool = False,
    logs: str | Path | None = None,
    callbacks: Sequence[Callable[[Run], Any]] = (),
    progress: bool | None = None,
    parallel: bool = True,
) -> History:
    """Train an energy.

    Constrained weights are clipped after every step, so that the energy is convex and what is
    stored is what is used. The energy is left in eval mode, with the best weights if there is a
    validation, else with the last.

    Started by `torchrun`, several processes share the examples of the loader, without a change to
    the script: W of them with batches of B do what one does with batches of W B.

    Args:
        energy: What is trained: any module with parameters.
        loader: Gives batches, anew for each epoch: a `DataLoader`, a list. Tensors go to the
            device of the energy.
        loss: Called as `loss(energy, *batch)`; a mean over the batch. Gives back a number, or
            `(number, solution)` with what `icnn.argmin` found: then the worst gap and the share of
            examples that converged are told.
        epochs: How often to go through the loader.
        optimizer: Of PyTorch; `Adam(energy.parameters(), lr=1e-3)` by default.
        schedule: Of PyTorch, for that optimiser. It counts steps, not epochs; but
            `ReduceLROnPlateau` looks at the validation, or at the loss, after each epoch.
        weight_decay: As of AdamW, but on the weights that a network uses, however they are stored:
            see `positivity` of the energies. An optimiser's own acts on what is stored.
        clip: The norm that gradients are clipped to.
        precision: `torch.bfloat16` or `torch.float16`: run the loss under autocast; the search of
            an argmin keeps the precision of the weights, which its certificate needs.
        validation: Batches, for which the mean loss is computed after each epoch under
            `torch.no_grad()`; or a function of the energy that gives a number. Less is better.
        patience: After how many epochs without a better validation to stop.
        checkpoint: A file to write after each epoch, in one piece: a run that was killed goes on
            from there to the same weights, to the last bit.
        every: After how many steps to write it besides.
        resume: Go on from `checkpoint`, if it is there.
        logs: A folder for TensorBoard.
        callbacks: Called with the `Run` after each epoch, in turn. One that gives back `True` ends
            the training.
        progress: Whether to show how far it is, by a bar on a terminal, else by a line for each
            epoch; by default on a terminal only.
        parallel: Whether to join the other processes, where there are any.

    Raises:
        FloatingPointError: The loss, a gradient or a weight is no number any more. The energy has
            the weights from before that step.
        KeyboardInterrupt: After Ctrl-C the step is finished and the checkpoint written.
        OSError: The checkpoint cannot be written. The one before is whole.

    Examples:
        >>> energy = icnn.FICNN(dim_y=2)
        >>> y = torch.rand(256, 2)
        >>> def loss(energy, y, cost):
        ...     return (energy(None, y) - cost).square().mean()
        >>> history = icnn.fit(energy, [(y, y.norm(dim=1))], loss, epochs=100)
        >>> history.rows[-1]["loss"] < history.rows[0]["loss"]
        True
    """
    check_instance("energy", energy, nn.Module)
    check_callable("loss", loss)
    check_count("epochs", epochs)
    check_number("weight_decay", weight_decay, 0.0)
    check_choice("precision", precision, PRECISIONS)
    for name, number in (("patience", patience), ("every", every)):
        if number is not None:
            check_count(name, number)
    if clip is not None and check_number("clip", clip) <= 0:
        raise ValueError(f"`clip` must be above 0, got {clip!r}")
    if patience is not None and validation is None:
        raise ValueError("`patience` needs a `validation`, got none")
    if checkpoint is None and (resume or every is not None):
        raise ValueError("`resume` and `every` need a `checkpoint`, got none")
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_dir():
        raise ValueError(f"`checkpoint` must be a file, got a folder: {path}")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ValueError(f"`callbacks` must be a list of functions, got {callbacks!r}")
    learned = [p for p in energy.parameters() if p.requires_grad]
    if not learned:
        raise ValueError("`energy` must have parameters that are learned, got none")
    team = join(learned[0].device) if parallel else Team(learned[0].device)
    energy.to(team.device)
    optimizer = optimizer or torch.optim.Adam(learned, lr=1e-3)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("`optimizer` must make steps of gradients that are there, got LBFGS")
    if schedule is not None and schedule.optimizer is not optimizer:
        raise ValueError("`schedule` must be one of `optimizer`, got one of another")

    own, shares = shard(loader, team)
    run = Run(
        energy=energy, optimizer=optimizer, loader=own, loss=loss, epochs=epochs,
        schedule=schedule, clip=clip, precision=precision, validation=validation,
        patience=patience, path=path, every=every, callbacks=tuple(callbacks), team=team,
        shares=shares,
    )  # fmt: skip
    if path is not None and team.agree(path.exists()):
        if not resume:
            raise ValueError(f"`checkpoint` is there already: {path}. Pass resume=True, or move it")
        run.load_state_dict(team.agree(checkpoints.load(path) if team.leads else None))
    with ExitStack() as stack:
        if weight_decay:
            stack.callback(decay(energy, optimizer, weight_decay).remove)
        stack.callback(keep_convex(energy, optimizer).remove)
        run.interrupted = stack.enter_context(interrupts(alone=team.size == 1))
        run.screens = screens(progress, epochs, logs, run.number) if team.leads else []
        for screen in run.screens:
            stack.callback(screen.close)
        return run.train()


@contextmanager
def interrupts(alone: bool) -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C; a second one ends at once, as ever.

    In a step an optimiser may have moved some weights and not others: nothing to write to a file.
    Of several processes one could stop while others wait for it, so that these end at once too.
    """
    seen: list[int] = []
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (alone and usual and threading.current_thread() is threading.main_thread()):
        yield seen
        return

    def note(number: int, frame: Any) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
