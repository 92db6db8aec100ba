"""Pictures that are moved, and aligned with each other."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

import icnn
from icnn.estimators import moves
from icnn.estimators.local_machines import Machines, Taste
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


def pictures() -> np.ndarray:
    """In two colours, of things in several places."""
    random = np.random.default_rng(1)
    images = things(random.integers(-3, 4, size=120), random, 1).numpy()
    return np.concatenate([images, images**2], axis=3)


@pytest.fixture(scope="module")
def model() -> icnn.Imputer:
    shape = (SIZE, SIZE, 2)
    return icnn.Imputer(image_shape=shape, symmetric=True, random_state=0).fit(pictures()[:60])


def test_machines_know_one_thing_in_several_places(model: icnn.Imputer):
    pixels = model.model_
    assert isinstance(pixels, Pixels)
    assert [bool(taste.moves) for _, taste in pixels.tastes] == [True, True, False], "if it is deep"
    Z = torch.from_numpy((pictures().reshape(120, -1) - model.mean_) / model.scale_)
    known = torch.arange(Z.shape[1]) < Z.shape[1] // 2
    errors = {}
    for way in ("aligned", "copied", ""):
        answers = pixels._answers(Z[:60].float(), known, Z[60:, known], Taste(moves=way))
        errors[way] = float((answers - Z[60:, ~known]).square().mean())
    assert errors["aligned"] < errors["copied"] < errors[""]


LOWER, LEFT, COLOUR = np.s_[16:], np.s_[:, :16], np.s_[..., 1]


@pytest.mark.parametrize("way", ["aligned", "copied", ""])
@pytest.mark.parametrize(("gaps", "axis"), [(LOWER, 1), (LEFT, 0), (COLOUR, 0)])
def test_answers_written_plainly(model: icnn.Imputer, gaps: Any, axis: int, way: Any):
    """Means over moves of machines that learn from pictures moved along the edge of the gaps."""
    pixels = model.model_
    assert isinstance(pixels, Pixels)
    known = torch.ones(SIZE, SIZE, 2, dtype=torch.bool)
    known[gaps] = False
    known = known.flatten()
    images = pixels.pictures.reshape(-1, SIZE, SIZE, 2)
    images = torch.cat([images, images.flip(2)])
    given, taste = torch.randn(3, int(known.sum()), dtype=torch.float64), Taste(moves=way)

    def machines(*parts: torch.Tensor, of: Taste = taste) -> torch.Tensor:
        examples = torch.cat(parts).flatten(1)
        made = Machines(examples, len(parts), True, (SIZE, SIZE, 2), torch.device("cpu"))
        return made(known, given, of)

    if way == "aligned":
        aligned = Aligned(images, known, axis, 1)
        expected = sum(
            chance[:, None] * machines(aligned.like(move), of=replace(taste, ridge=0.05))
            for move, chance in aligned.chances(given.float()).items()
        )
    elif way == "copied":
        expected = machines(images, moved(images, 1, axis), moved(images, -1, axis))
    else:
        expected = machines(images)
    torch.testing.assert_close(pixels._answers(pixels.pictures, known, given, taste), expected)


def test_of_few_groups_much_is_by_chance():
    def trial(*errors: float) -> Trial:
        return Trial(Taste(), np.array(errors), [])

    before = trial(3.0, 3.0, 3.0, 3.0)
    assert trial(2.0, 2.0, 2.0, 2.0).clearly_better(before)
    assert trial(2.0, 2.1, 2.0, 3.0).clearly_better(before)
    assert not trial(0.0, 3.2, 3.2, 3.2).clearly_better(before), "one person tells little"
    assert not before.clearly_better(before)
