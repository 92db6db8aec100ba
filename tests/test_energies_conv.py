"""Convolutional energies, ours and made from a user's network: what they compute, and Jensen."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import ACTIVATIONS, DEVICES, POSITIVITIES
from torch import Tensor, nn

import icnn
from icnn.energies.conv import ConvLayer
from icnn.energies.energy import Conv, resample
from icnn.energies.picnn import PartialLayer, XLayer

X_SHAPE = (2, 12, 10)
CONVS = ((4, 3, (2, 1)), ("max", 2), (5, (2, 3), 1))
DOUBLE = torch.float64


def to_image(**options) -> icnn.Energy:
    return icnn.ConvPICNN(X_SHAPE, (1, 12, 10), CONVS, (6,), **options)


def to_small_image(**options) -> icnn.Energy:
    """Of another size than x, with averages in between."""
    convs = ((4, 3, 1), ("avg", (2, 1)), (3, 2, 2))
    return icnn.ConvPICNN(X_SHAPE, (3, 7, 5), convs, (6, 5), x_norm="batch", **options)


def to_vector(**options) -> icnn.Energy:
    return icnn.ConvPICNN(X_SHAPE, (3,), CONVS, (6,), x_norm="layer", **options)


def act(activation: str) -> nn.Module:
    return {
        "relu": nn.ReLU(inplace=True),
        "leaky_relu": nn.LeakyReLU(0.1),
        "softplus": nn.Softplus(),
        "elu": nn.ELU(),
        "identity": nn.Identity(),
    }[activation]


def mlp(activation: str = "relu", **options) -> icnn.Energy:
    net = nn.Sequential(
        nn.Linear(5, 16), act(activation), nn.Dropout(0.3), nn.Linear(16, 8), act(activation),
        nn.Linear(8, 1),
    )  # fmt: skip
    return icnn.convexify(net, **options)


def pooled_first(activation: str = "relu", **options) -> icnn.Energy:
    net = nn.Sequential(
        nn.Dropout2d(0.2), nn.AvgPool2d(2), act(activation), nn.Conv2d(2, 4, 3, dilation=2),
        act(activation), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 1),
    )  # fmt: skip
    return icnn.convexify(net, (2, 12, 10), **options)


def vgg(activation: str = "relu", **options) -> icnn.Energy:
    """A small VGG: blocks of padded convolutions and maxima, then a classifier with dropout."""
    features = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), act(activation), nn.Conv2d(6, 6, 3, padding=1),
        act(activation), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1, stride=(1, 2)),
        act(activation), nn.MaxPool2d(2, padding=1),
    )  # fmt: skip
    classifier = nn.Sequential(nn.Linear(32, 10), act(activation), nn.Dropout(), nn.Linear(10, 1))
    net = nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), classifier)
    return icnn.convexify(net, (2, 12, 10), **options)


PARTIAL = (to_image, to_small_image, to_vector)
FULL = (mlp, pooled_first, vgg)
Make = Callable[..., Any]
EVERY = pytest.mark.parametrize("make", PARTIAL + FULL, ids=lambda make: make.__name__)


def batch(energy: icnn.Energy, size: int, **options) -> tuple[Tensor | None, Tensor]:
    assert energy.y_shape is not None
    partial = isinstance(energy, icnn.ConvPICNN)
    x = torch.randn(size, *X_SHAPE, **options) if partial else None
    return x, torch.randn(size, *energy.y_shape, **options)


def train(energy: icnn.Energy, steps: int = 40) -> None:
    """Adam on noise, nothing projected."""
    optimizer = torch.optim.Adam(energy.parameters(), lr=0.03)
    energy.train()
    for _ in range(steps):
        x, y = batch(energy, 16, dtype=DOUBLE)
        loss = (energy(x, y) - torch.randn(16, dtype=DOUBLE)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    energy.eval()


@torch.no_grad()
def jensen(energy: icnn.Energy, pairs: int = 1000) -> float:
    """The worst violation, relative to 1 + |f|."""
    (x, p), (_, q) = (batch(energy, pairs, dtype=DOUBLE) for _ in range(2))
    t = torch.rand(pairs, *[1] * (p.ndim - 1), dtype=DOUBLE)
    f = energy.at(x)
    a, b, middle = f(3 * p), f(3 * q), f(3 * (t * p + (1 - t) * q))
    t = t.flatten()
    return float(((middle - t * a - (1 - t) * b) / (1 + a.abs() + b.abs())).max())


@pytest.mark.parametrize("positivity", POSITIVITIES)
@EVERY
def test_jensen_before_and_after_training(make: Make, positivity: str):
    for activation in ACTIVATIONS if positivity == "project" else ("relu",):
        energy = make(activation=activation, positivity=positivity).double().eval()
        assert jensen(energy) <= 1e-9
        train(energy)
        assert jensen(energy) <= 1e-9


@EVERY
def test_without_positivity_jensen_fails(make: Make):
    energy = make(positivity=None).double().eval()
    assert jensen(energy) > 1e-4
    assert not icnn.check_convexity(energy).proved


@EVERY
def test_convexity_is_proved(make: Make):
    energy = make().double()
    train(energy, steps=10)
    report = icnn.check_convexity(energy)
    assert report.proved, str(report)


def test_conv_picnn_is_supplement_a():
    """The recurrence written out, with gates, both paths, the pooling and S."""
    energy = icnn.ConvPICNN(X_SHAPE, (1, 12, 10), CONVS, (6,), x_activation="tanh").double()
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.normal_(std=0.5)
    x, y = batch(energy, 4, dtype=DOUBLE)
    assert x is not None
    first, _, second = energy.steps
    assert isinstance(first, ConvLayer)
    assert isinstance(second, ConvLayer)

    def conv(linear: Any, v: Tensor, stride: Any = 1) -> Tensor:
        return F.conv2d(v, linear.weight, linear.bias, stride)

    z = (conv(first.wu, x, (2, 1)) + conv(first.wy, y * conv(first.wyu, x), (2, 1))).relu()
    u = conv(first.v, x, (2, 1)).tanh()
    assert u.shape == z.shape == (4, 4, 5, 8)
    z, u = F.max_pool2d(z, 2), F.max_pool2d(u, 2)
    # From 12 x 10 to 2 x 4: averages of 6 x 3 places, with one column left for the last.
    parts = ([0, 1, 2], [3, 4, 5], [6, 7, 8], [9])
    columns = [[v[..., part].mean(dim=-1) for part in parts] for v in (x, y)]
    sx, sy = (
        torch.stack([c.unflatten(2, (2, 6)).mean(dim=3) for c in found], dim=-1)
        for found in columns
    )
    c = torch.cat([u, sx], dim=1)
    assert second.wz is not None
    assert second.wzu is not None
    z = F.conv2d(z * conv(second.wzu, c).relu(), second.wz().clamp(min=0))
    z = (z + conv(second.wu, c) + conv(second.wy, sy * conv(second.wyu, c))).relu()
    u = conv(second.v, u).tanh().flatten(1)
    z, v = z.flatten(1), y.flatten(1)
    for i, layer in enumerate(energy.layers):
        assert isinstance(layer, PartialLayer)
        assert layer.wz is not None
        assert layer.wzu is not None
        z = (z * layer.wzu(u).relu()) @ layer.wz().T + layer.wu(u) + layer.wy(v * layer.wyu(u))
        if i == 0:
            z = z.relu()
            x_layer = energy.x_path[0]
            assert isinstance(x_layer, XLayer)
            u = x_layer.v(u).tanh()
    torch.testing.assert_close(energy(x, y), z.squeeze(1))


def test_a_vector_adds_one_number_to_each_map():
    layer = icnn.ConvPICNN(X_SHAPE, (3,), CONVS, (6,)).describe(torch.randn(2, *X_SHAPE))[0]
    assert isinstance(layer, Conv)
    y = torch.randn(2, 3)
    added = (layer.bias + (y @ layer.wy.T)[:, :, None, None]).relu()
    torch.testing.assert_close(layer(None, y), added)


def test_resampling_is_linear_and_keeps_constants():
    for before, after in (((12, 10), (5, 8)), ((3, 4), (7, 9)), ((12, 10), (12, 3))):
        a, b = torch.randn(2, 2, 3, *before, dtype=DOUBLE)
        both = resample(2 * a - b, after)
        torch.testing.assert_close(both, 2 * resample(a, after) - resample(b, after))
        assert torch.equal(resample(torch.ones(1, 1, *before), after), torch.ones(1, 1, *after))


def test_convexified_network_computes_what_its_layers_say():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(120, 1)
    )
    energy = icnn.convexify(net, (2, 12, 10))
    steps: Any = energy.steps
    conv, _, _, _, linear = steps
    y = torch.randn(3, 2, 12, 10)
    z = F.max_pool2d(F.conv2d(y, conv.wy.weight, conv.wy.bias, padding=1).relu(), 2)
    value = z.flatten(1) @ linear.wz().T + linear.wy(y.flatten(1))
    torch.testing.assert_close(energy(None, y), value.squeeze(1))
    assert icnn.convexify(nn.Sequential(nn.Linear(3, 1)))(None, torch.ones(2, 3)).shape == (2,)


@EVERY
def test_modules(make: Make, tmp_path):
    """At, empty batches, copies, pickles, files, autocast, gradients in y alone."""
    energy = make().eval()
    x, y = batch(energy, 4)
    expected = energy(x, y)
    assert torch.equal(energy.at(x)(y), expected)
    for twin in (copy.deepcopy(energy), pickle.loads(pickle.dumps(energy))):
        assert torch.equal(twin(x, y), expected)
    icnn.save(energy, tmp_path / "energy")
    loaded = icnn.load(tmp_path / "energy")
    assert torch.equal(loaded(x, y), expected)
    assert repr(loaded) == repr(energy)
    assert energy(None if x is None else x[:0], y[:0]).shape == (0,)
    assert energy.train()(None if x is None else x[:0], y[:0]).shape == (0,)
    assert all(value.isfinite().all() for value in energy.state_dict().values())
    energy.eval()
    with torch.autocast("cpu", torch.bfloat16):
        value = energy(x, y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0.1, atol=0.1)
    with torch.no_grad():
        f = energy.at(x)
    y.requires_grad_()
    f(y).sum().backward()
    assert all(parameter.grad is None for parameter in energy.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EVERY
def test_dtype_and_device_are_kept(make: Make, dtype: torch.dtype, device: str):
    energy = make().to(device, dtype).eval()
    x, y = batch(energy, 4, dtype=dtype, device=device)
    value = energy(x, y)
    assert (value.dtype, value.device.type) == (dtype, device)
    exact = copy.deepcopy(energy).to("cpu", DOUBLE)
    expected = exact(None if x is None else x.cpu().double(), y.cpu().double())
    torch.testing.assert_close(value.cpu().double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@EVERY
def test_compiles_as_one_graph(make: Make, device: str):
    torch.compiler.reset()
    energy = make().to(device).eval()
    backend = "inductor" if device == "cuda" else "aot_eager"
    x, y = batch(energy, 4, device=device)
    value = torch.compile(energy, fullgraph=True, backend=backend)(x, y)
    torch.testing.assert_close(value, energy(x, y), rtol=1e-3, atol=1e-3)


def test_dropout_masks_are_frozen_by_at():
    energy = mlp().train()
    _, y = batch(energy, 6)
    f = energy.at(None)
    assert torch.equal(f(y), f(y))
    assert not torch.equal(f(y), energy.at(None)(y))
    assert torch.equal(energy.eval()(None, y), energy(None, y))


BAD_CONVS = [
    ((), "`convs` must be a non-empty sequence"),
    ((3, 3, 1), r"`convs\[0\]` must be \(channels, kernel, stride\)"),
    ((("min", 2),), r"`convs\[0\]` must be \(channels, kernel, stride\)"),
    (((4, 0, 1),), r"`convs\[0\]\[1\]` must be an integer of at least 1, got 0"),
    (((4, (3, -1), 1),), r"`convs\[0\]\[1\]\[1\]` must be an integer of at least 1, got -1"),
    (((4, 3, 1), (4, 11, 1)), r"`convs\[1\]` must have a kernel of at most \(10, 8\)"),
    ((("max", 2),), "`convs` must hold at least one convolution"),
]


@pytest.mark.parametrize(("convs", "message"), BAD_CONVS)
def test_bad_convs(convs, message: str):
    with pytest.raises(ValueError, match=message):
        icnn.ConvPICNN(X_SHAPE, (3,), convs)


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"`x_shape` must be \(channels, height, width\)"):
        icnn.ConvPICNN((12, 10), (3,))
    with pytest.raises(ValueError, match=r"`y_shape` must be \(length,\) or \(channels, height"):
        icnn.ConvPICNN(X_SHAPE, (12, 10), CONVS)
    energy = to_image()
    x, y = batch(energy, 4)
    with pytest.raises(
        ValueError, match=r"`x` must have shape \(B, 2, 12, 10\), got \(4, 12, 10\)"
    ):
        energy(x[:, 0], y)  # type: ignore[index]
    with pytest.raises(
        ValueError, match=r"`y` must have shape \(4, 1, 12, 10\), got \(4, 12, 10\)"
    ):
        energy(x, y[:, 0])
    small = to_small_image()
    x, y = batch(small, 1)
    with pytest.raises(ValueError, match="`x` must hold at least 2 examples in training mode"):
        small(x, y)


BAD_NETWORKS = [
    (nn.Linear(3, 1), "`module` must be a Sequential, got Linear"),
    (nn.Sequential(), "`y_shape` must be given"),
    (nn.Sequential(nn.Conv2d(1, 1, 3)), "`y_shape` must be given"),
    (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), "'tanh', which is not convex"),
    (
        nn.Sequential(nn.Linear(3, 4), nn.ELU(2.0), nn.Linear(4, 1)),
        "alpha must lie between 0 and 1",
    ),
    (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), "got BatchNorm1d"),
    (nn.Sequential(nn.Linear(3, 4), nn.ReLU()), "`module` must end in a Linear with one output"),
    (nn.Sequential(nn.Linear(3, 4)), "`module` must end in a Linear with one output"),
    (nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 1)), "`module` must fit its input: Linear"),
]


@pytest.mark.parametrize(("module", "message"), BAD_NETWORKS)
def test_networks_that_cannot_be_made_convex(module, message: str):
    with pytest.raises(ValueError, match=message):
        icnn.convexify(module)


class Residual(nn.Sequential):
    def forward(self, input):
        return input - super().forward(input)


class Sine(nn.Linear):
    def forward(self, input):
        return super().forward(input).sin()


def test_subclasses_may_compute_anything_and_are_refused():
    for part in (Residual(nn.Linear(3, 3)), Sine(3, 3)):
        with pytest.raises(ValueError, match=r"`module` must be made of plain layers of torch\.nn"):
            icnn.convexify(nn.Sequential(part, nn.ReLU(), nn.Linear(3, 1)), (3,))


@pytest.mark.parametrize(
    ("parts", "y_shape"),
    [
        ([nn.Linear(8, 16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)], (4, 8)),
        ([nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(72, 1)], (8, 8)),
        ([nn.AvgPool2d(2, divisor_override=-1), nn.Flatten(), nn.Linear(32, 1)], (2, 8, 8)),
        ([nn.MaxPool2d(2, return_indices=True), nn.Flatten(), nn.Linear(32, 1)], (2, 8, 8)),
    ],
)
def test_layers_used_in_other_ways_are_refused(parts, y_shape):
    with pytest.raises(ValueError, match=r"`module` must (give|be made of)"):
        icnn.convexify(nn.Sequential(*parts), y_shape)


def test_dtype_and_mode_are_taken_over():
    energy = icnn.convexify(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double().eval()
    )
    assert not energy.training
    assert energy(None, torch.ones(2, 3, dtype=DOUBLE)).dtype == DOUBLE


@pytest.mark.parametrize("y_shape", [(3,), (1, 1, 1), (1, 12, 10)])
def test_pooling_first(y_shape):
    energy = icnn.ConvPICNN((1, 12, 10), y_shape, (("max", 2), (4, 3, 1)), (7,)).double()
    x = torch.randn(3, 1, 12, 10, dtype=DOUBLE)
    assert energy(x, torch.randn(3, *y_shape, dtype=DOUBLE)).shape == (3,)
    assert icnn.check_convexity(energy).proved


def test_resampling_passes_over_no_place_where_maps_differ_much():
    for before, after in ((12, 8), (12, 7), (12, 6), (12, 3), (15, 10)):
        maps = torch.ones(1, 1, before, before, requires_grad=True)
        resample(maps, (after, after)).sum().backward()
        assert maps.grad is not None
        assert bool((maps.grad > 0).all())


def test_ways_to_write_the_same_network():
    linear = nn.Linear(4 * 12 * 10, 1)
    plain = [nn.Conv2d(2, 4, (3, 5), padding=(2, 2), dilation=(2, 1)), nn.ReLU(), nn.Flatten()]
    same = nn.Conv2d(2, 4, (3, 5), padding="same", dilation=(2, 1))
    others = [nn.Identity(), same, nn.ReLU(), nn.Flatten(1, 3), nn.Identity()]
    y = torch.randn(3, 2, 12, 10)
    values = []
    for parts in ([*plain, linear], [*others, linear, nn.Identity()]):
        torch.manual_seed(0)
        values.append(icnn.convexify(nn.Sequential(*parts), (2, 12, 10))(None, y))
    assert torch.equal(*values)
    valid = nn.Sequential(nn.Conv2d(2, 4, 3, padding="valid"), nn.Flatten(), nn.Linear(320, 1))
    assert icnn.convexify(valid, (2, 12, 10))(None, y).shape == (3,)


def test_without_dense_layers():
    energy = icnn.ConvPICNN(X_SHAPE, (3,), CONVS, ())
    x, y = batch(energy, 4)
    assert energy(x, y).shape == (4,)
    assert icnn.check_convexity(energy).proved


def test_batch_norm_over_the_places_of_one_image():
    energy = icnn.ConvPICNN(X_SHAPE, (3,), CONVS, (), x_norm="batch")
    x, y = batch(energy, 1)
    assert bool(energy(x, y).isfinite().all())


def test_convolutions_that_cannot_be_made_convex():
    for conv in (nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 2, padding="same")):
        with pytest.raises(ValueError, match="`module` must have convolutions with one group"):
            icnn.convexify(nn.Sequential(conv, nn.Flatten(), nn.Linear(4, 1)), (2, 3, 3))
