"""The loop of the bundle entropy method where all but the energy is compiled."""

from collections import deque
from typing import Any

import torch

from icnn.kernels.dual import END, STEP, Model, reference
from icnn.kernels.ground import Ground
from icnn.solvers.bundle_entropy import INEXACT, ROOM, Cuts
from icnn.solvers.problem import RUNNING, Problem, Record
from icnn.solvers.replay import recorded

AHEAD = 1  # steps that a GPU has before it: none would leave it without work


class Watch:
    """At which step the last example was done."""

    def __init__(self, record: Record):
        self.status = record.status.numpy()  # which is quicker to look at

    def ended(self, step: int) -> int | None:
        """That step, if it is known yet."""
        return None if (self.status == RUNNING).any() else step

    def end(self) -> int | None:
        """The same at the end of the search."""


class Remote(Watch):
    """The same from afar: looks at what has arrived from a GPU, and does not wait for the rest."""

    def __init__(self, table: Any, max_steps: int, device: torch.device):
        self.left = torch.zeros(max_steps + 1, dtype=torch.int32, device=device)
        self.here = torch.empty(self.left.shape, dtype=torch.int32, pin_memory=True)
        self.counts = self.here.numpy()
        table.set(left=self.left)
        self.news: deque[tuple[int, torch.cuda.Event]] = deque()

    def ended(self, step: int) -> int | None:
        self.here[step].copy_(self.left[step], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.news.append((step, event))
        return self.read(AHEAD)

    def end(self) -> int | None:
        return self.read(0)

    def read(self, most: int) -> int | None:
        """All that is there, and so much that no more than `most` is to come."""
        while self.news and (len(self.news) > most or self.news[0][1].query()):
            step, event = self.news.popleft()
            event.synchronize()
            if not self.counts[step]:
                return step
        return None


def search(problem: Problem, record: Record, cuts: Cuts, max_steps: int) -> None:
    """Cuts at the minimiser of the cuts so far: on a CPU with Numba, on a GPU with Triton."""
    with torch.cuda.device_of(problem.start):
        loop(problem, record, cuts, max_steps)


def loop(problem: Problem, record: Record, cuts: Cuts, max_steps: int) -> None:
    """The loop. Passes after its end, before a GPU has told of that, change nothing."""
    start, device = problem.start, problem.start.device
    replay = recorded(problem)
    y = (start.clone() if replay is None else replay.y).flatten(start_dim=1)
    record.y = start.flatten(start_dim=1)  # the start is the best point, until there is a better
    gaps = record.value.new_empty(min(max_steps, ROOM), len(y))
    # With gradients to come, the shares themselves matter, and not only what they are worth.
    inexact = 0.0 if problem.gradient else INEXACT
    known = [problem.entropy, record.tol, inexact, torch.finfo(start.dtype).eps]
    numbers = torch.tensor(known, dtype=torch.float64, pin_memory=start.is_cuda)
    numbers = numbers.to(device, non_blocking=True)
    table = table_of(problem, record, cuts, {"y": y, "numbers": numbers})
    watch = Remote(table, max_steps, device) if start.is_cuda else Watch(record)
    ended, own, points = None, None, y.view(start.shape)
    for step in range(max_steps):
        if step == cuts.slots["lam"].shape[1] < cuts.most:
            cuts.grow()
            table.set(**cuts.room)
        value, slope = problem.passed(points, own) if replay is None else replay()
        own = own or problem.own
        cuts.count = min(step + 1, cuts.most)
        if step == max_steps - 1:
            numbers[2] = 0  # what is given back minimises its cuts
        table.set(step=step, count=cuts.count, energy=value, slope=slope)
        if step > len(gaps):
            gaps = torch.cat([gaps, torch.empty_like(gaps)])[:max_steps]
        table.set(gaps=gaps[max(0, step - 1)])
        try:
            table()
        except NotImplementedError:
            plain(problem, cuts, table.fields)
        ended = watch.ended(step)
        if ended is not None:
            break
    else:
        if max_steps > len(gaps):
            gaps = torch.cat([gaps, torch.empty_like(gaps[:1])])
        value = problem.evaluate(points) if replay is None else replay()[0]
        table.set(mode=END, step=max_steps, energy=value, gaps=gaps[max_steps - 1])
        table()
        ended = watch.end()
    if ended is not None:
        max_steps, cuts.count = ended, min(ended + 1, cuts.most)
    record.y = record.y.view(start.shape)
    record.gaps = gaps[:max_steps]


def table_of(problem: Problem, record: Record, cuts: Cuts, fields: dict[str, Any]) -> Any:
    """Where a compiled step finds all that it reads and writes."""
    start = problem.start
    ground: Ground = problem.domain.ground(start)  # pyright: ignore
    fields = {
        **fields,
        "mode": STEP,
        "answer": record.y,
        "value": record.value,
        "lower": record.lower,
        "bound": record.lower.clone(),
        "best": record.best,
        "rounding": record.rounding,
        "given": record.given,
        "steps": record.steps,
        "status": record.status,
        "rows": len(ground.low),
        **{name: part for name, part in ground._asdict().items() if part is not None},
        "learning": int(problem.gradient is not None),
        **cuts.room,
    }
    slopes = fields.pop("slopes")
    if start.is_cuda:
        from icnn.kernels import triton_steps

        return triton_steps.Table(slopes, **fields)
    from icnn.kernels import numba_steps

    fields["bend"] = torch.empty_like(record.value)
    fields["same"] = torch.zeros_like(record.given, dtype=torch.int8)
    return numba_steps.Table(slopes, **fields)


def plain(problem: Problem, cuts: Cuts, fields: dict[str, Any]) -> None:
    """The dual of a step in plain PyTorch, where it is too large for a kernel."""
    active, near = fields["active"], fields["near"].double()
    going = active[:, None]
    offsets = torch.where(going, cuts.offsets, 0.0)
    shares = torch.where(going, cuts.lam, 1 / cuts.count)
    slopes = torch.where(going[:, :, None], cuts.slopes, 0.0)
    model = Model(
        problem.domain,
        slopes,
        offsets,
        torch.ones_like(offsets, dtype=torch.bool),
        fields["entropy"],
        problem.start.shape,
        None,
        torch.where(going, near, 0.0),
    )
    found = reference(model, shares)
    cuts.lam.copy_(torch.where(going, found.lam, cuts.lam))
    y = found.y.flatten(start_dim=1).to(fields["y"].dtype)
    fields["y"].copy_(torch.where(going, y, fields["y"]))
    fields["found"].copy_(torch.where(active, found.value, fields["found"]))
