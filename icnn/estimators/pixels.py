"""What is likely in the gaps of pictures: a Gaussian of near pixels, and local kernel machines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor
from torch.nn import functional as F

from icnn.estimators.gaussian import most_likely
from icnn.estimators.local_machines import CHOICES, Machines, Taste, apart, places

MOST = 5000  # pixels, all of which are coupled
EXAMPLES = 2100  # of machines, shifted and mirrored pictures included
FEW = 400  # pictures to choose settings on
FOLDS, TRIED = 5, 3  # parts of the groups, and how many of them are held out in turn for that
SHIFTS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))
LARGE = 32  # pixels along a side, of pictures that look alike when they are moved by one
# How much of a covariance counts at any distance, and how much of the rest for a pixel's own side;
# how far it reaches, in sixty-fourths of a side; what is added to variances.
ALWAYS, OWN, REACH, NOISE = 0.5, 0.5, 8.0, 0.1
PARTS = len(CHOICES) + 3  # that a fit tells of
PULLS = (0.3, 1.0, 3.0, 10.0, 30.0)


class Pixels:
    """A Gaussian of all pixels, and machines for the gaps that they are asked about.

    Few pictures say little about pixels far from each other, so that covariances count less with
    the distance. How machines weigh things, and how much their answers count beside the Gaussian,
    is chosen on a part of the pictures, with half of each missing in several ways; gaps take the
    choice that was made for those most like them.

    Args:
        Z: Standardised pictures, as rows; numbers count where
        known: says so.
        shape: Height and width, and colours if there are.
        symmetric: Whether left and right are alike, as in faces.
        groups: Which pictures belong together, as those of one person: all or none of them are
            among those on which settings are chosen.
        random: What to draw from.
        device: Where machines compute.
        done: Told the name of each part as it begins, `PARTS` of them.

    Attributes:
        mean: Of the Gaussian, and
        precision: the inverse of its covariance.
        weight: Of the answers, for `icnn.Quadratic`.
        tastes: How machines weigh things: gaps like these, in this way.
    """

    def __init__(
        self, Z: np.ndarray, known: np.ndarray, shape: Sequence[int], symmetric: bool,
        groups: np.ndarray, random: np.random.RandomState, device: torch.device,
        done: Callable[[str], None],
    ):  # fmt: skip
        height, width, colours = (*shape, 1)[:3]
        self.shape, self.symmetric, self.device = (height, width, colours), symmetric, device
        self.places = places(self.shape)
        self.shifts = SHIFTS if min(height, width) >= LARGE else SHIFTS[:1]
        done("a Gaussian")
        taper = self._taper()
        whole = self._completed(torch.from_numpy(Z), torch.from_numpy(known), taper)
        self.tastes, pull = self._chosen(whole, groups, taper, random, done)
        done("all pictures")
        self._coupled(whole, taper)
        self.weight *= pull
        # Kernels grow with the square of examples: of more pictures, that many are drawn.
        some = np.sort(random.permutation(len(whole))[: EXAMPLES // (1 + symmetric)])
        self.machines = self._machines(whole[some], EXAMPLES)

    def __call__(self, Z: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Pictures with an answer in each gap."""
        answers = np.where(known, Z, self.mean)
        patterns, of = np.unique(known, axis=0, return_inverse=True)
        for i, pattern in enumerate(patterns):
            if pattern.any() and not pattern.all():
                rows = np.flatnonzero(of.ravel() == i)
                given = torch.from_numpy(Z[np.ix_(rows, pattern)])
                found = self.machines(torch.from_numpy(pattern), given, self._taste(pattern))
                answers[np.ix_(rows, ~pattern)] = found.numpy()
        return answers

    def _coupled(self, whole: Tensor, taper: Tensor) -> None:
        """Fit the Gaussian."""
        examples = self._augmented(whole, len(self.shifts))
        mean = examples.mean(dim=0)
        away = examples - mean
        covariance = (away.T @ away) / len(examples) * taper
        spread = covariance.diagonal().mean().clamp(min=1e-12)
        covariance.diagonal().add_(NOISE * spread)
        self.precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance)).numpy()
        self.mean, self.weight = mean.numpy(), np.full(len(mean), 1 / float(spread))

    def _completed(self, Z: Tensor, known: Tensor, taper: Tensor) -> Tensor:
        """Pictures whose gaps are filled by the Gaussian, in two rounds."""
        mean = torch.where(known, Z, 0.0).sum(dim=0) / known.sum(dim=0)
        whole, free = torch.where(known, Z, mean), np.full(Z.shape[1], np.inf)
        none = np.zeros(Z.shape[1])
        for _ in range(0 if bool(known.all()) else 2):
            self._coupled(whole, taper)
            whole = torch.from_numpy(most_likely(
                Z.numpy(), known.numpy(), self.mean, self.precision, whole.numpy(), none, -free,
                free,
            ))  # fmt: skip
        return whole

    def _taper(self) -> Tensor:
        """How much of a covariance counts: a kernel, so that what it multiplies stays one."""
        reach = REACH * max(self.shape[:2]) / 64
        found = torch.exp(-apart(self.places, self.places) / (2 * reach**2))
        if self.symmetric:
            middle = (self.shape[1] - 1) / 2
            folded = torch.stack([self.places[:, 0], (self.places[:, 1] - middle).abs()], dim=1)
            found = OWN * found + (1 - OWN) * torch.exp(-apart(folded, folded) / (2 * reach**2))
        return ALWAYS + (1 - ALWAYS) * found

    def _machines(self, whole: Tensor, most: int) -> Machines:
        copies = min(max(1, most // len(whole) // (1 + self.symmetric)), len(self.shifts))
        examples = self._augmented(whole, copies)
        return Machines(examples, copies, self.symmetric, self.shape, self.device)

    def _augmented(self, whole: Tensor, copies: int) -> Tensor:
        """Pictures, moved by a pixel, and mirrored."""
        images = whole.reshape(-1, *self.shape)
        if self.symmetric:
            images = torch.cat([images, images.flip(2)])
        padded = F.pad(images.movedim(3, 1), (1, 1, 1, 1), mode="replicate").movedim(1, 3)
        height, width, _ = self.shape
        moved = [
            padded[:, 1 + i : 1 + i + height, 1 + j : 1 + j + width]
            for i, j in self.shifts[:copies]
        ]
        return torch.cat(moved).reshape(-1, whole.shape[1])

    def _taste(self, known: np.ndarray) -> Taste:
        """That of the gaps which are most like these."""
        here = self._depth(known)
        return min(self.tastes, key=lambda kind: float(np.square(kind[0] - here).sum()))[1]

    def _depth(self, known: np.ndarray) -> np.ndarray:
        """How far, down and across, gaps are from what is known: what a choice depends on."""
        gaps = ~known.reshape(self.shape).any(axis=2)
        if not gaps.any():  # some colours of pixels are missing
            return np.zeros(2)
        nearest: Any = distance_transform_edt(gaps, return_distances=False, return_indices=True)
        return np.abs(nearest - np.indices(gaps.shape))[:, gaps].mean(axis=1)

    def _chosen(
        self, whole: Tensor, groups: np.ndarray, taper: Tensor, random: np.random.RandomState,
        done: Callable[[str], None],
    ) -> tuple[list[tuple[np.ndarray, Taste]], float]:  # fmt: skip
        """What is best on pictures held out, one setting after another, for each kind of gaps."""
        masks = [o for o in self._masks(random) if o.any() and not o.all()]  # as of tiny pictures
        tastes, pull = [Taste() for _ in masks], PULLS[1]
        depths = [self._depth(o.numpy()) for o in masks]
        kinds = random.permutation(np.unique(groups))
        mixed = random.permutation(len(whole))  # they may be sorted
        parts: list[tuple[Tensor, Tensor]] = []
        for part in np.array_split(kinds, min(FOLDS, len(kinds)))[:TRIED]:
            out = np.isin(groups[mixed], part)
            parts.append((whole[mixed[~out][:FEW]], whole[mixed[out][: FEW // 4]]))
        if min(len(rest) for rest, _ in parts) < 2:
            return list(zip(depths, tastes, strict=True)), pull
        machines = [self._machines(rest, 0) for rest, _ in parts]

        def error(o: Tensor, taste: Taste) -> float:
            wrong = [
                machine(o, out[:, o], taste) - out[:, ~o]
                for machine, (_, out) in zip(machines, parts, strict=True)
            ]
            return sum(float(part.square().mean()) for part in wrong)

        least = [error(o, taste) for o, taste in zip(masks, tastes, strict=True)]
        for name, values in CHOICES.items():
            done(f"choice of {name}")
            for i, o in enumerate(masks):
                for value in values:
                    other = replace(tastes[i], **{name: value})
                    if other != tastes[i] and (now := error(o, other)) < least[i]:
                        tastes[i], least[i] = other, now
        done("choice of the weight")
        free, wrong = np.full(whole.shape[1], np.inf), np.ones(len(PULLS))
        for machine, (rest, out) in zip(machines, parts, strict=True):
            self._coupled(rest, taper)
            for o, taste in zip(masks, tastes, strict=True):
                Z, known = out.numpy(), np.tile(o.numpy(), (len(out), 1))
                center = Z.copy()
                center[~known] = machine(o, out[:, o], taste).flatten()
                for i, way in enumerate(PULLS):
                    found = most_likely(
                        Z, known, self.mean, self.precision, center, way * self.weight, -free, free
                    )
                    # A product: of small errors and of large ones, the ratio counts.
                    wrong[i] *= float(np.square(found - Z)[~known].mean())
        return list(zip(depths, tastes, strict=True)), PULLS[int(wrong.argmin())]

    def _masks(self, random: np.random.RandomState) -> Iterator[Tensor]:
        """Which pixels are known where settings are chosen: halves of three kinds."""
        height, width, _ = self.shape
        rows, columns = (self.places[:, i].long() for i in range(2))
        yield rows < height // 2
        yield columns >= width // 2
        dots = torch.from_numpy(random.uniform(size=(height, width, 1)) < 0.5)
        yield dots.expand(self.shape).flatten()
