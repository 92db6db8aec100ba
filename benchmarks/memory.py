"""What memory does a step of training through the argmin need? `--fast` for a smoke test.

One step of training (argmin, loss, backward) of a network of the paper's size, in
float32; less its tangent plane at a random point, held constant, so that the answer lies near that
point and where many cuts meet, as in a trained network. On a CPU every storage that an operation
makes is counted from its birth to its death; parameters, their gradients and the batch are there
before and do not count. What operations use inside of themselves is not seen: therefore a fresh
process runs each cell again, without counting, and tells how its resident memory grew. On CUDA the
allocator tells. "Held" is what lives between the loss and backward.
"""

import argparse
import gc
import multiprocessing
import os
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import icnn
from benchmarks.gradients import Counted, Stretched, Way, error
from icnn import report

MEMORY: dict[str, Any] = {
    "dim_x": 1836, "dim_y": 159, "hidden": [600, 159], "batch": 128, "seed": 0,
    "factor": 25.0, "stretch": 12.0, "steps": [5, 10, 30, 100],
}  # fmt: skip
MEGA = 2**20


class Tilted(icnn.Energy):
    """An energy less a plane for each example, which is no more than a constant."""

    def __init__(self, energy: Stretched, plane: Tensor):
        super().__init__()
        self.energy, self.plane, self.y_shape = energy, plane, energy.y_shape

    def at(self, x: Tensor) -> Any:
        """For the one batch that the planes are for."""
        f = self.energy.at(x)
        return lambda y: f(y) - (self.plane * y).sum(dim=1)


class Storages(TorchDispatchMode):
    """Bytes of all storages that operations made and that are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.known: dict[int, weakref.ref] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for tensor in tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known and storage._cdata not in old:
                self.born(storage)
        return out

    def born(self, storage: torch.UntypedStorage) -> None:
        """Count it until it dies."""
        key, size = storage._cdata, storage.nbytes()

        def dies(_: Any) -> None:
            self.live -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, dies)
        self.live += size
        self.peak = max(self.peak, self.live)


def tensors(tree: Any) -> list[Tensor]:
    """All that are in it."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Allocator:
    """The same numbers from CUDA's allocator."""

    def __enter__(self) -> "Allocator":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        self.end = self.peak

    @property
    def live(self) -> int:
        """Now."""
        return torch.cuda.memory_allocated() - self.before

    @property
    def peak(self) -> int:
        """So far."""
        return torch.cuda.max_memory_allocated() - self.before


class Resident:
    """How far the resident memory of this process rose above where it was; Linux only."""

    def __enter__(self) -> "Resident":
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.before = status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def live(self) -> int:
        """Now; freed memory may still be there."""
        return status("VmRSS") - self.before

    @property
    def peak(self) -> int:
        """So far."""
        return status("VmHWM") - self.before


def status(field: str) -> int:
    """Bytes, from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_ways(steps: int) -> dict[str, tuple[str, Way]]:
    """An activation and a way each."""
    gradient = icnn.ProjectedGradient(steps, 0.003, decay=0.5)
    return {
        "cuts": ("relu", Way(Counted(steps, 0.0), "cuts")),
        "implicit": ("softplus", Way(Counted(steps, 0.0), "implicit")),
        "unroll": ("relu", Way(gradient, "unroll")),
        "unroll, last 5": ("relu", Way(replace(gradient, unrolled=5), "unroll")),
    }


def cell(name: str, steps: int, device: str, meter: str, settings: dict) -> dict:
    """One step of training under a meter; a shorter one went before, for what is made once."""
    MEMORY.update(settings)
    torch.set_num_threads(1)
    torch.manual_seed(MEMORY["seed"])
    activation, way = memory_ways(steps)[name]
    net = icnn.PICNN(MEMORY["dim_x"], MEMORY["dim_y"], MEMORY["hidden"], activation=activation)
    energy = Stretched(net, MEMORY["factor"], MEMORY["stretch"]).to(device)
    x = torch.randn(MEMORY["batch"], MEMORY["dim_x"]).to(device)
    target = torch.rand(MEMORY["batch"], MEMORY["dim_y"]).to(device)
    near = torch.rand_like(target).requires_grad_()
    energy = Tilted(energy, torch.autograd.grad(energy(x, near).sum(), near)[0])
    for parameter in energy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory_ways(2)[name][1].answer(energy, x).sum().backward()
    gc.collect()
    with {"storages": Storages, "resident": Resident, "cuda": Allocator}[meter]() as measured:
        loss = error(way.answer(energy, x), target)
        forward, held = measured.peak, measured.live
        loss.backward()
        peak = measured.peak
        del loss
        left = measured.live
        gc.collect()
        collected = measured.live
    active = getattr(way.solver, "active", None)
    return {
        "cuts": None if active is None else [int(active.median()), int(active.max())],
        "held": held / MEGA,
        "forward": forward / MEGA,
        "peak": peak / MEGA,
        "left": left / MEGA,
        "left after a collection": collected / MEGA,
    }


def memory(fast: bool, device: str) -> None:
    """A fresh process for each cell and meter."""
    small = {"batch": 16, "steps": [5, 10]}
    MEMORY.update(small if fast else {})
    meters = ["cuda"] if device == "cuda" else ["storages", "resident"]
    cells: list[tuple[str, int]] = [(w, k) for w in memory_ways(1) for k in MEMORY["steps"]]
    jobs = [(*one, meter) for one in cells for meter in meters]
    found: dict[tuple[str, int, str], dict] = {}
    context = multiprocessing.get_context("spawn")
    # Freed memory shall go back at once, else its holes count as resident: read at start-up.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    workers = 1 if device == "cuda" else 2
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {
            pool.submit(cell, name, steps, device, meter, MEMORY): (name, steps, meter)
            for name, steps, meter in jobs
        }
        for future in track(as_completed(futures), "Measuring memory", total=len(jobs)):
            found[futures[future]] = future.result()
    rows = []
    for name, steps in cells:
        seen = found[name, steps, meters[0]]
        row: dict[str, str | float] = {
            "way": name,
            "energy": memory_ways(1)[name][0],
            "steps": steps,
            "active cuts": " / ".join(map(str, seen["cuts"])) if seen["cuts"] else "",
            "held, MiB": round(seen["held"], 1),
            "peak of forward, MiB": round(seen["forward"], 1),
            "peak, MiB": round(seen["peak"], 1),
        }
        if "resident" in meters:
            row["peak, resident MiB"] = round(found[name, steps, "resident"]["peak"], 1)
        rows.append(row)
    print(report.table(rows))
    left = max(one["left"] for key, one in found.items() if key[2] == meters[0])
    print(f"left after backward, MiB: {left:.2f} at most")
    if not fast:
        notes = [{"way": k[0], "steps": k[1], "meter": k[2]} | v for k, v in found.items()]
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        name = "gradients-memory" + ("-cuda" if device == "cuda" else "")
        print(report.write(name, MEMORY | {"device": where, "notes": notes}, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="a smoke test; nothing is written")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    memory(given.fast, given.device)
