"""The paper's bundle entropy method as it is printed: a rival to time ours against.

Section 4.2 and supplement D (Algorithm 2), written from the text: the network is asked for values
and slopes once a step for the whole batch, and everything else is NumPy, one example at a time.
`ProjNewtonLogistic` is the projected Newton method of Bertsekas (1982) on the dual over the
simplex, from the uniform mixture, with at most 20 steps. Gradients are those of Proposition 3.

Two things are ours, so that equals are compared: a search ends at the gap that `icnn.argmin` asks
for, not after five steps; and cuts that depend on each other do not end it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

INNER, HALVINGS = 20, 30  # Newton steps, and halvings of each
SMALL, RIDGE = 1e-10, 1e-12  # a slope that counts as zero; beside the Hessian
ACTIVE = 1e-12  # a share that counts as zero


@dataclass
class Cuts:
    """The active cuts of one example, their points and shares, and the bound that they give."""

    slopes: list[Array] = field(default_factory=list)  # the rows of G
    offsets: list[float] = field(default_factory=list)  # h
    points: list[Array] = field(default_factory=list)
    shares: Array = field(default_factory=lambda: np.ones(1))
    lower: float = -np.inf

    def step(self, y: Array, value: float, slope: Array) -> Array:
        """One round of Algorithm 2: a cut at `y`, the best mixture, and where that leads."""
        self.slopes.append(slope)
        self.offsets.append(value - float(slope @ y))
        self.points.append(y)
        G, h = np.stack(self.slopes), np.array(self.offsets)
        self.shares = newton(G, h) if len(h) > 1 else np.ones(1)
        self.lower = max(self.lower, -dual(G, h, self.shares))
        keep = np.flatnonzero(self.shares > 0)
        for name in ("slopes", "offsets", "points"):
            setattr(self, name, [getattr(self, name)[i] for i in keep])
        slope = self.shares @ G
        self.shares = self.shares[keep]
        return sigmoid(-slope)


def sigmoid(values: Array) -> Array:
    """`1 / (1 + exp(-v))`, without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * values))


def negative_entropy(y: Array) -> Array:
    """`-H(y)`, summed over the last dimension."""
    y = np.clip(y, 1e-300, 1 - 1e-16)
    return (y * np.log(y) + (1 - y) * np.log1p(-y)).sum(axis=-1)


def dual(G: Array, h: Array, lam: Array) -> float:
    """Minus the dual of a bundle step, `1 . log(1 + exp(G^T lam)) - (G 1 + h) . lam`."""
    return float(np.logaddexp(0, lam @ G).sum() - (G.sum(axis=1) + h) @ lam)


def newton(G: Array, h: Array) -> Array:
    """`ProjNewtonLogistic(G, h)`: the shares at which the dual is largest.

    The largest share is one minus the others; those at zero that would leave the simplex stay;
    Newton's step in the rest is bent at zero and halved until the dual rises enough.
    """
    lam = np.full(len(h), 1 / len(h))
    linear, here = G.sum(axis=1) + h, dual(G, h, lam)
    for _ in range(INNER):
        z = sigmoid(lam @ G)
        slope = G @ z - linear
        top = int(lam.argmax())
        apart = G - G[top]
        slope = slope - slope[top]
        free = (lam > ACTIVE) | (slope < 0)
        free[top] = False
        if not free.any() or np.linalg.norm(slope[free]) < SMALL:
            break
        hessian = (apart[free] * (z * (1 - z))) @ apart[free].T
        hessian.flat[:: len(hessian) + 1] += RIDGE * (1 + hessian.trace())
        move = np.zeros_like(lam)
        move[free] = np.linalg.solve(hessian, -slope[free])
        ends = (bent(lam, 0.5**k * move, top) for k in range(HALVINGS))
        there = next((end for end in ends if rises(G, h, end, here, slope @ (end - lam))), None)
        if there is None:
            break
        lam, here = there, dual(G, h, there)
    return lam


def bent(lam: Array, move: Array, top: int) -> Array:
    """Shares after a step, none below zero but perhaps the largest, which takes the rest."""
    there = lam + move
    there[there <= ACTIVE] = 0
    there[top] = 0
    there[top] = 1 - there.sum()
    return there


def rises(G: Array, h: Array, lam: Array, before: float, promise: float) -> bool:
    """Whether shares are on the simplex, and the dual has risen by a part of what was promised."""
    return bool(lam.min() >= 0 and dual(G, h, lam) <= before + 1e-4 * promise)


@dataclass
class Answer:
    """What a search found, for each example."""

    y: Array
    value: Array
    gap: Array
    steps: NDArray[np.int64]
    cuts: list[Cuts]


def minimise(energy: Any, x: Tensor, tol: float, max_steps: int = 100) -> Answer:
    """Minimise `energy(x, y) - H(y)` over the unit box, to a relative gap."""
    with torch.no_grad():
        f = energy.at(x)
    batch, n = len(x), energy.y_shape[0]
    y = np.full((batch, n), 0.5)
    steps = np.full(batch, max_steps)
    value, gap = np.full(batch, np.inf), np.full(batch, np.inf)
    cuts, running = [Cuts() for _ in range(batch)], np.ones(batch, dtype=bool)
    for step in range(max_steps + 1):
        point = torch.from_numpy(y).to(x.dtype).requires_grad_()
        energies = f(point)
        (slopes,) = torch.autograd.grad(energies.sum(), point)
        values, slopes = energies.detach().double().numpy(), slopes.double().numpy()
        for i in np.flatnonzero(running):
            value[i] = values[i] + negative_entropy(y[i])
            gap[i] = value[i] - cuts[i].lower
            if gap[i] <= tol * max(1, abs(value[i])):
                running[i], steps[i] = False, step
            elif step < max_steps:
                y[i] = cuts[i].step(y[i].copy(), values[i], slopes[i])
        if not running.any():
            break
    return Answer(y, value, gap, steps, cuts)


def backward(energy: Any, x: Tensor, answer: Answer, slope: Array) -> None:
    """Proposition 3: add the gradient of a loss with this slope in `y` to the parameters."""
    rows, points, c_lam, directions = [], [], [], []
    for i, cuts in enumerate(answer.cuts):
        if not cuts.slopes:
            continue
        G, y = np.stack(cuts.slopes), answer.y[i]
        k, flat = len(G), y * (1 - y)  # the inverse of H
        system = np.zeros((k + 1, k + 1))
        system[:k, :k] = (G * flat) @ G.T
        system[:k, k] = system[k, :k] = 1
        right = np.append(-G @ (flat * slope[i]), 0)
        c = np.linalg.lstsq(system, right, rcond=None)[0][:k]
        c_y = -flat * (slope[i] + c @ G)
        rows += [i] * k
        points += cuts.points
        c_lam += list(c)
        directions += [cuts.shares[j] * c_y + c[j] * (y - cuts.points[j]) for j in range(k)]
    at = torch.from_numpy(np.stack(points)).to(x.dtype).requires_grad_()
    weight, along = (torch.from_numpy(np.array(part)).to(x.dtype) for part in (c_lam, directions))
    energies = energy(x[rows], at)
    (slopes,) = torch.autograd.grad(energies.sum(), at, create_graph=True)
    ((weight * energies).sum() + (along * slopes).sum()).backward()
