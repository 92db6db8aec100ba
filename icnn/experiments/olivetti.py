"""Section 6.3 and supplement K of the paper: one half of a face from the other.

Two protocols. The paper's: the left half, and the best epoch on the test set, whose faces are those
of five people. And an honest one: every choice is made by people held out of the training faces,
for the left half and for the bottom one.

Where it differs from the paper:

1. The paper's text says that the right half is predicted; its code predicts the left one from the
   right, mirrored, and so do we. Errors are mean squares on 0..255, of pixels of the missing half.
2. The paper's networks have batch norm along the x-path, and a learning rate that rises and falls;
   training faces are mirrored and moved by up to two pixels at random.
3. Gradient descent takes 30 steps with a momentum of 0.9 as the paper's code does, and stays in the
   box of grey levels, as the paper's text has it.
4. The better energy: `|factor (y - mean)|^2 / 2 + sum(weight (y - x)^2) / 2`, see `icnn.Imputer`.
   It is one for all gaps: left and bottom half, and those of the last table, which it never saw.
"""

from dataclasses import asdict, replace
from typing import Any

import numpy as np

import icnn
from icnn import report
from icnn.data import Faces, olivetti
from icnn.estimators.pixels import Pixels
from icnn.experiments import runs
from icnn.experiments.olivetti_methods import (
    CENTER,
    KERNEL,
    MEAN,
    METHODS,
    NEAREST,
    OURS,
    PAPER,
    PUBLISHED,
    RIDGE,
    SIDES,
    Completed,
    Curve,
    Settings,
    by_imputer,
    by_kernel,
    by_mean,
    by_nearest,
    by_ridge,
    errors,
    hidden,
    imputer,
    paper,
)  # fmt: skip
from icnn.experiments.olivetti_page import drawn, page
from icnn.experiments.statistics import Difference, paired_bootstrap
from icnn.extras import require
from icnn.learning.progress import parts_done

RIVALS = {MEAN: by_mean, NEAREST: by_nearest, RIDGE: by_ridge, KERNEL: by_kernel}
TRAINING, HELD = 35, 5  # people


def run(settings: Settings) -> dict[str, Any]:
    """Train, measure, draw: `olivetti.json`, pictures and `olivetti.html` in `out`."""
    for module, extra in (("rich", "cli"), ("sklearn", "sklearn"), ("matplotlib", "viz")):
        require(module, extra)
    from rich.console import Console

    console = Console()
    if settings.fast:
        console.print("A smoke test: one seed of a few faces. Its numbers mean nothing.")
        settings = replace(settings, seeds=1, epochs=1)
    faces = olivetti()
    if settings.fast:
        faces = faces[np.arange(400) % 10 < 2]
    both = faces[faces.people < TRAINING], faces[faces.people >= TRAINING]
    if settings.fast:
        faces = Faces(faces.images[:, ::4, ::4], faces.people)
    train, test = faces[faces.people < TRAINING], faces[faces.people >= TRAINING]
    seeds = runs.seeds(settings)
    with runs.resumed("olivetti", settings) as kept:
        rows = PAPER if settings.final else ()
        folds = np.array_split(np.arange(40), 2 if settings.fast else 8) if settings.final else []
        with parts_done(True, len(rows) + len(seeds) + len(folds)) as done:
            curves: dict[str, Curve] = {}
            for name in rows:
                done(f"paper: {name}")
                curves[name] = kept(paper)(name, settings, *both)
            found = []
            for seed in seeds:
                done(f"honest protocol, seed {seed}")
                parts = (train, test) if settings.final else apart(train, seed)
                own = kept(honest)(*parts, seed, others=seed == seeds[0])
                found.append(joined(kept(rivals)(*parts), own))
            crossed = []
            for i, people in enumerate(folds):
                done(f"cross-validation over people, part {i + 1}")
                out = np.isin(faces.people, people)
                parts = faces[~out], faces[out]
                crossed.append(joined(kept(rivals)(*parts), kept(honest)(*parts, settings.seed)))
        told = numbers(settings, seeds, curves, found, crossed)
        pictures = drawn(settings.out, curves, found[0])
        paths = report.publish(
            "olivetti", "Completion of faces: Olivetti", told,
            [__doc__ or "", *page(told, pictures, settings.final)],
            settings.out, reading=settings.final,
        )  # fmt: skip
        names = ("paper", "gain", "people", "gaps") if settings.final else ()
        for name in names:  # tables of the documents
            table = {key: told[key] for key in ("settings", "made")} | told[name]
            report.store(f"olivetti-{name}", table, settings.out)
    only_final = [told["people"]["rows"], told["paper"]["rows"]] if settings.final else []
    for rows in (told["rows"], told["gain"]["rows"], told["gaps"]["rows"], *only_final):
        print(report.table(rows))
    for name, gaps in told["gap of each face"].items():
        print(f"certified gap of each face, {name}: {' '.join(f'{gap:.0e}' for gap in gaps)}")
    if not settings.final:
        console.print("On people held out: --final measures on the test set, once all is chosen.")
    console.print(f"Look at [bold]{paths[-1]}[/]; the numbers are in {paths[0].name}")
    return told


def apart(train: Faces, seed: int) -> tuple[Faces, Faces]:
    """Faces to learn from, and those of a few people to measure on."""
    people = np.random.default_rng(seed).permutation(np.unique(train.people))[:HELD]
    out = np.isin(train.people, people)
    return train[~out], train[out]


def rivals(train: Faces, test: Faces) -> dict[str, dict[str, Completed]]:
    """Methods that do not depend on a seed, on both halves."""
    return {
        side: {
            name: method(train, test.images, hidden(side, test.images.shape[1]))
            for name, method in RIVALS.items()
        }
        for side in SIDES
    }


def honest(train: Faces, test: Faces, seed: int, others: bool = False) -> dict[str, Any]:
    """The imputer on both halves; and on other gaps, if wanted."""
    model, training = imputer(train, seed)
    assert isinstance(model.model_, Pixels)
    found: dict[str, Any] = {"people": test.people, "true": test.images.astype(float)}
    for side in SIDES:
        gaps = hidden(side, test.images.shape[1])
        found[side] = by_imputer(model, training, test.images, gaps)
    found["chosen"] = [asdict(taste) for _, taste in model.model_.tastes]
    found["weight"] = float(model.model_.weight[0])
    if others:
        found["others"] = any_gaps(model, train, test, seed)
    return found


def joined(rivals: dict[str, dict[str, Completed]], own: dict[str, Any]) -> dict[str, Any]:
    """All methods on both halves."""
    return own | {side: rivals[side] | own[side] for side in SIDES}


def any_gaps(model: icnn.Imputer, train: Faces, test: Faces, seed: int) -> dict[str, Any]:
    """Gaps other than halves, one for all faces or one for each, by the same model."""
    random, size = np.random.default_rng(seed), test.images.shape[1]
    rows = np.arange(len(test))[:: max(1, len(test) // 10)]
    images = test.images[rows].astype(float)
    box, scribble = np.zeros((2, size, size), dtype=bool)
    box[size * 9 // 32 : size * 21 // 32, size * 5 // 16 : size * 23 // 32] = True
    for _ in range(6):
        start, slope = random.uniform(0.1, 0.9, 2) * size, random.uniform(-0.7, 0.7, 2) * size
        for t in np.linspace(0, 1, 90):
            r, c = np.clip(start + slope * t, 1, size - 2).astype(int)
            scribble[r - 1 : r + 2, c - 1 : c + 2] = True
    kinds: dict[str, np.ndarray] = {
        "a box over the nose": np.broadcast_to(box, images.shape),
        "scribble": np.broadcast_to(scribble, images.shape),
        "dots, 60 %": random.uniform(size=images.shape) < 0.6,
        "dots, 95 %": random.uniform(size=images.shape) < 0.95,
    }
    found = {}
    for name, gaps in kinds.items():
        same = (gaps == gaps[0]).all()
        near = [by_nearest(train, images[i : i + 1], gaps[i]).images[0] for i in range(len(images))]
        kernel = by_kernel(train, images, gaps[0]).images if same else None
        solution = model.solve(np.where(gaps, np.nan, images))
        filled = solution.y.numpy().reshape(images.shape)
        found[name] = {
            "gaps": gaps, "filled": filled, "gap": solution.gap.numpy(),
            OURS: float(np.square(filled - images)[gaps].mean()),
            NEAREST: float(np.square(near - images)[gaps].mean()),
            KERNEL: "" if kernel is None else float(np.square(kernel - images)[gaps].mean()),
        }  # fmt: skip
    return {"true": images, "kinds": found}


def by_person(found: dict[str, Any], side: str, name: str) -> np.ndarray:
    """Mean squared errors of each person."""
    true = found["true"]
    wrong = errors(found[side][name].images, true, hidden(side, true.shape[1]))
    return np.array([wrong[found["people"] == p].mean() for p in np.unique(found["people"])])


def numbers(
    settings: Settings, seeds: list[int], curves: dict[str, Curve], found: list[dict[str, Any]],
    crossed: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """All that is kept."""
    rows: list[report.Row] = []
    for name in METHODS:
        row: dict[str, str | float] = {"method": name}
        for side in SIDES:
            means = np.array([by_person(f, side, name).mean() for f in found])
            row[side] = spread(means)
            if name != KERNEL:
                row[f"{side}, less kernel ridge"] = told_of(against(found, side, name, KERNEL))
            else:
                row[f"{side}, less kernel ridge"] = ""
        seconds = [f[side][name].seconds for f in found for side in SIDES]
        row["a half, with training, s"] = float(np.mean(seconds))
        rows.append(row)
    told = report.result(report.shown(settings), rows)
    on = {f"the {len(np.unique(found[0]['people']))} people above": found, "all people": crossed}
    told["gain"] = {"rows": [
        {"on": who, "less": name}
        | {side: told_of(against(some, side, OURS, name)) for side in SIDES}
        for who, some in on.items() if some for name in (KERNEL, CENTER)
    ]}  # fmt: skip
    told["chosen"] = [{key: f[key] for key in ("chosen", "weight")} for f in found]
    told["runs"] = [
        {"method": name, "seed": seed, "side": side,
         "error": float(by_person(f, side, name).mean()), "seconds": f[side][name].seconds,
         "worst gap": worst(f[side][name].gap)}
        for seed, f in zip(seeds, found, strict=True) for side in SIDES for name in METHODS
    ]  # fmt: skip
    told["paper"] = {
        "rows": [
            {"method": name, "MSE, best test epoch": f"{curve.best:.1f}",
             "last epoch": f"{curve.test[-1]:.1f}", "published": f"{PUBLISHED[name]}"}
            for name, curve in curves.items()
        ] + [
            {"method": f"{KERNEL}: no look at the test", "MSE, best test epoch": "",
             "last epoch": rows[METHODS.index(KERNEL)]["left"], "published": ""}
        ],
        "curves": {
            name: {"train": curve.train, "test": curve.test} for name, curve in curves.items()
        },
    }  # fmt: skip
    told["people"] = {"rows": [
        {"method": name} | {
            side: spread(np.concatenate([by_person(f, side, name) for f in crossed]))
            for side in SIDES
        }
        for name in METHODS
    ] if crossed else []}  # fmt: skip
    kinds = found[0]["others"]["kinds"]
    told["gaps"] = {"rows": [
        {"missing": name, **{method: one[method] for method in (NEAREST, KERNEL, OURS)},
         "worst gap": f"{one['gap'].max():.2g}",
         "least and largest": f"{one['filled'].min():.1f} ... {one['filled'].max():.1f}"}
        for name, one in kinds.items()
    ]}  # fmt: skip
    told["gap of each face"] = {name: one["gap"].tolist() for name, one in kinds.items()}
    return told


def worst(gap: np.ndarray | None) -> float | None:
    """Of a method that has one."""
    return None if gap is None else float(gap.max())


def spread(values: np.ndarray) -> str:
    """Mean and standard deviation, if there is any."""
    return f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if np.ptp(values) > 0 else "")


def told_of(difference: Difference) -> str:
    """With its interval."""
    return f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]"


def against(found: list[dict[str, Any]], side: str, name: str, other: str) -> Difference:
    """Errors of people less those of another method: of each the mean over seeds."""
    of: dict[int, list[np.ndarray]] = {}
    for one in found:
        both = np.stack([by_person(one, side, n) for n in (name, other)], axis=1)
        for person, wrong in zip(np.unique(one["people"]), both, strict=True):
            of.setdefault(person, []).append(wrong)
    means = np.array([np.mean(parts, axis=0) for parts in of.values()])
    return paired_bootstrap(means[:, 0], means[:, 1])
