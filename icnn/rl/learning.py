"""The one loss and the one choice of actions: functions of tensors, in a fixed number of steps.

So a stack of agents is one batch, and all of it can be recorded as a CUDA graph. What `argmin`
adds, a certificate for each example, costs more here than the steps themselves.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icnn.rl.agent import Agent

INSIDE = 1e-6  # how far from the bounds the slope of the entropy is taken


@dataclass(frozen=True)
class Rules:
    """How an agent learns.

    Attributes:
        gamma: The discount.
        steps: To an action, from the middle of the box.
        target_steps: The same in targets.
        rate: The length of the first step, of a box from -1 to 1; later ones are shorter.
        entropy: The weight of the entropy of actions, in loss and target alike.
        bounded: Whether targets are kept within what rewards seen so far can sum up to.
    """

    gamma: float = 0.99
    steps: int = 10
    target_steps: int = 6
    rate: float = 0.5
    entropy: float = 0.0
    bounded: bool = True


class Batch(NamedTuple):
    """Transitions: `(agents, B, ...)`, rewards and discounts `(agents, B)`, actions in [-1, 1]."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    discounts: Tensor  # gamma^n, and 0 where the episode ended by itself


def greedy(f: Any, start: Tensor, high: Tensor, steps: int, rules: Rules) -> Tensor:
    """Minimise `f.worst(a) - entropy * H(a)` over `-high <= a <= high`: Adam, in shorter steps.

    In closed form where `f` has one.
    """
    best = getattr(f, "best", None)
    if best is not None:
        return torch.minimum(torch.maximum(best, -high), high)
    a, mean, square = start, torch.zeros_like(start), torch.zeros_like(start)
    for i in range(steps):
        g = f.slope(a)
        if rules.entropy:
            # -H has the slope log(u / (1 - u)) / 2 in a = 2 u - 1
            u = ((a + 1) / 2).clamp(INSIDE, 1 - INSIDE)
            g = g + 0.5 * rules.entropy * (u / (1 - u)).log()
        mean, square = torch.lerp(g, mean, 0.5), torch.lerp(g * g, square, 0.9)
        length = rules.rate * (1 - i / steps) * (1 - 0.9 ** (i + 1)) ** 0.5 / (1 - 0.5 ** (i + 1))
        a = torch.addcdiv(a, mean, square.sqrt() + 1e-12, value=-length)
        a = torch.minimum(torch.maximum(a, -high), high)
    return a


def binary_entropy(a: Tensor) -> Tensor:
    """Of `u = (a + 1) / 2`, summed over coordinates."""
    u = ((a + 1) / 2).clamp(INSIDE, 1 - INSIDE)
    return -(u * u.log() + (1 - u) * (1 - u).log()).sum(dim=-1)


def td_loss(agent: Agent, batch: Batch, high: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Mean squares of `Q - r - gamma^n max Q`, and the mean of `Q`, of each agent: `(agents,)`.

    Values are in units of `seen.scale`.
    """
    seen = agent.seen
    with torch.no_grad():
        f = agent.at(batch.next_states, target=True)
        best = greedy(f, torch.zeros_like(batch.actions), high, rules.target_steps, rules)
        value = -f.worst(best)
        if rules.entropy:
            value = value + rules.entropy * binary_entropy(best)
        goal = torch.addcmul(batch.rewards / seen.scale, batch.discounts, value)
        if rules.bounded:
            low, top = (r / seen.scale / (1 - rules.gamma) for r in (seen.least, seen.most))
            goal = torch.minimum(torch.maximum(goal, low), top)
    found = -agent.at(batch.states).values(batch.actions)
    if rules.entropy:
        found = found + rules.entropy * binary_entropy(batch.actions)[:, None]
    loss = (found - goal[:, None]).square().mean(dim=2).sum(dim=1)
    return loss, (found.detach().mean(dim=(1, 2)) * seen.scale[:, 0])
