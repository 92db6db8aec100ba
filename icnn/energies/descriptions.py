"""Energies as JSON: a class of the tables below and the arguments of its constructor, both ways.

Nothing is imported, evaluated or unpickled: what the tables do not name cannot be described.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from icnn.checks import check_choice, check_count, check_instance, check_number
from icnn.energies.activations import ACTIVATIONS, Activation, elu, leaky_relu, softplus
from icnn.energies.compose import Max, Quadratic, Scale, Score, Sum
from icnn.energies.conv import ConvPICNN
from icnn.energies.convexify import Convexified
from icnn.energies.ficnn import FICNN
from icnn.energies.gaussian import Gaussian
from icnn.energies.layers import NonNegative
from icnn.energies.picnn import PICNN

Table = dict[type[nn.Module], str]

# What a file may hold: a class and the arguments of its constructor, kept as attributes under the
# same names. `argument` knows those that are not plain numbers and words.
ENERGIES: Table = {
    FICNN: "dim_y hidden dim_x activation positivity monotone",
    PICNN: "dim_x dim_y hidden activation x_activation x_norm positivity monotone x_hidden",
    ConvPICNN: "x_shape y_shape convs hidden activation x_activation x_norm positivity",
    Convexified: "module y_shape positivity",
    Score: "net",
    Quadratic: "center weight",
    Gaussian: "mean factor",
    Sum: "energies",
    Max: "energies",
    Scale: "energy c",
}
LATER = {"monotone", "x_hidden"}  # arguments that older files do not have
NETWORKS: Table = {
    nn.Sequential: "layers",
    nn.Linear: "in_features out_features bias",
    nn.Conv2d: "in_channels out_channels kernel_size stride padding dilation groups bias "
    "padding_mode",
    nn.ReLU: "inplace",
    nn.LeakyReLU: "negative_slope inplace",
    nn.ELU: "alpha inplace",
    nn.Softplus: "beta threshold",
    nn.Tanh: "",
    nn.Sigmoid: "",
    nn.GELU: "approximate",
    nn.SiLU: "inplace",
    nn.Identity: "",
    nn.Dropout: "p inplace",
    nn.Dropout2d: "p inplace",
    nn.BatchNorm1d: "num_features eps momentum affine track_running_stats",
    nn.BatchNorm2d: "num_features eps momentum affine track_running_stats",
    nn.LayerNorm: "normalized_shape eps elementwise_affine bias",
    nn.Flatten: "start_dim end_dim",
    nn.MaxPool2d: "kernel_size stride padding dilation return_indices ceil_mode",
    nn.AvgPool2d: "kernel_size stride padding ceil_mode count_include_pad divisor_override",
    nn.AdaptiveAvgPool2d: "output_size",
    nn.AdaptiveMaxPool2d: "output_size return_indices",
}
# What the arguments of those layers may be, as `torch.nn` does not look at all of them. What is
# named nowhere is a size, or several, of at least 1.
FLAGS = {"bias", "inplace", "affine", "track_running_stats", "elementwise_affine"}
FLAGS |= {"return_indices", "ceil_mode", "count_include_pad"}
NUMBERS = {"negative_slope", "alpha", "beta", "threshold", "p", "eps", "momentum"}
WORDS = {
    "approximate": ("none", "tanh"),
    "padding_mode": ("zeros", "reflect", "replicate", "circular"),
}
INSTEAD = {"padding": ("same", "valid")}
INSTEAD |= dict.fromkeys(("output_size", "momentum", "divisor_override"), (None,))
MINIMUM = {"padding": 0, "start_dim": -64, "end_dim": -64}
# Constructors that take their parts one by one.
MAKE: dict[type[nn.Module], Callable[..., nn.Module]] = {
    Sum: lambda energies: Sum(*energies),
    Max: lambda energies: Max(*energies),
    nn.Sequential: lambda layers: nn.Sequential(OrderedDict(layers)),
}
# Activations that are made with a number, and what that number is called.
WITH_NUMBER: dict[str, tuple[Callable[[float], Activation], str]] = {
    "leaky_relu": (leaky_relu, "slope"),
    "softplus": (softplus, "beta"),
    "elu": (elu, "alpha"),
}


def describe(where: str, part: Any, table: Table) -> dict[str, Any]:
    """A part of an energy as its class and the arguments of its constructor."""
    if type(part) not in table:
        raise ValueError(
            f"`{where}` must be one of the classes that a file can describe "
            f"({', '.join(cls.__name__ for cls in table)}), got "
            f"{repr(part).splitlines()[0].removesuffix('(')}"
        )
    data: dict[str, Any] = {"class": type(part).__name__}
    for name in table[type(part)].split():
        data[name] = argument(f"{where}.{name}", name, attribute(part, name), table, WRITE)
    return data


def build(where: str, data: Any, table: Table) -> nn.Module:
    """The inverse of `describe`, for a description that may be anything."""
    known = {cls.__name__: cls for cls in table}
    name = data.get("class") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"`{where}` must be one of the classes {', '.join(known)}, got {name!r}")
    names = table[known[name]].split()
    data = {**{n: None for n in names if n in LATER}, **data}
    if data.keys() != {"class", *names}:
        raise ValueError(
            f"`{where}` must give {name} the arguments {names}, got {[*data.keys() - {'class'}]}"
        )
    given = {n: argument(f"{where}.{n}", n, data[n], table, READ) for n in names}
    return MAKE.get(known[name], known[name])(**given)


def attribute(part: nn.Module, name: str) -> Any:
    """The argument that a part was made with."""
    if name == "bias":
        return part.bias is not None
    if isinstance(part, Convexified) and name == "module":
        return part.blueprint[0]
    if name == "layers":  # `children()` would leave out a layer that is used twice
        return dict(part._modules)
    value = getattr(part, name)
    return list(value) if isinstance(value, nn.ModuleList) else value


def write_activation(where: str, activation: Activation) -> dict[str, Any]:
    """An activation by its name and number, if that makes the same one again."""
    name, function = activation.name.partition("(")[0], activation.function
    data: dict[str, Any] = {"name": name}
    if name in WITH_NUMBER and isinstance(function, partial) and len(function.keywords) == 1:
        data[WITH_NUMBER[name][1]] = check_number(where, *function.keywords.values())
    try:
        if facts(read_activation(where, data)) == facts(activation):
            return data
    except ValueError:
        pass
    raise ValueError(
        f"`{where}` must be an activation of icnn.activations, or a file cannot describe it: "
        f"expected one of {', '.join(ACTIVATIONS)}, got {activation!r}"
    )


def read_activation(where: str, data: Any) -> Activation:
    """The inverse of `write_activation`."""
    name = data.get("name") if isinstance(data, dict) else None
    if isinstance(name, str) and name in ACTIVATIONS:
        make, number = WITH_NUMBER.get(name, (None, "name"))
        if data.keys() == {"name", number}:
            return make(check_number(where, data[number])) if make else ACTIVATIONS[name]()
    raise ValueError(f"`{where}` must describe one of {', '.join(ACTIVATIONS)}, got {data!r}")


def facts(activation: Activation) -> dict[str, Any]:
    """What tells activations apart. Partial functions are equal only to themselves."""
    f = activation.function
    whole = (f.func, f.args, f.keywords) if isinstance(f, partial) else f
    return {**vars(activation), "function": whole}


def write_value(where: str, value: Any) -> Any:
    """A number as it is, a tensor as its shape, a network as its description."""
    if isinstance(value, NonNegative):
        value = value.raw
    if isinstance(value, Tensor):
        return {"parameter" if isinstance(value, nn.Parameter) else "constant": [*value.shape]}
    if isinstance(value, float):
        return check_number(where, value)
    return describe(where, value, NETWORKS)


def read_value(where: str, data: Any) -> Any:
    """The inverse of `write_value`; the numbers of a tensor come later."""
    if not isinstance(data, dict):
        return check_number(where, data)
    for key, kind_of_tensor in (("parameter", nn.Parameter), ("constant", torch.detach)):
        if [*data] == [key] and isinstance(data[key], list):
            return kind_of_tensor(torch.empty([check_count(where, n, 0) for n in data[key]]))
    return build(where, data, NETWORKS)


class Way(NamedTuple):
    """The direction in which arguments travel: from attributes to JSON, or back."""

    part: Callable[[str, Any, Table], Any]
    activation: Callable[[str, Any], Any]
    value: Callable[[str, Any], Any]


WRITE = Way(describe, write_activation, write_value)
READ = Way(build, read_activation, read_value)


def argument(where: str, name: str, value: Any, table: Table, way: Way) -> Any:
    """One argument of a constructor, written or read by what its name says it is."""
    match name:
        case "energy" | "net" | "module":
            return way.part(where, value, ENERGIES if name == "energy" else NETWORKS)
        case "energies":
            parts = enumerate(check_instance(where, value, list))
            return [way.part(f"{where}[{i}]", part, table) for i, part in parts]
        case "layers":
            parts = check_instance(where, value, dict).items()
            return {key: way.part(f"{where}.{key}", part, table) for key, part in parts}
        case "activation" | "x_activation":
            return way.activation(where, value)
        case "center" | "weight" | "c" | "mean" | "factor":
            return way.value(where, value)
    return plain(where, name, value, table)


def plain(where: str, name: str, value: Any, table: Table) -> Any:
    """A number, a word or a tuple of such. Our own constructors check what they are given."""
    if table is NETWORKS and name in FLAGS:
        return check_instance(where, value, bool)
    if table is NETWORKS and name in WORDS:
        return check_choice(where, value, WORDS[name])
    if table is NETWORKS and name in NUMBERS and value not in INSTEAD.get(name, ()):
        return check_number(where, value)
    if isinstance(value, list | tuple):
        return tuple(plain(where, name, item, table) for item in value)
    if table is ENERGIES or value in INSTEAD.get(name, ()):
        return value
    return check_count(where, value, MINIMUM.get(name, 1))
