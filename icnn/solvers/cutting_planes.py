"""The bundle method of supplement C: one linear program an example and step, with HiGHS."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import OptimizeResult, linprog

from icnn.solvers.domains import Box, Simplex
from icnn.solvers.problem import Problem, Record, Tangent

Numbers = NDArray[np.float64]

PRECISION = 1e-9
"""How far HiGHS may stray from a constraint; its default of 1e-7 shows in the gap."""


def cutting_planes(problem: Problem, max_steps: int, tol: float) -> Record:
    """Minimise the cuts so far, and cut again where their minimiser is. For `entropy == 0`.

    Args:
        problem: On a box or the simplex.
        max_steps: Cuts at most, each a pass for a value and a gradient.
        tol: The gap at which an example is done, relative to `max(1, |value|)`.
    """
    regions = regions_of(problem)
    record, y = Record(problem, tol), problem.start
    batch, n = y.shape[0], y[:1].numel()
    lower, weight = record.lower, torch.zeros(batch, n + 1, dtype=torch.float64, device=y.device)
    cuts: list[list[Numbers]] = [[] for _ in regions]
    cost = np.append(np.zeros(n), 1.0)
    tangent = problem.tangent(y)
    for step in range(max_steps):
        tangent = problem.tangent(y) if step else tangent
        record.look(y, tangent, lower, step)
        if not bool(record.active.any()):
            return record
        # G_k = slope and h_k = f(y) - slope . y, in one row.
        h = problem.offset(y, tangent)
        new = torch.cat([tangent.slope, h[:, None]], dim=1).cpu().numpy()
        flat, weight = y.flatten(start_dim=1).double().clone(), weight.clone()
        for row in record.active.nonzero().flatten().tolist():
            cuts[row].append(new[row])
            gh = np.stack(cuts[row])
            # min t  subject to  G y + h <= t
            matrix = np.concatenate([gh[:, :n], np.full((len(gh), 1), -1.0)], axis=1)
            found = regions[row].minimise(cost, matrix, -gh[:, n], np.array([-np.inf]))
            solved(found, row)
            # Weak duality: any lam on the simplex makes one cut of all of them.
            lam = np.maximum(-found.ineqlin.marginals, 0)
            flat[row] = torch.from_numpy(found.x[:n])
            weight[row] = torch.from_numpy(lam / lam.sum() @ gh)
        lower = torch.maximum(lower, problem.bound(weight[:, :n], weight[:, n]))
        y = problem.domain.project(flat.reshape(y.shape)).to(y.dtype)
    value = problem.evaluate(y)
    record.look(y, Tangent(value, tangent.slope), lower, max_steps)
    return record


class Region(NamedTuple):
    """All `y` with `low <= y <= high` and `sums @ y = mass`."""

    low: Numbers
    high: Numbers
    sums: sparse.csr_array
    mass: Numbers

    def minimise(
        self, cost: Numbers, matrix: Any, limit: Numbers, floor: Numbers
    ) -> OptimizeResult:
        """The smallest `cost . v` with `matrix @ v <= limit`, of `v = (y, t)` with `t >= floor`."""
        low, high = np.append(self.low, floor), np.append(self.high, np.full_like(floor, np.inf))
        none = sparse.csr_array((len(self.mass), len(floor)))
        return linprog(
            cost,
            matrix if len(limit) else None,
            limit if len(limit) else None,
            sparse.hstack([self.sums, none], format="csr") if len(self.mass) else None,
            self.mass if len(self.mass) else None,
            np.stack([low, high], axis=1),
            method="highs",
            options={
                "primal_feasibility_tolerance": PRECISION,
                "dual_feasibility_tolerance": PRECISION,
            },
        )


def solved(found: OptimizeResult, row: int) -> OptimizeResult:
    """An answer of HiGHS, if it is one."""
    if found.status != 0:
        raise RuntimeError(f"HiGHS gave up on example {row}: {found.message}")
    return found


def regions_of(problem: Problem) -> list[Region]:
    """The domain of each example as linear constraints."""
    domain, like = problem.domain, problem.start.double()
    n, last = like[:1].numel(), like.shape[-1]
    sums, mass = sparse.csr_array((0, n)), like.new_zeros(like.shape[0], 0)
    if isinstance(domain, Box):
        low, high = (torch.as_tensor(bound).to(like) for bound in (domain.low, domain.high))
    elif isinstance(domain, Simplex):
        # What is given stands at its value; the free coordinates share the rest, if there are any.
        rest = torch.zeros_like(like) + domain.mass(like)
        low, high = domain.fill(torch.zeros_like(like)), domain.fill(rest)
        mass = low.sum(-1, keepdim=True) + torch.where(low < high, rest, 0.0).amax(-1, keepdim=True)
        sums = sparse.kron(sparse.eye_array(n // last), np.ones((1, last)), format="csr")
    else:
        raise ValueError(
            f"`domain` must be a Box or a Simplex for a linear program, got {domain!r}"
        )
    low, high, mass = (
        part.flatten(start_dim=1).cpu().numpy()
        for part in (low.expand_as(like), high.expand_as(like), mass)
    )
    return [Region(*parts, sums, total) for *parts, total in zip(low, high, mass, strict=True)]
