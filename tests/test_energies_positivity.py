"""`NonNegative`, `project_` and `keep_convex`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import FAMILIES, POSITIVITIES, batch, composed, picnn, train_on_noise
from torch import nn

import icnn
from icnn.energies.layers import POSITIVITY

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=5)
ANYTHING = st.lists(st.floats(-50, 50), min_size=1, max_size=5)


@pytest.mark.parametrize("positivity", [*POSITIVITIES, None])
@given(values=WEIGHTS)
@settings(deadline=None)
def test_reading_gives_back_what_was_set(positivity, values):
    weight = torch.tensor(values, dtype=torch.float64)
    kept = icnn.NonNegative(nn.Parameter(torch.zeros_like(weight)), positivity)
    kept.set_(weight)
    torch.testing.assert_close(kept(), weight, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("positivity", POSITIVITIES)
@given(values=ANYTHING)
@settings(deadline=None)
def test_what_is_read_is_never_negative(positivity, values):
    kept = icnn.NonNegative(nn.Parameter(torch.zeros(len(values))), positivity)
    with torch.no_grad():
        kept.raw.copy_(torch.tensor(values))
    assert (kept() >= 0).all()


def test_project_reads_the_clipped_value_to_the_bit_with_the_gradient_of_the_identity():
    raw = torch.cat([torch.randn(10_000), torch.randn(10_000) * 1e-30, torch.randn(10_000) * 1e30])
    kept = icnn.NonNegative(nn.Parameter(torch.zeros_like(raw)))
    with torch.no_grad():
        kept.raw.copy_(raw)
    assert torch.equal(kept(), raw.clamp(min=0))
    slope = torch.randn_like(raw)
    (gradient,) = torch.autograd.grad((kept() * slope).sum(), kept.raw)
    assert torch.equal(gradient, slope)


def test_a_clipped_weight_can_come_back():
    """A weight at -1 whose target is 2: without the straight-through gradient it would stay."""
    kept = icnn.NonNegative(nn.Parameter(torch.tensor(0.0)))
    with torch.no_grad():
        kept.raw.fill_(-1)
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (kept() - 2).square().backward()
        optimizer.step()
    assert kept().item() == pytest.approx(2, abs=1e-4)


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_project_changes_what_is_stored_and_not_what_is_computed(make):
    energy = make().double()
    train_on_noise(energy, steps=50)
    x, y = batch(20, dtype=torch.float64)
    before = energy(x, y)
    assert icnn.project_(energy) is energy
    stored = [p.raw for p in energy.modules() if isinstance(p, icnn.NonNegative)]
    assert all((raw >= 0).all() for raw in stored)
    assert torch.equal(energy(x, y), before)


@pytest.mark.parametrize("positivity", [*POSITIVITIES[1:], None])
def test_project_leaves_other_modes_alone(positivity):
    energy = picnn(positivity=positivity)
    train_on_noise(energy.double(), steps=20)
    before = {key: value.clone() for key, value in energy.state_dict().items()}
    icnn.project_(energy)
    assert all(torch.equal(value, before[key]) for key, value in energy.state_dict().items())


def test_keep_convex_projects_after_every_step_until_removed():
    energy = composed().double()
    optimizer = torch.optim.SGD(energy.parameters(), lr=10.0)
    stored = [p.raw for p in energy.modules() if isinstance(p, icnn.NonNegative)]
    handle = icnn.keep_convex(energy, optimizer)
    for parameter in energy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((raw == 0).all() for raw in stored)
    handle.remove()
    optimizer.step()
    assert all((raw == -10).all() for raw in stored)


def test_a_parameter_is_learned_and_stays_the_users_own_a_tensor_is_a_constant():
    parameter, constant = nn.Parameter(torch.ones(3)), torch.ones(3)
    assert icnn.NonNegative(parameter).raw is parameter
    kept = icnn.NonNegative(constant, "exp")
    assert not list(kept.parameters())
    assert set(kept.state_dict()) == {"raw_exp"}
    kept.set_(torch.full((3,), 5.0))
    assert torch.equal(constant, torch.ones(3))


@pytest.mark.parametrize("positivity", POSITIVITIES)
def test_negative_values_are_refused(positivity):
    with pytest.raises(ValueError, match="`value` must be at least 0, got a minimum of -1"):
        icnn.NonNegative(torch.tensor([1.0, -1.0]), positivity)


def test_weights_of_one_mode_do_not_load_into_another():
    with pytest.raises(
        RuntimeError, match=r"Missing key.*wz\.raw_exp.*\n.*Unexpected.*raw_project"
    ):
        picnn(positivity="exp").load_state_dict(picnn().state_dict())


def test_unknown_positivity():
    for make in (lambda p: icnn.FICNN(2, positivity=p), lambda p: icnn.PICNN(2, 2, positivity=p)):
        for unknown in ("relu", 0, ["project"]):
            with pytest.raises(
                ValueError, match="`positivity` must be one of 'project', 'softplus'"
            ):
                make(unknown)
    assert set(POSITIVITY) == {*POSITIVITIES, None}


@pytest.mark.parametrize("dim_x", [0, 2])
def test_monotone_whatever_an_optimiser_does(dim_x: int):
    torch.manual_seed(0)
    signs = (1, -1, 0)
    energy = icnn.PICNN(2, 3, (8, 8), monotone=signs) if dim_x else icnn.FICNN(3, monotone=signs)
    x = torch.randn(40, 2) if dim_x else None
    optimizer = torch.optim.SGD(energy.parameters(), lr=0.3)
    for _ in range(10):
        y = torch.randn(40, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(energy(x, y).sum(), y)
        assert slope[:, 0].min() >= 0
        assert slope[:, 1].max() <= 0
        optimizer.zero_grad()
        (energy(x, y) + y @ torch.tensor([1.0, -1.0, 1.0])).square().mean().backward()
        optimizer.step()
    f, y = energy.at(x), torch.randn(40, 3)
    before = f(y)
    icnn.project_(energy)
    torch.testing.assert_close(energy.at(x)(y), before, rtol=0, atol=0)
    assert (energy.layers[0].wy.weight[:, 0] >= 0).all()  # pyright: ignore
    assert icnn.check_convexity(energy, x).proved


def test_monotone_needs_weights_that_are_constrained():
    with pytest.raises(ValueError, match="`monotone` must be None with positivity=None"):
        icnn.FICNN(2, monotone=1, positivity=None)
