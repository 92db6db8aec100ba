"""Energies in files: the same to the bit, or refused; damaged and hostile files are refused."""

import copy
import json
import os
import random
from collections import OrderedDict
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import DIM_X, DIM_Y, FAMILIES, POSITIVITIES, Make, batch, composed, ficnn, picnn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import icnn
from icnn.energies import descriptions, files
from icnn.energies.files import load, save


def stored(**options) -> icnn.Energy:
    """The composition of all, without its lambda."""
    whole = composed(**options)
    assert isinstance(whole, icnn.Sum)
    return icnn.Sum(*list(whole.energies)[:-1])


STORED: tuple[Make, ...] = (*(make for make in FAMILIES if make is not composed), stored)
EVERY_STORED = pytest.mark.parametrize("make", STORED, ids=lambda make: make.__name__)
A = icnn.activations


def round_trip(energy: icnn.Energy, path: Path) -> icnn.Energy:
    """Through a file and back: the same values, gradients in `y` and state, to the bit."""
    save(energy, path)
    random_state = torch.get_rng_state()
    loaded = load(path)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(part.training for part in loaded.modules())
    reference = icnn.project_(copy.deepcopy(energy)).eval()
    assert_same_state(loaded, reference)
    state = energy.state_dict(keep_vars=True)
    for name, tensor in loaded.state_dict(keep_vars=True).items():
        assert type(tensor) is type(state[name])
        assert tensor.requires_grad == state[name].requires_grad
    dtype = next((t.dtype for t in state.values() if t.ndim), torch.float32)
    x, y = batch(5, dtype=dtype)
    for mine, theirs in zip(evaluated(loaded, x, y), evaluated(energy.eval(), x, y), strict=True):
        assert torch.equal(mine, theirs)
    return loaded


def evaluated(energy: icnn.Energy, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.clone().requires_grad_()
    value = energy(x, y)
    return value, torch.autograd.grad(value.sum(), y)[0]


def assert_same_state(one: icnn.Energy, other: icnn.Energy) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name])


def unsettle(energy: icnn.Energy) -> icnn.Energy:
    """Weights as training leaves them: negative ones below the clip among them."""
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return energy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@EVERY_STORED
def test_round_trip_in_every_dtype(make: Make, dtype: torch.dtype, tmp_path: Path):
    energy = make().to(dtype)
    energy(*batch(8, dtype=dtype))  # moves batch statistics
    round_trip(unsettle(energy), tmp_path / "energy.safetensors")


@pytest.mark.parametrize("positivity", [*POSITIVITIES, None])
@EVERY_STORED
def test_round_trip_in_every_mode(make: Make, positivity: str | None, tmp_path: Path):
    round_trip(unsettle(make(positivity=positivity)), tmp_path / "energy")


@pytest.mark.parametrize(
    "x_activation", [*A.ACTIVATIONS, A.leaky_relu(2.5)], ids=lambda a: getattr(a, "name", a)
)
@pytest.mark.parametrize(
    "activation",
    ["relu", "identity", A.leaky_relu(1 / 3), A.softplus(0.1), A.softplus(2), A.elu(0.7)],
    ids=lambda a: getattr(a, "name", a),
)
def test_activations_come_back_exactly(activation, x_activation, tmp_path: Path):
    energy = icnn.PICNN(DIM_X, DIM_Y, (4,), activation=activation, x_activation=x_activation)
    loaded = round_trip(energy, tmp_path / "energy")
    assert isinstance(loaded, icnn.PICNN)
    assert descriptions.facts(loaded.activation) == descriptions.facts(energy.activation)
    assert descriptions.facts(loaded.x_activation) == descriptions.facts(energy.x_activation)


P = nn.Parameter


@pytest.mark.parametrize(
    "make",
    [
        lambda: icnn.Quadratic(0.1, 1 / 3),
        lambda: icnn.Quadratic(-0.0, 0.0),
        lambda: icnn.Quadratic(torch.randn(DIM_Y)),
        lambda: icnn.Quadratic(P(torch.randn(DIM_Y)), torch.rand(DIM_Y)),
        lambda: icnn.Quadratic(P(torch.randn(DIM_Y), requires_grad=False), P(torch.rand(1))),
        lambda: icnn.Quadratic(0.5, P(torch.tensor(2.0))),
        lambda: icnn.Quadratic(0.5, torch.tensor(2.0, dtype=torch.float64)),
        lambda: icnn.Quadratic(nn.Linear(DIM_X, DIM_Y, bias=False), 2),
        lambda: icnn.Gaussian(torch.randn(DIM_Y), P(torch.randn(4, DIM_Y))),
        lambda: icnn.Scale(ficnn(), 0.1),
        lambda: icnn.Scale(ficnn(), torch.tensor(0.1)),
        lambda: icnn.Scale(ficnn(), P(torch.tensor(0.1))),
        lambda: icnn.Scale(icnn.Scale(icnn.Quadratic(0), 2), 3),
        lambda: icnn.Max(ficnn()).requires_grad_(False),
    ],
)
def test_compositions_in_all_forms(make, tmp_path: Path):
    energy = make()
    loaded = round_trip(energy, tmp_path / "energy")
    assert loaded.y_shape == energy.y_shape
    assert repr(loaded) == repr(energy)


def network() -> nn.Module:
    """Every layer that a vector can pass, nested, with names and with one layer used twice."""
    twice = nn.ELU(0.7)
    bent = [
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.3),
        nn.Softplus(2.0, 30.0),
        nn.Tanh(),
        nn.Sigmoid(),
    ]
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(DIM_X, 8),
            norm=nn.BatchNorm1d(8, momentum=None),
            middle=nn.Sequential(twice, nn.Linear(8, 8, bias=False), twice, nn.Dropout(0.1)),
            layer_norm=nn.LayerNorm([8], eps=1e-3, bias=False),
            more=nn.Sequential(*bent, nn.GELU("tanh"), nn.SiLU(), nn.Identity(), nn.Sequential()),
            plain_norm=nn.BatchNorm1d(8, affine=False),
            last=nn.Linear(8, DIM_Y),
        )
    )


def images() -> nn.Module:
    """Every layer for images, from 1 x 8 x 8 to DIM_Y."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=(1, 2), padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2, stride=1, ceil_mode=True),
        nn.Conv2d(4, 4, 3, padding="same", groups=2, bias=False),
        nn.AvgPool2d((2, 1), divisor_override=3),
        nn.AdaptiveAvgPool2d((2, None)),
        nn.Dropout2d(0.1),
        nn.AdaptiveMaxPool2d((2, None)),
        nn.Flatten(),
        nn.Linear(4 * 2 * 3, DIM_Y),
    )


@pytest.mark.parametrize("wrap", [icnn.Score, icnn.Quadratic])
def test_networks_of_x(wrap, tmp_path: Path):
    energy = wrap(network())
    energy(*batch(8))
    assert repr(round_trip(energy, tmp_path / "energy")) == repr(energy)
    seen = wrap(images())
    x, y = torch.randn(5, 1, 8, 8), torch.randn(5, DIM_Y)
    seen(x, y)
    save(seen, tmp_path / "energy")
    loaded = load(tmp_path / "energy")
    assert repr(loaded) == repr(seen)
    assert torch.equal(loaded(x, y), seen.eval()(x, y))


def test_every_class_is_covered_and_described_by_all_its_arguments():
    """What a constructor takes and a file does not hold would be lost without a word."""
    used = {type(part) for net in (network(), images()) for part in net.modules()}
    assert used == set(descriptions.NETWORKS)
    for cls, names in descriptions.ENERGIES.items():
        assert sorted(names.split()) == sorted(signature(cls).parameters)
    for cls, names in descriptions.NETWORKS.items():
        # A batch norm without bias is newer than the oldest PyTorch that we support: refused.
        later = {"bias"} if issubclass(cls, nn.BatchNorm1d | nn.BatchNorm2d) else set()
        known = {*names.split(), "device", "dtype", "args", "kwargs"} | later
        assert set(signature(cls).parameters) <= known


def test_a_loaded_energy_trains_on(tmp_path: Path):
    energy = stored()
    loaded = round_trip(energy, tmp_path / "energy").train()
    loaded(*batch(8)).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_tied_parameters_stay_tied(tmp_path: Path):
    scale, center = P(torch.tensor(0.5)), P(torch.randn(DIM_Y))
    part, norm = picnn(), nn.BatchNorm1d(DIM_X)
    energy = icnn.Sum(
        *(icnn.Scale(part, scale), icnn.Scale(part, scale), icnn.Quadratic(center, scale)),
        *(icnn.Quadratic(center), icnn.Scale(icnn.Quadratic(center), scale)),
        icnn.Max(*(icnn.Score(nn.Sequential(norm, nn.Linear(DIM_X, DIM_Y))) for _ in range(2))),
    )
    with torch.no_grad():
        scale.neg_()
    loaded = round_trip(energy, tmp_path / "energy")
    assert len(list(loaded.parameters())) == len(list(energy.parameters()))
    groups = [
        sorted(sorted(k for k, v in state.items() if v is tensor) for tensor in set(state.values()))
        for state in (e.state_dict(keep_vars=True) for e in (energy, loaded))
    ]
    assert groups[0] == groups[1]
    assert len(groups[0]) < len(energy.state_dict())


def test_a_tie_between_a_clipped_and_a_free_weight(tmp_path: Path):
    """Clipping it for one use would change the other: such a weight must be tidy already."""
    both = P(torch.ones(DIM_Y))
    energy = icnn.Sum(icnn.Quadratic(both), icnn.Quadratic(0.0, both))
    round_trip(energy, tmp_path / "energy")
    with torch.no_grad():
        both[0] = -1
    with pytest.raises(ValueError, match="at least 0, got a minimum of -1"):
        save(energy, tmp_path / "energy")


def test_views_and_strides_are_stored_as_plain_copies(tmp_path: Path):
    net = nn.Linear(DIM_X, DIM_Y)
    base = torch.randn(DIM_X, 2 * DIM_Y)
    net.weight = P(base.t()[::2])
    other = nn.Linear(DIM_X, DIM_Y)
    other.weight = P(net.weight.detach())
    energy = icnn.Sum(icnn.Score(net), icnn.Score(other))
    save(energy, tmp_path / "energy")
    loaded = load(tmp_path / "energy")
    assert_same_state(loaded, energy)
    assert len(list(loaded.parameters())) == 4


class Mine(icnn.FICNN):
    pass


class MyLinear(nn.Linear):
    pass


def rebuilt(change) -> icnn.Energy:
    energy = picnn()
    change(energy)
    return energy


@pytest.mark.parametrize(
    ("energy", "message"),
    [
        (lambda x, y: y.sum(1), "`energy` must be one of .*FICNN.*got <function"),
        (nn.Linear(3, 3), "got Linear"),
        (composed(), r"`energy.energies\[3\]` must .*got Function\(<lambda>\)"),
        (Mine(3), "got Mine"),
        (icnn.Score(torch.sin), "`energy.net` must be one of .*Linear.*got <built-in"),
        (icnn.Score(MyLinear(3, 3)), "`energy.net` must .* got MyLinear"),
        (icnn.Score(nn.Sequential(nn.Bilinear(1, 1, 1))), r"`energy.net.layers.0` .* got Bilinear"),
        (icnn.Quadratic(lambda x: x), "`energy.center` must .* got <function"),
        (icnn.Scale(nn.DataParallel(ficnn()), 1), "`energy.energy` must .* got DataParallel"),
        (
            ficnn(activation=icnn.Activation("relu", torch.relu, True, True, True, False)),
            "`energy.activation` must be an activation of icnn.activations.*got Activation",
        ),
        (
            picnn(x_activation=icnn.Activation("wave", torch.sin, False, False, False, True)),
            "`energy.x_activation` must .*wave",
        ),
        (rebuilt(lambda e: e.layers[0].wu.bias.data.fill_(torch.nan)), "wu.bias` must be finite"),
        (rebuilt(lambda e: setattr(e, "hidden", (16,))), "energy"),
        (rebuilt(lambda e: setattr(e.layers[0], "wy", MyLinear(3, 16, False))), "layers.0.wy"),
        (rebuilt(lambda e: e.to(torch.float8_e5m2)), "dtype` must be one of"),
        (rebuilt(lambda e: nn.utils.parametrizations.weight_norm(e.layers[0].wu)), "energy"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_file_is_touched(
    energy, message, tmp_path: Path
):
    path = tmp_path / "energy"
    path.write_text("older")
    with pytest.raises(ValueError, match=message):
        save(energy, path)
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["energy"]


@pytest.mark.parametrize("function", ["to_bytes", "os.replace", "os.fsync"])
def test_a_failure_midway_leaves_the_older_file(function, tmp_path: Path, monkeypatch):
    energy, path = ficnn(), tmp_path / "energy"
    save(energy, path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(f"icnn.energies.files.{function}", fail)
    with pytest.raises(OSError, match="disk full"):
        save(unsettle(energy), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["energy"]


def test_paths(tmp_path: Path):
    save(ficnn(), str(tmp_path / "energy"))
    load(str(tmp_path / "energy"))
    for path in (tmp_path, tmp_path / "none" / "energy", 3):
        with pytest.raises(ValueError, match="`path` must be"):
            save(ficnn(), path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
    with pytest.raises(ValueError, match="`path` must be a file that icnn"):
        load(tmp_path)


def test_a_loaded_energy_does_not_watch_its_file(tmp_path: Path):
    path = tmp_path / "energy"
    save(ficnn(), path)
    loaded = load(path)
    before = copy.deepcopy(loaded)
    with path.open("r+b") as file:
        file.write(b"\1" * path.stat().st_size)
    assert_same_state(loaded, before)


def taken_apart(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["icnn"]), load_file(path)


def forge(path: Path, header: Any, tensors: dict[str, Tensor]) -> None:
    """A file with whatever description, and the right sum."""
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, path, {"icnn": text, "sha256": files.digest(text, tensors)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "energy"
    net = nn.Sequential(nn.Linear(DIM_X, 8), nn.LeakyReLU(), nn.BatchNorm1d(8), nn.Linear(8, DIM_Y))
    save(icnn.Sum(ficnn(), icnn.Score(net), icnn.Quadratic(torch.zeros(DIM_Y), 2.0)), path)
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


WZ = "energies.0.layers.1.wz.raw_project"
COUNT = "energies.1.net.2.num_batches_tracked"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(WZ), f"tensors are missing: {WZ}"),
        (lambda t: t.update(more=torch.ones(1)), "tensors that no part has: 'more'"),
        (lambda t: t.update({WZ: t[WZ][:, :5].clone()}), r"must have shape \(16, 16\), got"),
        (lambda t: t.update({WZ: t[WZ].flatten()}), r"must have shape \(16, 16\), got \(256,\)"),
        (lambda t: t.update({WZ: t[WZ].long()}), "dtype` must be one of .*got torch.int64"),
        (lambda t: t.update({WZ: t[WZ].bool()}), "dtype` must be one of .*got 'BOOL'"),
        (lambda t: t.update({WZ: t[WZ].to(torch.float8_e5m2)}), "must be one of .*got 'F8_E5M2'"),
        (lambda t: t.update({COUNT: t[COUNT].float()}), "must be one of .*got torch.float32"),
        (lambda t: t[WZ].view(-1)[3:4].fill_(-1), "must be at least 0, got a minimum of -1"),
        (lambda t: t[WZ].view(-1)[3:4].fill_(torch.nan), "must be finite"),
        (lambda t: t[WZ].view(-1)[3:4].fill_(torch.inf), "must be finite"),
    ],
)
def test_wrong_tensors_are_refused(change, message, path: Path):
    header, tensors = taken_apart(path)
    forge(path, header, tensors)
    load(path)
    change(tensors)
    forge(path, header, tensors)
    refused(path, message)


def deep(levels: int) -> str:
    energy = '{"class": "Scale", "c": 1, "energy": ' * levels + "0" + "}" * levels
    return '{"format": "icnn", "version": 1, "tied": {}, "frozen": [], "energy": ' + energy + "}"


F = {"class": "FICNN", "dim_y": 3, "hidden": [16, 16], "dim_x": 0}
F |= {"activation": {"name": "relu"}, "positivity": "project"}
Q = {"class": "Quadratic", "center": 0.0, "weight": 1.0}
LINEAR = {"class": "Linear", "in_features": 3, "out_features": 3, "bias": True}
POOL = {"class": "MaxPool2d", "kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1}
POOL |= {"return_indices": False, "ceil_mode": False}


@pytest.mark.parametrize(
    ("energy", "message"),
    [
        (None, "`energy` must be one of the classes FICNN, .* got None"),
        ([], "must be one of the classes"),
        ({"class": "os.system", "command": "touch /tmp/owned"}, "got 'os.system'"),
        ({"class": "torch.nn.modules.linear.Linear"}, "must be one of the classes"),
        ({"class": "__reduce__"}, "must be one of the classes"),
        ({"class": "__class__", "__init__": []}, "must be one of the classes"),
        ({"class": ["FICNN"]}, "must be one of the classes"),
        (LINEAR, "got 'Linear'"),
        ({"class": "Function", "function": "eval"}, "got 'Function'"),
        ({"class": "Score", "net": F}, "`energy.net` must be one of .* got 'FICNN'"),
        ({"class": "Score", "net": "sin"}, "`energy.net` must be one of"),
        ({"class": "Score", "net": {"class": "Bilinear"}}, "got 'Bilinear'"),
        ({"class": "Sum", "energies": []}, "at least one energy"),
        ({"class": "Sum", "energies": {}}, "`energy.energies` must be a list, got dict"),
        ({"class": "Sum", "energies": [F, {**F, "dim_y": 2}]}, "share one y_shape"),
        ({**F, "device": "cuda"}, "must give FICNN the arguments"),
        ({**F, "forward": "eval"}, "must give FICNN the arguments"),
        ({k: F[k] for k in F if k != "dim_y"}, "must give FICNN the arguments"),
        ({**F, "dim_y": "3"}, "`dim_y` must be an integer"),
        ({**F, "dim_y": 3.0}, "`dim_y` must be an integer"),
        ({**F, "dim_y": True}, "`dim_y` must be an integer"),
        ({**F, "dim_y": None}, "`dim_y` must be an integer"),
        ({**F, "dim_y": {"__reduce__": "x"}}, "`dim_y` must be an integer"),
        ({**F, "dim_y": float("nan")}, "`dim_y` must be an integer"),
        ({**F, "dim_y": -1}, "`dim_y` must be an integer"),
        ({**F, "hidden": 16}, "`hidden` must be a non-empty sequence"),
        ({**F, "hidden": []}, "`hidden` must be a non-empty sequence"),
        ({**F, "hidden": [[16]]}, "must be an integer"),
        ({**F, "hidden": [10**6, 10**6]}, "tensors are missing|must have shape"),
        ({**F, "hidden": [2**62, 2**62]}, "cannot be built"),
        ({**F, "hidden": [10**30]}, "cannot be built"),
        ({**F, "hidden": [10**400]}, "cannot be built"),
        ({**F, "hidden": [1] * 10_000}, "too long for its 18 tensors"),
        ({**F, "positivity": "eval"}, "`positivity` must be one of"),
        ({**F, "positivity": ["project"]}, "`positivity` must be one of"),
        ({**F, "activation": "relu"}, "`energy.activation` must describe one of"),
        ({**F, "activation": {"name": ["relu"]}}, "`energy.activation` must describe one of"),
        ({**F, "activation": {"name": "relu", "slope": 1}}, "must describe one of"),
        ({**F, "activation": {"name": "leaky_relu"}}, "must describe one of"),
        ({**F, "activation": {"name": "leaky_relu", "slope": "1"}}, "must be a finite number"),
        ({**F, "activation": {"name": "leaky_relu", "slope": 2}}, "convex and non-decreasing"),
        ({**F, "activation": {"name": "softplus", "beta": 10**400}}, "cannot be built"),
        ({**F, "activation": {"name": "tanh"}}, "convex and non-decreasing"),
        ({**Q, "weight": -1}, "`weight` must be a finite number of at least 0"),
        ({**Q, "weight": float("inf")}, "must be a finite number"),
        ({**Q, "weight": F}, "must be one of the classes"),
        ({**Q, "weight": LINEAR}, "`weight` must be"),
        ({**Q, "center": {"parameter": "3"}}, "must be one of the classes"),
        ({**Q, "center": {"parameter": [-3]}}, "must be an integer"),
        ({**Q, "center": {"parameter": [10**12, 10**12]}}, "cannot be built"),
        ({**Q, "center": {"parameter": [10**12]}}, "tensors are missing"),
        ({**Q, "center": {"parameter": [1], "constant": [1]}}, "must be one of the classes"),
        ({"class": "Scale", "energy": F, "c": {"constant": [2]}}, "`c` must be a single number"),
        ({**Q, "center": {**LINEAR, "bias": 1}}, "`energy.center.bias` must be a bool"),
        ({**Q, "center": {**LINEAR, "in_features": "3"}}, "in_features` must be an integer"),
        ({**Q, "center": {**LINEAR, "in_features": [3]}}, "cannot be built"),
        ({**Q, "center": {**POOL, "kernel_size": -1}}, "kernel_size` must be an integer"),
        ({**Q, "center": {**POOL, "kernel_size": [2, None]}}, "kernel_size` must be an integer"),
        ({**Q, "center": {"class": "GELU", "approximate": "x"}}, "approximate` must be one of"),
        ({**Q, "center": {"class": "Dropout", "p": 2, "inplace": False}}, "dropout probability"),
        ({**Q, "center": {"class": "Dropout", "p": [0.1], "inplace": False}}, "a finite number"),
        ({**Q, "center": {"class": "Sequential", "layers": [LINEAR]}}, "layers` must be a dict"),
        ({**Q, "center": {"class": "Sequential", "layers": {"a.b": LINEAR}}}, "cannot be built"),
        ({**Q, "center": {"class": "Sequential", "layers": {"forward": LINEAR}}}, "cannot be"),
    ],
)
def test_hostile_descriptions_are_refused(energy, message, path: Path):
    header, tensors = taken_apart(path)
    forge(path, {**header, "energy": energy}, tensors)
    refused(path, message)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("\x00\ufffe", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"format": ' * 100_000, "no JSON"),
        ("9" * 5000, "no JSON"),
        ("3", "format 'icnn'"),
        ("[]", "format 'icnn'"),
        ("{}", "format 'icnn'"),
        ('{"format": "pt"}', "format 'icnn'"),
        ('{"format": "icnn"}', "version must be 1, got None"),
        ('{"format": "icnn", "version": 2}', "version must be 1, got 2"),
        ('{"format": "icnn", "version": NaN}', "version must be 1, got nan"),
        ('{"format": "icnn", "version": 1}', "`tied` must"),
        (deep(100), "must be one of"),
        (deep(300), "must be one of|recursion"),
        (deep(900), "recursion"),
        ({"tied": []}, "`tied` must map"),
        ({"tied": {"a": ["b"]}}, "`tied` must map"),
        ({"tied": {"a": "b"}}, "`tied` must map"),
        ({"tied": {WZ: COUNT}}, "`tied` must map"),
        ({"tied": {"a": WZ}}, "no part has: 'a'"),
        ({"frozen": None}, "`frozen` must list"),
        ({"frozen": [[]]}, "`frozen` must list"),
        ({"frozen": [COUNT]}, "`frozen` must list"),
        ({"frozen": ["training"]}, "`frozen` must list"),
    ],
)
def test_wrong_headers_are_refused(header, message, path: Path):
    good, tensors = taken_apart(path)
    forge(path, header if isinstance(header, str) else {**good, **header}, tensors)
    refused(path, message)


def test_a_parameter_is_not_tied_to_a_constant(path: Path):
    header, tensors = taken_apart(path)
    del tensors["energies.1.net.2.weight"]
    header["tied"] = {"energies.1.net.2.weight": "energies.1.net.2.running_mean"}
    forge(path, header, tensors)
    refused(path, "must not mix parameters and constants")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no whole safetensors file"),
        (b"\x80\x04\x95cos\nsystem\n", "no whole safetensors file"),
        (b"\xff" * 1000, "no whole safetensors file"),
        ((2).to_bytes(8, "little") + b"{}", "no icnn description"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path):
    (tmp_path / "other").write_bytes(content)
    refused(tmp_path / "other", message)


def test_files_of_others_are_refused(path: Path):
    header, tensors = taken_apart(path)
    for metadata in (None, {"format": "pt"}):
        save_file(tensors, path, metadata)
        refused(path, "no icnn description")
    save_file(tensors, path, {"icnn": json.dumps(header)})
    refused(path, "SHA-256")


def corrupted(content: bytes, path: Path, chance: random.Random) -> None:
    """Write a damaged copy: bytes flipped, cut off or added, tensors swapped or renamed."""
    damaged = bytearray(content)
    match chance.choice(["bit", "bytes", "header", "cut", "more", "hole", "swap", "rename"]):
        case "bit":
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        case "bytes":
            for _ in range(chance.randrange(1, 20)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        case "header":
            damaged[chance.randrange(chance.choice([8, 500, 3000]))] = chance.randrange(256)
        case "cut":
            del damaged[chance.randrange(len(damaged)) :]
        case "more":
            damaged += chance.randbytes(chance.randrange(1, 100))
        case "hole":
            start = chance.randrange(len(damaged))
            del damaged[start : start + chance.randrange(1, 100)]
        case way:
            path.write_bytes(content)
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
            tensors = load_file(path)
            one, other = chance.sample(list(tensors), 2)
            if way == "swap":
                tensors[one], tensors[other] = tensors[other], tensors[one]
            else:
                tensors[chance.choice([one + "x", other])] = tensors.pop(one)
            save_file({k: v.clone() for k, v in tensors.items()}, path, metadata)
            return
    path.write_bytes(damaged)


def test_random_corruptions_are_refused_or_harmless(path: Path):
    content, expected = path.read_bytes(), load(path)
    x, y = batch(5)
    chance, errors = random.Random(0), 0
    for _ in range(300):
        corrupted(content, path, chance)
        try:
            loaded = load(path)
        except ValueError:
            errors += 1
            continue
        assert_same_state(loaded, expected)
        assert torch.equal(loaded(x, y), expected(x, y))
        assert repr(loaded) == repr(expected)
    assert errors > 250


def test_nothing_is_unpickled_evaluated_or_imported():
    source = "".join(Path(str(part.__file__)).read_text() for part in (files, descriptions))
    for word in ("torch.load", "torch.save", "import pickle", "eval(", "exec(", "import_module"):
        assert word not in source.replace("energy.eval()", "")


def test_energies_that_were_changed_by_hand_are_refused(tmp_path: Path):
    other = icnn.FICNN(2, (3, 3))
    other.layers[1].activation = icnn.activations.softplus()  # type: ignore[union-attr]
    norm = icnn.PICNN(2, 2, (3,), x_norm="batch")
    norm.x_path[0].norm.eps = 0.5  # type: ignore[union-attr]
    patched = icnn.FICNN(2)
    patched.forward = lambda x, y: -y.sum(1)  # type: ignore[method-assign]
    for energy in (other, norm, patched):
        with pytest.raises(ValueError, match="`energy` must be one that a file can hold"):
            save(energy, tmp_path / "energy")


def test_weights_that_overflow_are_refused(tmp_path: Path):
    energy = icnn.FICNN(2, (3, 3), positivity="exp")
    with torch.no_grad():
        for part in energy.modules():
            if isinstance(part, icnn.NonNegative):
                part.raw.fill_(1e4)
    with pytest.raises(ValueError, match="got weights that overflow"):
        save(energy, tmp_path / "energy")
