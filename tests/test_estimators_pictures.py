"""`icnn.Imputer` in pictures: any gaps, machines against plain formulas, bad input."""

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.datasets import load_digits

import icnn
from icnn.estimators import local_machines
from icnn.estimators.local_machines import Machines, Taste
from icnn.estimators.pixels import Pixels, clearly_less, moved

DIGITS = load_digits().images[:240]  # pyright: ignore
SHAPE = (8, 8)


@pytest.fixture(scope="module")
def pictures() -> icnn.Imputer:
    return icnn.Imputer(image_shape=SHAPE, random_state=0).fit(DIGITS[:200])


def masks() -> dict[str, np.ndarray]:
    """Gaps of kinds on which nothing was chosen, and of one on which it was."""
    random = np.random.default_rng(0)
    box, scribble = np.zeros(SHAPE, dtype=bool), np.zeros(SHAPE, dtype=bool)
    box[2:6, 3:7] = True
    scribble[np.arange(8), np.abs(np.arange(8) - 4)] = True
    scribble[3] = True
    half = np.broadcast_to(np.arange(8)[:, None] >= 4, SHAPE)
    return {
        "half": half,
        "box": box,
        "scribble": scribble,
        "dots": random.uniform(size=SHAPE) < 0.6,
    }


@pytest.mark.parametrize("name", masks())
def test_pictures_with_any_gaps(pictures: icnn.Imputer, name: str):
    gaps = np.broadcast_to(masks()[name], (40, *SHAPE))
    true = DIGITS[200:]
    holes = np.where(gaps, np.nan, true)
    filled = pictures.transform(holes)
    assert filled.shape == holes.shape
    np.testing.assert_array_equal(filled[~gaps], true[~gaps])
    assert filled.min() >= 0
    assert filled.max() <= 16
    found = pictures.solve(holes)
    assert bool(found.converged.all())
    np.testing.assert_array_equal(found.y.numpy().reshape(holes.shape), filled)
    mean = np.broadcast_to(DIGITS[:200].mean(axis=0), true.shape)
    wrong, usual = (np.square(part - true)[gaps].mean() for part in (filled, mean))
    assert wrong < 0.6 * usual
    rows = pictures.transform(holes.reshape(40, -1))
    np.testing.assert_array_equal(rows, filled.reshape(40, -1))


def test_pictures_do_not_depend_on_others(pictures: icnn.Imputer):
    random = np.random.default_rng(1)
    holes = np.where(random.uniform(size=(6, *SHAPE)) < 0.5, np.nan, DIGITS[200:206])
    whole = pictures.transform(holes)
    for i in (0, 5):
        np.testing.assert_allclose(pictures.transform(holes[[i]])[0], whole[i], atol=1e-3)


def test_a_picture_without_any_pixel_and_one_with_all(pictures: icnn.Imputer):
    both = np.stack([np.full(SHAPE, np.nan), DIGITS[200]])
    filled = pictures.transform(both)
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(filled[1], DIGITS[200])


def test_pictures_with_colours_and_with_gaps_in_training():
    random = np.random.default_rng(0)
    tint = random.uniform(0.3, 1, size=(60, 1, 1, 3))
    images = DIGITS[:60, ::2, ::2, None] * tint
    images[random.uniform(size=images.shape) < 0.1] = np.nan
    model = icnn.Imputer(image_shape=(4, 4, 3), random_state=0).fit(images)
    holes = images[:9].copy()
    holes[:, 2:] = np.nan
    assert np.isfinite(model.transform(holes)).all()
    holes = images[:9].copy()
    holes[..., 1] = np.nan  # a colour
    assert np.isfinite(model.transform(holes)).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (3, 1), (1, 1, 3)])
def test_tiny_pictures(shape: tuple[int, ...]):
    images = np.random.default_rng(0).normal(size=(12, *shape))
    model = icnn.Imputer(image_shape=shape, random_state=0).fit(images)
    holes = images[:4].copy()
    holes[:, 0, 0] = np.nan
    assert np.isfinite(model.transform(holes)).all()
    holes = images[:4].copy()
    holes[..., 0] = np.nan  # of coloured pictures, one of the colours
    assert np.isfinite(model.transform(holes)).all()


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("symmetric", [False, True])
def test_machines_are_gaussian_processes(symmetric: bool, copies: int):
    """Against the same written down plainly: distances of pictures less a share of their level."""
    torch.manual_seed(0)
    shape, count = (6, 6, 1), 9
    whole = torch.rand(count, 36)
    examples = (
        torch.cat([whole, whole.reshape(-1, 6, 6).flip(2).flatten(1)]) if symmetric else whole
    )
    examples = torch.cat([examples + copy for copy in range(copies)])
    machines = Machines(examples, copies, symmetric, shape, torch.device("cpu"))
    known = torch.arange(36) < 24
    given_pixels, taste = torch.rand(4, 24), Taste(0.5, 0.6, 2.0, 0.2, 0.4)
    found = machines(known, given_pixels, taste)
    both = torch.cat([examples[:, known], given_pixels]).double()
    seen, n = machines.places[known], len(examples)
    grid = both.reshape(-1, 4, 6)
    slopes = (
        torch.cat(
            [
                (grid[:, 2:] - grid[:, :-2]).flatten(1),
                (grid[:, :, 2:] - grid[:, :, :-2]).flatten(1),
            ],
            dim=1,
        )
        / 2
    )
    spots = seen.reshape(4, 6, 2)
    middles = torch.cat(
        [
            ((spots[2:] + spots[:-2]) / 2).reshape(-1, 2),
            ((spots[:, 2:] + spots[:, :-2]) / 2).reshape(-1, 2),
        ]
    )

    def weights(places: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        def bump(to: torch.Tensor) -> torch.Tensor:
            away = (places - to).norm(dim=1)
            reach = 1 + local_machines.FARTHER * float(away.min())
            b = torch.exp(-(places - places[away.argmin()]).square().sum(dim=1) / (2 * reach**2))
            return b / b.sum()

        w = bump(center)
        if symmetric:
            share = taste.mirrored
            w = (1 - share) * w + share * bump(torch.stack([center[0], 5 - center[1]]))
        w = torch.where(w > 1e-2 * w.max(), w, 0.0)
        return (w / w.sum() + taste.everywhere / len(w)) / (1 + taste.everywhere)

    for block in machines._blocks(known):
        center = machines.places[block.pixels].mean(dim=0)
        w, ws = weights(seen, center), weights(middles, center)
        level = both @ w
        rows = (both - taste.level * level[:, None]) * w.sqrt()
        steep = taste.steepness * slopes * ws.sqrt()
        D = torch.cdist(torch.cat([rows, steep], 1), torch.cat([rows, steep], 1)[:n]).square()
        K = torch.exp(-(2 * local_machines.WIDTH * D / D[: local_machines.FEW].median()).sqrt())
        target = examples[:, block.pixels].double() - taste.level * level[:n, None]
        noise = (
            torch.tensor([1.0] * count + [local_machines.MORE] * count * symmetric) * taste.ridge
        )
        noise = copies**local_machines.GROWTH * noise.repeat(copies)
        weight = torch.linalg.solve(K[:n] + torch.diag(noise), target - target.mean(dim=0))
        expected = K[n:] @ weight + target.mean(dim=0) + taste.level * level[n:, None]
        torch.testing.assert_close(
            found[:, block.pixels - 24].double(), expected, atol=2e-3, rtol=0
        )


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_covariances_are_multiplied_with_keeps_them_such(symmetric: bool):
    model = icnn.Imputer(image_shape=SHAPE, symmetric=symmetric).fit(DIGITS[:30]).model_
    assert isinstance(model, Pixels)
    assert float(torch.linalg.eigvalsh(model._taper()).min()) > -1e-9


BAD_PICTURES = [
    ({"image_shape": (8,)}, DIGITS, {}, "`image_shape` must be (height, width) or"),
    ({"image_shape": (80, 80)}, DIGITS, {}, "with at most 5000 numbers, got (80, 80)"),
    ({"image_shape": "eight"}, DIGITS, {}, "`image_shape` must be (height, width) or"),
    ({"image_shape": SHAPE}, np.where(np.arange(8) == 3, np.nan, DIGITS), {}, "crop the pictures"),
    ({"image_shape": (8, 9)}, DIGITS, {}, "`X` must be pictures of shape (8, 9), (n, 8, 9) or"),
    ({"image_shape": SHAPE}, DIGITS[0], {}, "got (8, 8): one is X[None]"),
    ({}, DIGITS, {}, "as in Imputer(image_shape=(8, 8))"),
    ({"image_shape": SHAPE}, DIGITS, {"groups": [1, 2]}, "`groups` must be 240 names or numbers"),
    ({"image_shape": SHAPE}, DIGITS, {"groups": [None, 1] * 120}, "`groups` must be names or"),
    ({}, DIGITS[:, 0], {"groups": np.arange(240)}, "`groups` must be left out of tables"),
]


@pytest.mark.parametrize(("options", "images", "more", "told"), BAD_PICTURES)
def test_bad_pictures(options: Any, images: np.ndarray, more: Any, told: str):
    with pytest.raises(ValueError, match=re.escape(told)):
        icnn.Imputer(**options).fit(images, **more)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_groups_may_be_few(count: int):
    """Choices are then made on as many parts, and none if there is one."""
    model: Any = icnn.Imputer(random_state=0).set_params(image_shape=np.array(SHAPE))
    model.fit(DIGITS[:60], groups=[f"kind {i % count}" for i in range(60)])
    chosen = [taste != Taste() for _, taste in model.model_.tastes]
    assert chosen == [count > 1] * 4


def test_frames_of_pixels():
    names = [f"pixel {i}" for i in range(64)]
    frame = pd.DataFrame(DIGITS[:60].reshape(60, 64), columns=names)
    model = icnn.Imputer(image_shape=SHAPE, random_state=0).set_output(transform="pandas")
    holes = frame.copy()
    holes.iloc[:, 40:] = np.nan
    filled = model.fit(frame).transform(holes)
    assert isinstance(filled, pd.DataFrame)
    assert list(filled.columns) == names
    with pytest.raises(ValueError, match="feature names"):
        model.transform(holes[names[::-1]])
    rows = icnn.Imputer(image_shape=SHAPE, random_state=0).set_output(transform="pandas")
    assert rows.fit(DIGITS[:60]).transform(DIGITS[:3]).shape == (3, 64)


def test_a_picture_of_the_wrong_size(pictures: icnn.Imputer):
    with pytest.raises(TypeError, match="Sparse data was passed for X"):
        pictures.transform(sparse.csr_array(DIGITS[:2].reshape(-1, 64)))
    with pytest.raises(ValueError, match=re.escape("(n, 8, 8) or (n, 64), got (2, 9, 9)")):
        pictures.transform(np.zeros((2, 9, 9)))


def test_progress(capsys: pytest.CaptureFixture[str]):
    icnn.Imputer(image_shape=SHAPE, random_state=0, progress=True).fit(DIGITS[:40])
    assert "8 of 8: all pictures" in capsys.readouterr().err


def test_of_many_pictures_some_are_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("icnn.estimators.pixels.EXAMPLES", 50)
    for symmetric in (False, True):
        model: Any = icnn.Imputer(image_shape=SHAPE, symmetric=symmetric, random_state=0)
        model.fit(DIGITS[:120])
        assert len(model.model_.pictures) * (1 + symmetric) == 50
        holes = np.where(masks()["half"], np.nan, DIGITS[:3])
        assert np.isfinite(model.transform(holes)).all()


LARGE = 32
LOWER, LEFT, COLOUR, HOLE = np.s_[16:], np.s_[:, :16], np.s_[..., 1], np.s_[9:10, 9:10]


@pytest.fixture(scope="module")
def coloured() -> Pixels:
    """Of pictures that are large enough to be moved."""
    images = np.random.default_rng(0).normal(size=(12, LARGE, LARGE, 2)).cumsum(axis=1)
    model = icnn.Imputer(image_shape=images.shape[1:], symmetric=True, random_state=0)
    found = model.fit(images).model_
    assert isinstance(found, Pixels)
    return found


@pytest.mark.parametrize(("gaps", "axis"), [(LOWER, 1), (LEFT, 0), (COLOUR, None), (HOLE, None)])
def test_pictures_are_copied_along_the_edge_of_deep_gaps(
    coloured: Pixels, gaps: Any, axis: int | None
):
    known = torch.ones(LARGE, LARGE, 2, dtype=torch.bool)
    known[gaps] = False
    known, taste = known.flatten(), Taste()
    images = coloured.pictures.reshape(-1, LARGE, LARGE, 2)
    images = torch.cat([images, images.flip(2)])
    parts = [images]
    if axis is not None:
        parts += [moved(images, 1, axis), moved(images, -1, axis)]
    given = torch.randn(3, int(known.sum()), dtype=torch.float64)
    shape, cpu = (LARGE, LARGE, 2), torch.device("cpu")
    plain = Machines(images.flatten(1), 1, True, shape, cpu)(known, given, taste)
    copied = Machines(torch.cat(parts).flatten(1), len(parts), True, shape, cpu)
    pictures = coloured.pictures
    torch.testing.assert_close(coloured._answers(pictures, known, given, taste, False), plain)
    found = coloured._answers(pictures, known, given, taste, True)
    torch.testing.assert_close(found, copied(known, given, taste))
    assert torch.equal(found, plain) == (axis is None)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("move", [0, 2, -3, 100])
def test_moved(axis: int, move: int):
    images = torch.rand(4, 5, 6, 2)
    size = images.shape[1 + axis]
    at = torch.tensor([min(max(i + move, 0), size - 1) for i in range(size)])
    torch.testing.assert_close(moved(images, move, axis), images.index_select(1 + axis, at))


def test_of_few_groups_much_is_by_chance():
    before = np.full(4, 3.0)
    assert clearly_less(np.array([2.0, 2.0, 2.0, 2.0]), before)
    assert clearly_less(np.array([2.0, 2.1, 2.0, 3.0]), before)
    assert not clearly_less(np.array([2.0, 3.2, 3.2, 3.2]), before), "one person tells little"
    assert not clearly_less(before, before)
