"""Losses for energies. PyTorch's work on `solution.y` as on any tensor; here are two more."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from icnn.checks import check_callable, check_choice, check_number, check_shape, check_tensor
from icnn.energies.compose import AnyEnergy
from icnn.energies.energy import Energy, EnergyAt, at
from icnn.solvers.argmin import Solver, argmin
from icnn.solvers.bundle import Bundle
from icnn.solvers.bundle_entropy import BundleEntropy
from icnn.solvers.domains import Box, Simplex, total
from icnn.solvers.solution import Status

TOL = 1e-3  # of a rival: a step of training needs no better one
CORNER = 1e-5  # how far from a corner of its domain a target may be, for rounding


def max_margin(
    energy: AnyEnergy,
    x: Any,
    y_true: Tensor,
    domain: Box | Simplex,
    *,
    margin: str = "hamming",
    scale: float = 1.0,
    entropy: float = 0.0,
    solver: Solver | None = None,
    reduction: str = "mean",
    return_rival: bool = False,
) -> Any:
    """The structured hinge loss: the target shall be better than any other answer, by a margin.

    For each example, with `f` the energy minus `entropy * H`,

        f(x, y_true) - min_y (f(x, y) - scale * margin(y, y_true))    >= 0,

    as in supplement F of the paper. Where the margin is a linear function of `y` the minimum is a
    convex problem. Targets are therefore corners of the domain, and there are two margins. In the
    coordinates `u` in which the domain is `[0, 1]` or the simplex,

    - "hamming": `sum |u - u_true|`, how much is wrong;
    - "one-hot": `sum u_true (1 - u)`, how much of the target is missing. On the simplex it is half
      of the other.

    Args:
        energy: As in `icnn.argmin`.
        x: A batch, as the energy takes it.
        y_true: The targets, `(B, *y_shape)`: at the bounds of the box, or one-hot on the simplex.
        domain: `icnn.Box(low, high)` or `icnn.Simplex()`.
        margin: "hamming" or "one-hot".
        scale: What a margin of 1 costs in units of the energy.
        entropy: The weight of `H`; the one with which the energy predicts.
        solver: `icnn.Bundle(tol=1e-3)` by default, `icnn.BundleEntropy()` with an entropy.
        reduction: "mean", "sum" or "none", as in PyTorch.
        return_rival: Whether to give back `(loss, rival)`, with the `Solution` of the search: its
            `report()` says how many examples converged. The loss of one that did not is too small,
            by its gap at most.

    Examples:
        >>> energy = icnn.PICNN(dim_x=3, dim_y=2)
        >>> labels = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
        >>> loss = icnn.losses.max_margin(energy, torch.rand(2, 3), labels, icnn.Box())
        >>> loss.backward()
    """
    check_callable("energy", energy)
    check_choice("margin", margin, ["hamming", "one-hot"])
    check_choice("reduction", reduction, ["mean", "sum", "none"])
    scale = check_number("scale", scale, 0.0)
    entropy = check_number("entropy", entropy, 0.0)
    target = corners(y_true, domain)
    if solver is None:
        solver = BundleEntropy() if entropy else Bundle(tol=TOL)

    if (shape := getattr(energy, "y_shape", None)) is not None:
        check_shape("y_true", y_true, (None, *shape))

    weight = target if margin == "one-hot" else 2 * target - 1
    rivals = Rivals(energy, domain, scale * weight, scale * total(target))
    start = domain.center(y_true)
    rival = argmin(rivals, x, domain, entropy=entropy, solver=solver, start=start)
    # H is zero in a corner. A broken example has no rival, and no gradient.
    loss = (rivals.f(y_true) - rival.value.to(y_true.dtype)).clamp(min=0)
    loss = torch.where(rival.status == Status.NONFINITE, 0.0, loss)
    loss = loss if reduction == "none" else getattr(loss, reduction)()
    return (loss, rival) if return_rival else loss


class Rivals(Energy):
    """The energy less the margin; it keeps what it was at `x`, for the target to be judged by."""

    def __init__(self, energy: AnyEnergy, domain: Box | Simplex, weight: Tensor, most: Tensor):
        super().__init__()
        self.parts = (energy,)  # a tuple: not a part of this module, but somebody else's
        self.domain, self.weight, self.most = domain, weight, most
        self.training = getattr(energy, "training", False)
        self.smooth = getattr(energy, "smooth", None)

    def at(self, x: Any) -> EnergyAt:
        self.f = at(self.parts[0], x)
        return RivalsAt(self.f, self.domain, self.weight, self.most)


class RivalsAt:
    """The same at `x`: the margin is linear in `y`."""

    def __init__(self, f: Any, domain: Box | Simplex, weight: Tensor, most: Tensor):
        self.f, self.domain, self.weight, self.most = f, domain, weight, most

    def __call__(self, y: Tensor) -> Tensor:
        return self.f(y) - self.margin(y)

    def margin(self, y: Tensor) -> Tensor:
        """How wrong `y` is."""
        u = self.domain.unit(y).to(y.dtype) if isinstance(self.domain, Box) else y
        return self.most - total(self.weight * u)

    @property
    def value_and_gradient(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        own = getattr(self.f, "value_and_gradient", None)
        if own is None:
            return None
        slope = self.weight / self.domain.width if isinstance(self.domain, Box) else self.weight

        def both(y: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = own(y)
            return value - self.margin(y), gradient + slope.to(y.dtype)

        return both


def corners(y_true: Tensor, domain: Any) -> Tensor:
    """Targets in the coordinates where the domain's corners are zeros and ones, checked."""
    check_tensor("y_true", y_true)
    if y_true.ndim < 2:
        raise ValueError(
            f"`y_true` must have shape (B, *y_shape), got {tuple(y_true.shape)}: for classes, "
            "torch.nn.functional.one_hot(classes, number).float()"
        )
    if isinstance(domain, Box):
        # `unit` clips: outside is outside.
        inside = domain.contains(y_true)
        target = domain.unit(y_true).to(y_true.dtype)
    elif isinstance(domain, Simplex):
        inside, target = domain.contains(y_true), y_true
    else:
        raise ValueError(f"`domain` must be a Box or a Simplex, got {domain!r}")
    if not bool(inside.all()):
        row = int((~inside).nonzero()[0])
        raise ValueError(f"`y_true` must lie in {domain!r}, got example {row} outside of it")
    away = torch.minimum(target.abs(), (1 - target).abs()).flatten(start_dim=1).amax(dim=1)
    if bool((away > CORNER).any()):
        row = int((away > CORNER).nonzero()[0])
        raise ValueError(
            "`y_true` must be at corners of the domain (bounds of a box, one-hot on the simplex), "
            f"got example {row} between them: there a margin would not be a linear function of y, "
            "and the search for a rival no convex problem"
        )
    return target.round()


def soft_f1(y: Tensor, y_true: Tensor, *, average: str = "examples") -> Tensor:
    """One minus the F1 score, with labels `y` between 0 and 1 counted by their value.

    `F1 = 2 sum(y y_true) / (sum(y) + sum(y_true))`, over the labels of each example or over the
    examples of each label, then averaged; 0/0 counts as 0.

    Args:
        y: Predictions, `(B, labels)`.
        y_true: The labels, zeros and ones of the same shape.
        average: "examples" or "labels".

    Examples:
        >>> y_true = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> float(icnn.losses.soft_f1(y_true, y_true))
        0.0
    """
    check_tensor("y", y)
    check_shape("y", y, (None, None))
    if not isinstance(y_true, Tensor) or y_true.shape != y.shape:
        got = tuple(y_true.shape) if isinstance(y_true, Tensor) else type(y_true).__name__
        raise ValueError(f"`y_true` must have the shape of `y`, {tuple(y.shape)}, got {got}")
    check_choice("average", average, ["examples", "labels"])
    dim = 1 if average == "examples" else 0
    y_true = y_true.to(y.dtype)
    both = (y + y_true).sum(dim=dim)
    hits = 2 * (y * y_true).sum(dim=dim)
    return 1 - (hits / torch.where(both > 0, both, 1.0)).mean()
