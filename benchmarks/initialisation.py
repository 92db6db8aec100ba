"""Do deep energies start well, and does it matter?

A FICNN of twelve layers of 200 units, relu, standard normal `y` of dimension 10, started in three
ways: ours (`icnn.energies.initialisation`), PyTorch's default draw made non-negative, and the
published constants of Hoedt and Klambauer with our passthroughs beside them. Printed and drawn: the
spread of the units over a batch in every layer, and what is left of the variance of two convex
functions, `|y|^2` and log-sum-exp, while all are fitted with the same optimiser.

The optimiser of that comparison is one of several, which a second table compares for our start on
the sum of squares and on other seeds; it was chosen there.
"""

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn

import icnn
from icnn import report
from icnn.energies.ficnn import FullLayer

SETTINGS = {
    "dim_y": 10, "hidden": [200] * 12, "batch": 256, "seeds": [0, 1, 2],
    "seeds of the optimisers": [10, 11, 12],
}  # fmt: skip
CHOSEN = "step 0.003 after a warm-up of 300 steps"
PLAIN = {"steps": 2500, "lr": 1e-3, "warmup": 1, "beta": 0.999, "slower": 1.0}
OPTIMISERS = {
    "Adam, step 0.001": PLAIN,
    "the same with twice the steps": PLAIN | {"steps": 5000},
    "the same with `betas=(0.9, 0.99)`": PLAIN | {"beta": 0.99},
    CHOSEN: PLAIN | {"lr": 3e-3, "warmup": 300},
    "step 0.003, and 0.0003 for non-negative weights": PLAIN | {"lr": 3e-3, "slower": 0.1},
    "step 0.01, and 0.001 for non-negative weights": PLAIN | {"lr": 1e-2, "slower": 0.1},
}
TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of squares": lambda y: y.square().sum(dim=1),
    "log-sum-exp": lambda y: y.logsumexp(dim=1),
}


def ours() -> icnn.FICNN:
    """A FICNN as it comes."""
    return icnn.FICNN(SETTINGS["dim_y"], SETTINGS["hidden"])


def torch_default() -> icnn.FICNN:
    """The same, drawn as `nn.Linear` would be, and made non-negative where it must be."""
    energy = ours()
    for layer in energy.layers:
        assert isinstance(layer, FullLayer)
        layer.wy.reset_parameters()
        if layer.wz is not None:
            out, fan_in = layer.wz.raw.shape
            layer.wz.set_(nn.Linear(fan_in, out).weight.detach().abs())
    return energy


def hoedt_klambauer(r: float = 0.5) -> icnn.FICNN:
    """The same with their weights and biases for relu; the passthroughs stay as ours are."""
    energy = ours()
    for layer in energy.layers:
        assert isinstance(layer, FullLayer)
        if layer.wz is not None:
            n = layer.wz.raw.shape[1]
            overlap = math.sqrt(1 - r**2) + r * math.acos(-r)
            square = 2 * math.pi * r / (n * (math.pi - n + (n - 1) * overlap))
            log_variance = math.log1p(2 * (1 - r) / n / square)
            mean = math.log(square) / 2 - log_variance / 2
            layer.wz.set_(layer.wz.raw.detach().log_normal_(mean, math.sqrt(log_variance)))
            nn.init.constant_(layer.wy.bias, -n * math.sqrt(square / (2 * math.pi)))
    return energy


STARTS = {
    "icnn": ours,
    "Hoedt and Klambauer": hoedt_klambauer,
    "PyTorch's default, non-negative": torch_default,
}


@torch.no_grad()
def spreads(energy: icnn.FICNN) -> list[float]:
    """The standard deviation over a batch, averaged over units, after each hidden layer."""
    y = torch.randn(2000, energy.dim_y)
    z, found = None, []
    for layer in energy.describe(None)[:-1]:
        z = layer(z, y)
        found.append(float(z.std(dim=0).mean()))
    return found


def fit(start: str, name: str, optimiser: str, seed: int) -> list[float]:
    """Adam and a cosine on fresh data; the share of the variance that is left, every 20 steps."""
    torch.set_num_threads(1)  # the matrices are small
    torch.manual_seed(seed)
    energy, target, settings = STARTS[start](), TARGETS[name], OPTIMISERS[optimiser]
    steps, warmup, lr = settings["steps"], settings["warmup"], settings["lr"]
    kept = {id(part.raw) for part in energy.modules() if isinstance(part, icnn.NonNegative)}
    groups = [
        {
            "params": [p for p in energy.parameters() if id(p) in kept],
            "lr": lr * settings["slower"],
        },
        {"params": [p for p in energy.parameters() if id(p) not in kept], "lr": lr},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, settings["beta"]))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2,
    )
    icnn.keep_convex(energy, optimizer)
    test = torch.randn(5000, energy.dim_y)
    values = target(test)
    scale = target(torch.randn(100_000, energy.dim_y))
    mean, std = scale.mean(), scale.std()
    left = []
    for step in range(steps):
        y = torch.randn(SETTINGS["batch"], energy.dim_y)
        loss = (energy(None, y) - (target(y) - mean) / std).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 19:
            with torch.no_grad():
                error = energy(None, test) * std + mean - values
                left.append(float(error.square().mean() / values.var()))
    return left


def summary(ends: list[float]) -> dict[str, str]:
    """The median and the worst, in percent."""
    median = sorted(ends)[len(ends) // 2]
    return {"median": f"{100 * median:.2g} %", "worst": f"{100 * max(ends):.2g} %"}


def main() -> None:
    """Measure and print; write `results/initialisation*.json` and the picture of the docs."""
    starts = [
        (start, name, CHOSEN, seed)
        for start in STARTS
        for name in TARGETS
        for seed in SETTINGS["seeds"]
    ]
    others = [
        ("icnn", "sum of squares", optimiser, seed)
        for optimiser in OPTIMISERS
        for seed in SETTINGS["seeds of the optimisers"]
    ]
    with ProcessPoolExecutor() as pool:
        waiting = {case: pool.submit(fit, *case) for case in starts + others}
        curves = {
            case: future.result() for case, future in track(waiting.items(), description="Fitting")
        }

    rows, layers = [], {}
    for start, make in STARTS.items():
        torch.manual_seed(SETTINGS["seeds"][0])
        layers[start] = spreads(make())
        row: dict[str, str | float] = {"start": start}
        row["spread of layer 12 / layer 1"] = layers[start][-1] / layers[start][0]
        for name in TARGETS:
            ends = [curves[start, name, CHOSEN, seed][-1] for seed in SETTINGS["seeds"]]
            found = summary(ends)
            row[f"{name}: variance left, median"] = found["median"]
            row[f"{name}: worst"] = found["worst"]
        rows.append(row)
    print(report.table(rows))
    print(report.write("initialisation", SETTINGS | {"optimiser": OPTIMISERS[CHOSEN]}, rows))
    rows = []
    for optimiser in OPTIMISERS:
        seeds = SETTINGS["seeds of the optimisers"]
        ends = [curves["icnn", "sum of squares", optimiser, seed][-1] for seed in seeds]
        found = summary(ends)
        rows.append({"optimiser": optimiser} | {f"left, {k}": v for k, v in found.items()})
    print(report.table(rows))
    print(report.write("initialisation-optimisers", SETTINGS | {"optimisers": OPTIMISERS}, rows))
    draw(layers, {case: curves[case] for case in starts}, Path("docs/images/initialisation.png"))


def draw(layers: dict, curves: dict, path: Path) -> None:
    """The spread of each layer, and the fits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict(zip(STARTS, ("#1f5fa8", "#6f8f3a", "#b0452e"), strict=True))
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for start, spread in layers.items():
        axes[0].semilogy(range(1, 13), spread, "o-", color=colors[start], label=start)
    axes[0].set(title="Spread of the units at the start", xlabel="layer", ylabel="std over a batch")
    for axis, name in zip(axes[1:], TARGETS, strict=True):
        for (start, target, _, seed), left in curves.items():
            if target == name:
                label = start if seed == SETTINGS["seeds"][0] else None
                steps = range(20, 20 * len(left) + 1, 20)
                axis.semilogy(steps, left, color=colors[start], alpha=0.8, label=label)
        axis.axhline(0.01, color="0.5", ls=":", lw=1)
        axis.set(title=f"Fitting {name}", xlabel="step", ylabel="share of the variance left")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
