"""Pictures that are moved, and aligned with each other."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

import icnn
from icnn.estimators import moves
from icnn.estimators.local_machines import Taste
from icnn.estimators.moves import Aligned, moved
from icnn.estimators.pixels import Pixels, Trial

SIZE = 32


def things(places: np.ndarray, random: np.random.Generator, axis: int) -> torch.Tensor:
    """Pictures of things that differ in a few ways, at places along an axis."""
    wide = int(np.abs(places).max())
    ways = gaussian_filter(random.normal(size=(7, SIZE, SIZE + 2 * wide)), (0, 1.5, 1.5))
    of = np.column_stack([np.full(len(places), 2.0), random.normal(size=(len(places), 6))])
    images = np.einsum("nk,kij->nij", of, ways / ways.std())
    images = np.stack([one[:, wide + i :][:, :SIZE] for one, i in zip(images, places, strict=True)])
    return torch.from_numpy(images if axis else images.swapaxes(1, 2).copy())[..., None] / 3


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("colours", [1, 3])
def test_moved(axis: int, colours: int):
    images = torch.rand(4, 5, 6, colours)
    ways = torch.tensor([0, 2, -3, 100])
    found = moved(images, ways, axis)
    for image, way, other in zip(images, ways.tolist(), found, strict=True):
        size = image.shape[axis]
        at = [min(max(i + way, 0), size - 1) for i in range(size)]
        torch.testing.assert_close(other, image.index_select(axis, torch.tensor(at)))
    torch.testing.assert_close(moved(images, 1, axis)[1:2], moved(images[1:2], 1, axis))


def written_plainly(seen: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Mean squares of what pictures' mean and their first singular vectors leave of others."""
    mean = seen.mean(dim=0)
    span = torch.linalg.svd(seen - mean, full_matrices=False).Vh[: moves.DIRECTIONS]
    away = others - mean
    return (away - away @ span.T @ span).square().mean(dim=1)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("unit", [1, 2])
def test_aligning_leaves_less(axis: int, unit: int):
    random = np.random.default_rng(0)
    images = things(random.integers(-4, 5, size=40), random, axis)
    known = torch.from_numpy(random.uniform(size=SIZE**2) < 0.5)
    aligned = Aligned(images, known, axis, unit)

    def cost(way: torch.Tensor) -> float:
        seen = moved(images, unit * way, axis).flatten(1)[:, known]
        return float((written_plainly(seen, seen) + moves.COST * way.square()).sum())

    assert aligned.moves.any()
    assert cost(aligned.moves) < cost(torch.zeros_like(aligned.moves))
    torch.testing.assert_close(aligned.like(0), moved(images, unit * aligned.moves, axis))
    given = torch.rand(3, int(known.sum()), dtype=torch.float64)
    left = [
        written_plainly(aligned.like(way).flatten(1)[:, known], given) + moves.COST * way**2
        for way in (-2, -1, 0, 1, 2)
    ]
    expected = torch.softmax(-torch.stack(left) / moves.DOUBT, dim=0)
    torch.testing.assert_close(torch.stack(list(aligned.chances(given).values())), expected)


def test_aligned_machines_know_one_thing_in_several_places():
    random = np.random.default_rng(1)
    images = things(random.integers(-3, 4, size=160), random, 1).flatten(1).numpy()
    model = icnn.Imputer(image_shape=(SIZE, SIZE), random_state=0).fit(images[:60]).model_
    assert isinstance(model, Pixels)
    known = torch.arange(SIZE**2) < SIZE**2 // 2
    Z = torch.from_numpy((images - images.mean()) / images.std())
    pictures, given = Z[:60].float(), Z[60:, known]
    errors = []
    for taste in (Taste(aligned=True), Taste()):
        answers = model._answers(pictures, known, given, taste)
        errors.append(float((answers - Z[60:, ~known]).square().mean()))
    assert errors[0] < 0.8 * errors[1]
    assert model.tastes[0][1].aligned, "chosen for the lower half"


def test_of_few_groups_much_is_by_chance():
    def trial(*errors: float) -> Trial:
        return Trial(Taste(), np.array(errors), [])

    before = trial(3.0, 3.0, 3.0, 3.0)
    assert trial(2.0, 2.0, 2.0, 2.0).clearly_better(before)
    assert trial(2.0, 2.1, 2.0, 3.0).clearly_better(before)
    assert not trial(0.0, 3.2, 3.2, 3.2).clearly_better(before), "one person tells little"
    assert not before.clearly_better(before)
