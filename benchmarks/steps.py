"""How many steps does a minimiser take, and does a warm start save any?

Energies are `c * net(x, 4 * (y - 1/2))` on the unit box with entropy 1, in float64: a PICNN as it
is drawn, and one that was fitted to a convex function of `y` whose minimiser depends on `x`. The
factor `c = 2 * sqrt(n)` makes slopes of a coordinate about as large as those of the entropy for
every `n`; without it the entropy alone would decide.

A gap is the true one: the objective of the point that a solver would give back after `k` passes for
a value and a gradient, minus the optimum, relative to `max(1, |optimum|)`. The optimum is the best
value that a long run of `BundleEntropy` or any other found; how far from the true one that can be
is in the results. Points of gradient rules are the best so far, those of the bundle the last, as
both give them back.

Step size and decay of each gradient rule are chosen on other `x` of the same network, by the median
over them: of the steps to 1e-2, and again of those to 1e-4 (drawn in the picture), and of the gaps
after 5, 10 and 30 steps, each with its own choice.

Then all weights move by one more Adam step of the fit, and the new problem is solved from the
centre and from the old answer.
"""

import copy
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

import icnn
from icnn import report
from icnn.energies.energy import at
from icnn.solvers.bundle_entropy import Cuts
from icnn.solvers.problem import Problem

SETTINGS = {
    "dim_x": 3, "batch": 16, "seed": 0, "entropy": 1.0, "most steps": 100,
    "fit": {"steps": 400, "batch": 256, "lr": {6: 3e-3, 159: 3e-3, 2048: 1e-3}},
    "lr of the step between warm starts": 1e-3,
}  # fmt: skip
HIDDEN = {6: (200, 200), 159: (200, 200), 2048: (100, 100)}
NETWORKS = ("random", "trained")
MOST, LEVELS, BUDGETS = SETTINGS["most steps"], (1e-2, 1e-4), (5, 10, 30)
REFERENCE, WARM = icnn.BundleEntropy(180, 1e-6), icnn.BundleEntropy(130, 1e-5)
FLOOR = 1e-5  # below it gaps are not shown: the optimum is not known better
SHARE = 1e-3  # from which share in the mixture a cut counts as active
SIZES = {
    "momentum": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "spectral": (0.01, 0.1, 1.0),
    "adam": (0.01, 0.03, 0.1, 0.3),
}
MEMORY = {"momentum": 0.3, "spectral": 0.0, "adam": 0.9}
DECAYS = {"momentum": (0.0, 0.5), "spectral": (0.0,), "adam": (0.0, 0.5)}


class Stretched(icnn.Energy):
    """`c * net(x, 4 * (y - 1/2))`, which remembers the objective wherever it was evaluated."""

    def __init__(self, net: icnn.PICNN):
        super().__init__()
        self.net, self.c, self.y_shape = net, 2 * net.dim_y**0.5, net.y_shape
        self.seen: list[Tensor] = []

    def at(self, x: Tensor) -> Any:
        """Its values are noted from here on."""
        f, self.seen = self.net.at(x), []

        def value(y: Tensor) -> Tensor:
            found = self.c * f(4 * (y - 0.5))
            self.seen.append(found.detach() - SETTINGS["entropy"] * icnn.Box().entropy(y.detach()))
            return found

        return value


class Fit:
    """A PICNN and the function that it is fitted to.

    Their `y` lie between a random point of the box and the minimiser, at any distance: points drawn
    from a box of many dimensions are all equally far away.
    """

    def __init__(self, n: int):
        self.net = icnn.PICNN(SETTINGS["dim_x"], n, HIDDEN[n])
        self.lead = torch.randn(SETTINGS["dim_x"], n)
        self.mix = torch.randn(n, 5) / n**0.5
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=SETTINGS["fit"]["lr"][n])
        icnn.keep_convex(self.net, self.optimizer)
        target = self.sample(4000)[2]
        self.mean, self.std = target.mean(), target.std()

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, points, and `mean |d| + 0.3 max |mix d|` for `d = y - sigmoid(lead x)`."""
        x = torch.randn(count, SETTINGS["dim_x"])
        best = (x @ self.lead).sigmoid()
        d = torch.rand(count, 1) * (torch.rand_like(best) - best)
        return x, best + d, d.abs().mean(dim=1) + 0.3 * (d @ self.mix).abs().amax(dim=1)

    def error(self, count: int) -> Tensor:
        """The share of the target's variance that the network leaves."""
        x, y, target = self.sample(count)
        return (self.net(x, 4 * (y - 0.5)) - (target - self.mean) / self.std).square().mean()

    def step(self) -> None:
        """One step of Adam."""
        self.optimizer.zero_grad()
        self.error(SETTINGS["fit"]["batch"]).backward()
        self.optimizer.step()

    def run(self) -> None:
        """A few hundred, with a cosine to zero."""
        steps = SETTINGS["fit"]["steps"]
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        for _ in range(steps):
            self.step()
            schedule.step()

    def energy(self) -> Stretched:
        """The network as it is now."""
        return Stretched(copy.deepcopy(self.net).double().requires_grad_(False))


def solve(energy: Stretched, x: Tensor, solver: Any, start: Any = None) -> icnn.Solution:
    """On the unit box."""
    return icnn.argmin(
        energy, x, icnn.Box(), entropy=SETTINGS["entropy"], solver=solver, start=start
    )


def trace(energy: Stretched, x: Tensor, solver: Any) -> Tensor:
    """The objective of the answer after 0, 1, ... steps, `(MOST + 1, B)`."""
    solve(energy, x, solver)
    return path(energy, solver)


def path(energy: Stretched, solver: Any) -> Tensor:
    """The same for the last search."""
    values = torch.stack(energy.seen)
    # Who is done stays where it is.
    values = torch.cat([values, values[-1:].expand(MOST, -1)])[: MOST + 1]
    return values.cummin(dim=0).values if isinstance(solver, icnn.ProjectedGradient) else values


def relative(values: Tensor, optimum: Tensor) -> Tensor:
    """The true gap."""
    return (values - optimum) / optimum.abs().clamp(min=1)


def steps_to(gaps: Tensor, level: float) -> Tensor:
    """The first step at which each example has the gap; `MOST + 1` where none has."""
    reached = (gaps <= level).to(torch.uint8)
    return torch.where(reached.amax(dim=0) > 0, reached.argmax(dim=0), MOST + 1)


def middle(values: Tensor) -> float:
    """The median, the lower of two."""
    return float(values.double().median())


@dataclass
class Choice:
    """The best of one rule on other `x`: in steps to each level, in the gap after each budget."""

    levels: dict[float, icnn.ProjectedGradient]
    budgets: dict[int, icnn.ProjectedGradient]


def choose(energy: Stretched, x: Tensor) -> dict[str, Choice]:
    """Try all step sizes; the optimum is the best value that any solver found."""
    runs: dict[Any, Tensor] = {}
    for rule, sizes in SIZES.items():
        for size, decay in itertools.product(sizes, DECAYS[rule]):
            solver = icnn.ProjectedGradient(MOST, size, MEMORY[rule], rule, decay)
            runs[solver] = trace(energy, x, solver)
    best = solve(energy, x, icnn.BundleEntropy(60, 1e-5)).value
    best = torch.stack([best, *(run.amin(dim=0) for run in runs.values())]).amin(dim=0)
    gaps = {solver: relative(run, best) for solver, run in runs.items()}
    found = {}
    for rule in SIZES:
        mine = {solver: gap for solver, gap in gaps.items() if solver.rule == rule}
        found[rule] = Choice(
            {
                g: min(mine, key=lambda s: (middle(steps_to(mine[s], g)), middle(mine[s][-1])))
                for g in LEVELS
            },
            {k: min(mine, key=lambda s: middle(mine[s][k])) for k in BUDGETS},
        )
    return found


def active_cuts(energy: Stretched, x: Tensor, steps: int) -> Tensor:
    """How many cuts share in the answer after so many steps."""
    start = torch.full((x.shape[0], energy.net.dim_y), 0.5, dtype=x.dtype)
    problem = Problem(at(energy, x), icnn.Box(), SETTINGS["entropy"], start)
    cuts, y = Cuts(problem, steps), start
    entropy = torch.full_like(x[:, 0], SETTINGS["entropy"])
    everyone = torch.ones_like(entropy, dtype=torch.bool)
    for _ in range(steps):
        cuts.add(y, problem.tangent(y), everyone)
        y = cuts.minimise(entropy, everyone).y
    return (cuts.lam > SHARE).sum(dim=1)


def counts(steps: list[float]) -> str:
    """Whole numbers, side by side."""
    return " / ".join(str(int(k)) if k <= MOST else f"> {MOST}" for k in steps)


def small(gap: float) -> str:
    """A gap to one digit."""
    return ("" if gap > FLOOR else "< ") + f"{max(gap, FLOOR):.0e}".replace("e-0", "e-")


def main() -> None:
    """Measure and print; write the results and the picture of the docs."""
    torch.set_num_threads(1)
    torch.manual_seed(SETTINGS["seed"])
    tables: dict[str, list[dict]] = {name: [] for name in ("steps", "steps-five", "warm-start")}
    notes, curves = [], {}
    for n, network in track(list(itertools.product(HIDDEN, NETWORKS)), description="Solving"):
        fit = Fit(n)
        if network == "trained":
            fit.run()
        with torch.no_grad():
            left = float(fit.error(4000))
        energy, other = fit.energy(), fit.energy()
        x, elsewhere = torch.randn(2, SETTINGS["batch"], SETTINGS["dim_x"]).double().unbind()
        reference = solve(energy, x, REFERENCE)
        runs = {"bundle": path(energy, REFERENCE)}
        chosen = choose(other, elsewhere)
        quick, budgets = {"bundle": runs["bundle"]}, {}
        for rule, choice in chosen.items():
            quick[rule] = trace(energy, x, choice.levels[LEVELS[0]])
            runs[rule] = trace(energy, x, choice.levels[LEVELS[1]])
            budgets[rule] = {k: trace(energy, x, s)[k] for k, s in choice.budgets.items()}
        best = torch.stack([reference.value, *(run.amin(dim=0) for run in runs.values())])
        optimum = best.amin(dim=0)
        gaps = {name: relative(run, optimum) for name, run in runs.items()}
        curves[network, n] = {name: gap.median(dim=1).values for name, gap in gaps.items()}

        first = {"network": network, "n": n}
        reached = {
            name: [
                middle(steps_to(relative(run[name], optimum), level))
                for run, level in zip((quick, runs), LEVELS, strict=True)
            ]
            for name in gaps
        }
        cuts = active_cuts(energy, x, int(min(reached["bundle"][1], MOST)))
        row = first | {"cuts": int(middle(cuts))}
        shown = reference.gaps / optimum.abs().clamp(min=1)
        known = [middle(steps_to(shown, level) + 1) for level in LEVELS]
        row |= {"bundle": counts(reached.pop("bundle")), "its bound": counts(known)}
        tables["steps"].append(row | {name: counts(steps) for name, steps in reached.items()})
        five = {"bundle, 5": small(middle(gaps["bundle"][5]))}
        for rule in chosen:
            ends = (middle(relative(budgets[rule][k], optimum)) for k in BUDGETS)
            five[f"{rule}, 5 / 10 / 30"] = " / ".join(map(small, ends))
        tables["steps-five"].append(first | five)
        notes.append(
            first
            | {
                "variance left by the fit": left,
                "largest relative gap of the reference": float(
                    (reference.gap / reference.value.abs().clamp(min=1)).max()
                ),
                "chosen": {
                    rule: {
                        **{f"to {g:g}": vars(s) for g, s in c.levels.items()},
                        **{f"after {k}": vars(s) for k, s in c.budgets.items()},
                    }
                    for rule, c in chosen.items()
                },
            }
        )
        if network == "trained":
            tables["warm-start"].append(
                warm(fit, x, reference, chosen["spectral"].levels[LEVELS[1]])
            )

    for name, rows in tables.items():
        print(report.table(rows))
        print(report.write(name, SETTINGS | {"notes": notes}, rows))
    draw(curves, Path("docs/images/steps.png"))


def warm(fit: Fit, x: Tensor, old: icnn.Solution, spectral: icnn.ProjectedGradient) -> dict:
    """One more step of the fit; median steps from the centre and from the old answer."""
    for group in fit.optimizer.param_groups:
        group["lr"] = SETTINGS["lr of the step between warm starts"]
    fit.step()
    energy = fit.energy()
    row: dict[str, Any] = {"n": fit.net.dim_y}
    optimum = torch.full_like(old.value, torch.inf)
    for name, solver in (("bundle", WARM), ("spectral", spectral)):
        runs = []
        for start in (None, old):
            optimum = torch.minimum(optimum, solve(energy, x, solver, start).value)
            runs.append(path(energy, solver))
        runs = [relative(run, optimum) for run in runs]
        for level in LEVELS:
            steps = [middle(steps_to(run, level)) for run in runs]
            row[f"{name}, {level:.0e}".replace("e-0", "e-")] = " → ".join(map(count, steps))
        row.setdefault("gap of the old answer", small(middle(runs[1][0])))
    return row


def count(steps: float) -> str:
    """A whole number."""
    return counts([steps])


def draw(curves: dict[tuple[str, int], dict[str, Tensor]], path: Path) -> None:
    """True gap against step: a row for each network, a column for each n."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"bundle": "#1f5fa8", "momentum": "#b0452e", "spectral": "#6f8f3a", "adam": "#8a6fb0"}
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained", sharey=True)
    for (network, n), mine in curves.items():
        axis = axes[NETWORKS.index(network), list(HIDDEN).index(n)]
        for name, gap in mine.items():
            width = 2.5 if name == "bundle" else 1.5
            floor = gap.clamp(min=FLOOR / 10)
            done = int((floor > FLOOR).sum()) + 1
            axis.semilogy(
                range(len(gap))[:done], floor[:done], color=colors[name], lw=width, label=name
            )
        for level in LEVELS:
            axis.axhline(level, color="0.6", ls=":", lw=1)
        axis.set(title=f"{network}, n = {n}", ylim=(FLOOR, 3))
        # Early steps are worth more room.
        axis.set_xscale("function", functions=(np.sqrt, np.square))
        axis.set_xlim(0, MOST)
        axis.set_xticks([0, 1, 5, 10, 30, 60, 100])
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel("steps (value and gradient)")
    for axis in axes[:, 0]:
        axis.set_ylabel("true gap, relative")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
