"""A start measured on data, where the formulas of `initialisation` do not reach."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from icnn.energies.activations import IDENTITY
from icnn.energies.energy import Conv, Dense, LayeredEnergy
from icnn.energies.layers import NonNegative

E = TypeVar("E", bound=LayeredEnergy)


@torch.no_grad()
def calibrate_(energy: E, x: Tensor | None, y: Tensor) -> E:
    """Centre and scale every layer of a fresh energy on a batch of data, in place.

    A new energy expects standardised `x` and `y`, and knows nothing of poolings and of padding.
    After this call, on this batch, the units of every layer have mean 0 before their activation,
    and variance 1 on average over the layer; the energy itself has mean 0 and variance 1. Weights
    keep their signs, so it stays convex. Call it once, before training; it measures in eval mode,
    and dropout adds its noise to that.

    Args:
        energy: An `icnn.FICNN`, `icnn.PICNN`, `icnn.ConvPICNN` or what `icnn.convexify` made; of
            a composition, the network inside it.
        x: Some tens or hundreds of inputs as they will come in training.
        y: As many labels, or points where the energy will be looked at.

    Examples:
        >>> energy = icnn.FICNN(dim_y=2)
        >>> y = 200 + 50 * torch.randn(100, 2)
        >>> round(float(icnn.calibrate_(energy, None, y)(None, y).std()), 3)
        1.0
    """
    if not isinstance(energy, LayeredEnergy):
        raise ValueError(
            "`energy` must be a FICNN, PICNN, ConvPICNN or convexified network, got "
            f"{type(energy).__name__}: of a composition, calibrate the networks inside it"
        )
    names = [id(p) for _, p in energy.named_parameters(remove_duplicate=False)]
    if len(set(names)) < len(names):
        raise ValueError("`energy` must not share weights between layers: each has its own scale")
    parts = list(energy.modules())
    training = [part for part in parts if part.training]
    before = {name: value.clone() for name, value in energy.state_dict().items()}
    hooks = []
    energy.eval()  # without dropout, and without moving the averages of a norm
    try:
        # Bad input is refused before anything is changed.
        finite = bool(energy(x, y).isfinite().all())
        if y.shape[0] < 2:
            raise ValueError(f"`y` must hold at least 2 examples to measure on, got {y.shape[0]}")
        if not finite:
            raise ValueError("`x` and `y` must be finite, and so must the energy there")
        if not any(bool((v != v[:1]).any()) for v in (x, y) if v is not None):
            raise ValueError("`x` or `y` must differ between examples: there is nothing to measure")
        # Along x, from below: each layer is measured, and mended, when it is called.
        linears = [getattr(part, "v", None) for part in parts]
        hooks = [v.register_forward_hook(mend) for v in linears if isinstance(v, nn.Module)]
        layers = energy.describe(x)
        weights = iter([part for part in parts if hasattr(part, "wy")])
        z = None
        for layer in layers:
            if isinstance(layer, Dense | Conv):
                a = layer._replace(activation=IDENTITY)(z, y)
                mean, std = measure(a)
                part = next(weights)
                linears = [getattr(part, name, None) for name in ("wy", "wx", "wu")]
                standardise_([linear for linear in linears if linear is not None], mean, std)
                if isinstance(part.wz, NonNegative):
                    part.wz.set_(part.wz() / std)
                z = layer.activation(standardised(a, mean, std))
            else:
                z = layer(z, y)
        value = energy(x, y).double()
        if not (value.mean().abs() < 0.05 and 0.95 < value.std() < 1.05):
            raise ValueError(
                f"`x` and `y` must be of a size that {y.dtype} can measure on, got an energy of "
                f"mean {float(value.mean()):g} and standard deviation {float(value.std()):g}"
            )
    except BaseException:
        energy.load_state_dict(before)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for part in training:
            part.training = True
    return energy


def mend(linear: nn.Module, _, a: Tensor) -> Tensor:
    """A hook: `linear`, and what it just computed, centred and scaled."""
    mean, std = measure(a)
    standardise_([linear], mean, std)
    return standardised(a, mean, std)


def measure(a: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each unit over examples and places, and one standard deviation for them all."""
    over = [d for d in range(a.ndim) if d != 1]
    wide = a.double()  # squares of large and of small numbers
    mean, variance = wide.mean(dim=over), wide.var(dim=over).mean()
    # Units that vary by rounding alone have no scale to mend.
    rounding = (64 * torch.finfo(a.dtype).eps) ** 2 * wide.square().mean()
    std = torch.where(variance > rounding, variance, torch.ones_like(variance)).sqrt()
    return mean.to(a.dtype), std.to(a.dtype)


def standardised(a: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`(a - mean) / std`, unit by unit."""
    return (a - mean.reshape(-1, *(1 for _ in a.shape[2:]))) / std


def standardise_(linears: Iterable[nn.Module], mean: Tensor, std: Tensor) -> None:
    """Divide the sum of linear maps by `std`, after taking `mean` off their one bias."""
    for linear in linears:
        assert isinstance(linear, nn.Linear | nn.Conv2d)
        linear.weight.div_(std)
        if linear.bias is not None:
            linear.bias.sub_(mean).div_(std)
