"""The pieces of an energy that meet in an answer, from the cuts of a search, with their graph."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from icnn.energies.energy import EnergyAt
from icnn.solvers.adjoint import Bend
from icnn.solvers.problem import Pieces, Problem

SAME = 0.1  # tangents that curvature brings this much nearer to each other are of one piece
TINY = torch.finfo(torch.float64).tiny

Hold = Callable[[Tensor, Tensor], Tensor]
"""Puts the coordinates that are given in their place, with their graph, at points of some rows."""


class Part(NamedTuple):
    """What the optimality conditions are made of; the first two carry a graph."""

    heights: Tensor  # (B, k): the pieces at the answer
    mean: Tensor  # (B, n): the mixture of their slopes there
    slopes: Tensor  # (B, k, n), in float64
    plain: Tensor  # (B, k, n): the slopes where the cuts were made
    lam: Tensor  # (B, k)
    hessian: Callable[[Tensor], Tensor] | None


def alone(y: Tensor, slope: Tensor) -> Pieces:
    """One piece, that of the answer itself."""
    return Pieces(y[:, None], torch.ones_like(slope[:, :1]), slope, slope[:, None])


def counting(pieces: Pieces, y: Tensor, none: Tensor) -> Pieces:
    """The cuts that share in the answers, in as few slots as will hold them; `none` have no cut."""
    lam = pieces.lam
    if not lam.shape[1]:
        return alone(y, pieces.slope)
    order = lam.argsort(dim=1, descending=True, stable=True)
    order = order[:, : max(1, int((lam > 0).sum(dim=1).amax()))]
    lam = lam.gather(1, order)
    points = pieces.points.gather(1, order[:, :, None].expand(-1, -1, pieces.points.shape[2]))
    taken = (lam > 0) & ~none[:, None]
    points = torch.where(taken[:, :, None], points, y.flatten(start_dim=1)[:, None])
    return pieces._replace(points=points.unflatten(2, y.shape[1:]), lam=lam)


class Some(NamedTuple):
    """Some cuts of a batch that are evaluated in one pass: whose they are, and in which slots."""

    energy: EnergyAt
    rows: Tensor
    slots: Tensor


def together(problem: Problem, lam: Tensor) -> list[Some]:
    """All cuts that count in one pass, where the energy may be asked about some examples only.

    Else slot by slot: examples with fewer cuts than others then pay for slots that are empty.
    """
    batch, k = lam.shape
    select = getattr(problem.energy, "select", None)
    if select is None or k == 1:
        every = torch.arange(batch, device=lam.device)
        return [Some(problem.energy, every, torch.full_like(every, slot)) for slot in range(k)]
    rows, slots = (lam > 0).nonzero(as_tuple=True)
    return [Some(select(rows), rows, slots)]


def attached(problem: Problem, hold: Hold, pieces: Pieces, y: Tensor, curved: bool) -> Part:
    """The pieces as PyTorch's graph has them, cut by cut.

    Cuts are made near the answer and not at it. Straight pieces are the same there; of curved ones
    the heights and slopes are taken along, by their curvature where the cut was made.
    """
    lam, free = pieces.lam, problem.free
    far = (y[:, None] - pieces.points).flatten(start_dim=2)
    curved_away = curved and bool(far.any())
    points, slopes, heights, carried, parts = [], [], [], [], together(problem, lam)
    for energy, rows, slots in parts:
        point = pieces.points[rows, slots].detach().clone().requires_grad_()
        away, given = far[rows, slots], None if free is None else free[rows]
        height = energy(hold(point, rows))
        slope = slope_of(height, point, given)
        taken, bent = slope, torch.zeros_like(slope)
        if curved_away and slope.requires_grad:
            bent = slope_of((slope * away).sum(dim=1), point, given)
            taken = slope + bent
        points.append(point)
        slopes.append(slope)
        heights.append(height + ((slope + bent / 2) * away).sum(dim=1))
        carried.append(taken)
    rows = torch.cat([part.rows for part in parts])
    slots = torch.cat([part.slots for part in parts])
    shares = lam[rows, slots][:, None]

    def placed(values: list[Tensor]) -> Tensor:
        joined = torch.cat(values)
        empty = joined.new_zeros(*lam.shape, *joined.shape[1:])
        return empty.index_put((rows, slots), joined)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(y), values.shape[1]).index_add(0, rows, values)

    def hessian(q: Tensor) -> Tensor:
        vectors = (shares * q[rows]).to(y.dtype).split([len(slope) for slope in slopes])
        ways = [
            (s, p, v) for s, p, v in zip(slopes, points, vectors, strict=True) if s.requires_grad
        ]
        if not ways:
            return torch.zeros_like(q)
        outputs, inputs, weights = zip(*ways, strict=True)
        bent = torch.autograd.grad(
            outputs, inputs, weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        found = total(torch.cat(bent).flatten(start_dim=1))
        found = found if free is None else torch.where(free.flatten(start_dim=1), found, 0.0)
        return found.double()

    stacked = placed([slope.detach() for slope in carried]).double()
    straight = placed([slope.detach() for slope in slopes]).double() if curved_away else stacked
    mean = total(shares.to(y.dtype) * torch.cat(carried))
    return Part(placed(heights), mean, stacked, straight, lam, hessian if curved else None)


def slope_of(value: Tensor, point: Tensor, free: Tensor | None) -> Tensor:
    """The gradient of each example in its free coordinates, `(B, n)`, with its graph."""
    if not value.requires_grad:
        return torch.zeros_like(point).flatten(start_dim=1)
    (slope,) = torch.autograd.grad(
        value.sum(), point, create_graph=True, allow_unused=True, materialize_grads=True
    )
    slope = slope if free is None else torch.where(free, slope, torch.zeros_like(slope))
    return slope.flatten(start_dim=1)


def merged(part: Part, bend: Bend) -> Part:
    """Tangents of one curved piece are one: two of them would pin the answer between their points.

    Two cuts are of one piece if its curvature explains most of the difference of their slopes.
    """
    before, after = (apart(bend.gram(slopes)) for slopes in (part.plain, part.slopes))
    there = part.lam > 0
    same = (after <= SAME**2 * before) & there[:, :, None] & there[:, None, :]
    same = same | torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
    for _ in range(max(1, (same.shape[1] - 1).bit_length())):
        same = (same.double() @ same.double()) > 0
    # The first of a piece, the one with the largest share, stands for all.
    first = same.double().argmax(dim=1)
    belongs = torch.zeros_like(same).scatter(1, first[:, None, :], True)
    share = belongs * part.lam[:, None, :]
    lam = share.sum(dim=2)
    share = share / lam[:, :, None].clamp(min=TINY)
    heights = (share.to(part.heights.dtype) @ part.heights[:, :, None]).squeeze(2)
    return part._replace(heights=heights, slopes=share @ part.slopes, lam=lam)


def apart(gram: Tensor) -> Tensor:
    """Squared distances, from the products of vectors with each other."""
    own = gram.diagonal(dim1=1, dim2=2)
    return (own[:, :, None] + own[:, None, :] - 2 * gram).clamp(min=0)
