"""What a training run shows while it goes on: a bar on a terminal, curves in TensorBoard."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from icnn.extras import require


class Silence:
    """Nothing to see."""

    def begin(self, epoch: int, steps: int | None, done: int) -> None:
        """An epoch, which has `done` of its steps behind it."""

    def step(self, number: int, numbers: Mapping[str, float]) -> None:
        """A step: `number` of the whole run, and the means of the epoch so far."""

    def end(self, number: int, row: Mapping[str, float]) -> None:
        """An epoch is over."""

    def close(self) -> None:
        """The run is over."""


class Bar(Silence):
    """A bar of Rich: epochs, loss, the worst gap and the share of examples that converged."""

    def __init__(self, epochs: int):
        rich = require("rich.progress", "cli")
        console = require("rich.console", "cli").Console(stderr=True)
        epoch = f"epoch {{task.fields[epoch]}}/{epochs}"
        # On a narrow terminal it is the words that are cut.
        room = max(8, console.width - 48)
        cut = require("rich.table", "cli").Column(no_wrap=True, max_width=room)
        self.progress = rich.Progress(
            rich.TextColumn(epoch),
            rich.BarColumn(bar_width=20),
            rich.TimeRemainingColumn(elapsed_when_finished=True),
            rich.TextColumn("{task.description}", table_column=cut),
            console=console,
        )
        self.epochs, self.steps, self.past = epochs, None, ""
        self.task = self.progress.add_task("", total=None, epoch=1)
        self.progress.start()

    def begin(self, epoch: int, steps: int | None, done: int) -> None:
        self.steps = steps
        total = None if steps is None else steps * self.epochs
        place = None if steps is None else steps * (epoch - 1) + done
        self.progress.update(self.task, total=total, completed=place, epoch=epoch)

    def step(self, number: int, numbers: Mapping[str, float]) -> None:
        self.progress.update(self.task, advance=1, description=words(numbers) + self.past)

    def end(self, number: int, row: Mapping[str, float]) -> None:
        if "validation" in row:
            self.past = f", validation {row['validation']:.4g}"
        self.progress.update(self.task, description=words(row) + self.past)

    def close(self) -> None:
        self.progress.stop()


class Lines(Silence):
    """A line for each epoch, where there is no terminal for a bar."""

    def __init__(self, epochs: int):
        self.epochs = epochs

    def end(self, number: int, row: Mapping[str, float]) -> None:
        more = f", validation {row['validation']:.4g}" if "validation" in row else ""
        told = (
            f"epoch {row['epoch']:.0f}/{self.epochs}: {words(row)}{more} ({row['seconds']:.1f} s)"
        )
        print(told, file=sys.stderr, flush=True)


def words(row: Mapping[str, float]) -> str:
    """The numbers that a bar has room for."""
    told = f"loss {row['loss']:.4g}"
    if "gap" in row:
        told += f", worst gap {row['gap']:.2g}, {row['converged']:.1%} converged"
    return told


class Logs(Silence):
    """TensorBoard: `tensorboard --logdir FOLDER` shows it."""

    def __init__(self, folder: Path, number: int):
        writer = require("torch.utils.tensorboard", "viz").SummaryWriter
        # What an interrupted run logged past its checkpoint is made again.
        self.writer: Any = writer(str(folder), purge_step=number + 1 if number else None)

    def step(self, number: int, numbers: Mapping[str, float]) -> None:
        self.writer.add_scalar("step/loss", numbers["last"], number)

    def end(self, number: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "epoch":
                self.writer.add_scalar(f"epoch/{name}", value, number)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def screens(
    progress: bool | None, epochs: int, logs: str | Path | None, number: int
) -> list[Silence]:
    """What is wanted; by default a bar on a terminal only."""
    found: list[Silence] = [] if logs is None else [Logs(Path(logs), number)]
    bar = sys.stderr.isatty() and find_spec("rich") is not None
    if progress or (progress is None and bar):
        found.append(Bar(epochs) if bar else Lines(epochs))
    return found


@contextmanager
def parts_done(shown: bool, total: int) -> Iterator[Callable[[str], None]]:
    """For work of many trainings: called with the name of each as it begins, it moves a bar."""
    if not shown:
        yield lambda name: None
        return
    if not sys.stderr.isatty():
        place = count(1)
        yield lambda name: print(f"{next(place)} of {total}: {name}", file=sys.stderr, flush=True)
        return
    console = require("rich.console", "cli").Console(stderr=True)
    with require("rich.progress", "cli").Progress(console=console) as bar:
        task, begun = bar.add_task("", total=total), []

        def begin(name: str) -> None:
            bar.update(task, description=name, completed=len(begun))
            begun.append(name)

        yield begin
        bar.update(task, description="done", completed=total)
