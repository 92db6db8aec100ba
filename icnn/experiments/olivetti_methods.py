"""What the completion of faces compares: the paper's networks, rivals, the imputer."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import icnn
from icnn.data import Faces
from icnn.estimators.kernel import distances

CONVS = ((32, 8, (4, 2)), (64, 4, 2), (64, 3, 1))
SIDES = ("left", "bottom")
# The methods of the honest table, in its order.
MEAN, NEAREST, RIDGE = "mean face", "nearest neighbour", "ridge"
KERNEL, CENTER, OURS = "kernel ridge, mirrored faces", "same centre, no energy", "icnn.Imputer"
METHODS = (MEAN, NEAREST, RIDGE, KERNEL, CENTER, OURS)
BUNDLE, STEPS, RELAXED = "bundle entropy", "gradient descent", "gradient descent, not convex"
PAPER = {BUNDLE: 3e-3, STEPS: 1e-3, RELAXED: 3e-3}  # with the largest rates of their learning
PUBLISHED: dict[str, float] = dict(zip(PAPER, (833.0, 872.0, 850.9), strict=True))
RIDGES = tuple(10.0**k for k in np.arange(-3, 2.1, 0.5))
WIDTHS = (0.05, 0.1, 0.2, 0.4, 0.8)
FOLDS = 7


@dataclass(frozen=True)
class Settings:
    """What the experiment depends on."""

    seed: int = 0
    seeds: int = 5
    out: Path = Path("icnn-olivetti")
    fast: bool = False
    final: bool = False
    epochs: int = 60  # of the paper's networks


@dataclass
class Curve:
    """Squared errors over epochs, and what the best one makes of the test faces."""

    train: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    images: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def best(self) -> float:
        """The paper's number: of the best epoch on the test set."""
        return min(self.test)


@dataclass
class Completed:
    """What a method makes of the missing half, and how long that took, with all training."""

    images: np.ndarray
    seconds: float
    gap: np.ndarray | None = None


def hidden(side: str, size: int) -> np.ndarray:
    """Which pixels of a square are to be found."""
    gaps, half = np.zeros((size, size), dtype=bool), size // 2
    gaps[(slice(None), slice(half)) if side == "left" else (slice(half, None), slice(None))] = True
    return gaps


class Moved:
    """Batches of faces, each mirrored or not and moved by up to two pixels."""

    def __init__(self, images: Tensor, size: int):
        self.images, self.size = images, size
        self.padded = F.pad(images[:, None], (2, 2, 2, 2), mode="replicate")[:, 0]

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.images)).split(self.size):
            moves = torch.randint(0, 5, (len(rows), 2)).tolist()
            faces = torch.stack([
                self.padded[row, i : i + 64, j : j + 64]
                for row, (i, j) in zip(rows.tolist(), moves, strict=True)
            ])  # fmt: skip
            mirrored = torch.rand(len(rows), 1, 1) < 0.5
            yield halves(torch.where(mirrored, faces.flip(2), faces))


def halves(images: Tensor) -> tuple[Tensor, Tensor]:
    """The right half, mirrored, and the left one."""
    return images[:, None, :, 32:].flip(3), images[:, None, :, :32]


def paper(name: str, settings: Settings, train: Faces, test: Faces) -> Curve:
    """The left half by the paper's network, in its own protocol: the best epoch on the test set."""
    torch.manual_seed(settings.seed)
    energy = icnn.ConvPICNN(
        (1, 64, 32), (1, 64, 32), CONVS, (512,), x_norm="batch",
        positivity=None if name == RELAXED else "project",
    )  # fmt: skip
    solver: Any = icnn.BundleEntropy(max_steps=5)
    if name != BUNDLE:
        solver = icnn.ProjectedGradient(max_steps=30, step_size=0.01, momentum=0.9)
    entropy, curve = float(name == BUNDLE), Curve()

    def answer(energy: Any, x: Tensor) -> Tensor:
        return icnn.argmin(energy, x, icnn.Box(), entropy=entropy, solver=solver).y

    def loss(energy: Any, x: Tensor, y: Tensor) -> Tensor:
        return 255**2 * (answer(energy, x) - y).square().mean()

    def look(run: Any) -> None:
        run.energy.eval()
        with torch.no_grad():
            found = answer(run.energy, held[0])
        curve.test.append(255**2 * float((found - held[1]).square().mean()))
        curve.train.append(float(run.history.rows[-1]["loss"]))
        if curve.test[-1] == curve.best:
            curve.images = test.images.astype(float)
            curve.images[:, :, :32] = 255 * found[:, 0].numpy()

    images, other = (torch.from_numpy(part.images).float() / 255 for part in (train, test))
    loader, held = Moved(images, 70), halves(other)
    optimizer = torch.optim.Adam(energy.parameters(), lr=PAPER[name])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PAPER[name], total_steps=settings.epochs * len(loader) + 1, pct_start=0.1,
        cycle_momentum=False,
    )  # fmt: skip
    icnn.fit(
        energy, loader, loss, epochs=settings.epochs, optimizer=optimizer, schedule=schedule,
        callbacks=[look], progress=False, parallel=False,
    )  # fmt: skip
    return curve


def by_mean(train: Faces, test: np.ndarray, gaps: np.ndarray) -> Completed:
    """The mean face."""
    since = time.perf_counter()
    y = np.broadcast_to(train.images.mean(axis=0)[gaps], (len(test), gaps.sum()))
    return Completed(filled(test, gaps, y), time.perf_counter() - since)


def by_nearest(train: Faces, test: np.ndarray, gaps: np.ndarray) -> Completed:
    """The face whose known pixels are nearest."""
    since = time.perf_counter()
    x, y = train.images[:, ~gaps].astype(float), train.images[:, gaps]
    rows = distances(test[:, ~gaps], x).argmin(axis=1)
    return Completed(filled(test, gaps, y[rows]), time.perf_counter() - since)


def by_ridge(train: Faces, test: np.ndarray, gaps: np.ndarray) -> Completed:
    """A linear function of the known half; its parameter by cross-validation over people."""
    since = time.perf_counter()

    def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b.T / a.shape[1] / 50**2

    y = tuned(train, test, gaps, [products], mirrored=False)
    return Completed(filled(test, gaps, y), time.perf_counter() - since)


def by_kernel(train: Faces, test: np.ndarray, gaps: np.ndarray) -> Completed:
    """Least squares with an RBF kernel, and mirrored faces; width and ridge likewise."""
    since = time.perf_counter()
    x = train.images[:, ~gaps].astype(float)
    unit = float(np.median(distances(x, x)))

    def near(width: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        return lambda a, b: np.exp(-width * distances(a, b) / unit)

    y = tuned(train, test, gaps, [near(width) for width in WIDTHS], mirrored=True)
    return Completed(filled(test, gaps, y), time.perf_counter() - since)


def tuned(
    train: Faces, test: np.ndarray, gaps: np.ndarray, kernels: list[Any], mirrored: bool
) -> np.ndarray:
    """What the best kernel and ridge, by cross-validation over people, say of other faces."""
    images, people = train.images.astype(float), train.people
    if mirrored:
        images, people = np.concatenate([images, images[:, :, ::-1]]), np.tile(people, 2)
    x, y = images[:, ~gaps], images[:, gaps]
    middle, real = x.mean(axis=0), np.arange(len(x)) < len(train)
    kinds, errors = np.unique(people), {}
    for number, kernel in enumerate(kernels):
        K = kernel(x - middle, x - middle)
        for part in np.array_split(kinds, min(FOLDS, len(kinds))):
            out = np.isin(people, part)
            values, vectors = np.linalg.eigh(K[np.ix_(~out, ~out)])
            mean = y[~out].mean(axis=0)
            turned, new = vectors.T @ (y[~out] - mean), K[np.ix_(out & real, ~out)] @ vectors
            for ridge in RIDGES:
                answer = mean + (new / (values.clip(min=0) + ridge)) @ turned
                wrong = float(np.square(answer - y[out & real]).sum())
                errors[number, ridge] = errors.get((number, ridge), 0.0) + wrong
    number, ridge = min(errors, key=errors.__getitem__)
    kernel, mean = kernels[number], y.mean(axis=0)
    K = kernel(x - middle, x - middle) + ridge * np.eye(len(x))
    return mean + kernel(test[:, ~gaps] - middle, x - middle) @ np.linalg.solve(K, y - mean)


def filled(images: np.ndarray, gaps: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Faces with answers, cut to grey levels, in their gaps."""
    found = images.astype(float)
    found[:, gaps] = np.clip(y, 0, 255)
    return found


def imputer(train: Faces, seed: int) -> tuple[icnn.Imputer, float]:
    """Ours: one for all gaps; and how long it learned."""
    since = time.perf_counter()
    shape = train.images.shape[1:]
    model = icnn.Imputer(image_shape=shape, symmetric=True, random_state=seed)
    model.fit(train.images.astype(float), groups=train.people)
    return model, time.perf_counter() - since


def by_imputer(
    model: icnn.Imputer, training: float, test: np.ndarray, gaps: np.ndarray
) -> dict[str, Completed]:
    """What it answers, and what its machines alone do."""
    holes = np.where(gaps, np.nan, test.astype(float)).reshape(len(test), -1)
    since = time.perf_counter()
    center = model.answers(holes).reshape(test.shape)
    alone = training + time.perf_counter() - since
    since = time.perf_counter()
    found = model.solve(holes)
    seconds = training + time.perf_counter() - since
    return {
        CENTER: Completed(filled(test, gaps, center[:, gaps]), alone),
        OURS: Completed(found.y.numpy().reshape(test.shape), seconds, found.gap.numpy()),
    }


def errors(images: np.ndarray, true: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    """Mean squared error of each face, on 0..255."""
    return np.square(images - true)[:, gaps].mean(axis=1)
