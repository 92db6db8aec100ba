"""Promise 5: bad input is a `ValueError` that names the argument, what was expected, what came."""

import numpy as np
import pytest
import torch
from torch import nn

import icnn

PICNN = icnn.PICNN(4, 3, (5,))
BOTH = icnn.FICNN(3, (5,), dim_x=4)
SUM = icnn.Sum(icnn.Score(nn.Linear(4, 3)), PICNN)
X, Y = torch.zeros(6, 4), torch.zeros(6, 3)


@pytest.mark.parametrize("energy", [PICNN, BOTH, SUM], ids=["picnn", "ficnn", "sum"])
@pytest.mark.parametrize(
    ("y", "got"),
    [
        (Y[:, :2], r"shape \(6, 3\), got \(6, 2\)"),
        (Y[:5], r"shape \(6, 3\), got \(5, 3\)"),
        (Y[0], r"shape \(6, 3\), got \(3,\)"),
        (Y[None], r"shape \(6, 3\), got \(1, 6, 3\)"),
        (Y.double(), r"dtype torch.float32, got torch.float64"),
        (Y.long(), r"dtype torch.float32, got torch.int64"),
        (Y.to("meta"), r"on cpu, got meta"),
        (Y.numpy(), r"a tensor, got ndarray"),
        (None, r"a tensor, got NoneType"),
    ],
)
def test_y(energy, y, got: str):
    with pytest.raises(ValueError, match=rf"`y` must (have|be) {got}"):
        energy(X, y)


@pytest.mark.parametrize("energy", [PICNN, BOTH], ids=["picnn", "ficnn"])
@pytest.mark.parametrize(
    ("x", "got"),
    [
        (X[:, :2], r"have shape \(B, 4\), got \(6, 2\)"),
        (X[0], r"have shape \(B, 4\), got \(4,\)"),
        (X.double(), r"have dtype torch.float32, got torch.float64"),
        (X.long(), r"have dtype torch.float32, got torch.int64"),
        (np.zeros((6, 4)), r"be a tensor, got ndarray"),
        (None, r"be a tensor, got NoneType"),
    ],
)
def test_x(energy, x, got: str):
    with pytest.raises(ValueError, match=rf"`x` must {got}"):
        energy.at(x)


def test_y_of_a_ficnn_without_x():
    with pytest.raises(ValueError, match=r"`y` must have shape \(B, 3\), got \(6, 4\)"):
        icnn.FICNN(3)(None, X)


def test_autocast_takes_the_types_that_it_knows():
    with torch.autocast("cpu", torch.bfloat16):
        assert PICNN(X.bfloat16(), Y).shape == PICNN(X, Y.bfloat16()).shape == (6,)
        for y in (Y.long(), Y.double()):
            with pytest.raises(
                ValueError, match=r"`y` must have dtype torch\.float32, got torch\."
            ):
                PICNN(X, y)


WRONG_COUNTS = [0, -1, 2.0, "2", None, True]


@pytest.mark.parametrize("wrong", WRONG_COUNTS)
def test_dimensions(wrong):
    with pytest.raises(ValueError, match="`dim_y` must be an integer of at least 1, got"):
        icnn.FICNN(wrong)
    with pytest.raises(ValueError, match="`dim_y` must be an integer of at least 1, got"):
        icnn.PICNN(2, wrong)
    with pytest.raises(ValueError, match="`dim_x` must be an integer of at least 1, got"):
        icnn.PICNN(wrong, 2)
    if wrong != 0:
        with pytest.raises(ValueError, match="`dim_x` must be an integer of at least 0, got"):
            icnn.FICNN(2, dim_x=wrong)
    with pytest.raises(ValueError, match=r"`hidden\[1\]` must be an integer of at least 1, got"):
        icnn.FICNN(2, (3, wrong))


@pytest.mark.parametrize("wrong", [(), [], 200, None, "200"])
def test_hidden(wrong):
    for make in (lambda: icnn.FICNN(2, wrong), lambda: icnn.PICNN(2, 2, wrong)):
        with pytest.raises(ValueError, match="`hidden` must be a non-empty sequence of widths"):
            make()


def test_numpy_integers_are_integers():
    assert icnn.FICNN(np.int64(3), [np.int32(5)]).hidden == (5,)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["instance", True, 0, ["batch"]])
def test_x_norm(wrong):
    with pytest.raises(ValueError, match="`x_norm` must be one of None, 'batch', 'layer', got"):
        icnn.PICNN(2, 2, x_norm=wrong)


@pytest.mark.parametrize("wrong", [-1, -0.1, float("nan"), torch.tensor(-1.0)])
def test_negative_scale(wrong):
    with pytest.raises(ValueError, match="`c` must be at least 0, got"):
        icnn.Scale(PICNN, wrong)
    with pytest.raises(ValueError, match="`weight` must be at least 0, got"):
        icnn.Quadratic(0.0, wrong)


def test_scale_is_one_number():
    with pytest.raises(ValueError, match=r"`c` must be a single number, got shape \(3,\)"):
        icnn.Scale(PICNN, torch.ones(3))


def test_members():
    with pytest.raises(ValueError, match="`energies` must name at least one energy, got none"):
        icnn.Sum()
    with pytest.raises(ValueError, match=r"`energies\[1\]` must be a module or a function, got 3"):
        icnn.Max(PICNN, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`energies` must share one y_shape, got \(3,\), \(2,\)"):
        icnn.Sum(PICNN, icnn.FICNN(2))
    with pytest.raises(ValueError, match="`net` must be a module or a function, got"):
        icnn.Score(torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [icnn.Score, icnn.Quadratic])
def test_networks_of_x(make):
    with pytest.raises(ValueError, match=r"`y` must have shape \(6, 4\), got \(6, 3\)"):
        make(nn.Identity())(X, Y)
    with pytest.raises(ValueError, match=r"\(x\)` must be a tensor of shape \(B, \*y_shape\), got"):
        make(lambda x: x[:, 0])(X, Y)
    with pytest.raises(ValueError, match=r"\(x\)` must be a tensor of shape .* got NoneType"):
        make(lambda x: None)(X, Y)
    with pytest.raises(ValueError, match=r"`y` must have shape \(B, 2\), got \(6, 3\)"):
        icnn.Quadratic(torch.zeros(2))(X, Y)
