"""The one door: `argmin` checks what it is given, lets a solver work, and certifies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from icnn.checks import check_callable, check_choice, check_number, check_shape, check_tensor
from icnn.energies.energy import EnergyAt, at
from icnn.solvers.bowl import bent
from icnn.solvers.bundle import Bundle
from icnn.solvers.bundle_entropy import BundleEntropy
from icnn.solvers.differentiate import differentiate
from icnn.solvers.domains import Domain
from icnn.solvers.gradient import ProjectedGradient
from icnn.solvers.graph import Watched
from icnn.solvers.problem import RUNNING, Problem, Record
from icnn.solvers.solution import Solution, Status

F = TypeVar("F", bound=Callable[..., Any])


class Solver(Protocol):
    """Numbers that say how to search; the state of a search lives in the call."""

    def check(self, problem: Problem) -> None:
        """Refuse a problem that the solver is not for."""
        ...

    def solve(self, problem: Problem) -> Record:
        """Search; examples that are still running at the end have used up their steps."""
        ...


def eager(function: F) -> F:
    """Not for PyTorch's compiler: how long a search is depends on its numbers."""
    return cast(F, torch.compiler.disable(function))


@eager
def argmin(
    energy: Callable[[Any, Tensor], Tensor],
    x: Any,
    domain: Domain,
    *,
    entropy: float = 1.0,
    solver: Solver | None = None,
    start: "Tensor | Solution | None" = None,
    fixed: tuple[Tensor, Tensor] | None = None,
    gradient: str = "auto",
) -> Solution:
    """Minimise `energy(x, y) - entropy * H(y)` over `y` in a domain, for each example of a batch.

    Args:
        energy: Any module or function of `x` and `y` that gives one number for each example and is
            convex in `y`.
        x: A batch, as the energy takes it; `None` where it takes none.
        domain: `icnn.Box(low, high)`, `icnn.Simplex()`, or one of your own.
        entropy: The weight of the domain's entropy; 0 for the bare energy.
        solver: `icnn.BundleEntropy()` by default; with `entropy=0`, `icnn.Bundle()`,
            `icnn.ProjectedGradient()` or `icnn.LinearProgram()`.
        start: Where to start, a tensor or an earlier `Solution`; by default the centre.
        fixed: `(mask, values)`: coordinates that are given where the mask is true, at these values.
            They may lie outside the box; other values are ignored.
        gradient: How `y` carries gradients where grad mode is on: "cuts" (exact for energies of
            straight pieces), "implicit" (exact for smooth ones), "unroll" (through the steps of
            `icnn.ProjectedGradient`), or "auto", which looks at the energy and the solver.

    Examples:
        >>> energy = icnn.PICNN(dim_x=3, dim_y=2)
        >>> solution = icnn.argmin(energy, torch.rand(5, 3), icnn.Box())
        >>> bool(solution.converged.all()), solution.y.shape
        (True, torch.Size([5, 2]))
    """
    check_callable("energy", energy)
    if isinstance(domain, type) or not has(domain, Domain):
        raise ValueError(f"`domain` must be a domain such as icnn.Box(0, 1), got {domain!r}")
    entropy = check_number("entropy", entropy, 0.0)
    solver = BundleEntropy() if solver is None else solver
    if isinstance(solver, type) or not has(solver, Solver):
        raise ValueError(f"`solver` must be a solver such as icnn.BundleEntropy(), got {solver!r}")
    gradient = check_gradient(gradient, solver)
    given = start.y if isinstance(start, Solution) else start
    like = template(energy, x, domain, given, fixed)

    free = None
    if fixed is not None:
        mask, values = check_fixed(fixed, like)
        restrict = getattr(domain, "restrict", None)
        if restrict is None:
            raise ValueError(f"`fixed` must be None on {domain!r}, which has no method `restrict`")
        domain, free = restrict(mask, values), ~mask
    begin = domain.center(like.double()).to(like.dtype)
    if given is not None:
        begin = given.detach() if free is None else torch.where(free, given.detach(), begin)
        inside = domain.contains(begin)
        if not bool(inside.all()):
            row = int((~inside).nonzero()[0])
            raise ValueError(f"`start` must lie in {domain!r}, got example {row} outside of it")
        # A point that is outside by rounding would be better than the best one inside.
        begin = domain.project(begin.double()).to(like.dtype)
    learn = torch.is_grad_enabled()
    begin = begin if gradient == "unroll" else begin.detach()
    begin = begin.clone(memory_format=torch.contiguous_format)  # compiled steps read its memory
    x = pytree.tree_map_only(Tensor, lambda t: widened(t, like.dtype), x)
    with torch.inference_mode(False), torch.set_grad_enabled(learn), precise(like):
        # Once, and with its graph: dropout masks are the same in the search and in its gradient.
        noise = random_states(energy, like) if learn else None
        f, way = at(energy, x), gradient if learn else None
        problem = Problem(Watched(f), domain, entropy, begin, free, energy, x, way, noise)
        solver.check(problem)
        if isinstance(solver, Bundle) and solver.master == "proximal":
            problem = separated(problem, f, begin if given is None else None)
        with torch.no_grad():
            record = solver.solve(problem)
            solution = finished(problem, record)
        if not learn:
            return solution
        tied = differentiate(problem, record, solver.solve)
    return replace(solution, y=tied.y, value=tied.value)


def separated(problem: Problem, f: EnergyAt, start: Tensor | None) -> Problem:
    """With a quadratic of the energy in the place of the entropy that there is not, if it has one.

    Where no start was given, that of the domain is as good as any: `start` is to be its bottom.
    """
    found = bent(problem.domain, f, problem.start)
    if found is None:
        return problem
    rest, domain = found
    begin = (
        problem.start
        if start is None
        else domain.center(start).detach().clone(memory_format=torch.contiguous_format)
    )
    return replace(problem, energy=Watched(rest), domain=domain, entropy=1.0, start=begin)


@contextmanager
def precise(like: Tensor) -> Iterator[None]:
    """No shortcuts: certificates count on the rounding of a dtype, and twice is the same.

    Autocast keeps eight bits of a float32. On a GPU convolutions keep ten by default, and add up in
    any order.
    """
    with torch.autocast(like.device.type, enabled=False):
        if not like.is_cuda:
            yield
            return
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        short = matmul.allow_tf32
        matmul.allow_tf32 = False
        try:
            with cudnn.flags(cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False):
                yield
        finally:
            matmul.allow_tf32 = short


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In full precision what a network under autocast has left in a lower one."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    return x.to(dtype) if low and torch.is_autocast_enabled(x.device.type) else x


def has(thing: Any, protocol: Any) -> bool:
    """Whether it has the methods of a protocol; `isinstance` takes its time to say the same."""
    names = (name for name in vars(protocol) if not name.startswith("_"))
    return all(callable(getattr(thing, name, None)) for name in names)


def random_states(energy: Any, like: Tensor) -> tuple[Tensor, ...] | None:
    """The states of the random generators, for an energy that may draw dropout masks."""
    if not getattr(energy, "training", False):
        return None
    states = (torch.random.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state(like.device)) if like.is_cuda else states


def check_gradient(gradient: Any, solver: Solver) -> str:
    """A way to differentiate that goes with the solver; "auto" after gradient steps is "unroll"."""
    check_choice("gradient", gradient, ["auto", "cuts", "implicit", "unroll"])
    steps = isinstance(solver, ProjectedGradient)
    if gradient == "unroll" and not steps:
        raise ValueError(
            f'`gradient` must be "auto", "cuts" or "implicit" with {solver!r}, got "unroll", which '
            "goes through the steps of icnn.ProjectedGradient"
        )
    return "unroll" if steps and gradient == "auto" else gradient


def finished(problem: Problem, record: Record) -> Solution:
    """The record of a search as a solution."""
    status = torch.where(record.status == RUNNING, int(Status.MAX_STEPS), record.status)
    broken = status == int(Status.NONFINITE)
    value = record.value.masked_fill(broken, torch.nan)
    gap = (value - record.lower).masked_fill(broken, torch.inf)
    radius = torch.full_like(gap, torch.inf)
    own = getattr(problem.domain, "radius", None)
    if problem.entropy and own is not None:
        # A gap below zero is rounding, unless the energy is not convex.
        known = own(gap.clamp(min=0), problem.entropy, problem.start.shape)
        radius = torch.where(status == int(Status.NONCONVEX), radius, known)
    gaps = (
        torch.stack(record.gaps) if isinstance(record.gaps, list) and record.gaps else record.gaps
    )
    gaps = gaps if isinstance(gaps, Tensor) and len(gaps) else gap[None]
    return Solution(record.y, value, record.lower, gap, radius, record.steps, status, gaps)


def template(energy: Any, x: Any, domain: Domain, start: Tensor | None, fixed: Any) -> Tensor:
    """A tensor with the shape, dtype and device of the batch of `y`.

    The shape comes from `start`, else from the energy, else from the bounds; the batch from `x`,
    else from `start`, else from `fixed`, else from the bounds, else it is one problem.
    """
    if start is not None:
        check_tensor("start", start)
        if start.ndim < 2:
            raise ValueError(f"`start` must have shape (B, *y_shape), got {tuple(start.shape)}")
    pair = list(fixed) if isinstance(fixed, tuple | list) else []
    held = broadcast([t for t in pair if isinstance(t, Tensor)])
    bounds = [
        b for b in (getattr(domain, k, None) for k in ("low", "high")) if isinstance(b, Tensor)
    ]
    bound = broadcast(bounds)
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    batch = next((leaf.shape[0] for leaf in leaves if leaf.ndim), None)

    own = getattr(energy, "y_shape", None)
    own = None if own is None else ((own,) if isinstance(own, int) else tuple(own))
    if start is not None:
        shape = tuple(start.shape[1:])
        if own is not None and own != shape:
            raise ValueError(
                f"`start` must have shape (B, {', '.join(map(str, own))}), the energy's y_shape, "
                f"got {tuple(start.shape)}"
            )
    elif own is not None:
        shape = own
    elif bound is not None and bound.ndim:
        batched = batch is not None and bound.ndim > 1 and bound.shape[0] in (1, batch)
        shape = tuple(bound.shape[1:] if batched else bound.shape)
    elif held is not None and held.ndim > 1:
        shape = tuple(held.shape[1:])
    else:
        raise ValueError(
            "`start` must be given, or the energy must have an attribute `y_shape`, or the domain "
            "bounds that are tensors: nothing tells the shape of y"
        )
    for source, size in (
        ("x", batch),
        ("start", None if start is None else start.shape[0]),
        ("fixed", held.shape[0] if held is not None and held.ndim == len(shape) + 1 else None),
        ("domain", bound.shape[0] if bound is not None and bound.ndim > len(shape) else None),
    ):
        if size is None:
            continue
        if batch is not None and size not in (batch, 1 if source in ("fixed", "domain") else batch):
            raise ValueError(
                f"`{source}` must hold as many examples as the others, {batch}, got {size}"
            )
        batch = size if batch is None else batch
    full = (1 if batch is None else batch, *shape)

    floats = [t for t in leaves if t.is_floating_point()]
    weights = list(energy.parameters()) if isinstance(energy, nn.Module) else []
    known = [start, *weights, *floats, *[t for t in pair if isinstance(t, Tensor)], *bounds]
    like = next((t for t in known if t is not None and t.is_floating_point()), torch.empty(()))
    for bound in bounds:
        try:
            fits = torch.broadcast_shapes(bound.shape, full) == torch.Size(full)
        except RuntimeError:
            fits = False
        if not fits or bound.device != like.device:
            raise ValueError(
                f"`low` and `high` must broadcast to {full} on {like.device}, got "
                f"{tuple(bound.shape)} on {bound.device}"
            )
    if like.dtype not in (torch.float32, torch.float64) or len(full) < 2:
        raise ValueError(
            "`y` must be float32 or float64 with at least one dimension, got "
            f"{like.dtype} of shape {full}"
        )
    return like.new_zeros(()).expand(full)  # takes no room


def broadcast(tensors: list[Tensor]) -> Tensor | None:
    """A tensor of the shape that these have together, if they have one."""
    if not tensors:
        return None
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        return max(tensors, key=lambda t: t.ndim)
    return torch.empty(shape, device="meta")


def check_fixed(fixed: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """The mask and the values of the coordinates that are given, of the full shape."""
    if not isinstance(fixed, tuple | list) or len(fixed) != 2:
        raise ValueError(f"`fixed` must be a pair (mask, values), got {type(fixed).__name__}")
    mask, values = fixed
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"`fixed` must have a mask that is a tensor of bool, got {got}")
    check_tensor("fixed[1]", values)
    found = []
    for name, part in (("mask", mask), ("values", values)):
        try:
            found.append(torch.broadcast_to(part.to(like.device), like.shape))
        except RuntimeError:
            check_shape(f"fixed {name}", part, like.shape)
    mask, values = found
    values = torch.where(mask, values, torch.zeros_like(values)).to(like.dtype).double()
    if not bool(values.isfinite().all()):
        raise ValueError("`fixed` must have finite values where the mask is true")
    return mask, values
