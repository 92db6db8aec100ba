"""Pictures that are moved, and where others like them are likely to be."""

import torch
from torch import Tensor

ROUNDS = 8  # of aligning pictures with each other
FARTHEST, FAR = 4, 2  # moves of pictures to learn from, and of those to complete
DIRECTIONS = 3  # in which pictures differ from their mean wherever they are
# What a squared move costs, and how much of a mean squared error makes moves unlikely.
COST, DOUBT = 0.006, 0.03


def moved(images: Tensor, moves: Tensor | int, axis: int) -> Tensor:
    """Pictures whose number at `i + move` along an axis comes to `i`; the last ones stay.

    Args:
        images: Pictures, of rows, columns and colours;
        moves: how far to move each, or all;
        axis: 0 for rows, 1 for columns.
    """
    size = images.shape[1 + axis]
    here = torch.arange(size, device=images.device)
    if isinstance(moves, int):
        return images.index_select(1 + axis, (here + moves).clamp(0, size - 1))
    at = (here + moves[:, None]).clamp(0, size - 1)
    at = at[:, :, None, None] if axis == 0 else at[:, None, :, None]
    return torch.take_along_dim(images, at, 1 + axis)


class Aligned:
    """Pictures moved along an axis until they differ from each other in few directions.

    Args:
        images: Pictures, of rows, columns and colours.
        known: Which numbers of a picture are known, and to be compared.
        axis: Along which to move.
        unit: Pixels of a move.
    """

    def __init__(self, images: Tensor, known: Tensor, axis: int, unit: int):
        self.images, self.known, self.axis, self.unit = images, known, axis, unit
        self.moves = torch.zeros(len(images), dtype=torch.long, device=images.device)
        ways = torch.arange(-FARTHEST, FARTHEST + 1, device=images.device)
        everywhere = [self._seen(way) for way in ways.tolist()]
        for _ in range(ROUNDS):
            mean, directions = self._main(self._seen(self.moves))
            left = [rest(seen, mean, directions) for seen in everywhere]
            found = ways[(torch.stack(left, dim=1) + COST * ways.square()).argmin(dim=1)]
            if torch.equal(found, self.moves):
                break
            self.moves = found

    def chances(self, given: Tensor) -> dict[int, Tensor]:
        """How likely each move is of pictures of which known numbers are given."""
        ways = range(-FAR, FAR + 1)
        left = [rest(given, *self._main(self._seen(self.moves - way))) for way in ways]
        cost = torch.stack(left) + COST * torch.tensor(ways, device=given.device)[:, None].square()
        return dict(zip(ways, torch.softmax(-cost / DOUBT, dim=0), strict=True))

    def like(self, way: int) -> Tensor:
        """Pictures, moved to where one is whose move is this."""
        return moved(self.images, self.unit * (self.moves - way), self.axis)

    def _seen(self, moves: Tensor | int) -> Tensor:
        return moved(self.images, self.unit * moves, self.axis).flatten(1)[:, self.known]

    def _main(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Their mean, and the directions in which they differ most."""
        mean = seen.mean(dim=0)
        away = seen - mean
        # By the products of pictures, of which there are not many.
        values, vectors = torch.linalg.eigh(away @ away.T)
        values, vectors = values[-DIRECTIONS:], vectors[:, -DIRECTIONS:]
        return mean, (vectors / values.clamp(min=1e-6).sqrt()).T @ away


def rest(seen: Tensor, mean: Tensor, directions: Tensor) -> Tensor:
    """Mean squares of what no direction tells."""
    away = seen - mean
    return (away.square().sum(dim=1) - (away @ directions.T).square().sum(dim=1)) / seen.shape[1]
