"""What is likely in the gaps of pictures: a Gaussian of near pixels, and local kernel machines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from icnn.estimators.gaussian import most_likely
from icnn.estimators.local_machines import CHOICES, Machines, Taste, apart, places

MOST = 5000  # pixels, all of which are coupled
EXAMPLES = 2100  # of machines, shifted and mirrored pictures included
FEW = 400  # pictures to choose settings on
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
    is chosen on a fifth of the pictures, with half of each missing in several ways.

    Args:
        Z: Standardised pictures, as rows; numbers count where
        known: says so.
        shape: Height and width, and colours if there are.
        symmetric: Whether left and right are alike, as in faces.
        groups: Which pictures belong together, as those of one person: all or none of them are
            among those on which settings are chosen.
        random: What to draw from.
        done: Told the name of each part as it begins, `PARTS` of them.

    Attributes:
        mean: Of the Gaussian, and
        precision: the inverse of its covariance.
        weight: Of the answers, for `icnn.Quadratic`.
        taste: How machines weigh things.
    """

    def __init__(
        self, Z: np.ndarray, known: np.ndarray, shape: Sequence[int], symmetric: bool,
        groups: np.ndarray, random: np.random.RandomState, done: Callable[[str], None],
    ):  # fmt: skip
        height, width, colours = (*shape, 1)[:3]
        self.shape, self.symmetric = (height, width, colours), symmetric
        self.places = places(self.shape)
        self.shifts = SHIFTS if min(height, width) >= LARGE else SHIFTS[:1]
        done("a Gaussian")
        whole = self._completed(torch.from_numpy(Z), torch.from_numpy(known))
        self.taste, pull = self._chosen(whole, groups, random, done)
        done("all pictures")
        self._coupled(whole)
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
                found = self.machines(torch.from_numpy(pattern), given, self.taste)
                answers[np.ix_(rows, ~pattern)] = found.numpy()
        return answers

    def _coupled(self, whole: Tensor) -> None:
        """Fit the Gaussian."""
        examples = self._augmented(whole, len(self.shifts))
        mean = examples.mean(dim=0)
        away = examples - mean
        covariance = (away.T @ away) / len(examples) * self._taper()
        spread = covariance.diagonal().mean().clamp(min=1e-12)
        covariance.diagonal().add_(NOISE * spread)
        self.precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance)).numpy()
        self.mean, self.weight = mean.numpy(), np.full(len(mean), 1 / float(spread))

    def _completed(self, Z: Tensor, known: Tensor) -> Tensor:
        """Pictures whose gaps are filled by the Gaussian, in two rounds."""
        mean = torch.where(known, Z, 0.0).sum(dim=0) / known.sum(dim=0)
        whole, free = torch.where(known, Z, mean), np.full(Z.shape[1], np.inf)
        none = np.zeros(Z.shape[1])
        for _ in range(0 if bool(known.all()) else 2):
            self._coupled(whole)
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
        return Machines(examples, copies, self.symmetric, self.shape)

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

    def _chosen(
        self, whole: Tensor, groups: np.ndarray, random: np.random.RandomState,
        done: Callable[[str], None],
    ) -> tuple[Taste, float]:  # fmt: skip
        """What is best on pictures held out, one setting after another."""
        kinds = random.permutation(np.unique(groups))
        held = torch.from_numpy(np.isin(groups, kinds[: max(1, len(kinds) // 5)]))
        best, pull = Taste(), PULLS[1]
        mixed = torch.from_numpy(random.permutation(len(whole)))  # they may be sorted
        rest, out = whole[mixed[~held[mixed]][:FEW]], whole[mixed[held[mixed]][: FEW // 4]]
        if len(rest) < 2:
            return best, pull
        machines, masks = self._machines(rest, 0), list(self._masks(random))

        def error(taste: Taste) -> float:
            wrong = [machines(o, out[:, o], taste) - out[:, ~o] for o in masks]
            return float(sum(part.square().mean() for part in wrong))

        least = error(best)
        for name, values in CHOICES.items():
            done(f"choice of {name}")
            for value in values:
                other = replace(best, **{name: value})
                if other != best and (now := error(other)) < least:
                    best, least = other, now
        done("choice of the weight")
        self._coupled(rest)
        least = np.inf
        for way in PULLS:
            wrong = 0.0
            for o in masks:
                known, Z = o.numpy(), out.numpy()
                center = Z.copy()
                center[:, ~known] = machines(o, out[:, o], best).numpy()
                found = most_likely(
                    Z, np.tile(known, (len(Z), 1)), self.mean, self.precision, center,
                    way * self.weight, np.full(len(known), -np.inf), np.full(len(known), np.inf),
                )  # fmt: skip
                wrong += float(np.square(found - Z)[:, ~known].mean())
            if wrong < least:
                pull, least = way, wrong
        return best, pull

    def _masks(self, random: np.random.RandomState) -> Iterator[Tensor]:
        """Which pixels are known where settings are chosen: halves of three kinds."""
        height, width, _ = self.shape
        rows, columns = (self.places[:, i].long() for i in range(2))
        yield rows < height // 2
        yield columns >= width // 2
        dots = torch.from_numpy(random.uniform(size=(height, width, 1)) < 0.5)
        yield dots.expand(self.shape).flatten()
