"""Energies behave as modules do: `at`, modes, dtypes, devices, copies, files, compilation."""

import copy
import io
import pickle

import pytest
import torch
from networks import (
    DEVICES,
    DIM_X,
    DIM_Y,
    EVERY_FAMILY,
    Make,
    batch,
    composed,
    ficnn,
    picnn,
    picnn_batch_norm,
)
from torch import nn

import icnn


@EVERY_FAMILY
def test_at_is_the_energy_at_x(make: Make):
    energy = make().eval()
    x, y = batch(5)
    f = energy.at(x)
    for points in (y, y.neg(), torch.zeros_like(y)):
        torch.testing.assert_close(f(points), energy(x, points), rtol=0, atol=0)


@EVERY_FAMILY
def test_examples_do_not_see_each_other(make: Make):
    energy = make().double().eval()
    x, y = batch(5, dtype=torch.float64)
    alone = torch.cat([energy(x[i : i + 1], y[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(energy(x, y), alone, rtol=1e-12, atol=1e-12)


@EVERY_FAMILY
def test_empty_batch_gives_empty_result(make: Make):
    energy = make()
    x, y = batch(0)
    for mode in (True, False):
        assert energy.train(mode)(x, y).shape == (0,)
    assert all(value.isfinite().all() for value in energy.state_dict().values())


@EVERY_FAMILY
def test_nan_is_passed_on_and_stays_in_its_row(make: Make):
    energy = make().eval()
    x, y = batch(3)
    broken = y.clone()
    broken[1, 0] = torch.nan
    result = energy(x, broken)
    assert result.isnan().tolist() == [False, True, False]
    assert torch.equal(result[::2], energy(x, y)[::2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EVERY_FAMILY
def test_dtype_and_device_are_kept(make: Make, dtype: torch.dtype, device: str):
    energy = make().to(device, dtype).eval()
    x, y = batch(4, dtype=dtype, device=device)
    value = energy(x, y)
    assert (value.dtype, value.device.type) == (dtype, device)
    exact = copy.deepcopy(energy).to("cpu", torch.float64)(x.cpu().double(), y.cpu().double())
    torch.testing.assert_close(value.cpu().double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@EVERY_FAMILY
def test_bfloat16_autocast(make: Make, device: str):
    energy = make().to(device).eval()
    x, y = batch(16, device=device)
    with torch.autocast(device, torch.bfloat16):
        value = energy(x, y)
        value.sum().backward()
        f = energy.at(x)
        assert value.dtype == energy(x, y.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(value, energy(x, y), rtol=0.05, atol=0.05)
    torch.testing.assert_close(f(y), energy(x, y), rtol=0.05, atol=0.05)  # outside autocast
    assert all(p.grad is not None and p.grad.isfinite().all() for p in energy.parameters())


@pytest.mark.parametrize("device", DEVICES)
@EVERY_FAMILY
def test_compiles_as_one_graph(make: Make, device: str):
    """Captured whole, value and gradient; code generation itself is PyTorch's own business."""
    torch.compiler.reset()
    energy = make().to(device).eval()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(energy, fullgraph=True, backend=backend)
    x, y = batch(6, device=device)
    y.requires_grad_()
    value, expected = compiled(x, y), energy(x, y)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        *(torch.autograd.grad(v.sum(), y)[0] for v in (value, expected)), rtol=1e-4, atol=1e-5
    )


def test_compiles_in_training_mode_with_gradients_of_parameters():
    torch.compiler.reset()
    energy = picnn_batch_norm(positivity="softplus").train()
    other = copy.deepcopy(energy)
    x, y = batch(6)
    for f in (energy, torch.compile(other, fullgraph=True, backend="aot_eager")):
        f(x, y).square().sum().backward()
    for p, q in zip(energy.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@EVERY_FAMILY
def test_compiles_with_the_default_backend(make: Make):
    """Needs a C++ compiler, which a machine that only uses the library need not have."""
    torch.compiler.reset()
    energy = make().eval()
    x, y = batch(6)
    value = torch.compile(energy, fullgraph=True)(x, y)
    torch.testing.assert_close(value, energy(x, y), rtol=1e-4, atol=1e-5)


@EVERY_FAMILY
def test_exports_with_a_batch_of_any_size(make: Make):
    energy = make().eval()
    size = torch.export.Dim("size", min=2)
    dynamic = ({0: None if make is ficnn else size}, {0: size})
    exported = torch.export.export(energy, batch(5), dynamic_shapes=dynamic).module()
    x, y = batch(5 if make is ficnn else 9)
    torch.testing.assert_close(exported(x, y), energy(x, y))


def test_meta_device():
    with torch.device("meta"):
        energy = composed()
        assert energy(*batch(4)).shape == (4,)


@EVERY_FAMILY
def test_replicas_without_parameters(make: Make):
    """DataParallel gives its replicas plain tensors where parameters were."""
    energy = make().eval()
    x, y = batch(4)
    expected = energy(x, y)
    replica = copy.deepcopy(energy)
    for part in replica.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                del part._parameters[name]
                setattr(part, name, parameter.detach())
    assert not list(replica.parameters())
    assert torch.equal(replica(x, y), expected)


def test_forward_mode_does_not_depend_on_grad_mode():
    energy = picnn(activation="softplus").double()
    x, y = batch(4, dtype=torch.float64)
    parameters = {k: v.detach() for k, v in energy.named_parameters()}
    tangents = {k: torch.randn_like(v) for k, v in parameters.items()}

    def f(parameters):
        return torch.func.functional_call(energy, parameters, (x, y))

    forward = torch.func.jvp(f, (parameters,), (tangents,))[1]
    with torch.no_grad():
        under_no_grad = torch.func.jvp(f, (parameters,), (tangents,))[1]
    jacobians = torch.func.jacrev(f)(parameters)
    reverse = [jacobians[k].flatten(1) @ tangents[k].flatten() for k in tangents]
    torch.testing.assert_close(forward, under_no_grad)
    torch.testing.assert_close(forward, torch.stack(reverse).sum(dim=0))


@EVERY_FAMILY
def test_state_dict_loads_like_any_module(make: Make):
    first, second = make().eval(), make().eval()
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    x, y = batch(5)
    assert torch.equal(first(x, y), second(x, y))


@EVERY_FAMILY
def test_deep_copies_share_nothing(make: Make):
    energy = make().eval()
    x, y = batch(5)
    before = energy(x, y)
    other = copy.deepcopy(energy)
    assert torch.equal(other(x, y), before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert torch.equal(energy(x, y), before)


@pytest.mark.parametrize("activation", list(icnn.activations.ACTIVATIONS))
def test_pickles(activation: str):
    energy = icnn.Sum(
        icnn.PICNN(DIM_X, DIM_Y, (4,), x_activation=activation, activation="elu"),
        icnn.FICNN(DIM_Y, (4,), activation=icnn.activations.leaky_relu(0.3)),
        icnn.Score(nn.Linear(DIM_X, DIM_Y)),
        icnn.Scale(icnn.Quadratic(0.5, 2.0), 3.0),
    )
    x, y = batch(5)
    assert torch.equal(pickle.loads(pickle.dumps(energy))(x, y), energy(x, y))


def test_at_freezes_dropout_masks():
    energy = icnn.Score(nn.Sequential(nn.Linear(DIM_X, 50), nn.Dropout(), nn.Linear(50, DIM_Y)))
    x, y = batch(8)
    f = energy.at(x)
    assert torch.equal(f(y), f(y))
    assert not torch.equal(f(y), energy.at(x)(y))


@pytest.mark.parametrize("positivity", ["project", "abs", None])
@EVERY_FAMILY
def test_made_under_no_grad_at_has_gradients_in_y_alone(make: Make, positivity):
    energy = make(positivity=positivity)
    x, y = batch(4)
    with torch.no_grad():
        f = energy.at(x)
    y.requires_grad_()
    f(y).sum().backward()
    assert y.grad is not None
    assert all(parameter.grad is None for parameter in energy.parameters())


def test_at_freezes_batch_statistics():
    energy = picnn_batch_norm().train()
    x, y = batch(8)
    f = energy.at(x)
    statistics = {k: v.clone() for k, v in energy.state_dict().items() if "running" in k}
    assert len(statistics) == 6
    before = f(y)
    energy.eval()
    assert torch.equal(f(y), before)
    assert all(torch.equal(energy.state_dict()[k], v) for k, v in statistics.items())


def test_norm_acts_on_the_x_path_alone():
    """In training mode a batch norm makes examples meet, but only through x."""
    energy = picnn_batch_norm().double().train()
    x, y = batch(4, dtype=torch.float64)
    other = torch.cat([y[:1], torch.randn_like(y[1:])])
    assert torch.equal(energy(x, y)[0], energy(x, other)[0])


def test_same_seed_same_energy():
    energies = []
    for _ in range(2):
        torch.manual_seed(3)
        energies.append(icnn.PICNN(DIM_X, DIM_Y, x_norm="batch"))
    x, y = batch(5)
    assert torch.equal(energies[0](x, y), energies[1](x, y))


def test_x_of_a_ficnn_without_x_is_ignored():
    energy = icnn.FICNN(DIM_Y)
    x, y = batch(5)
    for anything in (None, x, x[:2], "anything"):
        assert torch.equal(energy(anything, y), energy(None, y))


@EVERY_FAMILY
def test_y_shape(make: Make):
    assert make().y_shape == (DIM_Y,)


def test_vmap_over_stacked_weights():
    """Many agents in one process: the energies are plain functions of their parameters."""
    energies = [icnn.PICNN(DIM_X, DIM_Y, (8,)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(energies)
    x, y = batch(5)

    def f(parameters, buffers):
        return torch.func.functional_call(energies[0], (parameters, buffers), (x, y))

    together = torch.func.vmap(f)(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([energy(x, y) for energy in energies]))
