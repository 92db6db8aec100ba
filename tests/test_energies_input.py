"""Promise 5: bad input is a `ValueError` that names the argument, what was expected, what came."""

import math

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
        (Y.long(), r"a floating-point tensor, got torch.int64"),
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
        (X.long(), r"be a floating-point tensor, got torch.int64: try .float\(\)"),
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
        with pytest.raises(ValueError, match=r"`y` must have dtype torch\.float32, got"):
            PICNN(X, Y.double())


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


def test_widths_of_the_x_path():
    with pytest.raises(ValueError, match="`x_hidden` must have as many widths as `hidden`"):
        icnn.PICNN(2, 2, (8, 8), x_hidden=(8,))
    with pytest.raises(ValueError, match="`x_hidden` must be a non-empty sequence of widths"):
        icnn.PICNN(2, 2, (8, 8), x_hidden=())


def test_numpy_integers_are_integers():
    assert icnn.FICNN(np.int64(3), [np.int32(5)]).hidden == (5,)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["instance", True, 0, ["batch"]])
def test_x_norm(wrong):
    with pytest.raises(ValueError, match="`x_norm` must be one of None, 'batch', 'layer', got"):
        icnn.PICNN(2, 2, x_norm=wrong)


NOT_WEIGHTS = [
    *((wrong, "a finite number of at least 0") for wrong in (-1, -0.1, math.nan, math.inf)),
    *((wrong, "a finite number of at least 0") for wrong in (None, "1", [1.0], True, nn.ReLU())),
    (torch.tensor(-1.0), "at least 0, got a minimum of -1"),
    (torch.tensor(math.nan), "at least 0, got a minimum of nan"),
    (torch.tensor(1), "a floating-point tensor, got torch.int64"),
]


@pytest.mark.parametrize(("wrong", "expected"), NOT_WEIGHTS)
def test_weights(wrong, expected: str):
    with pytest.raises(ValueError, match=f"`c` must be {expected}"):
        icnn.Scale(PICNN, wrong)
    with pytest.raises(ValueError, match=f"`weight` must be {expected}"):
        icnn.Quadratic(0.0, wrong)


@pytest.mark.parametrize("wrong", ["a", None, [0.0, 1.0, 0.0], np.zeros(3), math.inf])
def test_center(wrong):
    with pytest.raises(ValueError, match="`center` must be a finite number, got"):
        icnn.Quadratic(wrong)
    with pytest.raises(ValueError, match="`center` must be a floating-point tensor, got"):
        icnn.Quadratic(torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("shape", [(2, 6, 3), (6, 3), (5,), (5, 1, 1)])
def test_a_weight_must_not_make_y_grow(shape):
    match = r"`weight` must broadcast to y_shape \(3,\), got shape"
    for center in (0.0, torch.tensor(0.5), nn.Linear(4, 3)):
        with pytest.raises(ValueError, match=match):
            icnn.Quadratic(center, torch.ones(shape))(X, Y)
    with pytest.raises(ValueError, match=match):
        icnn.Quadratic(torch.zeros(3), torch.ones(shape))


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (Y[:, 0], r"have shape \(B, 1\), got \(6,\)"),
        (Y.numpy(), "be a tensor, got ndarray"),
        (None, "be a tensor, got NoneType"),
        (Y.long(), "be a floating-point tensor"),
    ],
)
def test_y_of_a_quadratic_around_a_number(y, expected: str):
    with pytest.raises(ValueError, match=f"`y` must {expected}"):
        icnn.Quadratic(0.0)(None, y)


def test_dtypes_of_a_quadratic():
    for energy in (icnn.Quadratic(torch.zeros(3).double()), icnn.Quadratic(0.0, Y[0].double())):
        with pytest.raises(ValueError, match=r"`y` must have dtype torch\.float64, got"):
            energy(None, Y)


@pytest.mark.parametrize("make", [icnn.Sum, icnn.Max, lambda energy: icnn.Scale(energy, 1.0)])
@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda x, y: y.sum(dim=1, keepdim=True), r"\(6, 1\)"),
        (lambda x, y: y.sum(), r"\(\)"),
        (lambda x, y: y, r"\(6, 3\)"),
        (lambda x, y: None, "NoneType"),
    ],
)
def test_a_users_energy_returns_one_value_per_example(make, wrong, got: str):
    with pytest.raises(
        ValueError, match=rf"must be one value per example, shape \(6,\), got {got}"
    ):
        make(wrong)(X, Y)


def test_an_energy_defines_something():
    class Nothing(icnn.Energy):
        pass

    with pytest.raises(TypeError, match=r"Nothing must define `at\(x\)` or `forward\(x, y\)`"):
        Nothing()(X, Y)


def test_nonnegative():
    for wrong, got in ((1.0, "a tensor, got float"), (torch.ones(2).long(), "a floating-point")):
        with pytest.raises(ValueError, match=f"`value` must be {got}"):
            icnn.NonNegative(wrong)  # type: ignore[arg-type]
    kept = icnn.NonNegative(torch.ones(2))
    with pytest.raises(ValueError, match=r"`value` must have shape \(2,\), got \(\)"):
        kept.set_(torch.tensor(1.0))


def test_project_and_keep_convex():
    optimizer = torch.optim.SGD(PICNN.parameters())
    with pytest.raises(ValueError, match="`module` must be a Module, got SGD"):
        icnn.keep_convex(optimizer, PICNN)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`optimizer` must be a Optimizer, got NoneType"):
        icnn.keep_convex(PICNN, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`module` must be a Module, got str"):
        icnn.project_("a")  # type: ignore[type-var]


def test_a_batch_of_one_has_no_batch_statistics():
    energy = icnn.PICNN(4, 3, (5,), x_norm="batch")
    with pytest.raises(ValueError, match="`x` must hold at least 2 examples in training mode"):
        energy(X[:1], Y[:1])
    assert energy.eval()(X[:1], Y[:1]).shape == (1,)


def test_scale_is_one_number():
    with pytest.raises(ValueError, match=r"`c` must be a single number, got shape \(3,\)"):
        icnn.Scale(PICNN, torch.ones(3))


def test_members():
    with pytest.raises(ValueError, match="`energies` must name at least one energy, got none"):
        icnn.Sum()
    with pytest.raises(ValueError, match="`energies` must be a module or a function, got 3"):
        icnn.Max(PICNN, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`energy` must be a module or a function, got 3"):
        icnn.Scale(3, 1.0)  # type: ignore[arg-type]
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
