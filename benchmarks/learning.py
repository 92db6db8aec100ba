"""Which way of learning an energy gives the best labels, and what does it cost?

The task: ten labels, and rules for what may be on together, so that an energy over the labels has
something to learn that independent classifiers cannot say. With `x` standard normal of length 20
and the entries of `A` and `B` too, scores are `tanh(x A / (2 sqrt(20))) B / sqrt(30)` with 30 units
between, standardised, plus noise; labels are the allowed `y` with the largest sum of scores.
Allowed are `y` with exactly one of the labels 0, 1, 2, with 4 wherever 3 is and 6 wherever 5 is,
and with three or four labels in all. Every seed draws another task and another start.

The energy is a network's scores and a FICNN over the labels, `-y . net(x) + c g(4 (y - 1/2))`, with
relu or softplus in `g`, from the same start for all ways. All ways predict by `icnn.argmin` with
entropy 1 and the bundle, and see the training set as often:

- regression: values are fitted to costs, the number of wrong labels times a scale, up to a constant
  of each example, at corrupted targets, labels of others and points of the box;
- candidates: the target competes with corrupted targets and labels of others, `-f` are logits;
- max-margin: `icnn.losses.max_margin` with a scale;
- cuts, implicit, unrolled: cross-entropy of the answer of `icnn.argmin`. Unrolled are spectral
  steps; plain ones, of a size chosen among 0.03, 0.1 and 0.3, came out about the same.

The rival is the network alone, with cross-entropy. Chosen on validation data of one more seed, from
the same grids for all: the learning rate, together with the scale where there is one. Chosen on
each seed's own validation data: the threshold of a label and the epoch. Test data choose nothing.

Seconds are those of one core, for training alone: without the looks at validation data.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

import icnn
from icnn import report

SETTINGS: dict[str, Any] = {
    "features": 20, "labels": 10, "train": 600, "validation": 300, "test": 1000, "noise": 0.1,
    "hidden of the network": [64], "hidden of the FICNN": [64, 64], "c at the start": 1.0,
    "epochs": 24, "batch": 50, "entropy": 1.0, "seeds": [4, 5, 6, 7, 8], "seed of choices": 100,
    "learning rates": [3e-3, 1e-2, 3e-2], "scales": [0.3, 1.0, 3.0],
    "unrolled steps": 10, "points": 16,
    "tolerance": 1e-3, "most cuts": 30, "equal time": 2.0,
}  # fmt: skip
BOX = icnn.Box()
BUNDLE = SETTINGS["most cuts"], SETTINGS["tolerance"]
STEPS = icnn.ProjectedGradient(SETTINGS["unrolled steps"], rule="spectral")
THRESHOLDS = torch.linspace(0.05, 0.95, 19)


class Data(NamedTuple):
    """Inputs and labels."""

    x: Tensor
    y: Tensor


def allowed() -> Tensor:
    """All label vectors that keep the rules."""
    y = torch.tensor(list(itertools.product((0.0, 1.0), repeat=SETTINGS["labels"])))
    one = y[:, :3].sum(dim=1) == 1
    implied = (y[:, 3] <= y[:, 4]) & (y[:, 5] <= y[:, 6])
    total = y.sum(dim=1)
    return y[one & implied & (total >= 3) & (total <= 4)]


def task(seed: int) -> tuple[dict[str, Data], dict[str, float]]:
    """Training, validation and test data; scores of who knows all but the noise."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [SETTINGS[part] for part in ("train", "validation", "test")]
    count, features, labels = sum(sizes), SETTINGS["features"], SETTINGS["labels"]
    x = torch.randn(count, features, generator=generator)
    inner = torch.randn(features, 30, generator=generator) / features**0.5
    outer = torch.randn(30, labels, generator=generator) / 30**0.5
    scores = (x @ inner / 2).tanh() @ outer
    scores = (scores - scores.mean(dim=0)) / scores.std(dim=0)
    noisy = scores + SETTINGS["noise"] * torch.randn(count, labels, generator=generator)
    valid = allowed()
    y, guess = (valid[(s @ valid.T).argmax(dim=1)] for s in (noisy, scores))
    parts = [Data(*part) for part in zip(x.split(sizes), y.split(sizes), strict=True)]
    data = {"train": parts[0], "validation": parts[1], "test": parts[2]}
    return data, metrics(guess[-sizes[-1] :], data["test"].y)


class Stretched(icnn.Energy):
    """A FICNN of `4 (y - 1/2)`: on the unit box its units are never all alike."""

    def __init__(self, activation: str):
        super().__init__()
        hidden = SETTINGS["hidden of the FICNN"]
        self.net = icnn.FICNN(SETTINGS["labels"], hidden, activation=activation)
        self.y_shape = self.net.y_shape

    def at(self, x: Any) -> Any:
        """It does not look at `x`."""
        f = self.net.at(None)
        return lambda y: f(4 * (y - 0.5))


def energy(activation: str | None, seed: int) -> icnn.Energy:
    """The same start for all; without an activation it is the network alone."""
    torch.manual_seed(seed)
    widths = (SETTINGS["features"], *SETTINGS["hidden of the network"], SETTINGS["labels"])
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    score = icnn.Score(nn.Sequential(*layers[:-1]))
    if activation is None:
        return score
    factor = nn.Parameter(torch.tensor(SETTINGS["c at the start"]))
    return icnn.Sum(score, icnn.Scale(Stretched(activation), factor))


@dataclass(frozen=True)
class Noting(icnn.BundleEntropy):
    """The bundle, which notes the gaps that it ended with: a loss does not hand them on."""

    gaps: list[Tensor] = field(default_factory=list, compare=False)

    def solve(self, problem: Any) -> Any:
        """Search, and note."""
        record = super().solve(problem)
        self.gaps.append(relative(record.value - record.lower, record.value))
        return record


def relative(gap: Tensor, value: Tensor) -> Tensor:
    """As a tolerance sees it."""
    return gap.detach() / value.detach().abs().clamp(min=1)


Loss = Callable[[Any, Data, float], Tensor]


class Losses:
    """The ways to learn; some have a scale."""

    def __init__(self, pool: Tensor):
        self.pool = pool  # labels of the training set
        self.solver = Noting(*BUNDLE)

    def points(self, y: Tensor, inside: bool) -> Tensor:
        """Points about each target, `(points, B, n)`: the target, near it, of others, inside."""
        count = SETTINGS["points"]
        near = count // 2
        rate = torch.rand(near, len(y), 1) * 0.4
        flipped = (y - (torch.rand(near, *y.shape) < rate).float()).abs()
        others = self.pool[torch.randint(len(self.pool), (count - near, len(y)))]
        if inside:
            half = len(others) // 2
            others = torch.cat([others[:half], torch.rand(len(others) - half, *y.shape)])
        return torch.cat([y[None], flipped, others])

    def values(self, energy: Any, data: Data, points: Tensor) -> Tensor:
        """The energy at many points of each example, `(points, B)`."""
        count = len(points)
        x = data.x.repeat(count, 1)
        return energy(x, points.flatten(end_dim=1)).unflatten(0, (count, -1))

    def regression(self, energy: Any, data: Data, scale: float) -> Tensor:
        """Fit costs, but for a constant of each example: the argmin does not see it."""
        points = self.points(data.y, inside=True)
        cost = scale * (points - data.y).abs().sum(dim=2)
        error = self.values(energy, data, points) - cost
        return (error - error.mean(dim=0)).square().mean()

    def candidates(self, energy: Any, data: Data, scale: float) -> Tensor:
        """The target against others; a rival that is the target itself does not count."""
        points = self.points(data.y, inside=False)
        same = (points == data.y).all(dim=2)
        same[0] = False
        logits = -self.values(energy, data, points).masked_fill(same, torch.inf)
        return F.cross_entropy(logits.T, torch.zeros(len(data.y), dtype=torch.int64))

    def max_margin(self, energy: Any, data: Data, scale: float) -> Tensor:
        """The structured hinge loss."""
        entropy = SETTINGS["entropy"]
        return icnn.losses.max_margin(
            energy, data.x, data.y, BOX, scale=scale, entropy=entropy, solver=self.solver
        )

    def through(self, energy: Any, data: Data, solver: Any, gradient: str) -> Tensor:
        """Cross-entropy of the answer."""
        start = torch.full_like(data.y, 0.5)
        entropy = SETTINGS["entropy"]
        found = icnn.argmin(
            energy, data.x, BOX, entropy=entropy, solver=solver, start=start, gradient=gradient
        )
        if gradient == "unroll":
            self.solver.gaps.append(relative(found.gap, found.value))
        return F.binary_cross_entropy(found.y.clamp(1e-6, 1 - 1e-6), data.y)

    def cuts(self, energy: Any, data: Data, scale: float) -> Tensor:
        """Proposition 3."""
        return self.through(energy, data, self.solver, "cuts")

    def implicit(self, energy: Any, data: Data, scale: float) -> Tensor:
        """With the curvature."""
        return self.through(energy, data, self.solver, "implicit")

    def unrolled(self, energy: Any, data: Data, scale: float) -> Tensor:
        """Through gradient steps."""
        return self.through(energy, data, STEPS, "unroll")

    def network(self, energy: Any, data: Data, scale: float) -> Tensor:
        """The rival: no energy over labels, no search."""
        return F.binary_cross_entropy_with_logits(energy.net(data.x), data.y)


class Way(NamedTuple):
    """A row of the table."""

    activation: str | None
    loss: str
    scaled: bool = False  # whether there is a scale to choose

    @property
    def name(self) -> str:
        """As the table has it."""
        return self.loss.replace("_", "-")


WAYS = (
    Way(None, "network"),
    Way("relu", "regression", True),
    Way("relu", "candidates"),
    Way("relu", "max_margin", True),
    Way("relu", "cuts"),
    Way("relu", "unrolled"),
    Way("softplus", "max_margin", True),
    Way("softplus", "cuts"),
    Way("softplus", "implicit"),
    Way("softplus", "unrolled"),
)


class Choice(NamedTuple):
    """What validation data decide."""

    lr: float
    scale: float


class Run(NamedTuple):
    """What came of one training."""

    epochs: list[int]
    f1: list[float]  # on validation data, after these epochs
    seconds: list[float]  # of training, up to there
    met: float  # the share of searches in training that met the tolerance; NaN if there were none
    test: dict[str, float]


def predict(energy: Any, x: Tensor, solver: Any) -> Tensor:
    """Labels between 0 and 1."""
    start = x.new_full((len(x), SETTINGS["labels"]), 0.5)
    with torch.no_grad():
        found = icnn.argmin(energy, x, BOX, entropy=SETTINGS["entropy"], solver=solver, start=start)
    return found.y


def metrics(guess: Tensor, y: Tensor) -> dict[str, float]:
    """F1 by examples and by labels, whole examples right, labels right, rules kept."""
    right = guess == y
    valid = (guess[:, None] == allowed()).all(dim=2).any(dim=1)
    found = {
        "F1, examples": 1 - icnn.losses.soft_f1(guess, y),
        "F1, labels": 1 - icnn.losses.soft_f1(guess, y, average="labels"),
        "exact": right.all(dim=1).float().mean(),
        "Hamming": right.float().mean(),
        "rules kept": valid.float().mean(),
    }
    return {name: float(value) for name, value in found.items()}


def best_threshold(soft: Tensor, y: Tensor) -> tuple[float, float]:
    """The F1 over examples that these data allow, and where."""
    scores = [1 - float(icnn.losses.soft_f1((soft > t).float(), y)) for t in THRESHOLDS]
    best = max(range(len(scores)), key=scores.__getitem__)
    return scores[best], float(THRESHOLDS[best])


def train(way: Way, seed: int, choice: Choice, epochs: int, final: bool) -> Run:
    """Adam with a cosine; epoch and threshold are those that validation data like best."""
    torch.set_num_threads(1)
    data, _ = task(seed)
    model = energy(way.activation, seed)
    losses = Losses(data["train"].y)
    loss_of: Loss = getattr(losses, way.loss)
    solver = icnn.BundleEntropy(*BUNDLE)
    optimizer = torch.optim.Adam(model.parameters(), lr=choice.lr)
    icnn.keep_convex(model, optimizer)
    batch, (x, y) = SETTINGS["batch"], data["train"]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(x) // batch)
    looks, f1, seconds, spent = [], [], [], 0.0
    best, threshold, weights = -1.0, 0.5, {}
    for epoch in range(epochs + 1):
        if epoch < 5 or epoch % 2 == 0:
            soft = predict(model, data["validation"].x, solver)
            score, where = best_threshold(soft, data["validation"].y)
            looks.append(epoch)
            f1.append(score)
            seconds.append(spent)
            if score > best:
                best, threshold = score, where
                weights = {name: value.clone() for name, value in model.state_dict().items()}
        if epoch == epochs:
            break
        start = time.process_time()
        for rows in torch.randperm(len(x)).split(batch):
            loss = loss_of(model, Data(x[rows], y[rows]), choice.scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        spent += time.process_time() - start
    gaps = losses.solver.gaps
    met = float((torch.cat(gaps) <= SETTINGS["tolerance"]).float().mean()) if gaps else float("nan")
    if not final:
        return Run(looks, f1, seconds, met, {})
    model.load_state_dict(weights)
    guess = (predict(model, data["test"].x, solver) > threshold).float()
    return Run(looks, f1, seconds, met, metrics(guess, data["test"].y))


class Trainings:
    """Many of them, two at a time, with a bar."""

    def __init__(self, progress: Progress, total: int, epochs: int):
        self.progress, self.epochs = progress, epochs
        self.bar = progress.add_task("Training", total=total)

    def all(self, cases: list[tuple[Way, int, Choice]], final: bool = False) -> list[Run]:
        """In their order."""
        with ProcessPoolExecutor(2) as pool:
            waiting = [pool.submit(train, *case, self.epochs, final) for case in cases]
            for future in waiting:
                future.add_done_callback(lambda _: self.progress.advance(self.bar))
            return [future.result() for future in waiting]

    def choose(self, options: dict[Way, list[Choice]]) -> dict[Way, Choice]:
        """The option of each way with the best F1 on validation data."""
        seed = SETTINGS["seed of choices"]
        cases = [(way, seed, choice) for way, choices in options.items() for choice in choices]
        runs = self.all(cases)
        scores = {
            (way, choice): max(run.f1) for (way, _, choice), run in zip(cases, runs, strict=True)
        }
        return {
            way: max(choices, key=lambda choice: scores[way, choice])
            for way, choices in options.items()
        }


def at_time(run: Run) -> float:
    """The F1 on validation data that was reached by then."""
    looks = zip(run.seconds, run.f1, strict=True)
    return max(score for seconds, score in looks if seconds <= SETTINGS["equal time"])


def row(way: Way, runs: list[Run], rival: list[Run]) -> dict[str, str | float]:
    """Means over seeds; differences from the rival are those of the same task."""
    found: dict[str, str | float] = {"energy": way.activation or "none", "way": way.name}
    for name in runs[0].test:
        found[name] = round(statistics.mean(run.test[name] for run in runs), 4)
    more = [run.test["exact"] - other.test["exact"] for run, other in zip(runs, rival, strict=True)]
    spread = statistics.stdev(more) if len(more) > 1 else 0.0
    found["exact, more than the network"] = f"{statistics.mean(more):+.3f} ± {spread:.3f}"
    reached = statistics.mean(map(at_time, runs))
    found[f"validation F1 after {SETTINGS['equal time']:g} s"] = round(reached, 4)
    lasted = statistics.mean(run.seconds[-1] / run.epochs[-1] for run in runs)
    found["s / epoch"] = round(lasted, 4)
    met = statistics.mean(run.met for run in runs)
    found["converged"] = f"{100 * met:.0f} %" if met == met else "no search"
    return found


def main() -> None:
    """Measure and print; write `results/learning.json` and the picture of the docs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true", help="does it run? Files go to /tmp")
    fast = parser.parse_args().fast
    seeds, rates = SETTINGS["seeds"], SETTINGS["learning rates"]
    scales, epochs = SETTINGS["scales"], SETTINGS["epochs"]
    if fast:
        seeds, rates, scales, epochs = seeds[:1], rates[1:2], scales[1:2], 2

    options = {
        way: [Choice(lr, scale) for lr in rates for scale in (scales if way.scaled else [1.0])]
        for way in WAYS
    }
    total = sum(map(len, options.values())) + len(WAYS) * len(seeds)
    with Progress() as progress:
        trainings = Trainings(progress, total, epochs)
        chosen = trainings.choose(options)
        cases = [(way, seed, chosen[way]) for seed in seeds for way in WAYS]
        done = trainings.all(cases, final=True)
    runs: dict[Way, list[Run]] = {way: [] for way in WAYS}
    for (way, _, _), run in zip(cases, done, strict=True):
        runs[way].append(run)

    rows = [row(way, runs[way], runs[WAYS[0]]) for way in WAYS]
    known = [task(seed)[1] for seed in seeds]
    notes = {
        "who knows all but the noise": {
            name: statistics.mean(one[name] for one in known) for name in known[0]
        },
        "epochs of the curves": done[0].epochs,
        "of each way": [
            {
                "energy": way.activation or "none",
                "way": way.name,
                "lr": chosen[way].lr,
                **({"scale": chosen[way].scale} if way.scaled else {}),
                "tests": [run.test for run in runs[way]],
                "curves": [{"f1": run.f1, "seconds": run.seconds} for run in runs[way]],
            }
            for way in WAYS
        ],
    }
    print(report.table(rows))
    folder = Path(tempfile.mkdtemp()) if fast else Path()
    print(report.write("learning", SETTINGS | {"notes": notes}, rows, folder / report.RESULTS))
    draw(runs, folder / ("learning.png" if fast else "docs/images/learning.png"))


def draw(runs: dict[Way, list[Run]], path: Path) -> None:
    """F1 on validation data against epochs and against seconds: the mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {
        "network": "0.25", "regression": "#b08a2e", "candidates": "#8a6fb0",
        "max_margin": "#6f8f3a", "cuts": "#1f5fa8", "implicit": "#2aa198", "unrolled": "#b0452e",
    }  # fmt: skip
    styles = {None: "-", "relu": "-", "softplus": "--"}
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained", sharey=True)
    for way, mine in runs.items():
        f1 = torch.tensor([run.f1 for run in mine]).mean(dim=0)
        seconds = torch.tensor([run.seconds for run in mine]).mean(dim=0)
        label = way.name if way.activation is None else f"{way.name} ({way.activation})"
        look = {"color": colors[way.loss], "ls": styles[way.activation], "lw": 1.8, "label": label}
        axes[0].plot(mine[0].epochs, f1, **look)
        axes[1].plot(seconds[1:], f1[1:], **look)
    axes[0].set(xlabel="epochs", ylabel="F1 over examples, validation data", ylim=(0.7, 0.9))
    axes[1].set(xlabel="seconds of training, one core", xscale="log")
    axes[1].axvline(SETTINGS["equal time"], color="0.6", ls=":", lw=1)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
