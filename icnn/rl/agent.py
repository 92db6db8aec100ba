"""What an agent is made of: critics, their slow copies, and what it has seen."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from icnn.rl.critics import Critics, CriticsAt
from icnn.rl.quadratics import QuadraticCritics, QuadraticsAt

FAR = 5.0  # standard deviations from the mean at which a state is cut off
PACE = 1e-3  # what an error as large as a usual reward changes of the caution


class Seen(nn.Module):
    """What each agent has seen so far: mean and variance of states, and the size of rewards.

    Args:
        agents: How many.
        dim_state: The length of a state.
        used: Whether states are standardised by it, and values scaled.

    Attributes:
        settled: Of how many rewards the size is the unit of values. A unit that grew while agents
            learn would act as a larger discount: they learn once it is settled.
        length: What states are multiplied by, so that long ones are not learned faster.
        caution: Where targets are between the mean of critics, 0, and the least of them, 1.
    """

    count: Tensor
    length: Tensor
    mean: Tensor
    variance: Tensor
    square: Tensor
    least: Tensor
    most: Tensor
    caution: Tensor

    def __init__(self, agents: int, dim_state: int, used: bool = True):
        super().__init__()
        self.used, self.settled = used, 5000
        one = torch.zeros(agents, 1)
        wide = torch.zeros(agents, 1, dim_state)
        self.register_buffer("count", torch.zeros(agents, 1, 1))
        length = torch.full((agents, 1, 1), shortened(dim_state))
        self.register_buffer("length", length, persistent=False)
        self.register_buffer("mean", wide)
        self.register_buffer("variance", wide + 1)
        for name in ("square", "least", "most"):
            self.register_buffer(name, one.clone())
        self.register_buffer("caution", one + 1)

    @torch.no_grad()
    def add(self, states: Tensor, rewards: Tensor) -> None:
        """Take note of new ones, `(agents, n, dim)` and `(agents, n)`."""
        new = states.shape[1]
        self.count.add_(new)
        share = new / self.count
        away = states.mean(dim=1, keepdim=True) - self.mean
        # Var = (1 - p) Var_old + p Var_new + p (1 - p) (mean_new - mean_old)^2
        spread = states.var(dim=1, correction=0, keepdim=True) + (1 - share) * away.square()
        self.variance.lerp_(spread, share)
        self.mean.addcmul_(share, away)
        early = (share * (self.count <= self.settled))[..., 0]
        self.square.lerp_(rewards.square().mean(dim=1, keepdim=True), early)
        torch.minimum(self.least, rewards.amin(dim=1, keepdim=True), out=self.least)
        torch.maximum(self.most, rewards.amax(dim=1, keepdim=True), out=self.most)

    @torch.no_grad()
    def judge(
        self, gamma: Tensor, last: Tensor, believed: Tensor, rewards: Tensor, terminated: Tensor,
        ended: Tensor,
    ) -> Tensor:  # fmt: skip
        """Learn how cautious targets should be, from a step that nobody has learned from yet.

            r + gamma Q(s', a') - Q(s, a)

        is zero on average if `Q`, the mean of critics, is right for those who act. Below zero, more
        was promised than came: targets move towards the least of critics. Above zero, to their
        mean. Those who act also explore, which targets do not: what that costs adds to the caution.

        Args:
            gamma: Discounts, `(agents, 1)`.
            last: What this has returned for the step before; zeros if there is none.
            believed: `Q(s, a)` of the step in units of `scale`; `(agents, n)`, as what follows.
            rewards: Of the step.
            terminated: 1 where the episode ended by itself, else 0.
            ended: 1 where it ended in any way.
        """
        before, gain, going = last.unbind()
        off = going * (gain / self.scale + gamma * believed - before)
        off = off + terminated * (rewards / self.scale - believed)
        off = off.mean(dim=1, keepdim=True) * (self.scale / self.size)
        self.caution.sub_(PACE * off).clamp_(0, 1)
        return torch.stack([believed, rewards, 1 - ended])

    def forward(self, states: Tensor) -> Tensor:
        if not self.used:
            return states
        away = ((states - self.mean) * (self.variance + 1e-8).rsqrt()).clamp(-FAR, FAR)
        return self.length * away

    @property
    def size(self) -> Tensor:
        """The root of the mean square of rewards, `(agents, 1)`; 1 if there are none."""
        return torch.where(self.square > 0, self.square.sqrt(), 1.0)

    @property
    def scale(self) -> Tensor:
        """The unit of values."""
        return self.size if self.used else torch.ones_like(self.square)


def shortened(dim: int) -> float:
    """`1`, or what makes a standardised state of many coordinates as long as one of sixteen.

    A step of Adam moves each weight by the same; so a unit moves by the sum of its inputs.
    """
    return min(1.0, 4 / dim**0.5)


class Agent(nn.Module):
    """One agent, or a stack of them: all tensors have a leading dimension of agents or networks.

    Args:
        critics: Of all agents, one after another.
        agents: How many there are.
        standardised: Whether states are standardised, and values in units of rewards.

    Attributes:
        real: 1 for what belongs to the actions of an agent, 0 for what follows; `(agents, 1, n)`.
        gamma: The discount of each, `(agents, 1)`; whoever makes agents sets it.
    """

    real: Tensor
    gamma: Tensor

    def __init__(
        self, critics: Critics | QuadraticCritics, agents: int = 1, standardised: bool = True
    ):
        super().__init__()
        self.critics = critics
        self.targets = deepcopy(critics).requires_grad_(False)
        self.seen = Seen(agents, critics.dim_state, standardised)
        self.register_buffer("real", torch.ones(agents, 1, critics.dim_action), persistent=False)
        self.register_buffer("gamma", torch.full((agents, 1), 0.99), persistent=False)

    def at(self, states: Tensor, target: bool = False) -> CriticsAt | QuadraticsAt:
        """Critics at states as they come, `(agents, B, dim)`; or their slow copies."""
        return (self.targets if target else self.critics).at(self.seen(states))

    def optimizer(self, rate: float, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
        """AdamW; what is not a matrix does not decay: norms, open gates, the weight of bowls."""
        matrices = ("head", "wy", "wz", "layer")
        named = list(self.critics.weights.items())
        groups = [
            {"params": [p for name, p in named if name.startswith(matrices) == decays],
             "weight_decay": weight_decay if decays else 0.0}
            for decays in (True, False)
        ]  # fmt: skip
        return torch.optim.AdamW(groups, lr=rate, fused=True, **options)

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Tidy the critics, and move their slow copies: `slow += share * (fast - slow)`."""
        self.critics.project_()
        slow, fast = (list(critics.parameters()) for critics in (self.targets, self.critics))
        torch._foreach_lerp_(slow, fast, share)  # pyright: ignore
