"""Energies without second derivatives: differences stand in for them, as section 5.1 offers."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from icnn.solvers.graph import leaves
from icnn.solvers.problem import Pieces, Problem
from icnn.solvers.tangents import Part

TINY = torch.finfo(torch.float64).tiny


def opaque(problem: Problem, here: Tensor, pieces: Pieces, y: Tensor, curved: bool) -> Part:
    """The pieces of an energy without second derivatives: differences stand in for them."""
    inputs = list(leaves(problem.energy(y.clone().requires_grad_()), tensors(problem.x)))
    points = pieces.points
    heights, slopes = Differences.apply(problem, points, here, *inputs)  # pyright: ignore
    away = (y[:, None] - points).flatten(start_dim=2)
    lam = pieces.lam

    def hessian(q: Tensor) -> Tensor:
        step = length(y.flatten(start_dim=1), q)
        ends = (problem.tangent(y + sign * (step * q).reshape(y.shape)).slope for sign in (1, -1))
        return torch.sub(*ends) / (2 * step)

    return Part(
        heights + (slopes * away).sum(dim=2),
        (lam.to(y.dtype)[:, None, :] @ slopes).squeeze(1),
        slopes.detach().double(),
        slopes.detach().double(),
        lam,
        hessian if curved else None,
    )


class Differences(torch.autograd.Function):
    """Values and slopes of an energy at some points; `grad_theta (slope . d)` by differences.

    As section 5.1 of the paper offers: the gradient in the parameters is taken ahead of and behind
    each point, along `d`.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, points: Tensor, here: Tensor, *inputs: Tensor) -> Any:
        ctx.problem, ctx.points, ctx.here, ctx.inputs = problem, points, here, inputs
        found = [problem.tangent(point) for point in points.unbind(dim=1)]
        values, slopes = (torch.stack(t, dim=1) for t in zip(*found, strict=True))
        return values.to(points.dtype), slopes.to(points.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore
        problem, weights, ways = ctx.problem, *gradients
        # A graph of its own: that of the search may be gone.
        known = {id(t): t.detach().requires_grad_() for t in tensors(problem.x) if t.requires_grad}
        x = pytree.tree_map(lambda leaf: known.get(id(leaf), leaf), problem.x)
        here = ctx.here.detach().requires_grad_()
        inputs = [here, *(known.get(id(t), t) for t in ctx.inputs)]
        with torch.enable_grad():
            (energy, _), total = problem.again(x), 0 * here.sum()
            for j, point in enumerate(ctx.points.unbind(dim=1)):
                way = ways[:, j]
                step = length(point.flatten(start_dim=1), way)
                move = (step * way).reshape(point.shape)
                if problem.free is not None:
                    point = torch.where(problem.free, point, here.to(point.dtype))
                slant = (energy(point + move) - energy(point - move)) / (2 * step[:, 0])
                total = total + (weights[:, j] * energy(point) + slant).sum()
            found = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True)
        return (None, None, *found)


def length(point: Tensor, way: Tensor) -> Tensor:
    """How far to go for a central difference: where rounding and curvature are alike, `(B, 1)`."""
    size = 1 + point.abs().amax(dim=1, keepdim=True)
    far = way.abs().amax(dim=1, keepdim=True)
    step = torch.finfo(point.dtype).eps ** (1 / 3) * size / far.clamp(min=TINY)
    return torch.where(far > 0, step, torch.ones_like(step))


def seems_smooth(problem: Problem, y: Tensor) -> bool:
    """Whether slopes change around the answers, and in proportion to the distance."""
    way = torch.ones_like(y).cumsum(dim=-1).sin()

    def change(size: float) -> Tensor:
        ends = (problem.tangent(y + sign * size * way).slope for sign in (1, -1))
        return torch.sub(*ends) / size

    size = torch.finfo(y.dtype).eps ** 0.25
    far, near = change(size), change(size / 2)
    return bool((far - near).abs().sum() < 0.1 * far.abs().sum())


def tensors(x: Any) -> list[Tensor]:
    """The tensors in `x`."""
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
