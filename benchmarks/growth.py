"""How does the time of an argmin grow with the batch, the size of y, the steps and the depth?

One of them doubles while the others stay. The slope is that of a straight line through all points,
logarithm against logarithm: 1 is linear growth. Times are of whole solves without the x-path, in
float64: in float32 searches would end before they have made all their steps.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import icnn
from benchmarks.argmin import At, Case, Net, inputs, steep
from benchmarks.options import options
from benchmarks.timing import medians
from icnn import report

BASE = {"B": 128, "n": 64, "K": 10, "depth": 2}
GRIDS = {
    "B": (128, 256, 512, 1024, 2048, 4096),
    "n": (64, 128, 256, 512, 1024, 2048),
    "K": (5, 10, 20, 40, 80),
    "depth": (1, 2, 4, 8),
}
SETTINGS: dict[str, Any] = {"seed": 0, "dim_x": 50, "width": 200, "entropy": 0.03, "base": BASE}
NAMES = {"B": "examples in the batch", "n": "coordinates of y", "K": "steps", "depth": "layers"}


def seconds(place: dict[str, int], device: str, rounds: int) -> float:
    """The time of one solve."""
    torch.manual_seed(SETTINGS["seed"])
    dim_x, hidden = SETTINGS["dim_x"], [SETTINGS["width"]] * place["depth"]
    energy = steep(icnn.PICNN(dim_x, place["n"], hidden).to(device)).double()
    net = Net("", lambda: energy, (place["B"],), (dim_x,), 0)
    x = inputs(net, place["B"], device).double()
    with torch.no_grad():
        frozen = At(energy.at(x), energy.y_shape)
    case = Case(net, "", place["B"], frozen, x, SETTINGS["entropy"], 0.0)
    return medians({"solve": lambda: case.solve(place["K"])}, rounds, 1)["solve"]


def slope(values: list[int], times: list[float]) -> float:
    """Of a line through the logarithms."""
    return float(np.polyfit(np.log(values), np.log(times), 1)[0])


def measure(device: str, rounds: int, fast: bool) -> list[dict[str, Any]]:
    """A row for every line of the picture."""
    rows = []
    for axis, grid in GRIDS.items():
        values = list(grid[:3] if fast else grid)
        times = [seconds({**BASE, axis: value}, device, rounds) for value in values]
        rows.append(
            {
                "doubled": NAMES[axis],
                "from": values[0],
                "to": values[-1],
                "first, ms": 1e3 * times[0],
                "last, ms": 1e3 * times[-1],
                "slope": slope(values, times),
            }
        )
        print(report.table(rows[-1:]).splitlines()[2], flush=True)
        rows[-1]["points"] = [values, [1e3 * t for t in times]]
    return rows


def draw(results: Path, path: Path) -> None:
    """All devices that results are there for, in one picture."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(11, 3), layout="constrained", sharey=True)
    for device, color in (("cpu", "#1f5fa8"), ("cuda", "#c8552b")):
        file = results / f"growth-{device}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        for axis, line, row in zip(axes, result["settings"]["points"], result["rows"], strict=True):
            label = f"{device}, slope {row['slope']:.2f}"
            axis.loglog(*line, "o-", color=color, lw=2, ms=4, label=label)
            axis.set_xlabel(row["doubled"])
            axis.set_xticks(line[0], [str(v) for v in line[0]])
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("whole solve, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> None:
    """Measure, print, write `results/growth-cpu.json` or `-cuda`, and draw."""
    arguments = options(__doc__)
    SETTINGS["seed"] = arguments.seed
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(device, arguments.rounds, arguments.fast)
    points = [row.pop("points") for row in rows]
    print(report.table(rows))
    if not arguments.fast:
        settings = {**SETTINGS, "points": points}
        print(report.write(f"growth-{device}", settings, rows, arguments.out))
        if device == "cpu":  # where Matplotlib is
            draw(arguments.out, Path("docs/images/growth.png"))


if __name__ == "__main__":
    main()
