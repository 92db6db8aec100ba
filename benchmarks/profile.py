"""Where does the time of an argmin go, before and after each thing that was tried?

K = 10 steps of the bundle entropy method, as in `benchmarks.argmin`, on random energies. Each row
adds one thing to the row before:

1. plain PyTorch: the reference of the dual and of the bookkeeping, passes by autograd;
2. own gradients: values and gradients of the energy written by hand, without PyTorch's graph;
3. compiled: the dual and all bookkeeping of a step in one call, with Numba on a CPU and with Triton
   on a GPU, stopped at a tenth of the gap (except in the last step);
4. learning: the same where gradients are to come, so that every dual is solved to the end.

A clock around every pass tells its share; on a GPU it waits for the device, so that the total is
from runs of their own, without it.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import icnn
from benchmarks.argmin import NETS, At, Case, inputs, steep, threads
from benchmarks.options import options
from benchmarks.timing import medians
from icnn import report
from icnn.solvers.problem import Problem
from icnn.solvers.replay import Replay

SETTINGS: dict[str, Any] = {"seed": 0, "steps": 10, "dtype": "float32"}
PLACES = ((0, 256, 0.03), (2, 128, 0.03), (3, 70, 0.01))


class Bare(At):
    """An energy at `x` that can do nothing but be called."""

    def at(self, x: object) -> Callable[[Tensor], Tensor]:
        return lambda y: self.f(y)


class Clock:
    """The time that passes take, while it runs."""

    def __init__(self, device: str):
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> "Clock":
        self.kept = Problem.tangent, Problem.passed, Problem.evaluate, Replay.__call__
        depth = 0

        def timed(function: Any) -> Any:
            def run(*arguments: Any) -> Any:
                nonlocal depth
                depth += 1
                start = self.now() if depth == 1 else 0.0
                try:
                    return function(*arguments)
                finally:
                    depth -= 1
                    self.seconds += self.now() - start if depth == 0 else 0.0

            return run

        self.set(*map(timed, self.kept))
        return self

    def __exit__(self, *_: object) -> None:
        self.set(*self.kept)

    def set(self, *functions: Any) -> None:
        """Put them in place."""
        Problem.tangent, Problem.passed, Problem.evaluate, Replay.__call__ = functions

    def now(self) -> float:
        """Seconds, when the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def solve(case: Case, energy: At, kernel: str, learning: bool) -> object:
    """One search."""
    solver = icnn.BundleEntropy(max_steps=SETTINGS["steps"], tol=0, kernel=kernel)
    if not learning:
        with torch.no_grad():
            return icnn.argmin(energy, case.x, icnn.Box(), entropy=case.entropy, solver=solver)
    y = torch.full((case.batch, *energy.y_shape), 0.5, device=case.x.device)
    problem = Problem(energy.f, icnn.Box(), case.entropy, y, None, energy, case.x, "cuts")
    with torch.no_grad():
        return solver.solve(problem)


def rows_of(place: tuple[int, int, float], device: str, rounds: int) -> list[report.Row]:
    """All rows of one network."""
    number, batch, entropy = place
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(SETTINGS["seed"])
    energy, x = steep(NETS[number].make().to(device)), inputs(NETS[number], batch, device)
    with torch.no_grad():
        f = energy.at(x)
    able, bare = At(f, energy.y_shape), Bare(f, energy.y_shape)
    case = Case(NETS[number], "random", batch, able, x, entropy, 0.0)
    y = torch.full((batch, *energy.y_shape), 0.5, device=device)
    variants: dict[str, tuple[At, str, bool]] = {
        "plain PyTorch": (bare, "torch", False),
        "+ own gradients": (able, "torch", False),
        "+ compiled": (able, "auto", False),
        "+ learning": (able, "auto", True),
    }
    steps = SETTINGS["steps"]
    functions = {name: lambda v=variant: solve(case, *v) for name, variant in variants.items()}
    seconds = medians({"passes": lambda: case.passes(y, steps), **functions}, rounds, 1)
    rows = []
    for name, variant in variants.items():
        with Clock(device) as clock:
            begin = clock.now()
            for _ in range(rounds):
                solve(case, *variant)
            share = clock.seconds / (clock.now() - begin)
        rows.append(
            {
                "network": NETS[number].name,
                "B": batch,
                "what": name,
                "solve, ms": 1e3 * seconds[name],
                "in passes": f"{share:.0%}",
                "in the rest": f"{1 - share:.0%}",
                "/ passes": seconds[name] / seconds["passes"],
            }
        )
        print(report.table(rows[-1:]).splitlines()[2], flush=True)
    return rows


def main() -> None:
    """Measure, print, write `results/profile-cpu.json`, or `-cuda`."""
    arguments = options(__doc__)
    SETTINGS["seed"] = arguments.seed
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = PLACES[:1] if arguments.fast else PLACES
    rows = [row for place in places for row in rows_of(place, device, min(arguments.rounds, 7))]
    print(report.table(rows))
    if not arguments.fast:
        where = torch.cuda.get_device_name() if device == "cuda" else threads()
        print(report.write(f"profile-{device}", {**SETTINGS, "where": where}, rows, arguments.out))


if __name__ == "__main__":
    main()
