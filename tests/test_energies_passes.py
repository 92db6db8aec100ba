"""What an energy at `x` can do besides: value and gradient by hand, and some of its examples."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_energies_conv as images
import torch
import torch.nn.functional as F
from networks import ACTIVATIONS, DIM_X, DIM_Y, FAMILIES
from torch import Tensor, nn

import icnn
from icnn.energies.energy import at

DOUBLE = torch.float64


def l1(x: Any, y: Tensor) -> Tensor:
    return y.abs().flatten(start_dim=1).sum(dim=1)


def nested(**options) -> icnn.Energy:
    """Every composition of ours, two levels deep, with learned numbers and ties of the maximum."""
    full, net = icnn.FICNN(DIM_Y, (8, 8), **options), nn.Linear(DIM_X, DIM_Y)
    learned = nn.Parameter(torch.tensor(0.3))
    return icnn.Sum(
        icnn.Scale(icnn.Max(full, icnn.Sum(full), icnn.Score(net)), learned),
        icnn.Quadratic(net, nn.Parameter(torch.rand(DIM_Y))),
        icnn.Quadratic(0.5, 2.0),
        icnn.Quadratic(nn.Parameter(torch.rand(DIM_Y))),
        icnn.Gaussian(nn.Parameter(torch.rand(DIM_Y)), torch.rand(3, DIM_Y)),
        icnn.PICNN(DIM_X, DIM_Y, (8,), **options),
    )


def flat_first(activation: str = "relu", **options) -> icnn.Energy:
    """Below its first layer is a reshaped `y`, and nothing with weights."""
    act = images.act(activation)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), act, nn.Linear(4, 1))
    return icnn.convexify(net, (3, 2, 2), **options)


def one_map_of_many(**options) -> icnn.Energy:
    """Images of one map, and of more maps than oneDNN needs, at sizes that differ."""
    return icnn.ConvPICNN(images.X_SHAPE, (9, 6, 11), ((3, 3, 2), ("avg", 2)), (), **options)


MAKES = (
    *(make for make in FAMILIES if make.__name__ != "composed"),
    nested, flat_first, one_map_of_many, *images.PARTIAL, *images.FULL,
)  # fmt: skip
EVERY = pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
Make = Callable[..., Any]


def batch(energy: icnn.Energy, size: int) -> tuple[Tensor, Tensor]:
    assert energy.y_shape is not None
    x_shape = images.X_SHAPE if isinstance(energy, icnn.ConvPICNN) else (DIM_X,)
    x, y = (torch.randn(size, *shape, dtype=DOUBLE) for shape in (x_shape, energy.y_shape))
    return x, y


def by_graph(f: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.detach().clone().requires_grad_()
    value = f(y)
    return value.detach(), torch.autograd.grad(value.sum(), y)[0]


def close(found: Tensor, expected: Tensor, tol: float) -> None:
    """To rounding of the largest."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol * scale)


def same(f: Any, y: Tensor, tol: float = 1e-12) -> None:
    before = y.clone()
    found, expected = f.value_and_gradient(y), by_graph(f, y)
    for part, other in zip(found, expected, strict=True):
        assert not part.requires_grad
        assert (part.shape, part.dtype) == (other.shape, other.dtype)
        close(part, other, tol)
    assert torch.equal(y, before), "y is not written to"
    found[1].zero_()  # what comes back is the caller's own
    close(f.value_and_gradient(y)[1], expected[1], tol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY
def test_value_and_gradient_are_those_of_the_graph(make: Make, activation: str):
    torch.manual_seed(0)
    energy = make(activation=activation).double()
    for training in (False, True):
        energy.train(training)
        x, y = batch(energy, 7)
        with torch.set_grad_enabled(training):
            f = energy.at(x)
        same(f, y)
        same(f, y.transpose(0, -1).contiguous().transpose(0, -1))  # other strides
        same(f, y.requires_grad_())
        same(at(energy, x), y.detach())


@EVERY
def test_at_kinks_the_subgradient_is_pytorchs(make: Make):
    """Zero weights and biases: every unit at its kink, every maximum a tie."""
    energy = make(activation="relu").double().eval()
    x, y = batch(energy, 4)
    same(energy.at(x), torch.zeros_like(y))
    with torch.no_grad():
        for name, parameter in energy.named_parameters():
            if "bias" in name or "wyu" in name:
                parameter.zero_()
    same(energy.at(x), torch.zeros_like(y))
    same(energy.at(x), y)


OTHERS = (
    icnn.Activation("squared", lambda z: z.relu().square(), True, True, False, True),
    icnn.Activation("relu", torch.relu, True, True, True, False),
    icnn.Activation("partly", partial(F.elu, alpha=0.5, inplace=False), True, True, False, False),
    icnn.activations.leaky_relu(0.0),
    icnn.activations.elu(0.3),
    icnn.activations.softplus(7.0),
)


@pytest.mark.parametrize("activation", OTHERS, ids=lambda activation: activation.name)
def test_any_activation(activation: icnn.Activation):
    energy = icnn.PICNN(DIM_X, DIM_Y, (6, 6), activation=activation).double()
    x, y = batch(energy, 5)
    same(energy.at(x), y)
    same(energy.at(x), 100 * y)
    with torch.inference_mode():
        f: Any = energy.at(x)
        value, gradient = f.value_and_gradient(y)
    for part, other in zip((value, gradient), by_graph(energy.at(x), y), strict=True):
        torch.testing.assert_close(part.clone(), other, rtol=1e-12, atol=1e-12)


def test_wide_labels_in_single_precision():
    energy = icnn.PICNN(30, 40, (50, 20))
    x, y = torch.randn(64, 30), torch.randn(64, 40)
    same(energy.at(x), y, tol=1e-5)
    energy = icnn.ConvPICNN((1, 16, 16), (1, 16, 16), ((12, 5, 2), (9, 3, 1)), (7,))
    x, y = torch.randn(2, 5, 1, 16, 16)
    same(energy.at(x), y, tol=1e-5)


def test_under_autocast_it_keeps_its_own_precision():
    energy = icnn.PICNN(DIM_X, DIM_Y, (8, 8))
    x, y = torch.randn(6, DIM_X), torch.randn(6, DIM_Y)
    f: Any = energy.at(x)
    with torch.autocast("cpu", torch.bfloat16):
        for part, other in zip(f.value_and_gradient(y), by_graph(f, y), strict=True):
            torch.testing.assert_close(part, other, rtol=0.05, atol=0.05)
            assert part.dtype == torch.float32
        assert f.value_and_gradient(y.bfloat16())[1].dtype == torch.bfloat16


@EVERY
def test_bad_labels_are_refused_as_ever(make: Make):
    energy = make().double()
    x, y = batch(energy, 3)
    for wrong in (y.float(), y[..., :-1], None):
        with pytest.raises(ValueError, match="`y` must"):
            energy.at(x).value_and_gradient(wrong)


INDICES = ([2, 0, 5, 3], [1, 1, 1], [4], [], list(range(6)), [5, 4, 3, 2, 1, 0, 0, 2])


@pytest.mark.parametrize("index", INDICES, ids=str)
@EVERY
def test_select_is_the_energy_at_these_examples(make: Make, index: list[int]):
    energy = make(activation="softplus").double().eval()
    (x, _), (_, y), rows = batch(energy, 6), batch(energy, len(index)), torch.tensor(index).long()
    sides = []
    for select in (True, False):
        for parameter in energy.parameters():
            parameter.grad = None
        own = x.clone().requires_grad_()
        f = energy.at(own).select(rows) if select else energy.at(own[rows])
        same(f, y)
        f(y).square().sum().backward()
        sides.append([own.grad, *(parameter.grad for parameter in energy.parameters())])
    for found, expected in zip(*sides, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    whole: Any = at(energy, x)
    again = whole.select(rows).select(torch.arange(len(index)).flip(0))
    torch.testing.assert_close(again(y.flip(0)).flip(0), f(y), rtol=1e-12, atol=1e-12)


def test_select_of_a_batch_of_one():
    energy = icnn.FICNN(DIM_Y, (6,), dim_x=DIM_X).double()
    (x, _), (_, y) = batch(energy, 1), batch(energy, 3)
    whole: Any = energy.at(x)
    f = whole.select(torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(f(y), energy(x.expand(3, -1), y))


def test_select_shares_weights_and_computes_nothing_of_x_again():
    energy = icnn.PICNN(DIM_X, DIM_Y, (6,), x_norm="batch")
    x = torch.randn(8, DIM_X)
    f: Any = energy.at(x)
    before = copy.deepcopy(energy.state_dict())
    some = f.select(torch.tensor([3, 1]))
    assert some.below[0].wy is f.below[0].wy
    assert all(torch.equal(before[name], value) for name, value in energy.state_dict().items())


@pytest.mark.parametrize("kind", ["score", "mlp", "vgg", "pooled_first", "sum"])
def test_select_keeps_dropout_masks(kind: str):
    net = nn.Sequential(nn.Linear(DIM_X, 5), nn.Dropout(0.5))
    mlp = images.mlp().double().train()
    energy: Any = {
        "score": icnn.Score(net), "sum": icnn.Sum(icnn.Score(net), mlp), "mlp": mlp,
        "vgg": images.vgg(), "pooled_first": images.pooled_first(),
    }[kind].double().train()  # fmt: skip
    y = torch.randn(9, *(energy.y_shape or (5,)), dtype=DOUBLE)
    f = energy.at(torch.randn(9, DIM_X, dtype=DOUBLE))
    value, gradient = f.value_and_gradient(y)
    for rows in (torch.tensor([7, 2, 2, 0]), torch.arange(9).flip(0)):
        some = f.select(rows)
        torch.testing.assert_close(some(y[rows]), value[rows])
        torch.testing.assert_close(some.value_and_gradient(y[rows])[1], gradient[rows])
    torch.testing.assert_close(f(y), value)


class Own(icnn.Energy):
    """A user's energy whose `at` gives an object with as many abilities as asked for."""

    def __init__(self, *abilities: str, wrong: bool = False):
        super().__init__()
        self.abilities, self.wrong = abilities, wrong

    def at(self, x: Any) -> Any:
        own = self

        class At:
            def __call__(self, y: Tensor) -> Tensor:
                return (y - x).square().sum(dim=1)

        def both(self: Any, y: Tensor) -> tuple[Tensor, Tensor]:
            return self(y), (2 * (y - x))[:, int(own.wrong) :]

        for name, method in (("value_and_gradient", both),
                             ("select", lambda self, index: own.at(x[index]))):  # fmt: skip
            if name in own.abilities:
                setattr(At, name, method)
        return At()


def test_abilities_of_users_pass_through():
    x, y = torch.randn(2, 6, 3, dtype=DOUBLE)
    rows = torch.tensor([4, 4, 1])
    for wrap in (lambda e: e, icnn.Sum, icnn.Max, lambda e: icnn.Scale(e, 2.0)):
        f: Any = at(wrap(Own("value_and_gradient", "select")), x)
        same(f, y)
        same(f.select(rows), y[rows])
        torch.testing.assert_close(f.select(rows)(y[rows]), f(y)[rows])
        lame: Any = at(wrap(Own("select")), x)
        assert lame.value_and_gradient is None
        assert lame.select(rows).value_and_gradient is None


PLAIN = (
    l1,
    Own(),
    nn.Bilinear(3, 3, 1),
    icnn.Sum(icnn.Quadratic(0.0), l1),
    icnn.Scale(icnn.Max(Own(), icnn.Quadratic(0.0)), 2.0),
)


@pytest.mark.parametrize("energy", PLAIN, ids=lambda energy: type(energy).__name__)
def test_without_the_parts_there_are_no_abilities(energy: Any):
    f = at(energy, torch.randn(6, 3, dtype=DOUBLE))
    assert getattr(f, "value_and_gradient", None) is None
    assert getattr(f, "select", None) is None


def test_what_a_user_returns_is_looked_at():
    f: Any = at(Own("value_and_gradient", wrong=True), torch.randn(6, 3))
    with pytest.raises(ValueError, match=r"give a gradient, shape \(6, 3\), got \(6, 2\)"):
        f.value_and_gradient(torch.randn(6, 3))
