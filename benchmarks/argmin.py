"""What does an argmin cost beyond its network passes?

The limit for K steps is K value-and-gradient passes and one value pass: all else is overhead. Both
are timed in turn, on the same `at(x)` callable, in float32: the passes eager, by autograd, the
solve as a user calls it, `icnn.argmin(..., solver=icnn.BundleEntropy(max_steps=K, tol=0))` without
gradients. The x-path, which both need once, is computed before. On a GPU convolutions are those of
full float32 in both, as certificates need them.

Energies are random (initialised, with steeper passthroughs) and trained (to fit a cost with kinks).
The entropy is the largest of a few at which three cuts or more are active in the mean after 10
steps; an easier problem would hardly need its cuts.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import icnn
from benchmarks.options import options
from benchmarks.timing import medians
from icnn import report
from icnn.energies.energy import EnergyAt

STEPS = (5, 10, 30)
SECONDS = 6  # for a row, about
ENTROPIES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
IMAGE = (1, 64, 32)
CONVS = ((32, 8, (4, 2)), (64, 4, 2), (64, 3, 1))
SETTINGS = {"seed": 0, "dtype": "float32", "tol": 0}


class Net(NamedTuple):
    """A network, and the batches that it is asked about."""

    name: str
    make: Callable[[], Any]
    batches: tuple[int, ...]
    x_shape: tuple[int, ...]
    density: float  # of ones in x; 0 for normal numbers
    training: int = 150  # steps


NETS = (
    Net("PICNN(17, 6, (200, 200))", lambda: icnn.PICNN(17, 6), (256,), (17,), 0),
    Net("PICNN(376, 17, (200, 200))", lambda: icnn.PICNN(376, 17), (256,), (376,), 0),
    Net(
        "PICNN(1836, 159, (600, 159))",
        lambda: icnn.PICNN(1836, 159, (600, 159)),
        (128, 2515),
        (1836,),
        0.04,
    ),
    Net("ConvPICNN", lambda: icnn.ConvPICNN(IMAGE, IMAGE, CONVS), (70, 1024), IMAGE, 0.5, 15),
)


class At:
    """An energy whose x-path is computed already."""

    def __init__(self, f: EnergyAt, y_shape: tuple[int, ...]):
        self.f, self.y_shape = f, y_shape

    def at(self, x: object) -> EnergyAt:
        return self.f

    def __call__(self, x: object, y: Tensor) -> Tensor:
        return self.f(y)


class Case(NamedTuple):
    """A frozen energy, its batch and an entropy."""

    net: Net
    weights: str
    batch: int
    energy: At
    x: Tensor
    entropy: float
    active: float

    def solve(self, steps: int, **options: Any) -> icnn.Solution:
        """As a user calls it."""
        solver = icnn.BundleEntropy(max_steps=steps, tol=0, **options)
        with torch.no_grad():
            return icnn.argmin(self.energy, self.x, icnn.Box(), entropy=self.entropy, solver=solver)

    def passes(self, y: Tensor, steps: int) -> Tensor:
        """What it cannot do without."""
        f = self.energy.f
        for _ in range(steps):
            points = y.detach().requires_grad_()
            torch.autograd.grad(f(points).sum(), points)
        with torch.no_grad():
            return f(y)


def inputs(net: Net, batch: int, device: str) -> Tensor:
    """Sparse words, pixels, or observations."""
    if not net.density:
        return torch.randn(batch, *net.x_shape, device=device)
    return (torch.rand(batch, *net.x_shape, device=device) < net.density).float()


def trained(net: Net, energy: Any, device: str) -> Any:
    """Fit `sum |y - g(x)|` for a fixed map g: a cost with kinks in every coordinate."""
    n = torch.Size(energy.y_shape).numel()
    dim_x = torch.Size(net.x_shape).numel()
    mix = torch.randn(dim_x, n, device=device) / (dim_x * (net.density or 1)) ** 0.5
    optimizer = torch.optim.Adam(energy.parameters(), lr=2e-3)
    icnn.keep_convex(energy, optimizer)
    for _ in range(net.training):
        x = inputs(net, min(128, net.batches[0]), device)
        y = torch.rand(len(x), *energy.y_shape, device=device)
        goal = (x.flatten(start_dim=1) @ mix).sigmoid()
        cost = (y.flatten(start_dim=1) - goal).abs().sum(dim=1)
        loss = (energy(x, y) - cost).square().mean() / n
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return energy


def steep(energy: Any) -> Any:
    """Passthroughs four times as steep: as initialised, an energy is almost a plane."""
    with torch.no_grad():
        for layer in (*energy.layers[:-1], *getattr(energy, "steps", ())):
            layer.wy.weight.mul_(4)
    return energy


def cases(device: str, nets: list[str], settings: dict[str, Any]) -> Iterator[Case]:
    """Every network, random and trained, at every batch."""
    torch.backends.cudnn.allow_tf32 = False
    for net in NETS:
        if nets and not any(name in net.name for name in nets):
            continue
        for weights in ("random", "trained"):
            torch.manual_seed(settings["seed"])
            energy = steep(net.make().to(device))
            if weights == "trained":
                energy = trained(net, energy, device)
            for batch in net.batches:
                x = inputs(net, batch, device)
                with torch.no_grad():
                    frozen = At(energy.at(x), energy.y_shape)
                yield with_entropy(net, weights, batch, frozen, x)


def with_entropy(net: Net, weights: str, batch: int, energy: At, x: Tensor) -> Case:
    """The largest entropy at which three cuts or more are active."""
    case = Case(net, weights, batch, energy, x, 1.0, 0.0)
    for entropy in ENTROPIES:
        case = case._replace(entropy=entropy, active=active_cuts(case._replace(entropy=entropy)))
        if case.active >= 3:
            break
    return case


def active_cuts(case: Case) -> float:
    """How many cuts share in an answer after 10 steps, in the mean."""
    from icnn.energies.energy import at
    from icnn.solvers.problem import Problem

    y = torch.full((case.batch, *case.energy.y_shape), 0.5, device=case.x.device)
    solver = icnn.BundleEntropy(max_steps=10, tol=0)
    problem = Problem(at(case.energy, case.x), icnn.Box(), case.entropy, y, gradient="cuts")
    with torch.no_grad():
        pieces = solver.solve(problem).pieces
    assert pieces is not None
    return float((pieces.lam > 0).double().sum(dim=1).mean())


def measure(case: Case, steps: int, rounds: int, **options: Any) -> report.Row:
    """One row: the whole solve against the passes that it made."""
    solution = case.solve(steps, **options)
    begin = time.perf_counter()
    made = int(case.solve(steps, **options).steps.max())
    # A few seconds for each row, whatever the network.
    rounds = max(3, min(rounds, int(SECONDS / (time.perf_counter() - begin))))
    y = solution.y
    seconds = medians(
        {
            "solve": lambda: case.solve(steps, **options),
            "passes": lambda: case.passes(y, made),
        },
        rounds=rounds,
        calls=1,
    )
    return {
        "network": case.net.name,
        "n": torch.Size(case.energy.y_shape).numel(),
        "B": case.batch,
        "weights": case.weights,
        "entropy": f"{case.entropy:g}",
        "active cuts": case.active,
        "K": made,
        "solve, ms": 1e3 * seconds["solve"],
        "passes, ms": 1e3 * seconds["passes"],
        "ratio": seconds["solve"] / seconds["passes"],
    }


def main() -> None:
    """Measure, print, write `results/argmin-cpu.json`, or `-cuda`."""
    arguments = options(
        __doc__,
        nets={"nargs": "*", "default": [], "help": "parts of names: these networks only"},
        kernel={"default": "auto", "help": "see icnn.BundleEntropy"},
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings, rows = {**SETTINGS, "seed": arguments.seed}, []
    nets = ["PICNN(17"] if arguments.fast else arguments.nets
    for case in cases(device, nets, settings):
        for steps in STEPS:
            rows.append(measure(case, steps, arguments.rounds, kernel=arguments.kernel))
            print(report.table(rows[-1:]).splitlines()[2], flush=True)
    print(report.table(rows))
    if not nets and arguments.kernel == "auto":
        where = torch.cuda.get_device_name() if device == "cuda" else threads()
        print(report.write(f"argmin-{device}", {**settings, "where": where}, rows, arguments.out))
        if device == "cpu":  # where Matplotlib is
            draw(arguments.out, Path("docs/images/speed.png"))


def draw(results: Path, path: Path) -> None:
    """The ratios of all devices that results are there for."""
    import matplotlib.pyplot as plt

    files = [results / f"argmin-{device}.json" for device in ("cpu", "cuda")]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    figure, axes = plt.subplots(
        1, len(found), figsize=(5.5 * len(found), 3.4), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    shades = dict(zip(STEPS, ("#9dc3e6", "#4a8fd0", "#1f4e87"), strict=True))
    for axis, result in zip(axes[0], found, strict=True):
        rows = result["rows"]
        places = sorted({(row["n"], row["B"]) for row in rows})
        for number, place in enumerate(places):
            of_place = [row for row in rows if (row["n"], row["B"]) == place]
            for index, row in enumerate(of_place):
                steps, trained = STEPS[index % len(STEPS)], index >= len(STEPS)
                left = number + (index + 0.5) / (len(of_place) + 1.5)
                axis.bar(
                    left, row["ratio"], 0.11, color=shades[steps], hatch="//" if trained else None,
                    edgecolor="white", linewidth=0.3,
                    label=f"K <= {steps}" if number == 0 and not trained else None,
                )  # fmt: skip
        axis.axhline(1, color="#444444", lw=1)
        axis.set_xticks(
            [n + 0.45 for n in range(len(places))], [f"n={n}\nB={b}" for n, b in places], fontsize=8
        )
        axis.set_title(result["settings"]["where"], fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, ncols=3)
    axes[0][0].set_ylabel("whole solve / its passes")
    figure.supxlabel("hatched: trained networks, plain: random ones", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def threads() -> str:
    """How many a CPU works with."""
    return f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
