"""What is likely in the gaps of pictures: a Gaussian of near pixels, and local kernel machines."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from icnn.estimators.gaussian import most_likely
from icnn.estimators.local_machines import CHOICES, Machines, Taste, apart, places

MOST = 5000  # pixels, all of which are coupled
EXAMPLES = 2100  # of machines, shifted and mirrored pictures included
FEW = 400  # pictures to choose settings on
FOLDS = 5  # parts of the groups, each held out in turn for that
SHIFTS = tuple(product((0, 1, -1), repeat=2))  # down and across
AWAY = 2 / 64  # of a side, by which copies of pictures are moved to learn from them as well
LARGE = 32  # pixels along a side, of pictures that look alike when they are moved by one
# How much of a covariance counts at any distance, and how much of the rest for a pixel's own side;
# how far it reaches, in sixty-fourths of a side; what is added to variances.
ALWAYS, OWN, REACH, NOISE = 0.1, 0.5, 13.0, 0.1
PARTS = len(CHOICES) + 3  # that a fit tells of
PULL, PULLS = 0.3, (0.1, 1.0, 3.0, 10.0)  # of the answers: the usual weight, and other ones
SURE = 0.5  # standard errors, by which another setting has to be better than the usual one


class Pixels:
    """A Gaussian of all pixels, and machines for the gaps that they are asked about.

    Few pictures say little about pixels far from each other, so that covariances count less with
    the distance. How machines weigh things, and how much their answers count beside the Gaussian,
    is chosen on each part of the pictures in turn, pixels missing in several ways; gaps take the
    choice that was made for those most like them. A setting other than the usual one is taken if it
    is clearly better.

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
        pictures: What machines learn from.
    """

    def __init__(
        self, Z: np.ndarray, known: np.ndarray, shape: Sequence[int], symmetric: bool,
        groups: np.ndarray, random: np.random.RandomState, device: torch.device,
        done: Callable[[str], None],
    ):  # fmt: skip
        height, width, colours = (*shape, 1)[:3]
        self.shape, self.symmetric = (height, width, colours), symmetric
        self.places = places(self.shape)
        self.large = min(height, width) >= LARGE
        done("a Gaussian")
        taper = self._taper()
        whole = self._completed(torch.from_numpy(Z), torch.from_numpy(known), taper)
        self.tastes, pull = self._chosen(whole, groups, taper, random, device, done)
        done("all pictures")
        self._coupled(whole, taper)
        self.weight *= pull
        # Kernels grow with the square of examples: of more pictures, that many are drawn.
        some = np.sort(random.permutation(len(whole))[: EXAMPLES // (1 + symmetric)])
        self.pictures = whole[some].float().to(device)

    def __call__(self, Z: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Pictures with an answer in each gap."""
        answers = np.where(known, Z, self.mean)
        patterns, of = np.unique(known, axis=0, return_inverse=True)
        for i, pattern in enumerate(patterns):
            if pattern.any() and not pattern.all():
                rows = np.flatnonzero(of.ravel() == i)
                given = torch.from_numpy(Z[np.ix_(rows, pattern)])
                taste = self._taste(pattern)
                found = self._answers(self.pictures, torch.from_numpy(pattern), given, taste, True)
                answers[np.ix_(rows, ~pattern)] = found.numpy()
        return answers

    def _answers(
        self, pictures: Tensor, known: Tensor, given: Tensor, taste: Taste, copied: bool
    ) -> Tensor:
        """What machines make of what is given, with copies of pictures where they tell more."""
        images, depth = self._mirrored(pictures), self._depth(known.numpy())
        # Along the edge of the gaps, to where known pixels are the same ones; others, not deeper
        # than a move, are filled by what is next to them.
        axis = int(depth.argmin())
        away, few = AWAY * self.shape[axis], 3 * len(images) <= EXAMPLES
        moves = [0]
        if copied and few and self.large and depth.max() > away:
            moves += [round(away), -round(away)]
        examples = torch.cat([moved(images, move, axis) for move in moves]).flatten(1)
        machines = Machines(examples, len(moves), self.symmetric, self.shape, pictures.device)
        return machines(known, given, taste)

    def _coupled(self, whole: Tensor, taper: Tensor) -> None:
        """Fit the Gaussian."""
        images = self._mirrored(whole)
        shifts = SHIFTS if self.large else SHIFTS[:1]
        examples = torch.cat([moved(moved(images, i, 0), j, 1) for i, j in shifts]).flatten(1)
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

    def _mirrored(self, pictures: Tensor) -> Tensor:
        """Pictures of rows, columns and colours; then their mirror images, if they are alike."""
        images = pictures.reshape(-1, *self.shape)
        return torch.cat([images, images.flip(2)]) if self.symmetric else images

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
        device: torch.device, done: Callable[[str], None],
    ) -> tuple[list[tuple[np.ndarray, Taste]], float]:  # fmt: skip
        """What is best on pictures held out, one setting after another, for each kind of gaps."""
        masks = [o for o in self._masks(random) if o.any() and not o.all()]  # as of tiny pictures
        depths = [self._depth(o.numpy()) for o in masks]
        kinds = random.permutation(np.unique(groups))
        mixed = random.permutation(len(whole))  # they may be sorted
        parts: list[tuple[Tensor, Tensor]] = []
        held: list[np.ndarray] = []
        for part in np.array_split(kinds, min(FOLDS, len(kinds))):
            out = np.isin(groups[mixed], part)
            held.append(mixed[out][: FEW // 4])
            parts.append((whole[mixed[~out][:FEW]], whole[held[-1]]))
        whose = np.unique(groups[np.concatenate(held)], return_inverse=True)[1]
        if not masks or min(len(rest) for rest, _ in parts) < 2:
            return [(depth, Taste()) for depth in depths] or [(np.zeros(2), Taste())], PULL
        learned = [rest.float().to(device) for rest, _ in parts]

        def by_group(wrong: list[np.ndarray]) -> np.ndarray:
            return np.bincount(whose, np.concatenate(wrong)) / np.bincount(whose)

        def errors(o: Tensor, taste: Taste) -> np.ndarray:
            return by_group([
                (self._answers(rest, o, out[:, o], taste, False) - out[:, ~o])
                .square().mean(dim=1).numpy()
                for rest, (_, out) in zip(learned, parts, strict=True)
            ])  # fmt: skip

        tastes = [Taste() for _ in masks]
        least = [errors(o, Taste()) for o in masks]
        for name, values in CHOICES.items():
            done(f"choice of {name}")
            for i, o in enumerate(masks):
                for value in values if self.symmetric or name != "mirrored" else ():
                    taste = replace(tastes[i], **{name: value})
                    if clearly_less(found := errors(o, taste), least[i]):
                        tastes[i], least[i] = taste, found
        done("choice of the weight")
        free, pulls = np.full(whole.shape[1], np.inf), (PULL, *PULLS)
        wrong: dict[tuple[int, float], list[np.ndarray]] = defaultdict(list)
        for pictures, (rest, out) in zip(learned, parts, strict=True):
            self._coupled(rest, taper)
            for i, (o, taste) in enumerate(zip(masks, tastes, strict=True)):
                Z, known = out.numpy(), np.tile(o.numpy(), (len(out), 1))
                center = Z.copy()
                center[~known] = self._answers(pictures, o, out[:, o], taste, True).flatten()
                for pull in pulls:
                    found = most_likely(
                        Z, known, self.mean, self.precision, center, pull * self.weight, -free, free
                    )
                    wrong[i, pull].append(np.square(found - Z)[:, ~o.numpy()].mean(axis=1))
        # Of gaps with small errors and of those with large ones, the ratio counts.
        usual = [max(by_group(wrong[i, PULL]).mean(), 1e-12) for i in range(len(masks))]
        ratios = {
            pull: np.sum([by_group(wrong[i, pull]) / u for i, u in enumerate(usual)], axis=0)
            for pull in pulls
        }
        best = PULL
        for pull in PULLS:
            if clearly_less(ratios[pull], ratios[best]):
                best = pull
        return list(zip(depths, tastes, strict=True)), best

    def _masks(self, random: np.random.RandomState) -> Iterator[Tensor]:
        """Which pixels are known where settings are chosen: halves of three kinds, and a frame."""
        height, width, _ = self.shape
        rows, columns = (self.places[:, i].long() for i in range(2))
        yield rows < height // 2
        yield columns >= width // 2
        dots = torch.from_numpy(random.uniform(size=(height, width, 1)) < 0.5)
        yield dots.expand(self.shape).flatten()
        sides = zip((rows, columns), (height, width), strict=True)
        down, across = ((at < size // 4) | (at >= size - size // 4) for at, size in sides)
        yield down | across


def moved(images: Tensor, move: int, axis: int) -> Tensor:
    """Pictures whose pixels at `i + move` along an axis come to `i`; those at the end stay."""
    at = torch.arange(images.shape[1 + axis], device=images.device) + move
    return images.index_select(1 + axis, at.clamp(0, len(at) - 1))


def clearly_less(errors: np.ndarray, others: np.ndarray) -> bool:
    """By a share of the standard error: of few groups, much is by chance."""
    gain = others - errors
    return float(gain.mean()) > SURE * float(gain.std(ddof=1)) / len(gain) ** 0.5
