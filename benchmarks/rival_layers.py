"""Layers with gradients that others can express: planes with an entropy or a quadratic.

See `benchmarks/rivals.py`, which runs it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import cvxpy as cp
import torch
from torch import Tensor

import icnn
from benchmarks.contest import TIGHT, certified, clarabel, cosine, loosest, ready, relative, row
from benchmarks.timing import medians

Numbers = dict[str, Any]
QPTH = "qpth"  # on one thread: the batched LU that it uses is broken on two, in torch 2.13 for CPUs
Layer = Callable[..., Tensor]  # the parameters, then a tolerance, to the answers


class Planes:
    """`max_i (A_i . y + b_i)` minus an entropy, or plus `weight / 2 |y - c|^2`, on the unit box.

    `A` is shared, as weights are; `b` and `c` are of each example. Numbers are float32 ones.
    """

    def __init__(self, numbers: Numbers, batch: int, quadratic: bool, seed: int):
        torch.manual_seed(seed)
        self.n, self.pieces, self.weight = numbers["n"], numbers["pieces"], numbers["weight"]
        self.quadratic = quadratic
        slopes = numbers["slope"] / self.n**0.5 * torch.randn(self.pieces, self.n)
        b, c = torch.randn(batch, self.pieces), 2 * torch.rand(batch, self.n) - 0.5
        self.parameters = [slopes, b, c] if quadratic else [slopes, b]
        self.loss = torch.randn(batch, self.n)

    def leaves(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The parameters, to be differentiated in."""
        return [p.to(dtype, copy=True).requires_grad_() for p in self.parameters]

    def value(self, y: Tensor) -> Tensor:
        """The objective of the first few examples, in float64; outside of the box it is put in."""
        slopes, *rest = (p.double() for p in self.parameters)
        y = y.detach().double().clamp(0, 1)
        value = (y @ slopes.t() + rest[0][: len(y)]).amax(dim=1)
        if self.quadratic:
            return value + self.weight / 2 * (y - rest[1][: len(y)]).square().sum(dim=1)
        return value - icnn.Box().entropy(y)

    def ours(self, leaves: list[Tensor], tol: float) -> icnn.Solution:
        """With cuts of the planes only."""
        slopes = leaves[0]

        def planes(x: list[Tensor], y: Tensor) -> Tensor:
            return (y @ slopes.t() + x[0]).amax(dim=1)

        box = icnn.Box(torch.zeros_like(slopes[0]), torch.ones_like(slopes[0]))
        if not self.quadratic:
            return icnn.argmin(planes, leaves[1:], box, solver=icnn.BundleEntropy(tol=tol))
        energy = icnn.Sum(planes, icnn.Quadratic(lambda x: x[1], self.weight))
        return icnn.argmin(energy, leaves[1:], box, entropy=0.0, solver=icnn.Bundle(tol=tol))

    def expression(self, y: Any, top: Any, c: Any) -> Any:
        """The objective of CVXPY."""
        if self.quadratic:
            return top + self.weight / 2 * cp.sum_squares(y - c)
        return top - cp.sum(cp.entr(y)) - cp.sum(cp.entr(1 - y))

    def gradients(self, solve: Layer, tol: float, dtype: torch.dtype = torch.float64) -> Any:
        """Forward and backward: the answers, and the gradients of the loss in the parameters."""
        leaves = self.leaves(dtype)
        y = solve(leaves, tol)
        (y * self.loss.to(y.dtype)).sum().backward()
        return y.detach(), [leaf.grad for leaf in leaves]


def exact(planes: Planes) -> tuple[Tensor, list[Tensor]]:
    """The optimum and the gradients, from what a tight Clarabel finds active."""
    slopes, b, *rest = (p.double() for p in planes.parameters)
    y, t = cp.Variable(planes.n), cp.Variable()
    offsets, center = cp.Parameter(planes.pieces), cp.Parameter(planes.n)
    below: Any = slopes.numpy() @ y + offsets <= t
    cost = planes.expression(y, t, center)
    bounds: list[Any] = [y >= 0, y <= 1]
    problem = cp.Problem(cp.Minimize(cost), [below, *bounds])
    found, grads = [], [torch.zeros_like(p, dtype=torch.float64) for p in planes.parameters]
    for i, loss in enumerate(planes.loss.double()):
        c = rest[0][i] if rest else torch.zeros(planes.n, dtype=torch.float64)
        offsets.value, center.value = b[i].numpy(), c.numpy()
        problem.solve(solver=cp.CLARABEL, **clarabel(1e-9))
        parts = (y.value, t.value, below.dual_value, *(bound.dual_value for bound in bounds))
        at, top, lam, low, high = (torch.tensor(part, dtype=torch.float64) for part in parts)
        # Of a multiplier and its slack one goes to zero: the larger one stays.
        active = lam > top - slopes @ at - b[i]
        free = (at > low) & (1 - at > high) | torch.tensor(not planes.quadratic)
        at = torch.where(free, at, at.round())
        optimum = Optimum(planes, slopes[active], b[i][active], c, free)
        at, lam, matrix = optimum.polish(at, lam[active])
        found.append(at)
        # The transposed system is the same one.
        pull = torch.linalg.solve(matrix, -optimum.right(loss[free], 0 * lam, 0.0))
        moved, shares = torch.zeros_like(at), pull[len(loss[free]) : -1]
        moved[free] = pull[: len(loss[free])]
        grads[0][active] += lam[:, None] * moved + shares[:, None] * at
        grads[1][i, active] = shares
        if rest:
            grads[2][i] = -planes.weight * moved
    return planes.value(torch.stack(found)), grads


@dataclass(frozen=True, eq=False)
class Optimum:
    """The optimality conditions of one example, whose active pieces and free coordinates we know.

    `h'(y) + G^T lam = 0`, `G y + b = t`, `1 . lam = 1`, in the free `y`, `lam` and `t`.
    """

    planes: Planes
    slopes: Tensor
    b: Tensor
    c: Tensor
    free: Tensor

    def right(self, first: Tensor, second: Tensor, third: float | Tensor) -> Tensor:
        """The three parts of a vector."""
        return torch.cat([first, second, torch.as_tensor(third, dtype=first.dtype).reshape(1)])

    def polish(self, y: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A few Newton steps, and the matrix of the last one."""
        G, f, weight = self.slopes[:, self.free], int(self.free.sum()), self.planes.weight
        top = (self.slopes @ y + self.b).mean()
        matrix = torch.zeros(f + len(lam) + 1, f + len(lam) + 1, dtype=y.dtype)
        matrix[f:-1, :f], matrix[:f, f:-1] = G, G.t()
        matrix[f:-1, -1] = matrix[-1, f:-1] = -1
        for _ in range(5):
            inside = y[self.free]
            if self.planes.quadratic:
                slope, bend = weight * (inside - self.c[self.free]), torch.full_like(inside, weight)
            else:
                slope, bend = inside.logit(), 1 / (inside * (1 - inside))
            matrix[:f, :f] = bend.diag()
            missed = self.slopes @ y + self.b - top
            step = torch.linalg.solve(matrix, -self.right(slope + lam @ G, missed, 1 - lam.sum()))
            y = y.clone()
            y[self.free] += step[:f]
            lam, top = lam + step[f:-1], top + step[-1]
        return y, lam, matrix


def cvxpylayer(planes: Planes, method: str) -> tuple[Layer, float]:
    """A layer of cvxpylayers, and the seconds that it took to make it."""
    layers = import_module("cvxpylayers.torch")
    y, shapes = cp.Variable(planes.n), [p.shape for p in planes.parameters]
    given = [cp.Parameter(shapes[0]), *(cp.Parameter(shape[1:]) for shape in shapes[1:])]
    cost = planes.expression(y, cp.max(given[0] @ y + given[1]), given[-1])
    problem = cp.Problem(cp.Minimize(cost), [y >= 0, y <= 1])
    start = time.perf_counter()
    layer = layers.CvxpyLayer(problem, parameters=given, variables=[y])

    def solve(leaves: list[Tensor], tol: float) -> Tensor:
        numbers = clarabel(tol) if method == "Clarabel" else {"eps": tol}
        return layer(*leaves, solver_args={"solve_method": method, **numbers})[0]

    return solve, time.perf_counter() - start


def qpth_layer(planes: Planes) -> Layer:
    """The quadratic program in `(y, t)` by qpth, which wants a little curvature in `t` as well."""
    qp = import_module("qpth.qp").QPFunction
    n, weight = planes.n, planes.weight

    def solve(leaves: list[Tensor], tol: float) -> Tensor:
        slopes, b, c = leaves
        batch = len(b)
        like: Any = {"dtype": b.dtype}
        unit, none = torch.eye(n, **like), torch.zeros(n, 1, **like)
        bend = torch.full((n + 1,), weight, **like)
        bend[n] = 1e-6
        planes_and_t = torch.cat([slopes, -torch.ones(len(slopes), 1, **like)], dim=1)
        left = torch.cat([planes_and_t, torch.cat([-unit, none], 1), torch.cat([unit, none], 1)])
        right = torch.cat([-b, torch.zeros(batch, n, **like), torch.ones(batch, n, **like)], 1)
        linear = torch.cat([-weight * c, torch.ones(batch, 1, **like)], dim=1)
        nothing = torch.empty(0, **like)
        # For each example by hand: the gradient of what qpth expands is a mean, not a sum.
        left = left.expand(batch, -1, -1)
        layer = qp(eps=tol, verbose=-1, maxIter=50, check_Q_spd=False)
        return layer(bend.diag(), linear, left, right, nothing, nothing)[:, :n]

    return solve


def single(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same on one thread."""

    def called() -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function()
        finally:
            torch.set_num_threads(threads)

    return called


def layer_rows(settings: dict[str, Any], quadratic: bool) -> list[dict]:
    """One energy against all that can express it."""
    numbers, tol = settings["layers"], settings["tol"]
    planes = Planes(numbers, settings["batch"], quadratic, settings["seed"])
    optimum, known = exact(planes)
    problem = "planes, quadratic" if quadratic else "planes, entropy"

    def ours(leaves: list[Tensor], tol: float) -> Tensor:
        return planes.ours(leaves, tol).y

    rivals: dict[str, tuple[Layer, float | None]] = {}
    if ready("cvxpylayers", "pip install --group bench"):
        for method in ("SCS", "Clarabel"):
            rivals[f"cvxpylayers, {method}"] = cvxpylayer(planes, method)
    if quadratic and ready("qpth", "pip install --no-deps qpth"):
        rivals[QPTH] = qpth_layer(planes), None
    forward_and_back = partial(planes.gradients, ours, tol, torch.float32)
    turns: dict[str, Callable[[], Any]] = {"icnn": forward_and_back}
    if QPTH in rivals:
        turns["icnn, 1 thread"] = single(forward_and_back)
    loose = {}
    for name, (solve, _) in rivals.items():
        alone = single if name == QPTH else (lambda function: function)

        def gap(tol: float, solve: Layer = solve, alone: Any = alone) -> float:
            with torch.no_grad():
                y = alone(partial(solve, planes.leaves(), tol))()
            return relative(planes.value(y), optimum)

        loose[name] = loosest(gap, tol)
        turns[name] = alone(partial(planes.gradients, solve, loose[name]))
        turns[f"{name}, tight"] = alone(partial(planes.gradients, solve, TIGHT))
    tight = {name: turns.pop(f"{name}, tight") for name in rivals}
    seconds = medians(turns, numbers["rounds"], 1)

    solution = planes.ours(planes.leaves(torch.float32), tol)
    print(f"{problem}: {solution.report()}")
    print(f"true gap of icnn: {relative(planes.value(solution.y), optimum):.1e}")
    fair = cosine(planes.gradients(ours, TIGHT)[1], known)
    rows = []
    for name, (_, prepared) in rivals.items():
        (y, _), (_, gradients) = turns[name](), tight[name]()
        mine = seconds["icnn, 1 thread" if name == QPTH else "icnn"]
        note = f"tolerance {loose[name]:g}" + (", 1 thread both" if name == QPTH else "")
        made = {} if prepared is None else {"prepared": prepared}
        line = row(
            problem, "forward and backward", name, mine, seconds[name],
            gap_icnn=certified(solution),
            gap_rival=relative(planes.value(y), optimum), cosine_icnn=fair,
            cosine_rival=cosine(gradients, known), note=note, **made,
        )  # fmt: skip
        rows.append(line)
    return rows
