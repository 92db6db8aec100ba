"""What is shown of the completion of faces: a page, and pictures."""

from pathlib import Path
from typing import Any

import numpy as np

from icnn.experiments.olivetti_methods import METHODS, OURS, PUBLISHED, SIDES, Curve, hidden


def page(told: dict[str, Any], pictures: dict[str, Path], final: bool) -> list[Any]:
    """The parts of the report, after its text."""
    where = "on the last five people" if final else "on five of the training people, held out"
    found: list[Any] = [
        f"The honest protocol, {where}: mean squared errors, mean and standard deviation over "
        "seeds; the difference to the kernel ridge has its 95 % interval (bootstrap over people).",
        told["rows"],
        f"Errors of {OURS} less those of others, likewise.",
        told["gain"]["rows"],
        "Faces by AT&T Laboratories Cambridge. Below each completion: where it is wrong.",
        *(pictures[side] for side in SIDES),
        "Gaps that the same model never saw: the error, and the worst certificate of a face.",
        told["gaps"]["rows"],
        pictures["gaps"],
    ]
    if final:
        found += [
            "Cross-validation over all 40 people: mean and standard deviation over people.",
            told["people"]["rows"],
            "The paper's protocol: the left half, the best epoch on the test set.",
            told["paper"]["rows"],
            pictures["curves"],
        ]
    return found


def drawn(out: Path, curves: dict[str, Curve], found: dict[str, Any]) -> dict[str, Path]:
    """Pictures: completions with their errors, other gaps, and the paper's figure."""
    from matplotlib.figure import Figure

    paths = {name: out / f"olivetti-{name}.png" for name in (*SIDES, "gaps")}
    people = found["people"]
    rows = [int(np.flatnonzero(people == p)[0]) for p in np.unique(people)][:4]
    for side in SIDES:
        true = found["true"]
        gaps = hidden(side, true.shape[1])
        parts = {name: found[side][name].images for name in METHODS}
        if side == "left" and true.shape[1] == 64:  # what the paper's networks are made for
            parts = {f"paper, {name}": curve.images for name, curve in curves.items()} | parts
        observed = np.where(gaps, 255.0, true)
        columns = {"observed": observed, "true": true} | parts
        figure = Figure(figsize=(1.25 * len(columns), 2.5 * len(rows)), layout="constrained")
        grid: Any = figure.subplots(2 * len(rows), len(columns), squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for i, row in enumerate(rows):
            for j, (name, images) in enumerate(columns.items()):
                grid[2 * i, j].imshow(images[row], cmap="gray", vmin=0, vmax=255)
                if not i:
                    grid[0, j].set_title(name.replace(", ", ",\n"), fontsize=7)
                if name in parts:
                    wrong = images[row] - true[row]
                    grid[2 * i + 1, j].imshow(wrong, cmap="RdBu_r", vmin=-80, vmax=80)
        figure.savefig(paths[side], dpi=130)
    other = found["others"]
    kinds = other["kinds"]
    figure = Figure(figsize=(1.6 * 2 * len(kinds), 5), layout="constrained")
    grid = figure.subplots(3, 2 * len(kinds), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for j, (name, one) in enumerate(kinds.items()):
        for i in range(min(3, len(other["true"]))):
            seen = np.where(one["gaps"][i], 255.0, other["true"][i])
            for axes, image in zip(
                grid[i, 2 * j : 2 * j + 2], (seen, one["filled"][i]), strict=True
            ):
                axes.imshow(image, cmap="gray", vmin=0, vmax=255)
        grid[0, 2 * j].set_title(name, fontsize=8)
    figure.savefig(paths["gaps"], dpi=130)
    if curves:
        paths["curves"] = out / "olivetti-curves.png"
        figure = Figure(figsize=(4 * len(curves), 3), layout="constrained")
        grid = figure.subplots(1, len(curves), sharey=True, squeeze=False)
        for axes, (name, curve) in zip(grid[0], curves.items(), strict=True):
            epochs = range(1, len(curve.test) + 1)
            axes.plot(epochs, curve.train, label="training")
            axes.plot(epochs, curve.test, label="test")
            axes.axhline(PUBLISHED[name], color="0.5", ls=":", label="published")
            axes.set(title=name, xlabel="epoch", ylim=(0, 2000))
            axes.spines[["top", "right"]].set_visible(False)
        grid[0, 0].set_ylabel("mean squared error")
        grid[0, 0].legend(frameon=False)
        figure.savefig(paths["curves"], dpi=130)
    return paths
