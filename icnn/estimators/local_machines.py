"""Kernel machines for the gaps of pictures, each for a block of pixels and what is near it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SIDE = 8  # blocks along a side of a picture, each with a machine of its own
FEW = 100  # examples, whose median distance to all is the unit
# How far pixels count from the known one that is nearest to a block, and to its mirror image, in
# sixty-fourths of a side, and how much farther for each pixel to go there.
NEAR, NEAR_MIRRORED, FARTHER = 1.0, 4.0, 0.4
WIDTH = 0.1  # of the kernel exp(-sqrt(2 width d^2))
MORE = 6.0  # the ridge of mirrored pictures, in units of that of others: they are less alike
GROWTH = 0.7  # of the ridge with the number of copies of each picture


@dataclass(frozen=True)
class Taste:
    """What is different from one kind of pictures, or of gaps, to another.

    Attributes:
        everywhere: How much all known pixels count beside those near a block.
        level: Which share of the level of known pixels is taken as that of missing ones.
        steepness: How much differences of pixels count beside pixels.
        ridge: What is added to the diagonal of kernels.
        mirrored: How much pixels count that are near the mirror image of a block.
    """

    everywhere: float = 0.1
    level: float = 0.75
    steepness: float = 0.0
    ridge: float = 0.1
    mirrored: float = 0.2


CHOICES = {  # other than the usual one
    "everywhere": (0.03, 0.3, 1.0),
    "level": (0.0,),
    "steepness": (3.0,),
    "mirrored": (0.5,),
    "ridge": (0.03, 0.3),
}


class Block(NamedTuple):
    """A part of the gaps, where it is, and where its mirror image is."""

    pixels: Tensor
    centers: list[Tensor]


class Features(NamedTuple):
    """Numbers of each picture, where they are, and squared distances by all of them."""

    numbers: Tensor
    places: Tensor
    apart: Tensor


class Machines:
    """Examples, from which machines are made for the gaps that they are asked about.

    Each block of a picture has its own Gaussian process. Its kernel is of the pixels near the block
    (from the nearest known one on) and near its mirror image, and a little of all others: few
    pictures say little about pixels far from each other.

    Args:
        examples: Rows of pixels; `copies` of each picture, one after the other. The second half of
            each copy is mirrored if
        symmetric: Left and right are alike.
        copies: How many of each picture.
        shape: Height, width and colours.
        device: Where to compute.
    """

    def __init__(
        self, examples: Tensor, copies: int, symmetric: bool, shape: tuple[int, int, int],
        device: torch.device,
    ):  # fmt: skip
        # Kernels with a ridge are far from singular: half of the digits are enough for them.
        self.examples = examples.float().to(device)
        self.symmetric, self.shape = symmetric, shape
        ridge = self.examples.new_ones(1 + symmetric, len(examples) // copies // (1 + symmetric))
        ridge[1:] *= MORE
        self.ridge = copies**GROWTH * ridge.flatten().repeat(copies)
        self.places = places(shape).to(device)
        self.unit = max(shape[:2]) / 64

    def __call__(self, known: Tensor, given: Tensor, taste: Taste) -> Tensor:
        """Answers to all pixels that are missing, by a machine for each block of them."""
        count = len(self.examples)
        known, given = known.to(self.places.device), given.to(self.places.device)
        both = torch.cat([self.examples[:, known], given.float()])
        values = Features(both, self.places[known], apart(both, both[:count]) / both.shape[1])
        slopes = self._slopes(known, both) if taste.steepness else None
        answers = given.new_empty(len(given), int((~known).sum()))
        place = torch.cumsum(~known, dim=0) - 1
        for block in self._blocks(known):
            near, level = self._near(values, block, taste)
            # D = sum w (x - x')^2,    m = sum w x.    Without a share l of the levels m it is
            # sum w ((x - l m) - (x' - l m'))^2 = D - (2 l - l^2) (m - m')^2
            share = 2 * taste.level - taste.level**2
            D = near - share * (level[:, None] - level[:count]).square()
            if slopes is not None and len(slopes.places):
                D = D + taste.steepness**2 * self._near(slopes, block, taste)[0]
            D = D.clamp(min=0)
            middle = D[:FEW].median()
            K = torch.exp(-(2 * WIDTH * D / torch.where(middle > 0, middle, 1.0)).sqrt())
            target = self.examples[:, block.pixels] - taste.level * level[:count, None]
            mean = target.mean(dim=0)
            factor = torch.linalg.cholesky(K[:count] + torch.diag(taste.ridge * self.ridge))
            weights = torch.cholesky_solve(target - mean, factor)
            found = K[count:] @ weights + mean + taste.level * level[count:, None]
            answers[:, place[block.pixels]] = found.to(given.dtype)
        return answers.cpu()

    def _near(self, features: Features, block: Block, taste: Taste) -> tuple[Tensor, Tensor]:
        """Squared distances of pictures to the examples where it counts, and levels there."""
        weight = self._bump(features.places, block.centers[0], NEAR)
        if self.symmetric:
            other = self._bump(features.places, block.centers[1], NEAR_MIRRORED)
            weight = (1 - taste.mirrored) * weight + taste.mirrored * other
        near = (weight > 1e-2 * weight.max()).nonzero()[:, 0]
        weight = (weight[near] / weight[near].sum()).float()
        part, count = features.numbers[:, near], len(self.examples)
        own = apart(part * weight.sqrt(), part[:count] * weight.sqrt())
        level = part @ weight + taste.everywhere * features.numbers.mean(dim=1)
        whole = 1 + taste.everywhere
        return (own + taste.everywhere * features.apart) / whole, level / whole

    def _slopes(self, known: Tensor, both: Tensor) -> Features:
        """Differences of pixels two apart, where both are known."""
        at = torch.full((len(known),), -1, device=known.device)
        at[known] = torch.arange(both.shape[1], device=known.device)
        at = at.reshape(self.shape)
        pairs = [(at[2:], at[:-2]), (at[:, 2:], at[:, :-2])]
        a, b = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
        whole = (a >= 0) & (b >= 0)
        a, b = a[whole], b[whole]
        numbers, seen = (both[:, a] - both[:, b]) / 2, self.places[known]
        distances = apart(numbers, numbers[: len(self.examples)]) / max(1, numbers.shape[1])
        return Features(numbers, (seen[a] + seen[b]) / 2, distances)

    def _blocks(self, known: Tensor) -> Iterator[Block]:
        """Squares of pixels that are missing."""
        height, width, _ = self.shape
        size = max(2, round(max(height, width) / SIDE))
        square = (self.places // size) @ self.places.new_tensor([float(width), 1.0])
        for which in torch.unique(square[~known]):
            pixels = ((square == which) & ~known).nonzero()[:, 0]
            center = self.places[pixels].mean(dim=0)
            yield Block(pixels, [center, torch.stack([center[0], width - 1 - center[1]])])

    def _bump(self, places: Tensor, center: Tensor, reach: float) -> Tensor:
        """How much what is near the place that is nearest to a center counts."""
        distance = (places - center).square().sum(dim=1)
        nearest = places[distance.argmin()]
        reach = max(reach * self.unit, 1.0) + FARTHER * float(distance.min().sqrt())
        bump = torch.exp(-(places - nearest).square().sum(dim=1) / (2 * reach**2))
        return bump / bump.sum()


def places(shape: tuple[int, int, int]) -> Tensor:
    """Row and column of each number of a picture."""
    grid = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in shape))
    return grid[:, :2]


def apart(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances of rows."""
    squares = [part.square().sum(dim=1) for part in (a, b)]
    return (squares[0][:, None] + squares[1] - 2 * a @ b.T).clamp(min=0)
