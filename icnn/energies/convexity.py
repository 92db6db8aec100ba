"""Is this energy convex in `y`? A proof where there is one, else a search for a counterexample."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils import _pytree as pytree

from icnn.checks import check_callable
from icnn.energies.counterexample import Counterexample, EnergyLike, batch_size, search
from icnn.energies.layers import NonNegative
from icnn.energies.proof import Proof, prove


@dataclass(frozen=True)
class ConvexityReport:
    """What `icnn.check_convexity` found.

    Attributes:
        proved: Whether the energy is convex in `y` for every `x`, beyond doubt but for rounding.
        reasons: What the proof relied on; without a proof, what stood in its way.
        counterexample: A proof of the contrary, where there is no proof and one was found.
    """

    proved: bool
    reasons: tuple[str, ...]
    counterexample: Counterexample | None = None

    def __str__(self) -> str:
        if self.proved:
            head = "convex in y: proved"
        elif self.counterexample is not None:
            head = f"not convex in y: {self.counterexample}"
        else:
            head = "not proved, and no counterexample found"
        return "\n".join([head, *(f"  - {reason}" for reason in self.reasons)])


def check_convexity(energy: EnergyLike, x: Any = None, domain: Any = None) -> ConvexityReport:
    """Prove that `energy` is convex in `y`, or look for a counterexample.

    The proof follows the traced computation with the sign and curvature rules of disciplined
    convex programming, so that anybody's `forward` is judged by what it computes. It reads the
    weights as they are now, in eval mode, and holds for every `x` and every batch of such shapes.
    Not everything convex can be proved: without a proof, Jensen's inequality is tried along
    random segments. The energy and the global random state stay as they are.

    Args:
        energy: Any module or function of `x` and `y` with an attribute `y_shape`.
        x: A batch of `x` with the shapes that the energy expects; `None` where the energy takes
            none, or says what it takes by `dim_x` or `x_shape`.
        domain: Where `y` lies: proof and search keep to it. Without it, everywhere.

    Examples:
        >>> report = icnn.check_convexity(icnn.FICNN(dim_y=2))
        >>> report.proved
        True
    """
    check_callable("energy", energy)
    if domain is not None and not hasattr(domain, "project"):
        raise ValueError(f"`domain` must be a domain, with a method `project`, got {domain!r}")
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), _private(energy) as own, _private(energy) as fresh:
        generator = torch.Generator().manual_seed(0)
        like = _tensor_like(own, x)
        made_up = x is None
        x = _example_x(own, like, generator) if made_up else x
        y = torch.randn(batch_size(x), *_y_shape(own, domain), generator=generator).to(like)
        value = _check_call(own, x, y)
        if not torch.equal(own(x, y.clone()).nan_to_num(), value.nan_to_num()):
            again = "it gives other values when it is called again: does it draw random numbers?"
            return ConvexityReport(False, (again,))
        # Traced on a copy that was never called: what a first call keeps would be a constant.
        reasons, proof = _attempt(fresh, x, y, domain)
        if _mixes(own, x, y, value):
            mixed = "the value of an example depends on the other examples of its batch"
            reasons, proof = (mixed, *(reasons if proof is None or proof.doubts else ())), None
        if proof is not None and not proof.doubts:
            return ConvexityReport(True, reasons)
        try:
            found = search(own, x, y, domain, made_up, generator)
        except (RuntimeError, ValueError) as error:  # an energy that takes no other batch
            first = next(iter(str(error).splitlines()), "")
            reasons, found = (*reasons, f"no search for a counterexample: {first}"), None
    return ConvexityReport(False, reasons, found)


def _attempt(
    energy: EnergyLike, x: Any, y: Tensor, domain: Any
) -> tuple[tuple[str, ...], Proof | None]:
    low, high = _limits(domain)
    try:
        proof = prove(energy, x, y, low, high)
    except Exception as error:  # whatever a user's code raises when it is traced
        first = next(iter(str(error).splitlines()), "")
        return (f"it cannot be traced: {type(error).__name__}: {first}",), None
    if _relaxed(energy):
        proof.doubts.append("positivity=None promises nothing: the next step may change the signs")
    if proof.doubts:
        return tuple(dict.fromkeys(proof.doubts)), proof
    names = ", ".join(f"{name} ({n})" for name, n in proof.operators.most_common())
    reasons = [
        f"{proof.operators.total()} operators of known curvature along y: {names}",
        "eval mode"
        if isinstance(energy, nn.Module)
        else "modules inside it in the mode they are in",
    ]
    if proof.signs:
        reasons.append(f"the signs of {proof.signs} weights as they are now")
    if -math.inf < low or high < math.inf:
        reasons.append(f"y between {low:g} and {high:g}")
    given = {type(v).__name__ for v in pytree.tree_leaves(x) if not isinstance(v, Tensor | None)}
    if given:
        reasons.append(f"the parts of x that are not tensors, as they are: {', '.join(given)}")
    return tuple(reasons), proof


def _relaxed(energy: EnergyLike) -> bool:
    """Whether the energy was asked for without the constraint, whatever its signs are today."""
    parts = energy.modules() if isinstance(energy, nn.Module) else []
    return any(isinstance(part, NonNegative) and part.positivity is None for part in parts)


@contextmanager
def _private(energy: EnergyLike) -> Iterator[EnergyLike]:
    """A copy in eval mode. A module that cannot be copied is lent, and gets its mode back."""
    if isinstance(energy, OptimizedModule) and not energy._forward_hooks:
        energy = energy._orig_mod  # what torch.compile wraps
    if not isinstance(energy, nn.Module):
        yield energy
        return
    modes = {module: module.training for module in energy.modules()}
    try:
        try:
            own = copy.deepcopy(energy).requires_grad_(False)
        except (RuntimeError, TypeError):  # non-leaf tensors, handles
            own = energy
        yield own.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


def _tensor_like(energy: EnergyLike, x: Any) -> Tensor:
    """A tensor with the dtype and device that `y` should have."""
    own = [*energy.parameters(), *energy.buffers()] if isinstance(energy, nn.Module) else []
    tensors = [t for t in (*own, *pytree.tree_leaves(x)) if isinstance(t, Tensor)]
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def _example_x(energy: EnergyLike, like: Tensor, generator: torch.Generator) -> Any:
    """An `x` for an energy that says, or one of whose parts says, what it takes."""
    for part in energy.modules() if isinstance(energy, nn.Module) else [energy]:
        shape = getattr(part, "x_shape", None) or getattr(part, "dim_x", None)
        if shape:
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            return torch.randn(batch_size(None), *shape, generator=generator).to(like)
    return None


def _y_shape(energy: EnergyLike, domain: Any) -> tuple[int, ...]:
    bounds = (getattr(domain, name, None) for name in ("low", "high"))
    shapes = (tuple(b.shape) for b in bounds if isinstance(b, Tensor) and b.ndim)
    shape = getattr(energy, "y_shape", None) or next(shapes, None)
    if not shape:
        name = getattr(energy, "__name__", type(energy).__name__)
        raise ValueError(
            "`energy` must have an attribute `y_shape`, or `domain` bounds of that shape: set "
            f"energy.y_shape = (n,) where each y has n numbers, got {name} without it"
        )
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _limits(domain: Any) -> tuple[float, float]:
    """Numbers between which the domain's bounds hold every coordinate of `y`."""
    low, high = getattr(domain, "low", -math.inf), getattr(domain, "high", math.inf)
    return torch.as_tensor(low).min().item(), torch.as_tensor(high).max().item()


def _mixes(energy: EnergyLike, x: Any, y: Tensor, value: Tensor) -> bool:
    """Whether an example at either end has another value beside other examples."""
    for row, beside in ((0, [y[:1], y[1:] + 1]), (-1, [y[:-1] + 1, y[-1:]])):
        found = energy(x, torch.cat(beside))[row]
        if not torch.allclose(found, value[row], rtol=1e-3, atol=1e-4, equal_nan=True):
            return True
    return False


def _check_call(energy: EnergyLike, x: Any, y: Tensor) -> Tensor:
    """Meet an energy that cannot be evaluated at the door, with its own error as the cause."""
    try:
        value = energy(x, y.clone())
    except Exception as error:
        if x is not None:
            raise
        raise ValueError(
            f"`x` must be a batch that `energy` takes with y of shape {tuple(y.shape)}, got None: "
            f"energy(None, y) fails with {error}"
        ) from error
    if not isinstance(value, Tensor) or value.shape != y.shape[:1]:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"`energy(x, y)` must be one value per example, shape ({y.shape[0]},), got {got}"
        )
    return value
