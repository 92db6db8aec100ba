"""The state of a training run and its steps: what callbacks see, and what a checkpoint holds."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from icnn.learning import checkpoints
from icnn.learning.checkpoints import random_state, set_random_state
from icnn.learning.history import History
from icnn.learning.parallel import Shard, Team
from icnn.learning.progress import Silence
from icnn.learning.steps import Step, Sums, examples, length, snapshot, told
from icnn.solvers.solution import Status

SKIPS = 30  # steps in a row that a scaler may leave out
# What of a run is stored as it is.
PLAIN = ("epoch", "step", "number", "halted", "least", "kept", "began")


@dataclass(repr=False)
class Run:
    """A training run: what callbacks see, and what a checkpoint holds.

    Attributes:
        energy: What is trained.
        optimizer: What moves it.
        history: The epochs so far.
        epoch: How many of them are behind us.
    """

    energy: nn.Module
    optimizer: Optimizer
    loader: Iterable[Any]
    loss: Callable[..., Any]
    epochs: int
    schedule: LRScheduler | None
    clip: float | None
    precision: torch.dtype | None
    validation: Any
    patience: int | None
    path: Path | None
    every: int | None
    callbacks: tuple[Callable[["Run"], Any], ...]
    team: Team
    shares: Shard | None
    history: History = field(default_factory=History)
    epoch: int = 0
    step: int = 0  # of the epoch
    number: int = 0  # of steps in all
    halted: bool = False
    least: float = math.inf
    kept: dict[str, Any] | None = None  # the weights of the best epoch
    sums: Sums = field(default_factory=Sums)
    began: dict[str, Any] = field(default_factory=dict)  # generators at the start of the epoch
    now: dict[str, Any] | None = None  # and where a checkpoint in the middle of it was written
    interrupted: list[int] = field(default_factory=list)
    screens: list[Silence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step_module = Step(self.energy, self.loss)
        self.model = self.team.wrap(self.step_module)
        device = self.team.device.type
        self.scaler = torch.amp.GradScaler(device, enabled=self.precision == torch.float16)
        self.loaders = (self.loader, self.validation)  # who may have generators of their own
        self.pending: memoryview | None = None
        self.statistics: list[Tensor] = []
        self.skipped = 0
        self.lately: deque[float] = deque(maxlen=3)

    def train(self) -> History:
        """All epochs that are left."""
        try:
            while (reason := self.over()) is None:
                self.go_through()
                self.heed()
            self.write()
        except FloatingPointError:
            raise
        except BaseException:
            self.write()
            raise
        finally:
            self.energy.zero_grad()
            self.energy.eval()
        self.history.stopped = reason
        if self.validation is not None and self.kept is not None:
            self.energy.load_state_dict(self.kept)
        return self.history

    def over(self) -> str | None:
        """Why there is no other epoch, if there is none."""
        if self.halted and self.callbacks:  # without them it may go on
            return "a callback ended it"
        if self.patience is not None and self.epoch - self.history.best >= self.patience:
            return f"no better validation in {self.patience} epochs"
        return "all of them" if self.epoch >= self.epochs else None

    def go_through(self) -> None:
        """One epoch, from where a checkpoint left it."""
        self.energy.train()
        since = time.perf_counter()
        steps = length(self.loader)
        for screen in self.screens:
            screen.begin(self.epoch + 1, steps, self.step)
        seen = self.step
        if not seen:
            self.sums, self.began = Sums(), self.team.agree(random_state(*self.loaders))
        if seen or self.team.size > 1:
            set_random_state(self.began, *self.loaders)
        batches = iter(self.loader)
        for place in count():
            if seen and place == seen and self.now is not None:
                set_random_state(self.now, *self.loaders)
            try:
                batch = next(batches, None)
            except RuntimeError:  # a worker that Ctrl-C has reached
                if place >= seen:  # else generators are not where the checkpoint left them
                    self.heed()
                raise
            if batch is None:
                break
            if not place and not self.team.leads:
                # One order of examples for all processes; dropout of its own for each.
                torch.manual_seed(int(torch.randint(2**62, ())) + self.team.rank)
            if place >= seen:
                self.advance(batch)
        if not self.step:
            again = ", as an iterator that can be read only once" if self.epoch else ""
            raise ValueError(
                f"`loader` must give batches, got none in epoch {self.epoch + 1}{again}"
            )
        self.close_epoch(time.perf_counter() - since)

    def advance(self, batch: Any) -> None:
        """One step of the optimiser."""
        batch = self.moved(batch)
        self.statistics = [buffer.clone() for buffer in self.energy.buffers()]
        with self.cast():
            loss = self.model(batch)
        if not loss.requires_grad:
            raise ValueError("`loss` must depend on weights of `energy`, got one that does not")
        self.energy.zero_grad()
        share = self.shares.share(self.step) if self.shares else 1.0
        self.scaler.scale(loss * share).backward()
        self.scaler.unscale_(self.optimizer)
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in weights if p.grad is not None]
        # In double precision: what is large but finite can still be clipped.
        norms = torch._foreach_norm(gradients, 2, torch.float64)  # pyright: ignore
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.clip is not None:
            clip_grads_with_norm_(weights, self.clip, norm)
        solution = self.step_module.solution
        # One look at the device for all of them.
        numbers = [loss.detach().double(), norm.double(), *told(solution)]
        value, size, *answers = torch.stack(numbers).tolist()
        self.check(value, size)
        self.write()  # the weights that it holds are good: they gave numbers
        self.scaler.step(self.optimizer)
        self.scaler.update()
        schedule = self.schedule
        left_out = not math.isfinite(size)  # by the scaler
        if not (schedule is None or isinstance(schedule, ReduceLROnPlateau) or left_out):
            schedule.step()
        if share:
            gap, converged = answers or (-math.inf, 0)
            self.sums.add(
                value, examples(batch), gap, len(solution.gap) if answers else 0, converged
            )
        self.step_module.solution = None
        self.lately.append(value)
        self.step, self.number = self.step + 1, self.number + 1
        for screen in self.screens:
            screen.step(self.number, {"last": value, **self.sums.row()})
        if self.every is not None and self.step % self.every == 0:
            self.save()
        self.heed()

    def heed(self) -> None:
        """Ctrl-C, when all is in order."""
        if self.interrupted:
            self.save()
            told = f"interrupted in epoch {self.epoch + 1} after step {self.step}"
            more = f": resume=True goes on from {self.path}" if self.path else ""
            raise KeyboardInterrupt(told + more)

    def check(self, loss: float, norm: float) -> None:
        """Numbers, or a clear end."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped = 0
            return
        self.skipped += 1
        # A scaler leaves out steps whose gradients overflow, and scales down.
        if math.isfinite(loss) and self.scaler.is_enabled() and self.skipped < SKIPS:
            return
        if not math.isfinite(loss):
            what = f"the loss is {loss:g}"
            status = getattr(self.step_module.solution, "status", torch.empty(0))
            broken = int((status == int(Status.NONFINITE)).sum())
            what += f" ({broken} of {len(status)} answers have no finite energy)" if broken else ""
        else:
            names = (
                name
                for name, p in self.energy.named_parameters()
                if p.grad is not None and not bool(p.grad.isfinite().all())
            )
            what = f"the gradient of `{next(names, 'a parameter')}` is not finite"
        self.fail(what, self.step + 1)

    def fail(self, what: str, step: int) -> None:
        """The end."""
        with torch.no_grad():
            for buffer, old in zip(self.energy.buffers(), self.statistics, strict=True):
                buffer.copy_(old)
        before = ", ".join(f"{value:.3g}" for value in self.lately)
        lately = f" The steps before had {before}." if before else ""
        there = self.path is not None and self.path.exists()
        raise FloatingPointError(
            f"{what} in epoch {self.epoch + 1}, step {step}.{lately} A lower learning "
            "rate or `clip` may help; else look at the data. "
            + (f"The last good checkpoint is {self.path}." if there else "There is no checkpoint.")
        )

    def close_epoch(self, seconds: float) -> None:
        """Validation, the best weights, callbacks, the checkpoint."""
        stored = [*self.energy.parameters(), *self.energy.buffers()]
        if not all(bool(t.isfinite().all()) for t in stored):
            self.fail("a weight, or a statistic of a norm, is not finite at the end", self.step)
        row = {"epoch": self.epoch + 1, **self.joined().row()}
        if self.validation is not None:
            score = self.team.agree(self.validate() if self.team.leads else 0.0)
            if math.isnan(score):
                self.fail("the validation is nan", self.step)
            row["validation"] = score
        self.epoch, self.step, self.now = self.epoch + 1, 0, None
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(row.get("validation", row["loss"]))
        row |= {"rate": float(self.optimizer.param_groups[0]["lr"]), "seconds": seconds}
        self.history.rows.append(row)
        if self.validation is None or row["validation"] < self.least or self.history.best == 0:
            self.history.best = self.epoch
            if self.validation is not None:
                self.least, self.kept = row["validation"], snapshot(self.energy)
        for screen in self.screens:
            screen.end(self.number, row)
        self.save()  # before callbacks, which may raise, and after them, as one may end the run
        asked = [callback(self) is True for callback in self.callbacks]
        self.halted = self.team.agree(any(asked))
        self.save()

    def joined(self) -> Sums:
        """The sums of all processes."""
        parts: list[Sums] = self.team.gather(self.sums)
        return Sums(
            sum(part.loss for part in parts),
            sum(part.count for part in parts),
            max(part.gap for part in parts),
            sum(part.solved for part in parts),
            sum(part.converged for part in parts),
        )

    def validate(self) -> float:
        """The mean loss on the validation's batches, or what its function says."""
        self.energy.eval()
        with torch.no_grad(), self.cast():
            if callable(self.validation):
                return number(self.validation(self.energy))
            sums, step = Sums(), Step(self.energy, self.loss)
            for batch in self.validation:
                batch = self.moved(batch)
                sums.add(float(step(batch)), examples(batch))
        if not sums.count:
            raise ValueError("`validation` must give batches, got none")
        return sums.row()["loss"]

    def moved(self, batch: Any) -> Any:
        """A batch where the energy is."""
        device = self.team.device
        if isinstance(batch, list | tuple) and all(isinstance(part, Tensor) for part in batch):
            return [part.to(device, non_blocking=True) for part in batch]  # by far the usual case
        return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)

    def cast(self) -> Any:
        """Autocast, if it is wanted."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.team.device.type, dtype=self.precision)

    def save(self) -> None:
        """Keep a checkpoint for the next step to prove, if one is wanted."""
        if self.path is None:
            return
        states = self.team.gather(random_state(*self.loaders))
        if self.team.leads:
            self.pending = checkpoints.packed(self.state_dict() | {"now": states})

    def write(self) -> None:
        """Write what is to be saved, once it has proved to be good."""
        data, self.pending = self.pending, None
        if data is not None and self.path is not None:
            checkpoints.write(self.path, data)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on."""
        return {
            "energy": self.energy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "scaler": self.scaler.state_dict(),
            "rows": self.history.rows,
            "best": self.history.best,
            "sums": asdict(self.sums),
            **{name: getattr(self, name) for name in PLAIN},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if (self.schedule is None) != (state["schedule"] is None):
            raise ValueError("`schedule` must be there as it was when the checkpoint was written")
        try:
            self.energy.load_state_dict(state["energy"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            told = f"{self.path} is a checkpoint of another energy or optimiser: {error}"
            raise ValueError(told) from error
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.history = History(state["rows"], state["best"])
        self.sums = Sums(**state["sums"])
        for name in PLAIN:
            setattr(self, name, state[name])
        states = state["now"]
        if self.step and len(states) != self.team.size:
            raise ValueError(
                f"{self.path} was written in the middle of an epoch by {len(states)} processes, "
                f"and is resumed by as many, got {self.team.size}"
            )
        self.now = state = states[self.team.rank % len(states)]
        set_random_state(state, *self.loaders)


def number(value: Any) -> float:
    """What a validation says."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`validation` must give a number, got {value!r}") from error
