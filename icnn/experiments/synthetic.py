"""Section 6.1 and supplement I of the paper: labels of points in the plane.

An energy `f(x, y)` of a point and its label, `y` between 0 and 1; the label that is predicted
minimises `f(x, y) - H(y)`, and the energy is learned through that minimum by its cross entropy. A
FICNN is convex in point and label together, which restricts it; a PICNN in the label alone.

Where it differs from the paper, which shows a picture and says little about how it was made:

1. Data: scikit-learn's moons, circles and blobs (four, with the labels of a chessboard), and a
   square that a line divides, with noise; 600 points. A quarter of them is held out to look at,
   until all is chosen; in the end all are for training, and 2,000 fresh ones for measuring.
2. Numbers: accuracy and cross entropy over seeds, each with data of its own, against a feed-forward
   network that is trained in the same way, and a support vector machine with an RBF kernel whose
   parameters are chosen by cross-validation. Those of networks were chosen on other seeds.
3. Softplus units, and a learning rate that falls to zero, in the place of an epoch that is chosen.
4. The last layer of the FICNN, which the paper's code drops, is there.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import icnn
from icnn import report
from icnn.experiments.statistics import Difference, paired_bootstrap
from icnn.extras import require
from icnn.learning.batches import batches

POINTS, FRESH = 600, 2000
FAR = 1_000_000  # from the seed of points to that of fresh ones
METHODS = ("FICNN", "PICNN", "feed-forward", "RBF SVM")


@dataclass(frozen=True)
class Settings:
    """What the experiment depends on."""

    seed: int = 0
    seeds: int = 5
    out: Path = Path("icnn-synthetic")
    fast: bool = False
    final: bool = False
    hidden: tuple[int, ...] = (200, 200)
    activation: str = "softplus"
    epochs: int = 40
    batch: int = 50


# Of each network, chosen on data of other seeds than those that are reported.
RATE = {"FICNN": 1e-2, "PICNN": 3e-3, "feed-forward": 1e-2}
DECAY = {"FICNN": 0.01, "PICNN": 0.3, "feed-forward": 0.01}


def moons(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two half circles."""
    from sklearn.datasets import make_moons

    x, y = make_moons(count, noise=0.2, random_state=seed)
    return np.asarray(x), np.asarray(y)


def circles(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One circle in another."""
    from sklearn.datasets import make_circles

    x, y = make_circles(count, noise=0.15, factor=0.5, random_state=seed)
    return np.asarray(x), np.asarray(y)


def linear(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A square that a line divides, but for some points."""
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (count, 2))
    return x, (x @ [1, 0.6] + 0.2 * random.normal(size=count) > 0).astype(int)


def blobs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Four clouds with the labels of a chessboard."""
    from sklearn.datasets import make_blobs

    centers = np.array([(-1, -1), (1, 1), (-1, 1), (1, -1)], dtype=float)
    x, y = make_blobs(count, centers=centers, cluster_std=0.4, random_state=seed)[:2]
    return np.asarray(x), (np.asarray(y) >= 2).astype(int)


DATA: dict[str, Callable[[int, int], tuple[np.ndarray, np.ndarray]]] = {
    "moons": moons,
    "circles": circles,
    "linear": linear,
    "blobs": blobs,
}


def domain(like: Tensor) -> icnn.Box:
    """Labels."""
    return icnn.Box(like.new_zeros(1), like.new_ones(1))


def cross_entropy(energy: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, icnn.Solution]:
    """Of the label that is predicted, with gradients through the minimum."""
    solver = icnn.BundleEntropy(max_steps=10, tol=1e-3)
    found = icnn.argmin(energy, x, domain(x), solver=solver)
    return F.binary_cross_entropy(found.y.clamp(1e-6, 1 - 1e-6), y), found


def network(method: str, settings: Settings) -> nn.Module:
    """An energy; that of a feed-forward network is linear in the label."""
    hidden, activation = settings.hidden, settings.activation
    if method == "FICNN":
        return icnn.FICNN(1, hidden, dim_x=2, activation=activation)
    if method == "PICNN":
        return icnn.PICNN(2, 1, hidden, activation=activation, x_activation=activation)
    layers: list[nn.Module] = []
    for before, after in zip((2, *hidden), hidden, strict=False):
        layers += [nn.Linear(before, after), nn.Softplus()]
    return icnn.Score(nn.Sequential(*layers, nn.Linear(hidden[-1], 1)))


@dataclass(frozen=True)
class Trained:
    """A classifier of standardised points."""

    mean: np.ndarray
    scale: np.ndarray
    model: Any  # an energy, or a classifier of scikit-learn

    def scaled(self, x: np.ndarray) -> np.ndarray:
        """As the model takes them."""
        return (x - self.mean) / self.scale

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Labels between 0 and 1; those of the machine are one or the other."""
        x = self.scaled(x)
        if not isinstance(self.model, nn.Module):
            return self.model.predict(x).astype(float)
        with torch.no_grad():
            given = torch.from_numpy(x).float()
            solver = icnn.BundleEntropy(tol=1e-6)
            return icnn.argmin(self.model, given, domain(given), solver=solver).y[:, 0].numpy()


def train(method: str, x: np.ndarray, y: np.ndarray, seed: int, settings: Settings) -> Trained:
    """Learn from the data."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    x = (x - mean) / scale
    if method == "RBF SVM":
        from sklearn.model_selection import GridSearchCV
        from sklearn.svm import SVC

        grid = {"C": [0.1, 1, 10, 100], "gamma": [0.1, 0.3, 1, 3]}
        return Trained(mean, scale, GridSearchCV(SVC(), grid).fit(x, y))
    torch.manual_seed(seed)
    energy = network(method, settings)
    points, labels = torch.from_numpy(x).float(), torch.from_numpy(y[:, None]).float()
    loader = batches(points, labels, size=settings.batch)
    epochs = settings.epochs
    optimizer = torch.optim.Adam(energy.parameters(), lr=RATE[method])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE[method], total_steps=epochs * len(loader) + 1, pct_start=0.2,
        cycle_momentum=False,
    )  # fmt: skip
    icnn.fit(
        energy, loader, cross_entropy, epochs=epochs, optimizer=optimizer, schedule=schedule,
        weight_decay=DECAY[method], progress=False,
    )  # fmt: skip
    return Trained(mean, scale, energy)


def run(settings: Settings) -> dict[str, Any]:
    """Train, measure, draw: `synthetic.json`, `synthetic.png` and `synthetic.html` in `out`."""
    for module, extra in (("rich", "cli"), ("sklearn", "sklearn"), ("matplotlib", "viz")):
        require(module, extra)
    from rich.console import Console
    from rich.progress import Progress

    console = Console()
    if settings.fast:
        console.print("A smoke test: one seed, two epochs. Its numbers mean nothing.")
        settings = replace(settings, seeds=1, epochs=2)
    seeds = [(settings.seed + i) % 2**32 for i in range(settings.seeds)]
    scores: dict[tuple[str, str], list[Score]] = {}
    shown: dict[tuple[str, str], Trained] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(DATA) * len(seeds) * len(METHODS))
        for name, make in DATA.items():
            for seed in seeds:
                x, y = make(POINTS, seed)
                part = POINTS if settings.final else 3 * POINTS // 4
                far = (seed + FAR) % 2**32
                fresh = make(FRESH, far) if settings.final else (x[part:], y[part:])
                for method in METHODS:
                    progress.update(task, description=f"{name}, seed {seed}, {method}")
                    found = train(method, x[:part], y[:part], seed, settings)
                    score = judged(found, *fresh)
                    scores.setdefault((name, method), []).append(score)
                    if seed == seeds[0]:
                        shown[name, method] = found
                    progress.advance(task)
    rows, losses = [row(name, scores) for name in DATA], [loss(name, scores) for name in DATA]
    chosen = {"learning rates": RATE, "weight decay": DECAY}
    told = report.result(report.shown(settings) | chosen, rows)
    told["cross entropy"] = losses
    told["PICNN - SVM"] = {name: asdict(apart(name, scores)) for name in DATA}
    told["runs"] = [
        {"data": name, "method": method, "seed": seed, **score.numbers()}
        for (name, method), each in scores.items()
        for seed, score in zip(seeds, each, strict=True)
    ]
    picture = settings.out / "synthetic.png"
    draw(shown, seeds[0], picture)
    paths = report.publish(
        "synthetic",
        "Labels of points in the plane",
        told,
        [
            __doc__ or "",
            "Accuracy, mean and standard deviation over seeds, "
            + ("on 2,000 fresh points." if settings.final else "on the points held out.")
            + " The last column is a mean difference with its 95 % interval (paired bootstrap over "
            "the points of all seeds).",
            rows,
            picture,
            "Labels predicted by FICNN and PICNN, and their energies along the dotted line, "
            "for each label from 0 to 1: red is high. The blue line is the minimum.",
            "Cross entropy: what a FICNN, convex in point and label together, cannot say.",
            losses,
        ],
        settings.out,
        reading=settings.final,
    )
    print(report.table(rows))  # a console would break its lines
    if not settings.final:
        console.print("On points held out: --final measures on fresh ones, once all is chosen.")
    console.print(f"Look at [bold]{paths[-1]}[/]; the numbers are in {paths[0].name}")
    return told


@dataclass(frozen=True)
class Score:
    """How good a classifier is."""

    right: np.ndarray  # or not, for each point
    cross_entropy: float | None

    @property
    def accuracy(self) -> float:
        """The share of points that are right."""
        return float(self.right.mean())

    def numbers(self) -> dict[str, float | None]:
        """For the file."""
        return {"accuracy": self.accuracy, "cross_entropy": self.cross_entropy}


def judged(found: Trained, x: np.ndarray, y: np.ndarray) -> Score:
    """On points that it has not seen."""
    label = found.predict(x)
    right = (label > 0.5) == y
    if not isinstance(found.model, nn.Module):
        return Score(right, None)
    likely = np.where(y == 1, label, 1 - label).clip(1e-6)
    return Score(right, float(-np.log(likely).mean()))


def row(name: str, scores: dict[tuple[str, str], list[Score]]) -> dict[str, str | float]:
    """Accuracies of all methods."""
    found: dict[str, str | float] = {"data": name}
    for method in METHODS:
        values = np.array([score.accuracy for score in scores[name, method]])
        found[method] = f"{values.mean():.4f} ± {values.std():.4f}"
    found["PICNN - SVM"] = str(apart(name, scores))
    return found


def apart(name: str, scores: dict[tuple[str, str], list[Score]]) -> Difference:
    """The PICNN from the support vector machine, on the points of all seeds."""
    own, rival = (
        np.concatenate([score.right for score in scores[name, method]])
        for method in ("PICNN", "RBF SVM")
    )
    return paired_bootstrap(own, rival)


def loss(name: str, scores: dict[tuple[str, str], list[Score]]) -> dict[str, str | float]:
    """The cross entropy of those that give probabilities."""
    found: dict[str, str | float] = {"data": name}
    for method in METHODS[:3]:
        values = np.array([score.cross_entropy for score in scores[name, method]], dtype=float)
        found[method] = f"{values.mean():.3f} ± {values.std():.3f}"
    return found


def draw(shown: dict[tuple[str, str], Trained], seed: int, path: Path) -> None:
    """Labels over the plane, and energies over labels along a line through it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(DATA), 10.5), layout="constrained")
    grid: Any = figure.subplots(4, len(DATA), squeeze=False)
    for column, (name, make) in enumerate(DATA.items()):
        x, y = make(POINTS, seed)
        low, high = x.min(axis=0) - 0.4, x.max(axis=0) + 0.4
        first, second = (np.linspace(low[i], high[i], 120) for i in range(2))
        plane = np.stack(np.meshgrid(first, second), axis=-1)
        height = low[1] + 0.35 * (high[1] - low[1])
        for line, method in enumerate(METHODS[:2]):
            axes, found = grid[line, column], shown[name, method]
            labels = found.predict(plane.reshape(-1, 2)).reshape(120, 120)
            axes.contourf(first, second, labels, np.linspace(0, 1, 11), cmap="RdBu_r", alpha=0.6)
            axes.contour(first, second, labels, [0.5], colors="k", linewidths=1)
            for label, color in ((0, "tab:blue"), (1, "tab:red")):
                axes.plot(*x[y == label].T, ".", ms=2.5, color=color, label=f"label {label}")
            axes.axhline(height, color="white", lw=1, ls=":")
            axes.set(xticks=[], yticks=[], ylabel=method if not column else "")
            axes.set_title("" if line else name)
            section(grid[2 + line, column], found, first, height)
            grid[2 + line, column].set_ylabel(f"{method}: label" if not column else "")
        grid[3, column].set_xlabel("along the dotted line")
    grid[0, 0].legend(loc="lower left", markerscale=3, fontsize="small")
    figure.savefig(path, dpi=130)


def section(axes: Any, found: Trained, first: np.ndarray, height: float) -> None:
    """The objective over points of a line and all labels, each point's least value at zero."""
    label = torch.linspace(0.005, 0.995, 100)
    points = np.stack([first, np.full_like(first, height)], axis=1)
    x = torch.from_numpy(found.scaled(points)).float()
    with torch.no_grad():
        f = found.model.at(x)
        energy = torch.stack([f(y.expand(len(x), 1)) for y in label])
    y = label[:, None]
    energy = energy + y * y.log() + (1 - y) * (1 - y).log()
    energy = (energy - energy.amin(dim=0)).numpy()
    axes.contourf(first, label, np.minimum(energy, 6), 20, cmap="YlOrRd")
    axes.plot(first, found.predict(points), color="tab:blue", lw=2)
    axes.set(xticks=[], yticks=[0, 1], ylim=(0, 1))
