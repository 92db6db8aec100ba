"""The paper's recurrences, letter by letter, and Proposition 2."""

import numpy as np
import pytest
import torch
from networks import DIM_X, DIM_Y, EVERY_FAMILY, Make, batch
from torch import nn

import icnn
from icnn.energies.ficnn import FullLayer
from icnn.energies.layers import NonNegative
from icnn.energies.picnn import PartialLayer, XLayer

DOUBLE = torch.float64
G = {"relu": lambda v: np.maximum(v, 0), "softplus": lambda v: np.logaddexp(v, 0)}


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def weight(part: NonNegative | None) -> np.ndarray:
    assert part is not None
    return array(part())


def randomise(module: nn.Module) -> None:
    """Weights of both signs everywhere, gates far from one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()


@pytest.mark.parametrize("dim_x", [0, DIM_X])
@pytest.mark.parametrize("activation", G)
def test_ficnn_is_equation_2(activation: str, dim_x: int):
    energy = icnn.FICNN(DIM_Y, (5, 7), dim_x=dim_x, activation=activation).double()
    randomise(energy)
    xs, ys = batch(6, dtype=DOUBLE)
    for x, y, f in zip(array(xs), array(ys), array(energy(xs, ys)), strict=True):
        z = np.zeros(0)
        for i, layer in enumerate(energy.layers):
            assert isinstance(layer, FullLayer)
            total = array(layer.wy.weight) @ y + array(layer.wy.bias)
            if layer.wx is not None:
                total = total + array(layer.wx.weight) @ x
            if i > 0:
                total = total + np.maximum(weight(layer.wz), 0) @ z
            z = G[activation](total) if i < 2 else total
        assert z.shape == (1,)
        assert f == pytest.approx(z[0], rel=1e-12)


def normalise(norm: nn.Module, values: np.ndarray, batch_norm: bool, training: bool) -> np.ndarray:
    """Batch norm (by the batch, or by running statistics) or layer norm, from its definition."""
    state = {key: array(value) for key, value in norm.state_dict().items()}
    if batch_norm and not training:
        mean, variance = state["running_mean"], state["running_var"]
    else:
        axis = 0 if batch_norm else 1
        mean = values.mean(axis=axis, keepdims=True)
        variance = values.var(axis=axis, keepdims=True)
    return (values - mean) / np.sqrt(variance + 1e-5) * state["weight"] + state["bias"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("x_norm", [None, "batch", "layer"])
@pytest.mark.parametrize("activation", G)
def test_picnn_is_equation_3(activation: str, x_norm: str | None, training: bool):
    energy = icnn.PICNN(
        DIM_X, DIM_Y, (5, 7), activation=activation, x_activation="tanh", x_norm=x_norm
    ).double()
    randomise(energy)
    energy(*batch(20, dtype=DOUBLE))  # running statistics that are not those of a fresh module
    energy.train(training)
    x, y = batch(6, dtype=DOUBLE)
    u, z, v = array(x), np.zeros((6, 0)), array(y)
    for i, layer in enumerate(energy.layers):
        assert isinstance(layer, PartialLayer)
        total = u @ array(layer.wu.weight).T + array(layer.wu.bias)
        gate = u @ array(layer.wyu.weight).T + array(layer.wyu.bias)
        total = total + (v * gate) @ array(layer.wy.weight).T
        if i > 0:
            assert layer.wzu is not None
            gate = u @ array(layer.wzu.weight).T + array(layer.wzu.bias)
            total = total + (z * np.maximum(gate, 0)) @ weight(layer.wz).T
        z = G[activation](total) if i < 2 else total
        if i < 2:
            x_layer = energy.x_path[i]
            assert isinstance(x_layer, XLayer)
            u = u @ array(x_layer.v.weight).T + array(x_layer.v.bias)
            if x_norm:
                u = normalise(x_layer.norm, u, x_norm == "batch", training)
            u = np.tanh(u)
    np.testing.assert_allclose(array(energy(x, y)), z[:, 0], rtol=1e-11)


def test_gates_start_near_one():
    """A fresh PICNN is close to a FICNN, with a term in x beside it."""
    layers = icnn.PICNN(DIM_X, DIM_Y).describe(torch.randn(1000, DIM_X))
    for layer in layers:
        for gate in (layer.gate_y, layer.gate_z):
            assert gate is None or gate.mean().item() == pytest.approx(1, abs=0.2)


def test_proposition_2_a_picnn_that_is_a_given_ficnn():
    """Zero weights along x, gates of one."""
    full = icnn.FICNN(DIM_Y, (5, 7)).double()
    partial = icnn.PICNN(DIM_X, DIM_Y, (5, 7)).double()
    randomise(full)
    with torch.no_grad():
        for parameter in partial.parameters():
            parameter.zero_()
        for f, p in zip(full.layers, partial.layers, strict=True):
            assert isinstance(f, FullLayer)
            assert isinstance(p, PartialLayer)
            p.wy.weight.copy_(f.wy.weight)
            p.wu.bias.copy_(f.wy.bias)
            p.wyu.bias.fill_(1)
            if f.wz is not None and p.wz is not None and p.wzu is not None:
                p.wz.set_(f.wz())
                p.wzu.bias.fill_(1)
    x, y = batch(100, dtype=DOUBLE)
    torch.testing.assert_close(partial(x, y), full(None, y), rtol=0, atol=1e-10)


def test_proposition_2_a_picnn_that_is_a_given_feed_forward_network():
    """The x-path is the network, its last layer the last gate, and the energy is `-y . F(x)`."""
    network = nn.Sequential(
        nn.Linear(DIM_X, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, DIM_Y)
    ).double()
    energy = icnn.PICNN(DIM_X, DIM_Y, (5, 7), x_activation="tanh").double()
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.zero_()
    for x_layer, linear in zip(energy.x_path, (network[0], network[2]), strict=True):
        assert isinstance(x_layer, XLayer)
        x_layer.v.load_state_dict(linear.state_dict())
    last = energy.layers[-1]
    assert isinstance(last, PartialLayer)
    last.wyu.load_state_dict(network[4].state_dict())
    nn.init.constant_(last.wy.weight, -1)
    x, y = batch(100, dtype=DOUBLE)
    expected = -(y * network(x)).sum(dim=1)
    torch.testing.assert_close(energy(x, y), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(icnn.Score(network)(x, y), expected, rtol=0, atol=1e-10)


@EVERY_FAMILY
def test_gradients_match_finite_differences(make: Make):
    """With respect to x, y and every parameter (softplus: no kinks to step on)."""
    energy = make(activation="softplus").double().eval()
    x, y = batch(3, dtype=DOUBLE)
    parameters = dict(energy.named_parameters())

    def f(x, y, *values):
        return torch.func.functional_call(
            energy, dict(zip(parameters, values, strict=True)), (x, y)
        )

    inputs = [v.detach().requires_grad_() for v in (x, y, *parameters.values())]
    assert torch.autograd.gradcheck(f, inputs, atol=1e-6)
