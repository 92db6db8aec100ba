"""Non-negative weights: how they are kept, read and tidied.

`NonNegative` is the one place where a sign constraint lives. Whatever an optimiser did to the
stored tensor, what a network reads from it is non-negative.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from icnn.checks import check_choice, check_instance, check_nonnegative, check_shape, check_tensor
from icnn.energies.activations import smooth_plus

M = TypeVar("M", bound=nn.Module)


def clip_straight_through(raw: Tensor) -> Tensor:
    """`max(raw, 0)`, with the gradient of the identity so that a clipped weight can come back.

    In floating point raw + (0 - raw) is exactly 0 and raw + (raw - raw) exactly raw.
    """
    return raw + (raw.clamp(min=0) - raw).detach()


@dataclass(frozen=True)
class Positivity:
    """A map onto the non-negative numbers and one of its right inverses."""

    effective: Callable[[Tensor], Tensor]
    raw: Callable[[Tensor], Tensor]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _log(weight: Tensor) -> Tensor:
    return weight.clamp(min=torch.finfo(weight.dtype).tiny).log()


def _inverse_softplus(weight: Tensor) -> Tensor:
    # log(exp(w) - 1) = w + log(1 - exp(-w)), which does not overflow.
    weight = weight.clamp(min=torch.finfo(weight.dtype).tiny)
    return weight + torch.log(-torch.expm1(-weight))


POSITIVITY: dict[str | None, Positivity] = {
    "project": Positivity(clip_straight_through, _unchanged),
    "softplus": Positivity(smooth_plus, _inverse_softplus),
    "exp": Positivity(torch.exp, _log),
    "square": Positivity(torch.square, torch.sqrt),
    "abs": Positivity(torch.abs, _unchanged),
    None: Positivity(_unchanged, _unchanged),
}


def frozen(parameter: Tensor) -> Tensor:
    """A parameter as computations under the present grad mode see it.

    What is computed under `no_grad` carries no gradient; a parameter that is passed on as it is
    would, and an energy frozen at `x` would learn through some of its weights and not others.
    A view drops the gradient and, unlike `detach`, keeps the tangents of forward-mode AD.
    """
    return parameter if torch.is_grad_enabled() else parameter.view_as(parameter)


class Constrained(nn.Module):
    """A module that stores weights which it reads as if they were in some set."""

    def project_(self) -> None:
        """Store them as they are read."""
        raise TypeError(f"{type(self).__name__} must define `project_()`")


class NonNegative(Constrained):
    """A tensor that is non-negative whenever it is read by calling the module.

    What is stored has the name of its mode in a `state_dict`, so that weights stored in one mode
    are not read in another by mistake.

    Args:
        value: What it holds at first. An `nn.Parameter` is learned, and is the tensor that the
            module stores in; a plain tensor is a constant.
        positivity: `"project"` clips at zero on reading, with a straight-through gradient;
            `"softplus"`, `"exp"`, `"square"` and `"abs"` reparametrise; `None` constrains nothing
            (the paper's relaxed variant, which is not convex).
    """

    def __init__(self, value: Tensor, positivity: str | None = "project"):
        super().__init__()
        self.positivity = check_choice("positivity", positivity, list(POSITIVITY))
        check_tensor("value", value)
        self._name = f"raw_{positivity or 'free'}"
        if isinstance(value, nn.Parameter):
            self.register_parameter(self._name, value)
        else:
            self.register_buffer(self._name, value.detach().clone())
        self.set_(value)

    @property
    def raw(self) -> Tensor:
        """The tensor that is stored, and that an optimiser moves."""
        return getattr(self, self._name)

    def forward(self) -> Tensor:
        return POSITIVITY[self.positivity].effective(frozen(self.raw))

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Store `value`, so that reading gives it back."""
        check = check_tensor if self.positivity is None else check_nonnegative
        check_shape("value", check("value", value), self.raw.shape)
        self.raw.copy_(POSITIVITY[self.positivity].raw(value.detach()))

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply what is read by a positive number."""
        way = POSITIVITY[self.positivity]
        if way.raw is _unchanged:
            self.raw.mul_(factor)
        elif self.positivity == "square":  # the sign of what is stored stays
            self.raw.mul_(factor**0.5)
        else:
            self.raw.copy_(way.raw(way.effective(self.raw) * factor))

    @torch.no_grad()
    def project_(self) -> None:
        """Clip what is stored to what is read. Reparametrised tensors have nothing to clip."""
        if self.positivity == "project":
            self.raw.clamp_(min=0)

    def extra_repr(self) -> str:
        return f"{tuple(self.raw.shape)}, positivity={self.positivity!r}"


def project_(module: M) -> M:
    """Clip every constrained weight of `module` to its set, in place, and return the module."""
    for part in check_instance("module", module, nn.Module).modules():
        if isinstance(part, Constrained):
            part.project_()
    return module


def keep_convex(module: nn.Module, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Call `project_(module)` after every `optimizer.step()`.

    The energy is convex without it. With it the stored weights are the ones that are used, so
    that weight decay and momentum act on them, and a clipped weight does not drift away below
    zero. The handle that comes back has `remove()`.
    """
    check_instance("module", module, nn.Module)
    check_instance("optimizer", optimizer, torch.optim.Optimizer)
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in moved for p in module.parameters()):
        raise ValueError("`optimizer` must hold parameters of `module`, got one that holds none")

    parts = [part for part in module.modules() if isinstance(part, Constrained)]

    def tidy(*_) -> None:
        for part in parts:
            part.project_()

    return optimizer.register_step_post_hook(tidy)
