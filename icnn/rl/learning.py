"""The one loss and the one choice of actions: functions of tensors, in a fixed number of steps.

So a stack of agents is one batch, and all of it can be recorded as a CUDA graph. What `argmin`
adds, a certificate for each example, costs more here than the steps themselves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icnn.checks import check_count, check_number
from icnn.rl.agent import Agent
from icnn.rl.critics import PAPER_FORM, Form
from icnn.rl.quadratics import Quadratics

INSIDE = 1e-6  # how far from the bounds the slope of the entropy is taken


@dataclass(frozen=True)
class Rules:
    """How an agent learns.

    Attributes:
        steps: To an action, from the middle of the box.
        target_steps: The same in targets.
        rate: The length of the first step, of a box from -1 to 1; later ones are shorter.
        entropy: The weight of the entropy of actions, in loss and target alike.
        bounded: Whether targets are kept within what rewards seen so far can sum up to.
        calibrated: Whether targets of several critics lie where steps that were made show them to
            be right, between their mean and the least; else they are the least.
        far: The share of targets that sum up `n_steps`; the rest are of one step.
    """

    steps: int = 10
    target_steps: int = 4
    rate: float = 0.5
    entropy: float = 0.0
    bounded: bool = True
    calibrated: bool = True
    far: float = 0.25

    def __post_init__(self):
        check_count("steps", self.steps)
        check_count("target_steps", self.target_steps)
        check_number("rate", self.rate, minimum=0)
        check_number("entropy", self.entropy, minimum=0)
        if check_number("far", self.far, minimum=0) > 1:
            raise ValueError(f"`far` must be at most 1, a share, got {self.far!r}")

    def judges(self, critics: int) -> bool:
        """Whether there is anything to calibrate."""
        return self.calibrated and critics > 1


class Batch(NamedTuple):
    """Transitions: `(agents, B, ...)`, rewards and discounts `(agents, B)`, actions in [-1, 1]."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    discounts: Tensor  # gamma^n, and 0 where the episode ended by itself


def whole(actions: Tensor) -> Tensor:
    """The nearest actions of the whole box."""
    return actions.clamp(-1, 1)


def greedy(
    f: Any, start: Tensor, steps: int, rules: Rules, project: Callable[[Tensor], Tensor] = whole,
    joint: bool = False, step: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Tensor:  # fmt: skip
    """Minimise `f.worst(a) - entropy * H(a)` by Adam in ever shorter steps; or in closed form.

    Args:
        f: Critics at states.
        start: Where to begin.
        steps: How many.
        rules: How long they are, and the entropy.
        project: Gives the nearest actions that are allowed.
        joint: Whether coordinates share the length of a step: where actions are not allowed
            coordinate by coordinate, other steps would come to rest in the wrong place.
        step: Another version of `adam_step`.
    """
    best = getattr(f, "best", None)
    if best is not None and project is whole and not rules.entropy:
        return best
    a, mean, square = start, torch.zeros_like(start), torch.zeros_like(start)
    for length in lengths(steps, rules.rate, None if step is None else start.device):
        a, mean, square = (step or adam_step)(
            f, a, mean, square, length, rules.entropy, project, joint
        )
    return a


def adam_step(
    f: Any, a: Tensor, mean: Tensor, square: Tensor, length: Tensor | float, entropy: float,
    project: Callable[[Tensor], Tensor], joint: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One of them, from an action and what Adam knows to the next."""
    g = f.slope(a)
    if entropy:
        # -H has the slope log(u / (1 - u)) / 2 in a = 2 u - 1
        u = ((a + 1) / 2).clamp(INSIDE, 1 - INSIDE)
        g = g + 0.5 * entropy * (u / (1 - u)).log()
    size = g * g
    size = size.mean(dim=-1, keepdim=True).expand_as(g) if joint else size
    mean, square = torch.lerp(g, mean, 0.5), torch.lerp(size, square, 0.9)
    return project(a - mean * (length / (square.sqrt() + 1e-12))), mean, square


def lengths(steps: int, rate: float, device: torch.device | None) -> Sequence[Tensor | float]:
    """Of steps: ever shorter, and corrected for what Adam does not know at first.

    As tensors on a device, so that compiled steps are one program; else as numbers.
    """
    found = [
        rate * (1 - i / steps) * (1 - 0.9 ** (i + 1)) ** 0.5 / (1 - 0.5 ** (i + 1))
        for i in range(steps)
    ]
    return found if device is None else on_device(tuple(found), device)


@lru_cache
def on_device(numbers: tuple[float, ...], device: torch.device) -> list[Tensor]:
    """Copied there once: a CUDA graph cannot wait for it."""
    return [torch.tensor(number, device=device) for number in numbers]


def binary_entropy(a: Tensor, real: Tensor | float = 1.0) -> Tensor:
    """Of `u = (a + 1) / 2`, summed over coordinates that are real."""
    u = ((a + 1) / 2).clamp(INSIDE, 1 - INSIDE)
    return -(real * (u * u.log() + (1 - u) * (1 - u).log())).sum(dim=-1)


def worth(f: Any, actions: Tensor, rules: Rules, real: Tensor) -> Tensor:
    """`Q` of each critic, `(agents, critics, B)`, with the entropy of actions if that counts."""
    q = -f.values(actions)
    return q + rules.entropy * binary_entropy(actions, real)[:, None] if rules.entropy else q


@torch.no_grad()
def td_goal(
    agent: Agent, batch: Batch, rules: Rules, step: Callable[..., Any] | None = None
) -> Tensor:
    """What `Q` should be, `r + gamma^n max Q`, by the slow copies: `(agents, B)`.

    Values are in units of `seen.scale`.
    """
    seen, soft = agent.seen, rules.entropy
    f = agent.at(batch.next_states, target=True)
    # Each critic chooses for its share of the states: it values its own choice too highly, and
    # the others that choice too little. The least of all is too low, the mean may be too high.
    check_batch_size(batch.actions.shape[1], f.shape[1])
    start = torch.zeros_like(batch.actions).view(math.prod(f.shape), -1, batch.actions.shape[2])
    best = greedy(f.apart(), start, rules.target_steps, rules, step=step)
    best = best.reshape(batch.actions.shape)
    q = worth(f, best, rules, agent.real)
    value = q.amin(dim=1)
    if rules.judges(q.shape[1]):
        value = torch.lerp(q.mean(dim=1), value, seen.caution)
    goal = torch.addcmul(batch.rewards / seen.scale, batch.discounts, value)
    if rules.bounded:
        # Entropies, of log 2 for each coordinate at most, are rewards as well.
        most = seen.most / seen.scale + soft * math.log(2) * agent.real.sum(dim=2)
        low, top = (r / (1 - agent.gamma) for r in (seen.least / seen.scale, most))
        goal = torch.minimum(torch.maximum(goal, low), top)
    return goal


def td_loss(agent: Agent, batch: Batch, goal: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Mean squares of `Q - goal`, and the mean of `Q`, of each agent: `(agents,)`."""
    found = worth(agent.at(batch.states), batch.actions, rules, agent.real)
    loss = (found - goal[:, None]).square().mean(dim=2).sum(dim=1)
    return loss, found.detach().mean(dim=(1, 2)) * agent.seen.scale[:, 0]


def parts(batch: Batch, goal: Tensor, count: int) -> Iterator[tuple[Batch, Tensor]]:
    """As many parts of a batch, and of its goals."""
    pieces = (tensor.chunk(count, dim=1) for tensor in (*batch, goal))
    for *part, own in zip(*pieces, strict=True):
        yield Batch(*part), own


def is_far(size: int, share: float) -> Tensor:
    """Which targets of a batch sum up several steps: a share of them, evenly."""
    done = (torch.arange(size + 1, dtype=torch.float64) * share).floor()
    return done.diff() > 0


def check_batch_size(size: int, critics: int, minibatches: int = 1) -> None:
    """Each critic has a share of the batch, and so has each update."""
    for count, of in ((critics, "critics"), (minibatches, "minibatches")):
        if size % count:
            raise ValueError(f"`batch_size` must be a multiple of {count} {of}, got {size}")


@dataclass(frozen=True)
class Training:
    """All settings of an agent, by the names that they have in `icnn.rl.ICNNQ`."""

    form: Form | Quadratics = field(default_factory=Form)
    rules: Rules = field(default_factory=Rules)
    critics: int = 2
    standardised: bool = True
    slow: bool = True
    gamma: float = 0.99
    learning_rate: float = 8e-4
    weight_decay: float = 5e-2
    tau: float = 0.02
    batch_size: int = 256
    learning_starts: int = 5000
    minibatches: int = 1
    gradient_steps: int = 1
    n_steps: int = 3
    noise: float = 0.2

    def __post_init__(self):
        check_batch_size(self.batch_size, self.critics, self.minibatches)
        if self.learning_starts < self.n_steps:
            raise ValueError(
                f"`learning_starts` must be at least `n_steps`, {self.n_steps}, got "
                f"{self.learning_starts}"
            )

    def options(self) -> dict[str, Any]:
        """As arguments of `icnn.rl.ICNNQ`."""
        of_policy = ("form", "critics", "standardised", "slow", "weight_decay")
        found = {name: value for name, value in vars(self).items() if name not in of_policy}
        return found | {"policy_kwargs": {name: getattr(self, name) for name in of_policy}}


# Algorithm 3: one network, the entropy in loss and target, nothing standardised; rates of its code.
PAPER = Training(
    form=PAPER_FORM,
    rules=Rules(
        entropy=1.0, bounded=False, calibrated=False, far=1.0, steps=30, target_steps=30
    ),
    critics=1, standardised=False, slow=False, learning_rate=1e-3, weight_decay=1e-3, tau=1e-3,
    n_steps=1, noise=0.1,
)  # fmt: skip
