"""A start measured on data: every layer centred and of one size, and as convex as before."""

import pytest
import torch
from networks import EVERY_FAMILY, POSITIVITIES, Make, batch, composed, jensen
from test_energies_initialisation import spreads
from torch import Tensor, nn

import icnn
from icnn.energies.energy import LayeredEnergy

DOUBLE = torch.float64


def vgg(pool: type[nn.Module]) -> LayeredEnergy:
    """Five blocks of two convolutions, to maps of 2 x 2: the formulas alone start it dead."""
    parts, before = [], 3
    for channels in (8, 16, 32, 32, 32):
        for _ in range(2):
            parts += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        parts.append(pool(2))
    net = nn.Sequential(*parts, nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1))
    return icnn.convexify(net, (3, 64, 64))


def conv(pool: str) -> icnn.ConvPICNN:
    convs = [step for channels in (8, 16, 32, 32) for step in ((channels, 3, 1), (pool, 2))]
    return icnn.ConvPICNN((3, 64, 64), (3, 64, 64), convs, (50,))


def images(size: int) -> Tensor:
    """Pixels between 0 and 1, with the spectrum of natural images."""
    k = torch.fft.fftfreq(64)
    frequency = (k[:, None].square() + k.square()).sqrt()
    frequency[0, 0] = 1 / 64
    maps = torch.fft.ifft2(torch.fft.fft2(torch.randn(size, 3, 64, 64)) / frequency).real
    return torch.sigmoid(maps / maps.std() - 1)


def noise(size: int) -> Tensor:
    return torch.randn(size, 3, 64, 64)


@pytest.mark.parametrize(
    ("make", "pool"),
    [(vgg, nn.MaxPool2d), (vgg, nn.AvgPool2d), (conv, "max"), (conv, "avg")],
    ids=["vgg max", "vgg avg", "picnn max", "picnn avg"],
)
@pytest.mark.parametrize("data", [noise, images])
def test_spread_behind_poolings(make, pool, data):
    energy = make(pool)
    icnn.calibrate_(energy, data(40), data(40))
    found = spreads(energy, data(40), data(40))  # fresh data
    # Averages over four places of noise halve the spread: a quarter is half of that.
    assert 0.25 <= min(found) / found[0] <= max(found) / found[0] <= 2


@EVERY_FAMILY
@pytest.mark.parametrize("positivity", [*POSITIVITIES, None])
def test_units_are_standardised(make: Make, positivity):
    energy = make(positivity=positivity).double()
    if make is composed:
        with pytest.raises(ValueError, match="of a composition, calibrate the networks inside it"):
            icnn.calibrate_(energy, *batch(8, dtype=DOUBLE))  # type: ignore[type-var]
        return
    assert isinstance(energy, LayeredEnergy)
    x, y = batch(200, dtype=DOUBLE)
    x, y = 100 + 20 * x, 5 - 0.1 * y
    assert icnn.calibrate_(energy, x, y) is energy
    assert energy.training
    energy.eval()
    with torch.no_grad():
        value, z = energy(x, y), None
        for layer in energy.describe(x):
            a = layer._replace(activation=icnn.activations.identity())(z, y)
            assert float(a.mean(dim=0).abs().max()) < 1e-8
            assert float(a.var(dim=0).mean()) == pytest.approx(1)
            z = layer(z, y)
    assert float(value.std()) == pytest.approx(1)
    if positivity is not None:
        assert jensen(energy, 2000) <= 1e-9


def test_data_that_do_not_vary():
    with pytest.raises(ValueError, match="`x` or `y` must differ between examples"):
        icnn.calibrate_(icnn.PICNN(4, 3), torch.ones(5, 4), torch.ones(5, 3))
    # Black images but for one pixel: most units of a convolution see nothing.
    energy, y = conv("max"), torch.zeros(5, 3, 64, 64)
    x = y.clone()
    x[0, 0, 0, 0] = 1
    icnn.calibrate_(energy, x, y)
    assert float(energy(x, y).abs().max()) < 10


def test_bad_input_changes_nothing():
    energy = icnn.PICNN(4, 3)
    before = {name: value.clone() for name, value in energy.state_dict().items()}
    with pytest.raises(ValueError, match=r"`y` must have shape \(5, 3\), got \(5, 2\)"):
        icnn.calibrate_(energy, torch.randn(5, 4), torch.randn(5, 2))
    with pytest.raises(ValueError, match="`y` must hold at least 2 examples to measure on, got 1"):
        icnn.calibrate_(energy, torch.randn(1, 4), torch.randn(1, 3))
    with pytest.raises(ValueError, match="`x` and `y` must be finite"):
        icnn.calibrate_(energy, torch.full((5, 4), torch.nan), torch.randn(5, 3))
    assert all(torch.equal(value, before[name]) for name, value in energy.state_dict().items())


@pytest.mark.parametrize("scale", [1e20, 1e-15])
def test_extreme_scales(scale: float):
    y = scale * torch.randn(50, 2)
    energy = icnn.calibrate_(icnn.FICNN(2), None, y)
    assert float(energy(None, y).std()) == pytest.approx(1, abs=1e-3)


def test_what_cannot_be_calibrated_is_left_as_it_was():
    energy = icnn.FICNN(2, (8, 8, 8))
    energy.layers[2].wz = energy.layers[1].wz  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in energy.state_dict().items()}
    with pytest.raises(ValueError, match="`energy` must not share weights"):
        icnn.calibrate_(energy, None, 50 + torch.randn(50, 2))
    assert all(torch.equal(value, before[name]) for name, value in energy.state_dict().items())
    half = icnn.FICNN(2).half()
    before = {name: value.clone() for name, value in half.state_dict().items()}
    with pytest.raises(ValueError, match=r"must be (finite|of a size)"):
        icnn.calibrate_(half, None, (20_000 * torch.randn(50, 2)).half())
    assert all(torch.equal(value, before[name]) for name, value in half.state_dict().items())
