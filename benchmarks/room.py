"""What memory does an argmin need beyond one network pass, against the size of its cuts?

K cuts of a batch are `K * B * n` numbers of the energy's dtype. The memory is the peak of a whole
solve without gradients, less the peak of one eager value-and-gradient pass by autograd; the x-path
is there before. On a CPU all storages that operations of PyTorch make are counted, and beside it
how far the resident memory of a fresh process rose; on CUDA the allocator tells. What a recorded
pass keeps from call to call on CUDA, its own memory and a copy of the network at its `x`, is apart.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.argmin import NETS, At, Case, inputs, steep
from benchmarks.memory import MEGA, Allocator, Resident, Storages
from benchmarks.options import options
from icnn import report
from icnn.solvers import search
from icnn.solvers.argmin import precise

STEPS = (5, 10, 30)
SETTINGS: dict[str, Any] = {"seed": 0, "entropy": 0.03, "dtype": "float32"}


def made(net: int, batch: int, device: str) -> Case:
    """A case with its x-path computed."""
    torch.manual_seed(SETTINGS["seed"])
    energy, x = steep(NETS[net].make().to(device)), inputs(NETS[net], batch, device)
    with torch.no_grad():
        frozen = At(energy.at(x), energy.y_shape)
    return Case(NETS[net], "", batch, frozen, x, SETTINGS["entropy"], 0.0)


def peak(meter: Any, function: Callable[[], object]) -> int:
    """The most bytes that were there at once."""
    for _ in range(2):
        function()
    with meter:
        function()
    return meter.peak


def measure(net: int, batch: int, steps: int, device: str, resident: bool) -> tuple[int, int]:
    """The peaks of a solve and of a pass."""
    case = made(net, batch, device)
    y = torch.full((batch, *case.energy.y_shape), 0.5, device=device)
    kind = Resident if resident else Allocator if device == "cuda" else Storages
    with unrecorded(), precise(y):
        solve = peak(kind(), lambda: case.solve(steps))
        return solve, peak(kind(), lambda: case.passes(y, 1))


@contextmanager
def unrecorded() -> Iterator[None]:
    """Without recorded passes."""
    kept = search.recorded
    search.recorded = lambda problem: None
    try:
        yield
    finally:
        search.recorded = kept


def recording(net: int, batch: int) -> int:
    """What a recorded pass keeps."""
    case = made(net, batch, "cuda")
    case.solve(2)
    before = torch.cuda.memory_allocated()
    case.solve(2)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def fresh(*arguments: Any) -> tuple[int, int]:
    """The same in a process of its own: memory that others left behind does not show."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, *arguments).result()


def main() -> None:
    """Measure, print, write `results/room-cpu.json` or `-cuda`."""
    arguments = options(__doc__)
    SETTINGS["seed"] = arguments.seed
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[report.Row] = []
    places = [(2, 128), (2, 2515), (3, 70), (3, 1024)]
    for net, batch in places[:1] if arguments.fast else places:
        n = torch.Size(made(net, 1, "cpu").energy.y_shape).numel()
        for steps in STEPS:
            cuts = 4 * batch * steps * n
            solve, one = measure(net, batch, steps, device, False)
            row: dict[str, str | float] = {
                "network": NETS[net].name,
                "n": n,
                "B": batch,
                "K": steps,
                "cuts, MiB": cuts / MEGA,
                "beyond a pass, MiB": (solve - one) / MEGA,
                "/ cuts": (solve - one) / cuts,
            }
            if device == "cpu":
                solve, one = fresh(net, batch, steps, device, True)
                row["/ cuts, resident"] = (solve - one) / cuts
            else:
                row["recorded pass, MiB"] = recording(net, batch) / MEGA
            rows.append(row)
            print(report.table(rows[-1:]).splitlines()[2], flush=True)
    print(report.table(rows))
    if not arguments.fast:
        print(report.write(f"room-{device}", SETTINGS, rows, arguments.out))


if __name__ == "__main__":
    main()
