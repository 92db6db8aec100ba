"""Answers to the last digit: Newton's method on the optimality conditions.

A gap `d` fixes an answer only to the root of `d`, too little for finite differences. So from the
answer of a search and its active cuts we solve, for each example,

    sum_i lam_i f_i'(y) - entropy * H'(y) = mu,   f_i(y) = t,   sum lam = 1,   y in the domain,

where `f_i` is the piece of the energy that a cut touches. A straight piece is known from the cut;
curved ones are given as functions, by an energy whose attribute `members` lists them.

That the conditions hold is checked with the energy itself. For a convex energy they are sufficient,
also after a small change of it: no search is needed then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import icnn
from icnn.energies.energy import at
from icnn.solvers.problem import Problem

SEARCH = icnn.BundleEntropy(max_steps=120, tol=1e-14)


class Expansion(NamedTuple):
    """A piece to second order around a point."""

    point: Tensor
    value: Tensor
    slope: Tensor
    hessian: Tensor

    def at(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Its value and its slope at another point."""
        away = y - self.point
        bent = self.hessian @ away
        return self.value + self.slope @ away + away @ bent / 2, self.slope + bent


def expand(f: Callable[[Tensor], Tensor], point: Tensor) -> Expansion:
    point = point.detach().clone().requires_grad_()
    value = f(point)
    (slope,) = torch.autograd.grad(value, point, create_graph=True)
    hessian = torch.zeros(len(point), len(point), dtype=point.dtype)
    if slope.requires_grad:
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        rows = [torch.autograd.grad(part, point, **options)[0] for part in slope]
        hessian = torch.stack(rows)
    return Expansion(point.detach(), value.detach(), slope.detach(), hessian)


class Optimum:
    """The minimisers of a batch: searched for once, then followed.

    Args:
        energy: Convex; straight pieces, or smooth ones that its `members` lists.
        x: A tensor.
        entropy: Positive.
        domain: As it is now; it may be another one later.
        fixed: As in `icnn.argmin`.
        smooth: Whether the energy has one piece.
    """

    def __init__(
        self, energy: Any, x: Tensor, entropy: float, domain: Any, fixed: Any, smooth: bool
    ):
        self.energy, self.x, self.entropy = energy, x, entropy
        members = getattr(energy, "members", None)
        self.members = [energy] if members is None else members
        self.moving = smooth or members is not None
        with torch.no_grad():
            like = x.new_empty(len(x), *energy.y_shape)
            self.free = torch.ones_like(like, dtype=torch.bool)
            if fixed is not None:
                self.free, domain = ~fixed[0], domain.restrict(*fixed)
            begin = domain.center(like)
            problem = Problem(at(energy, x), domain, entropy, begin, self.free, energy, x, "cuts")
            found = SEARCH.solve(problem)
        assert found.pieces is not None
        self.y, self.cuts = found.y, found.pieces
        self.active = [self.pieces(row) for row in range(len(self.y))]

    def pieces(self, row: int) -> list[tuple[int, Tensor, Tensor]]:
        """For each piece that meets in the answer: which member, a point of it, its share."""
        found: list[tuple[int, Tensor, Tensor]] = []
        slopes: list[Tensor] = []
        y, lam = self.y[row], self.cuts.lam[row]
        for point, share in zip(self.cuts.points[row][lam > 0], lam[lam > 0], strict=True):
            point = point.reshape(y.shape)
            values = [m(self.x[row : row + 1], point[None])[0] for m in self.members]
            member = int(torch.stack(values).argmax())
            z = y[self.free[row]]
            f, cut = self.piece(row, member, y), point[self.free[row]]
            height, slope = expand(f, z if self.moving else cut).at(z)
            if height < self.energy(self.x[row : row + 1], y[None])[0] - 1e-7:
                continue  # a cut that was needed by the search, of a piece that is below the answer
            for i, other in enumerate(slopes):
                if (other - slope).abs().max() < 1e-4 * (1 + slope.abs().max()):
                    found[i] = (found[i][0], found[i][1], found[i][2] + share)
                    break
            else:
                found.append((member, point, share))
                slopes.append(slope)
        return found

    def piece(self, row: int, member: int, y: Tensor) -> Callable[[Tensor], Tensor]:
        """A member of the energy as a function of the free coordinates; others are those of `y`."""
        x, free = self.x[row : row + 1].detach(), self.free[row]
        return lambda z: self.members[member](x, y.masked_scatter(free, z)[None])[0]

    def follow(self, domain: Any, fixed: Any) -> Tensor:
        """The answers for the weights, `x`, domain and given values as they are now."""
        y = self.y if fixed is None else torch.where(fixed[0], fixed[1].detach(), self.y)
        return torch.stack([self.newton(row, y, domain) for row in range(len(y))])

    def newton(self, row: int, y: Tensor, domain: Any) -> Tensor:
        free, e = self.free[row], self.entropy
        full, z = y[row], y[row][free]
        sums, mass = torch.zeros(0, len(z), dtype=z.dtype), torch.zeros(0, dtype=z.dtype)
        low, width = torch.zeros_like(z), torch.ones_like(z)
        box = isinstance(domain, icnn.Box)
        if box:
            bounds = (torch.as_tensor(b, dtype=z.dtype).detach() for b in (domain.low, domain.high))
            low, high = (bound.expand_as(y)[row][free] for bound in bounds)
            width = high - low
        else:
            place = torch.arange(free.numel()).reshape(free.shape) // free.shape[-1]
            sums = torch.stack([(place[free] == r).to(z.dtype) for r in place.unique()])
            given = torch.where(free, 0.0, full).flatten()
            mass = 1 - torch.stack([given[place.flatten() == r].sum() for r in place.unique()])

        # In a = -H'(y), up to a factor, nothing is ever too near to a bound.
        u = ((z - low) / width).clamp(1e-16, 1 - 1e-16)
        a = u.logit() if box else z.clamp(min=1e-300).log()
        members = [self.piece(row, member, full) for member, _, _ in self.active[row]]
        points = [point[free] for _, point, _ in self.active[row]]
        lam = torch.stack([share for _, _, share in self.active[row]])
        k, n, m = len(lam), len(z), len(sums)
        mu, step = torch.zeros(m, dtype=z.dtype), torch.full_like(z, torch.inf)
        parts = [expand(f, point) for f, point in zip(members, points, strict=True)]
        for _ in range(50):
            z = low + width * a.sigmoid() if box else a.exp()
            turn = width * a.sigmoid() * (-a).sigmoid() if box else z  # dz/da
            if self.moving:
                parts = [expand(f, z) for f in members]
            heights, slopes = map(torch.stack, zip(*(part.at(z) for part in parts), strict=True))
            hessian = torch.stack([part.hessian for part in parts])
            system = torch.zeros(n + k + 1 + m, n + k + 1 + m, dtype=z.dtype)
            system[:n, :n] = (lam[:, None, None] * hessian).sum(dim=0) * turn
            system[:n, :n] += torch.diag(e / width)
            system[:n, n : n + k], system[n : n + k, :n] = slopes.T, slopes * turn
            system[n : n + k, n + k] = system[n + k, n : n + k] = -1
            system[:n, n + k + 1 :], system[n + k + 1 :, :n] = sums.T, sums * turn
            pull = slopes.T @ lam + e * a / width + sums.T @ mu
            missing = [pull, heights - heights.mean(), (1 - lam.sum())[None], sums @ z - mass]
            # Pieces may depend on each other: then the least change of their shares.
            right = -torch.cat(missing)[:, None]
            step = torch.linalg.lstsq(system, right, rcond=1e-13, driver="gelsd").solution[:, 0]
            a = a + step[:n] / step[:n].abs().max().clamp(min=1)
            lam, mu = lam + step[n : n + k], mu + step[n + k + 1 :]
            if step[:n].abs().max() < 1e-13 * (1 + a.abs().max()):
                break
        assert step[:n].abs().max() < 1e-10 * (1 + a.abs().max()), "Newton has not converged"
        # All pieces meet in the energy itself, and all of them pull.
        value = self.energy(self.x[row : row + 1], full.masked_scatter(free, z)[None])[0].detach()
        apart = torch.stack([part.at(z)[0] - value for part in parts]).abs()
        assert (apart < 1e-9 * (1 + value.abs())).all(), "a piece is not part of the energy here"
        assert (lam > 0).all(), "a piece does not count any more"
        return full.masked_scatter(free, z)
