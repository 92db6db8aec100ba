"""Do deep energies start well, and does it matter?

A FICNN of twelve layers of 200 units, relu, standard normal `y` of dimension 10, started in two
ways: ours (`icnn.energies.initialisation`), and PyTorch's default draw made non-negative. Printed
and drawn: the spread of the units over a batch in every layer, and what is left of the variance of
two convex functions, `|y|^2` and log-sum-exp, while both are fitted with the same optimiser.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn

import icnn
from icnn import report
from icnn.energies.ficnn import FullLayer

SETTINGS = {
    "dim_y": 10, "hidden": [200] * 12, "steps": 2500, "batch": 256, "lr": 1e-3, "seeds": [0, 1, 2]
}  # fmt: skip
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


STARTS = {"icnn": ours, "PyTorch's default, non-negative": torch_default}


@torch.no_grad()
def spreads(energy: icnn.FICNN) -> list[float]:
    """The standard deviation over a batch, averaged over units, after each hidden layer."""
    y = torch.randn(2000, energy.dim_y)
    z, found = None, []
    for layer in energy.describe(None)[:-1]:
        z = layer(z, y)
        found.append(float(z.std(dim=0).mean()))
    return found


def fit(energy: icnn.FICNN, target: Callable[[Tensor], Tensor], name: str) -> list[float]:
    """Adam on fresh data; the share of the target's variance that is left, every 20 steps."""
    optimizer = torch.optim.Adam(energy.parameters(), lr=SETTINGS["lr"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SETTINGS["steps"])
    icnn.keep_convex(energy, optimizer)
    test = torch.randn(5000, energy.dim_y)
    values = target(test)
    scale = target(torch.randn(100_000, energy.dim_y))
    mean, std = scale.mean(), scale.std()
    left = []
    for step in track(range(SETTINGS["steps"]), description=name, transient=True):
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


def main() -> None:
    """Measure, print, write `results/initialisation.json` and `docs/images/initialisation.png`."""
    torch.set_num_threads(1)  # the matrices are small
    rows, curves, layers = [], {}, {}
    for start, make in STARTS.items():
        torch.manual_seed(SETTINGS["seeds"][0])
        layers[start] = spreads(make())
        row: dict[str, str | float] = {"start": start}
        row["spread of layer 12 / layer 1"] = layers[start][-1] / layers[start][0]
        for name, target in TARGETS.items():
            ends = []
            for seed in SETTINGS["seeds"]:
                torch.manual_seed(seed)
                curves[start, name, seed] = fit(make(), target, f"{start}, {name}, seed {seed}")
                ends.append(curves[start, name, seed][-1])
            row[f"{name}: variance left, median"] = f"{100 * sorted(ends)[len(ends) // 2]:.2g} %"
            row[f"{name}: worst"] = f"{100 * max(ends):.2g} %"
        rows.append(row)
    print(report.table(rows))
    print(report.write("initialisation", SETTINGS, rows))
    draw(layers, curves, Path("docs/images/initialisation.png"))


def draw(layers: dict, curves: dict, path: Path) -> None:
    """The spread of each layer, and the fits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict(zip(STARTS, ("#1f5fa8", "#b0452e"), strict=True))
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for start, spread in layers.items():
        axes[0].semilogy(range(1, 13), spread, "o-", color=colors[start], label=start)
    axes[0].set(title="Spread of the units at the start", xlabel="layer", ylabel="std over a batch")
    for axis, name in zip(axes[1:], TARGETS, strict=True):
        for (start, target, seed), left in curves.items():
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
