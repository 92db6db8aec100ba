"""What the registry says of an activation is what the function does."""

import pickle
from functools import partial

import pytest
import torch
from networks import DIM_X, DIM_Y

import icnn
from icnn.energies.activations import ACTIVATIONS, Activation, elu, leaky_relu, softplus

# Steps of 2^-7: binary fractions, so that straight pieces have second differences of exactly zero.
GRID = torch.arange(-60, 60, 2**-7, dtype=torch.float64)
CASES = [
    *(make() for make in ACTIVATIONS.values()),
    *(leaky_relu(slope) for slope in (-0.5, 0.0, 0.5, 1.0, 2.0)),
    *(elu(alpha) for alpha in (-1.0, 0.0, 0.5, 1.0, 1.5)),
    *(softplus(beta) for beta in (0.1, 10.0)),
]


@pytest.mark.parametrize("activation", CASES, ids=lambda a: a.name)
def test_flags_are_true(activation: Activation):
    values = activation(GRID)
    slopes = values.diff() * 2**7
    bends = slopes.diff() * 2**7
    assert activation.convex == bool((bends >= -1e-9).all())
    assert activation.nondecreasing == bool((slopes >= -1e-12).all())
    # A straight piece has no bend; an activation of pieces has a handful of bent places.
    assert activation.piecewise_linear == bool((bends.abs() > 1e-10).sum() <= 2)
    # At a kink the slope jumps by a fixed amount, however fine the grid.
    z = torch.linspace(-1e-6, 1e-6, 3, dtype=torch.float64)
    jump = activation(z).diff().diff().abs().item() / 1e-6
    assert activation.smooth == (jump < 1e-3)


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0])
def test_softplus_has_no_step(beta: float):
    """PyTorch's own falls by 2e-9 where it switches to the identity."""
    z = torch.linspace(15, 45, 100_001, dtype=torch.float64) / beta
    assert (softplus(beta)(z).diff() > 0).all()


@pytest.mark.parametrize("activation", CASES, ids=lambda a: a.name)
def test_what_is_not_convex_and_nondecreasing_is_refused(activation: Activation):
    if activation.convex and activation.nondecreasing:
        icnn.FICNN(DIM_Y, activation=activation)
        icnn.PICNN(DIM_X, DIM_Y, activation=activation)
        return
    for make in (partial(icnn.FICNN, DIM_Y), partial(icnn.PICNN, DIM_X, DIM_Y)):
        with pytest.raises(
            ValueError, match=r"`activation` must be convex and non-decreasing"
        ) as e:
            make(activation=activation)
        assert repr(activation.name) in str(e.value)
        assert activation.reason in str(e.value)
    icnn.PICNN(DIM_X, DIM_Y, x_activation=activation)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "gelu", "silu"])
def test_refusal_says_why(name: str):
    with pytest.raises(ValueError, match=rf"relu.*got '{name}', which is not convex .*bends down"):
        icnn.FICNN(DIM_Y, activation=name)


@pytest.mark.parametrize("unknown", ["swish", "ReLU", torch.relu, torch.nn.ReLU(), None, 3])
def test_unknown_activation(unknown):
    for argument in ("activation", "x_activation"):
        with pytest.raises(ValueError, match=f"`{argument}` must be one of the names relu"):
            icnn.PICNN(DIM_X, DIM_Y, **{argument: unknown})


def test_softplus_needs_a_positive_beta():
    for beta in (0.0, -1.0):
        with pytest.raises(ValueError, match="`beta` must be positive, got"):
            softplus(beta)


@pytest.mark.parametrize("wrong", ["a", None, float("nan"), float("inf")])
def test_numbers_of_activations(wrong):
    for make, argument in ((leaky_relu, "slope"), (elu, "alpha"), (softplus, "beta")):
        with pytest.raises(ValueError, match=f"`{argument}` must be a finite number, got"):
            make(wrong)


def test_a_users_own_activation():
    squared = Activation("squared", lambda z: z.relu().square(), True, True, False, True)
    energy = icnn.FICNN(DIM_Y, activation=squared)
    assert energy(None, torch.ones(2, DIM_Y)).shape == (2,)


@pytest.mark.parametrize("activation", CASES, ids=lambda a: a.name)
def test_activations_pickle(activation: Activation):
    assert torch.equal(pickle.loads(pickle.dumps(activation))(GRID), activation(GRID))
