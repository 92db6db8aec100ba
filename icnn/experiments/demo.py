"""A tour of what works, in half a minute: four energies trained, measured and drawn.

1. Bowl: a FICNN fits noisy convex data; a plain network of the same size shows what it is spared.
2. Valley: a PICNN learns `p(y | x) ~ exp(-f(x, y))`, which winds in `x` and is convex in `y`.
3. Digits: a PICNN over one-hot labels reads scikit-learn's digits, next to simple rivals.
4. Gaps: an imputer fills in what is missing of digits, a half or most of their pixels.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import icnn
from icnn.extras import require

Track = Callable[[str], Iterable[int]]
"""Counts optimiser steps and shows their progress under a name."""


@dataclass(frozen=True)
class Settings:
    """What the tour depends on."""

    seed: int = 0
    out: Path = Path("icnn-demo")
    fast: bool = False


def run(settings: Settings) -> dict[str, Any]:
    """Take the tour: prints and returns its numbers, writes them and `demo.png` to `out`."""
    for module, extra in (("rich", "cli"), ("sklearn", "sklearn"), ("matplotlib", "viz")):
        require(module, extra)
    from rich.console import Console
    from rich.padding import Padding
    from rich.progress import Progress

    settings.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print("[bold]icnn[/]: energies f(x, y) that are convex in y by construction")
    torch.manual_seed(settings.seed)
    steps = 100 if settings.fast else 800
    with Progress(console=console, transient=True) as progress:

        def track(name: str) -> Iterable[int]:
            return progress.track(range(steps), description=name)

        stops = [bowl(track), valley(track), digits(track, settings.seed)]
        progress.add_task("an imputer of digits", total=None)
        stops.append(gaps(settings.seed, 100 if settings.fast else 600))
    for stop in stops:
        console.print(f"\n[bold]{stop['title']}[/]")
        for name, (number, form) in stop["numbers"].items():
            console.print(f"  {name:<50} {number:>9{form}}", highlight=False)
    console.print("\n[bold]What would break convexity is refused[/]")
    refused = f"icnn.FICNN(2, activation='tanh')\nValueError: {refusal()}"
    console.print(Padding(refused, (0, 0, 1, 2)), highlight=False)

    result = {
        "settings": asdict(settings) | {"out": str(settings.out)},
        "numbers": {
            stop["title"]: {name: number for name, (number, _) in stop["numbers"].items()}
            for stop in stops
        },
    }
    (settings.out / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(stops, settings.out / "demo.png")
    console.print(f"Look at [bold]{settings.out / 'demo.png'}[/]; the numbers are in demo.json")
    return result


def minimise(loss: Callable[[], Tensor], energy: nn.Module, steps: Iterable[int]) -> None:
    """Adam; each step is a batch that says nothing."""
    optimizer = torch.optim.Adam(energy.parameters(), lr=3e-3)
    icnn.fit(energy, steps, lambda energy, _: loss(), epochs=1, optimizer=optimizer, progress=False)


def bowl(track: Track) -> dict[str, Any]:
    """Direct functional fitting: the values of a convex function, seen through noise."""

    def truth(y: Tensor) -> Tensor:
        return (y.square() / 2 + y.abs()).squeeze(1)

    y = torch.rand(30, 1) * 4 - 2
    values = truth(y) + 0.6 * torch.randn(30)
    plain = nn.Sequential(
        nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)
    )
    convex = icnn.FICNN(1, (64, 64))
    minimise(lambda: F.mse_loss(plain(y), values), plain, track("a plain network"))
    minimise(lambda: F.mse_loss(convex(None, y), values), convex, track("a FICNN"))
    grid = torch.linspace(-2, 2, 401)[:, None]
    fits = {"plain network": plain, "FICNN": lambda y: convex(None, y)}
    numbers = {}
    for name, fit in fits.items():
        error = F.mse_loss(fit(grid), truth(grid)).sqrt().item()
        numbers[f"{name}, 64-64: rms distance from the truth"] = error, ".3f"
        numbers[f"{name}, 64-64: chords below the curve"] = violations(fit), ".1%"
    numbers["FICNN, 64-64: proved convex (1 is yes)"] = (
        int(icnn.check_convexity(convex).proved),
        "d",
    )
    return {
        "title": "Bowl: 30 noisy values of a convex function, two fits",
        "numbers": numbers,
        "data": (y, values),
        "grid": grid,
        "curves": {name: fit(grid).detach() for name, fit in fits.items()},
        "truth": truth(grid),
    }


@torch.no_grad()
def violations(f: Callable[[Tensor], Tensor]) -> float:
    """The share of 10,000 random segments of [-2, 2] on which `f` rises above its chord."""
    p, q = torch.rand(2, 10_000, 1) * 4 - 2
    t = torch.rand(10_000)
    chord = t * f(p) + (1 - t) * f(q)
    rounding = 1e-5 * (1 + chord.abs())
    return (f(t[:, None] * p + (1 - t[:, None]) * q) > chord + rounding).float().mean().item()


def valley(track: Track) -> dict[str, Any]:
    """A conditional density that is log-concave in `y` for every `x`, by maximum likelihood."""
    x = torch.rand(800, 1) * 6 - 3
    y = 0.5 + 0.3 * torch.sin(2 * x) + (0.03 + 0.02 * (x + 3)) * torch.randn(800, 1)
    y = y.clamp(0, 1)
    energy = icnn.PICNN(1, 1, (64, 64), activation="softplus", x_activation="silu")
    levels = torch.linspace(0, 1, 41)

    def loss() -> Tensor:
        rows = torch.randint(len(x), (64,))
        f = energy.at(x[rows])  # the x-path once, then one short pass for each level of y
        normaliser = torch.stack([-f(level.expand(64, 1)) for level in levels]).logsumexp(dim=0)
        return (f(y[rows]) + normaliser).mean()

    minimise(loss, energy, track("a PICNN of a winding valley"))
    xs, ys = torch.linspace(-3, 3, 241), torch.linspace(0, 1, 161)
    with torch.no_grad():
        f = energy.at(xs[:, None])
        surface = torch.stack([f(level.expand(len(xs), 1)) for level in ys])
    lowest = ys[surface.argmin(dim=0)]
    miss = (lowest - (0.5 + 0.3 * torch.sin(2 * xs))).abs().mean()
    return {
        "title": "Valley: a PICNN that winds in x and is convex in y",
        "numbers": {
            f"slices f(x, .) that bend down, of {len(xs)}": (bent(surface), "d"),
            "proved convex in y for every x (1 is yes)": (
                int(icnn.check_convexity(energy).proved),
                "d",
            ),
            "mean distance of the argmin from the truth": (miss.item(), ".3f"),
        },
        "data": (x, y),
        "axes": (xs, ys),
        "surface": surface,
        "lowest": lowest,
    }


def bent(surface: Tensor) -> int:
    """How many columns of values on an even grid have a second difference below rounding."""
    rounding = 1e-5 * (1 + surface.abs().amax(dim=0))
    return int((surface.diff(n=2, dim=0) < -rounding).any(dim=0).sum())


def digits(track: Track, seed: int) -> dict[str, Any]:
    """Classes are the corners of a simplex: `p(k | x) ~ exp(-f(x, e_k))`."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.svm import SVC

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images / 16, labels, test_size=0.25, stratify=labels, random_state=seed
    )
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    k, k_test = (torch.tensor(part) for part in split[2:])
    corners = torch.eye(10)

    def logits(energy: icnn.Energy, x: Tensor) -> Tensor:
        f = energy.at(x)
        return -torch.stack([f(corner.expand(len(x), 10)) for corner in corners], dim=1)

    def train(energy: icnn.Energy, name: str) -> float:
        def loss() -> Tensor:
            rows = torch.randint(len(x), (128,))
            return F.cross_entropy(logits(energy, x[rows]), k[rows])

        minimise(loss, energy, track(name))
        with torch.no_grad():
            return (logits(energy, x_test).argmax(dim=1) == k_test).float().mean().item()

    energy = icnn.PICNN(64, 10, (128, 128))
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    accuracy = {
        "PICNN, 128-128": train(energy, "a PICNN of digits"),
        "Score(feed-forward), 128-128: no label energy": train(icnn.Score(net), "its rival"),
    }
    for name, rival in (
        ("logistic regression", LogisticRegression(max_iter=2000)),
        ("RBF support vector machine", SVC()),
    ):
        accuracy[name] = float(
            rival.fit(x.numpy(), k.numpy()).score(x_test.numpy(), k_test.numpy())
        )

    # Along the edge from the corner of one digit to that of another: a curve for each image.
    t = torch.linspace(0, 1, 101)
    three, eight = (x_test[k_test == digit][:8] for digit in (3, 8))
    with torch.no_grad():
        f = energy.at(torch.cat([three, eight]))
        edge = [f(((1 - s) * corners[3] + s * corners[8]).expand(16, 10)) for s in t]
    return {
        "title": "Digits: test accuracy of energies over one-hot labels, and of simple rivals",
        "numbers": {name: (value, ".1%") for name, value in accuracy.items()},
        "t": t,
        "edge": torch.stack(edge),
    }


def gaps(seed: int, count: int) -> dict[str, Any]:
    """Pixels that are missing, whichever they are: the minimum over them given the others."""
    from sklearn.datasets import load_digits
    from sklearn.impute import KNNImputer

    random = np.random.default_rng(seed)
    every, _ = load_digits(return_X_y=True)
    images = random.permutation(np.reshape(every, (-1, 8, 8)))[: count + 40]
    train, true = images[:count], images[count:]
    model = icnn.Imputer(image_shape=(8, 8), random_state=seed).fit(train)
    rival: Any = KNNImputer().fit(train.reshape(count, -1))
    half = np.zeros(true.shape, dtype=bool)
    half[:, 4:] = True
    numbers, shown = {}, {}
    for name, missing in (
        ("lower half", half),
        ("60 % of pixels", random.uniform(size=true.shape) < 0.6),
    ):
        seen = np.where(missing, np.nan, true)
        found = model.solve(seen)
        filled = found.y.numpy().reshape(true.shape)
        near = rival.transform(seen.reshape(len(true), -1)).reshape(true.shape)
        for method, answer in (("Imputer", filled), ("k-NN", near)):
            error = float(np.sqrt(np.square(answer - true)[missing].mean()))
            numbers[f"{name}, {method}: rms error, of 16 levels"] = error, ".2f"
        numbers[f"{name}, Imputer: largest certified gap"] = float(found.gap.max()), ".1e"
        shown[name] = {"seen": seen, "filled in": filled, "true": true}
    return {"title": "Gaps: what is missing of digits, filled in", "numbers": numbers, **shown}


def refusal() -> str:
    """What the library says to an activation that is not convex."""
    try:
        icnn.FICNN(2, activation="tanh")
    except ValueError as error:
        return str(error)
    raise AssertionError("tanh was accepted")


def draw(stops: list[dict[str, Any]], path: Path) -> None:
    """The four stops side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    one, two, three, four = stops
    plain, ours, best, other = "#b0452e", "#1f5fa8", "#f28e2b", "#7a4fa3"
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.8))
    axes = axes.flatten()
    figure.set_layout_engine("constrained", wspace=0.06, hspace=0.06)

    axis = axes[0]
    axis.plot(*one["data"], "o", color="0.65", ms=5, label="data")
    axis.plot(one["grid"], one["truth"], color="0.3", ls=":", lw=1.5, label="truth")
    for (name, curve), color in zip(one["curves"].items(), (plain, ours), strict=True):
        axis.plot(one["grid"], curve, color=color, lw=2.2, label=name)
    axis.set(title="FICNN: convex, whatever the noise", xlabel="y", ylabel="f(y)")
    axis.legend(frameon=False)

    axis = axes[1]
    xs, ys = two["axes"]
    above = (two["surface"] - two["surface"].amin(dim=0)).clamp(max=12)
    mesh = axis.contourf(xs, ys, above, levels=24, cmap="Blues_r")
    axis.plot(*two["data"], ".", color="k", ms=1.5, alpha=0.5)
    axis.plot(xs, two["lowest"], color=best, lw=2.5, label="argmin over y")
    axis.set(title="PICNN: winds in x, convex in y", xlabel="x", ylabel="y", ylim=(0, 1))
    axis.legend(loc="upper left", framealpha=0.9)
    figure.colorbar(mesh, ax=axis, label="f(x, y) - min over y")

    axis = axes[2]
    edge = three["edge"] - three["edge"].amin(dim=0)
    for column, (digit, color) in enumerate([("a 3", ours)] * 8 + [("an 8", other)] * 8):
        label = f"images of {digit}" if column in (0, 8) else None
        axis.plot(three["t"], edge[:, column], color=color, alpha=0.8, label=label)
    axis.set_xticks([0, 1], ["label 3", "label 8"])
    axis.set(title="Digits: the energy between two labels", ylabel="f(x, y) - min over the edge")
    axis.legend(frameon=False)
    for axis in axes[:3]:
        axis.spines[["top", "right"]].set_visible(False)

    axis, wide, kinds = axes[3], 8, ("lower half", "60 % of pixels")
    rows = [(kind, part) for kind in kinds for part in ("seen", "filled in", "true")]
    tiles = np.full((9 * len(rows) + 2, 9 * wide - 1), -1.0)  # the ground between pictures
    for i, (kind, part) in enumerate(rows):
        for j in range(wide):
            top = 9 * i + (3 if i >= 3 else 0)
            tiles[top : top + 8, 9 * j : 9 * j + 8] = four[kind][part][j]
    colours = plt.get_cmap("gray_r").with_extremes(bad="#f4c9a0", under="white")
    axis.imshow(tiles, cmap=colours, vmin=0, vmax=16)
    axis.set_yticks([3.5 + 9 * i + (3 if i >= 3 else 0) for i in range(len(rows))])
    axis.set_yticklabels([part for _, part in rows])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set(title="Gaps: filled in, whichever pixels are missing")
    figure.savefig(path, dpi=110)
    plt.close(figure)
