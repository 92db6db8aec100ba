"""Promise 1: convex by construction, at initialisation and after any number of steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import (
    ACTIVATIONS,
    EVERY_FAMILY,
    FAMILIES,
    POSITIVITIES,
    Make,
    ficnn_of_both,
    jensen,
    picnn,
)
from networks import train_on_noise as train

from icnn.energies.layers import NonNegative

PAIRS, TOLERANCE = 10_000, 1e-9


@pytest.mark.parametrize("positivity", POSITIVITIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY_FAMILY
def test_jensen_before_and_after_training(make: Make, activation: str, positivity: str):
    energy = make(activation=activation, positivity=positivity).double().eval()
    jointly = make is ficnn_of_both
    assert jensen(energy, PAIRS, jointly) <= TOLERANCE
    train(energy)
    assert jensen(energy, PAIRS, jointly) <= TOLERANCE


@EVERY_FAMILY
def test_without_positivity_jensen_fails(make: Make):
    """The relaxed variant is not convex, which also shows that the test above can fail."""
    energy = make(positivity=None).double().eval()
    train(energy)
    assert jensen(energy, PAIRS) > 1e-3


def test_training_moves_weights_below_zero_and_the_energy_stays_convex():
    """Straight-through clipping is what keeps it: the stored weights are negative by then."""
    energy = picnn().double()
    train(energy)
    weights = [part for part in energy.modules() if isinstance(part, NonNegative)]
    assert min(weight.raw.min().item() for weight in weights) < 0
    assert min(weight().min().item() for weight in weights) == 0
    assert jensen(energy, PAIRS) <= TOLERANCE


@settings(max_examples=40, deadline=None)
@given(
    make=st.sampled_from(FAMILIES),
    activation=st.sampled_from(ACTIVATIONS),
    positivity=st.sampled_from(POSITIVITIES),
    scale=st.floats(0.01, 3.0),
    seed=st.integers(0, 2**31),
)
def test_jensen_for_any_weights(
    make: Make, activation: str, positivity: str, scale: float, seed: int
):
    """Whatever numbers the parameters hold."""
    torch.manual_seed(seed)
    energy = make(activation=activation, positivity=positivity).double().eval()
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.normal_(std=scale)
    assert jensen(energy, 1000, make is ficnn_of_both) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@EVERY_FAMILY
def test_jensen_along_a_long_run(make: Make, kind):
    energy = make().double()
    optimizer = kind(energy.parameters(), lr=1e-3)
    for _ in range(20):
        train(energy, 500, optimizer)
        assert jensen(energy, PAIRS, make is ficnn_of_both) <= TOLERANCE
