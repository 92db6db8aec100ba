"""How good are gradients through the argmin after few steps? `--fast` for a smoke test.

Energies `c * net(x, a * (y - 1/2))` on the unit box, with entropy 1 and in float64,
learn soft labels that share three hidden causes; through the argmin, with the way that is right for
them: "cuts" for relu, "implicit" for softplus. Now and then training stops, and all gradients of
the loss of a fixed batch are held against two others:

- the exact one: that of an argmin that converged, by the right way. It is itself held against
  central differences of converged answers;
- for each way its own: the derivative of the loss of the very answers that its few steps gave.
  Central differences of them in random directions are compared with the gradient along those
  directions, since there are too many parameters to move each of them. Only examples count whose
  answers have a derivative, as differences ahead and behind tell: a search that evaluates a relu
  energy on a kink jumps there. Constrained weights at zero stay, since on one side nothing happens.

Step size and decay of gradient steps are the best of a few, each time and for each number of steps,
by the median objective on other `x`.
"""

import argparse
import itertools
import multiprocessing
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

import icnn
from icnn import report
from icnn.energies.energy import at
from icnn.solvers.gradient import Cuts
from icnn.solvers.problem import Problem, Record

COSINES: dict[str, Any] = {
    "dim_x": 6, "labels": 10, "causes": 3, "hidden": [16, 16],
    "factor": 5.0, "stretch": 4.0, "entropy": 1.0,
    "batch": 32, "probe": 32, "lr": 1e-2, "seeds": [0, 1, 2, 3, 4], "times": [0, 10, 30, 100],
    "steps in training": 20, "directions": 16, "difference": 1e-6,
    "directions to check the exact gradient": 3, "its difference": 3e-6,
    "step sizes": [0.01, 0.03, 0.1, 0.3], "decays": [0.0, 0.5], "momentum": 0.3,
}  # fmt: skip
RIGHT = {"relu": "cuts", "softplus": "implicit"}
EXACT = icnn.BundleEntropy(300, 1e-12)
SHARE = 1e-3  # from which share in the mixture a cut counts as active
JUMP = 0.1  # how far differences ahead and behind may be apart, relative to them


class Stretched(icnn.Energy):
    """`c * net(x, a * (y - 1/2))`: without stretch and factor the entropy alone would decide."""

    def __init__(self, net: icnn.PICNN, c: float, a: float):
        super().__init__()
        self.net, self.c, self.a, self.y_shape = net, c, a, net.y_shape

    def at(self, x: Tensor) -> Any:
        """Once for each `x`."""
        f = self.net.at(x)
        return lambda y: self.c * f(self.a * (y - 0.5))


class Counted(icnn.BundleEntropy):
    """Remembers how many cuts share in the answers."""

    active = torch.zeros(0)

    def solve(self, problem: Problem) -> Record:
        """As ever."""
        record = super().solve(problem)
        assert record.pieces is not None
        object.__setattr__(self, "active", (record.pieces.lam > SHARE).sum(dim=1).double())
        return record


@dataclass(frozen=True)
class Way:
    """A solver and how its answers get their gradients."""

    solver: Any
    gradient: str

    def answer(self, energy: nn.Module, x: Tensor, entropy: float = 1.0) -> Tensor:
        """With its graph."""
        found = icnn.argmin(
            energy, x, icnn.Box(), entropy=entropy, solver=self.solver, gradient=self.gradient
        )
        return found.y

    def quick(self, energy: icnn.Energy, x: Tensor) -> tuple[Tensor, Tensor]:
        """The answer and its objective, without a graph; gradient steps without their bound."""
        entropy = COSINES["entropy"]
        with torch.no_grad():
            if not isinstance(self.solver, icnn.ProjectedGradient):
                found = icnn.argmin(energy, x, icnn.Box(), entropy=entropy, solver=self.solver)
                return found.y, found.value
            assert energy.y_shape is not None
            start = torch.full((len(x), *energy.y_shape), 0.5, dtype=x.dtype)
            problem = Problem(at(energy, x), icnn.Box(), entropy, start)
            best, _ = self.solver.descend(problem, Record(problem, 0.0), Cuts(problem, 1))
            return best.y, best.objective


class Task:
    """Soft labels of `x` that go together: they share a few causes, which are seen with noise."""

    def __init__(self, seed: int):
        self.draws = torch.Generator().manual_seed(1000 + seed)
        n, dim_x, causes = COSINES["labels"], COSINES["dim_x"], COSINES["causes"]
        self.cause = self.normal(dim_x, causes) / dim_x**0.5
        self.mix, self.own = self.normal(causes, n), self.normal(dim_x, n) / dim_x**0.5

    def normal(self, *shape: int) -> Tensor:
        """In float64."""
        return torch.randn(*shape, generator=self.draws, dtype=torch.float64)

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        x = self.normal(count, COSINES["dim_x"])
        cause = (2 * x @ self.cause + 0.5 * self.normal(count, COSINES["causes"])).tanh()
        return x, (0.5 * (cause @ self.mix + 0.7 * x @ self.own)).sigmoid()


def errors(y: Tensor, target: Tensor) -> Tensor:
    """The loss of each example."""
    return (y - target).square().mean(dim=1)


def error(y: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return errors(y, target).mean()


def slope(energy: nn.Module, loss: Tensor) -> Tensor:
    """All gradients in the parameters, in a row."""
    parameters = list(energy.parameters())
    found = torch.autograd.grad(
        loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([part.flatten() for part in found])


def cosine(a: Tensor, b: Tensor) -> float:
    """Between two vectors."""
    return float(nn.functional.cosine_similarity(a, b, dim=0))


def differences(
    energy: nn.Module, losses: Callable[[], Tensor], directions: Tensor, length: float
) -> tuple[Tensor, Tensor]:
    """Differences of each example's loss along each direction, ahead and behind, `(m, B)`."""
    parameters = list(energy.parameters())
    here = nn.utils.parameters_to_vector(parameters).detach().clone()
    ends = []
    with torch.no_grad():
        middle = losses()
        for direction, sign in itertools.product(directions, (1, -1)):
            nn.utils.vector_to_parameters(here + sign * length * direction, parameters)
            ends.append(sign * (losses() - middle) / length)
        nn.utils.vector_to_parameters(here, parameters)
    return torch.stack(ends[::2]), torch.stack(ends[1::2])


def movable(energy: nn.Module) -> Tensor:
    """Zero for constrained weights at their bound, one for all other parameters."""
    bound = {id(m.raw) for m in energy.modules() if isinstance(m, icnn.NonNegative)}
    parts = [(p > 0) if id(p) in bound else torch.ones_like(p) for p in energy.parameters()]
    return torch.cat([part.flatten().double() for part in parts])


def own_cosine(energy: nn.Module, losses: Tensor, directions: Tensor, ends: Any) -> list[float]:
    """To the differences of the same answers; and the share of examples that have a derivative."""
    ahead, behind = ends
    middle = (ahead + behind) / 2
    smooth = (ahead - behind).norm(dim=0) <= JUMP * middle.norm(dim=0)
    found = slope(energy, (losses * smooth).sum())
    share = float(smooth.double().mean())
    return [cosine(directions @ found, (middle * smooth).sum(dim=1)) if share else 0.0, share]


def stepping(energy: icnn.Energy, x: Tensor, steps: int) -> icnn.ProjectedGradient:
    """The best of a few step sizes."""
    tried = [
        icnn.ProjectedGradient(steps, size, COSINES["momentum"], decay=decay)
        for size, decay in itertools.product(COSINES["step sizes"], COSINES["decays"])
    ]
    return min(tried, key=lambda s: float(Way(s, "unroll").quick(energy, x)[1].median()))


def look(energy: Stretched, probe: tuple[Tensor, Tensor], other: Tensor, directions: Tensor):
    """All cosines at one time of training, and how the task stands."""
    right, (x, target) = RIGHT[energy.net.activation.name.split("(")[0]], probe
    reference = Counted(EXACT.max_steps, EXACT.tol)
    y = Way(reference, right).answer(energy, x)
    loss = error(y, target)
    exact = slope(energy, loss)
    short, long = (stepping(energy, other, steps) for steps in (5, 30))
    five, far = icnn.BundleEntropy(5, 0.0), icnn.BundleEntropy(300, 1e-8)
    ways = {
        "cuts, 5": Way(five, "cuts"),
        "implicit, 5": Way(five, "implicit"),
        f"{right}, 20": Way(icnn.BundleEntropy(20, 0.0), right),
        "unroll, 5": Way(short, "unroll"),
        "unroll, 30": Way(long, "unroll"),
        "unroll, last 5 of 30": Way(replace(long, unrolled=5), "unroll"),
        "cuts, converged": Way(far, "cuts"),
    }
    directions = directions * movable(energy)
    known, rows = {}, {}
    for name, way in ways.items():
        losses = errors(way.answer(energy, x), target)
        rows[name] = [cosine(slope(energy, losses.mean()), exact)]
        if way.solver.max_steps not in (5, 30):  # dear to difference, and nearly converged
            rows[name] += [torch.nan, torch.nan]
            continue
        key = replace(way.solver, unrolled=None) if way.gradient == "unroll" else way.solver
        if key not in known:
            known[key] = differences(
                energy,
                lambda way=way: errors(way.quick(energy, x)[0], target),
                directions,
                COSINES["difference"],
            )
        rows[name] += own_cosine(energy, losses, directions, known[key])
    checked = directions[: COSINES["directions to check the exact gradient"]]
    ends = differences(
        energy,
        lambda: errors(Way(EXACT, right).quick(energy, x)[0], target),
        checked,
        COSINES["its difference"],
    )
    true = torch.stack(ends).mean(dim=(0, 2))
    away = (checked @ exact - true).norm() / true.norm()
    task = {
        "loss": float(loss.detach()),
        "cuts": float(reference.active.median()),
        "most cuts": float(reference.active.max()),
        "off after 5": float((ways["cuts, 5"].quick(energy, x)[0] - y.detach()).norm(dim=1).mean()),
        "differences": float(away),
        "step sizes": [(s.max_steps, s.step_size, s.decay) for s in (short, long)],
    }
    return rows, task


def train(activation: str, seed: int, settings: dict) -> list[tuple[dict, dict]]:
    """One run, with a look at each of its times."""
    COSINES.update(settings)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = Task(seed)
    net = icnn.PICNN(
        COSINES["dim_x"], COSINES["labels"], COSINES["hidden"], activation=activation
    ).double()
    energy = Stretched(net, COSINES["factor"], COSINES["stretch"])
    optimizer = torch.optim.Adam(energy.parameters(), lr=COSINES["lr"])
    icnn.keep_convex(energy, optimizer)
    probe, (other, _) = task.sample(COSINES["probe"]), task.sample(COSINES["probe"])
    count = sum(p.numel() for p in energy.parameters())
    directions = task.normal(COSINES["directions"], count)
    way = Way(icnn.BundleEntropy(COSINES["steps in training"], 1e-6), RIGHT[activation])
    found = []
    for step in range(max(COSINES["times"]) + 1):
        if step in COSINES["times"]:
            found.append(look(energy, probe, other, directions))
        x, target = task.sample(COSINES["batch"])
        optimizer.zero_grad()
        error(way.answer(energy, x), target).backward()
        optimizer.step()
    return found


def cosines(fast: bool) -> None:
    """Both activations, all seeds, two at a time."""
    small = {"seeds": [0, 1], "times": [0, 3], "directions": 4}
    COSINES.update(small if fast else {})
    context = multiprocessing.get_context("spawn")
    jobs: list[tuple[str, int]] = [(a, s) for a in RIGHT for s in COSINES["seeds"]]
    runs: dict[tuple[str, int], list[tuple[dict, dict]]] = {}
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        futures = {pool.submit(train, job[0], job[1], COSINES): job for job in jobs}
        for future in track(as_completed(futures), "Training", total=len(jobs)):
            runs[futures[future]] = future.result()

    rows, tasks, notes = [], [], []
    times = COSINES["times"]
    for activation in RIGHT:
        mine = [runs[activation, seed] for seed in COSINES["seeds"]]
        for name in mine[0][0][0]:
            cells = torch.tensor([[look[0][name] for look in run] for run in mine])
            exact, own, smooth = cells.unbind(dim=2)
            row: dict[str, str | float] = {"energy": activation, "way": name}
            row |= {f"step {t}": round(float(exact[:, i].mean()), 3) for i, t in enumerate(times)}
            row |= {"worst": round(float(exact.min()), 3)}
            parts = {"own": own.mean(), "own, worst": own.min(), "smooth": smooth.mean()}
            row |= {k: "" if v.isnan() else round(float(v), 3) for k, v in parts.items()}
            rows.append(row)
        for i, time in enumerate(times):
            seen = [run[i][1] for run in mine]
            tasks.append(
                {
                    "energy": activation,
                    "step": time,
                    "loss": statistics.mean(one["loss"] for one in seen),
                    "active cuts, median": int(statistics.median(one["cuts"] for one in seen)),
                    "most": int(max(one["most cuts"] for one in seen)),
                    "answer after 5 off by": statistics.mean(one["off after 5"] for one in seen),
                }
            )
            notes += [{"energy": activation, "step": time} | one for one in seen]
    print(report.table(rows), report.table(tasks), sep="\n")
    worst = max(note["differences"] for note in notes)
    print(f"exact gradients against differences: {worst:.1e} at worst")
    if fast:
        return
    settings = COSINES | {"exact against differences, worst": worst, "notes": notes}
    print(report.write("gradients-cosines", settings, rows))
    print(report.write("gradients-task", COSINES, tasks))
    draw(rows, Path("docs/images/gradients.png"))


def draw(rows: list[dict], path: Path) -> None:
    """Cosine to the exact gradient against the step of training, means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles = {
        "cuts, converged": ("#8a6fb0", "-", "x"),
        "cuts, 20": ("#12305a", "-", "P"),
        "cuts, 5": ("#1f77c8", "-", "o"),
        "implicit, 20": ("#3d5218", "-", "P"),
        "implicit, 5": ("#7fa83a", "--", "s"),
        "unroll, 30": ("#b0452e", "-", "^"),
        "unroll, 5": ("#e0a58f", "-", "v"),
        "unroll, last 5 of 30": ("#b0452e", ":", "D"),
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    times, lines = COSINES["times"], {}
    for row in rows:
        axis = axes[list(RIGHT).index(row["energy"])]
        color, line, mark = styles[row["way"]]
        cells = [row[f"step {time}"] for time in times]
        (lines[row["way"]],) = axis.plot(times, cells, color=color, ls=line, marker=mark, ms=6)
    for axis, activation in zip(axes, RIGHT, strict=True):
        axis.axhline(0, color="0.6", ls=":", lw=1)
        axis.set(title=f"{activation} (exact way: {RIGHT[activation]})", xlabel="training step")
        axis.set_xscale("symlog", linthresh=10)
        axis.set_xticks(times, [str(time) for time in times])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("cosine to the exact gradient")
    names = [name for name in styles if name in lines]
    figure.legend([lines[n] for n in names], names, frameon=False, loc="outside right center")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="a smoke test; nothing is written")
    warnings.filterwarnings("ignore", category=UserWarning)
    cosines(parser.parse_args().fast)
