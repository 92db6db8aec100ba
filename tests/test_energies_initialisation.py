"""Deep energies start with units of about one size in every layer."""

import math

import pytest
import torch
from networks import POSITIVITIES
from torch import Tensor

import icnn
from icnn.energies.activations import Activation, elu, identity, leaky_relu, relu, softplus
from icnn.energies.energy import LayeredEnergy
from icnn.energies.initialisation import PASSED, moments, nonnegative_weight

DEPTH = 12
MODES = [*POSITIVITIES, None]


@torch.no_grad()
def spreads(energy: LayeredEnergy, x: Tensor | None, y: Tensor) -> list[float]:
    """The standard deviation over the batch, averaged over units, after every hidden layer."""
    z, found = None, []
    for layer in energy.describe(x)[:-1]:
        z = layer(z, y)
        found.append(z.std(dim=0).mean().item())
    return found


def smooth(*shape: int) -> Tensor:
    """Standardised images that vary slowly, as real ones do."""
    coarse = torch.randn(*shape[:2], 8, 8)
    maps = torch.nn.functional.interpolate(coarse, size=shape[2:], mode="bicubic")
    return (maps - maps.mean(dim=0)) / maps.std(dim=0)


@pytest.mark.parametrize("positivity", MODES)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "softplus", "elu"])
@pytest.mark.parametrize("dim_y", [2, 100])
def test_spread_of_dense_layers(activation: str, positivity, dim_y: int):
    x, y = torch.randn(1000, 20), torch.randn(1000, dim_y)
    hidden = (200,) * DEPTH
    for energy in (
        icnn.FICNN(dim_y, hidden, activation=activation, positivity=positivity),
        icnn.FICNN(dim_y, hidden, dim_x=20, activation=activation, positivity=positivity),
        icnn.PICNN(20, dim_y, hidden, activation=activation, positivity=positivity),
    ):
        found = spreads(energy, x, y)
        assert len(found) == DEPTH
        assert 0.5 <= min(found) / found[0] <= max(found) / found[0] <= 2


@pytest.mark.parametrize("positivity", MODES)
@pytest.mark.parametrize("activation", ["relu", "softplus"])
@pytest.mark.parametrize("image", [torch.randn, smooth], ids=["noise", "smooth"])
@pytest.mark.parametrize("y_shape", [(3, 32, 32), (20,)], ids=["image", "vector"])
def test_spread_of_convolutional_layers(y_shape, image, activation: str, positivity):
    energy = icnn.ConvPICNN(
        (3, 32, 32),
        y_shape,
        ((32, 3, 1),) * DEPTH,
        (50,),
        activation=activation,
        positivity=positivity,
    )
    y = image(50, *y_shape) if len(y_shape) == 3 else torch.randn(50, *y_shape)
    found = spreads(energy, image(50, 3, 32, 32), y)
    assert len(found) == DEPTH + 1
    assert 0.5 <= min(found) / found[0] <= max(found) / found[0] <= 2


def test_moments():
    assert moments(relu()) == pytest.approx((1 / math.sqrt(2 * math.pi), 0.5), rel=1e-4)
    assert moments(identity()) == pytest.approx((0, 1), abs=1e-9)
    a = torch.randn(4_000_000, dtype=torch.float64)
    for activation in (softplus(), softplus(5.0), elu(), leaky_relu(0.3)):
        measured = activation(a).mean().item(), activation(a).square().mean().item()
        assert moments(activation) == pytest.approx(measured, rel=3e-3)


@pytest.mark.parametrize("incoming", [relu(), softplus()], ids=lambda a: a.name)
def test_the_draw_has_the_mean_and_variance_that_it_promises(incoming: Activation):
    """On a fan-in so small that the tail of the log-normal shows in a sample."""
    n = 4
    kept, bias = nonnegative_weight((1_000_000, n), incoming, "project")
    mean, square = moments(incoming)
    assert kept().mean().item() == pytest.approx(1 / n, rel=0.02)
    variance = (1 - PASSED) / (n * (square - mean**2))
    assert kept().var().item() == pytest.approx(variance, rel=0.2)
    torch.testing.assert_close(bias, -mean * kept().detach().sum(dim=1))


def test_every_mode_draws_the_same_weights():
    drawn = []
    for positivity in POSITIVITIES:
        torch.manual_seed(0)
        drawn.append(nonnegative_weight((8, 50), relu(), positivity)[0]())
    for other in drawn[1:]:
        torch.testing.assert_close(other, drawn[0], rtol=1e-4, atol=1e-7)
