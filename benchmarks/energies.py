"""What does a PICNN cost beyond its matrix products?

The network of the paper's BibTeX experiment, `PICNN(1836, 159, (600, 159))`, batch 128.
`value and y-gradient` is what a solver calls at every step; `at(x)` is what it calls once.

- bare torch: the same function, its gradient written by hand, without autograd and checks;
- products alone: its matrix products and nothing else, neither gates nor kinks nor biases.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import icnn
from benchmarks.timing import medians
from icnn import report
from icnn.energies.energy import Dense
from icnn.energies.picnn import PartialLayer, XLayer

SETTINGS = {"dim_x": 1836, "dim_y": 159, "hidden": [600, 159], "batch": 128, "seed": 0}


def main() -> None:
    """Measure, print, write `results/energies-cpu.json`, or `-cuda` where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SETTINGS["seed"])
    energy = icnn.PICNN(SETTINGS["dim_x"], SETTINGS["dim_y"], SETTINGS["hidden"]).to(device)
    x = (torch.rand(SETTINGS["batch"], SETTINGS["dim_x"]) < 0.04).float().to(device)
    y = torch.rand(SETTINGS["batch"], SETTINGS["dim_y"], device=device)
    rows = []
    for threads in (1, 2) if device == "cpu" else (1,):
        torch.set_num_threads(threads)
        where = f"CPU, {threads} thread{'s'[: threads - 1]}"
        if device == "cuda":
            where = torch.cuda.get_device_name()
        rows += [row(f"{name}, {where}", *three) for name, three in cases(energy, x, y).items()]
    print(report.table(rows))
    print(report.write(f"energies-{device}", SETTINGS, rows))


Cases = dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object]]]


def cases(energy: icnn.PICNN, x: Tensor, y: Tensor) -> Cases:
    """For each question: icnn, bare torch, the products alone."""
    with torch.no_grad():  # as a solver does
        f, layers = energy.at(x), energy.describe(x)

    def value_and_gradient() -> tuple[Tensor, Tensor]:
        points = y.detach().requires_grad_()
        value = f(points)
        (gradient,) = torch.autograd.grad(value.sum(), points)
        return value, gradient

    return {
        "value and y-gradient": (
            value_and_gradient,
            lambda: bare_value_and_gradient(layers, y),
            lambda: bare_products(layers, y),
        ),
        "at(x)": (
            torch.no_grad()(lambda: energy.at(x)),
            lambda: bare_x_path(energy, x),
            lambda: bare_x_products(energy, x),
        ),
    }


def row(name: str, ours: Callable, bare: Callable, products: Callable) -> report.Row:
    """One line of the table."""
    seconds = medians({"icnn": ours, "bare": bare, "products": products})
    return {
        "": name,
        "icnn, ms": 1e3 * seconds["icnn"],
        "/ bare torch": seconds["icnn"] / seconds["bare"],
        "/ products alone": seconds["icnn"] / seconds["products"],
    }


@torch.no_grad()
def bare_value_and_gradient(layers: list[Dense], y: Tensor) -> tuple[Tensor, Tensor]:
    """A relu PICNN and its gradient in `y`, by hand."""
    outputs: list[Tensor] = []
    for layer in layers:
        assert layer.gate_y is not None
        z = torch.addmm(layer.bias, y * layer.gate_y, layer.wy.t())
        if layer.wz is not None and layer.gate_z is not None:
            z = torch.addmm(z, outputs[-1] * layer.gate_z, layer.wz.t())
        outputs.append(z.relu() if layer is not layers[-1] else z)
    slope = torch.ones_like(outputs[-1])
    gradient = torch.zeros_like(y)
    for layer, z in zip(reversed(layers), reversed(outputs), strict=True):
        if layer is not layers[-1]:
            slope = slope * (z > 0)
        assert layer.gate_y is not None
        gradient = torch.addcmul(gradient, slope @ layer.wy, layer.gate_y)
        if layer.wz is not None and layer.gate_z is not None:
            slope = (slope @ layer.wz) * layer.gate_z
    return outputs[-1].squeeze(1), gradient


@torch.no_grad()
def bare_products(layers: list[Dense], y: Tensor) -> None:
    """The products of the above, forward and backward."""
    z = y
    for layer in layers:
        term = y @ layer.wy.t()
        z = term if layer.wz is None else torch.addmm(term, z, layer.wz.t())
    slope = torch.ones_like(z)
    for layer in reversed(layers):
        _ = slope @ layer.wy
        if layer.wz is not None:
            slope = slope @ layer.wz


@torch.no_grad()
def bare_x_path(energy: icnn.PICNN, x: Tensor) -> list[Tensor]:
    """Every quantity that the y-path needs of `x`, with weights read as they are stored."""
    found, u = [], x
    for i, layer in enumerate(energy.layers):
        assert isinstance(layer, PartialLayer)
        found += [layer.wyu(u), layer.wu(u)]
        if layer.wzu is not None:
            found.append(layer.wzu(u).relu())
        if i < len(energy.x_path):
            x_layer = energy.x_path[i]
            assert isinstance(x_layer, XLayer)
            u = x_layer.v(u).relu()
    return found


@torch.no_grad()
def bare_x_products(energy: icnn.PICNN, x: Tensor) -> None:
    """The products of the above."""
    u = x
    for i, layer in enumerate(energy.layers):
        assert isinstance(layer, PartialLayer)
        for linear in (layer.wyu, layer.wu, layer.wzu):
            if linear is not None:
                _ = u @ linear.weight.t()
        if i < len(energy.x_path):
            x_layer = energy.x_path[i]
            assert isinstance(x_layer, XLayer)
            u = u @ x_layer.v.weight.t()


if __name__ == "__main__":
    main()
