"""A policy without an actor: the action of the least energy, of the whole box or a part of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor

from icnn.energies.energy import Energy, EnergyAt
from icnn.rl.agent import Agent
from icnn.rl.critics import Form
from icnn.rl.learning import Rules, greedy, whole
from icnn.rl.quadratics import Quadratics
from icnn.solvers.argmin import Solver, argmin
from icnn.solvers.bundle import Bundle
from icnn.solvers.bundle_entropy import BundleEntropy
from icnn.solvers.domains import Box, Domain
from icnn.solvers.solution import Solution

SOLVER = Bundle(tol=1e-3)
MORE = 3  # times as many steps where coordinates share their length


class GreedyPolicy(BasePolicy):
    """Takes the action of the least energy.

    Args:
        observation_space: A `Box`.
        action_space: A bounded `Box`.
        lr_schedule: As everywhere in Stable-Baselines3.
        form: What a critic looks like.
        critics: How many; the size of batches must be a multiple of it.
        standardised: Whether states are standardised by what was seen of them so far.
        slow: Whether the slow copies of critics, which are means over the last of them, choose what
            is done without noise; else the critics themselves do.
        weight_decay: Of the optimiser, AdamW.
        noise: The standard deviation of what is added to actions in training; the box is 2 wide.
        rules: How to look for an action.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Box, lr_schedule: Schedule,
        form: Form | Quadratics | None = None, critics: int = 2, standardised: bool = True,
        slow: bool = True, weight_decay: float = 5e-2, noise: float = 0.2,
        rules: Rules | None = None, **kwargs: Any,
    ):  # fmt: skip
        if "net_arch" in kwargs:
            raise ValueError(
                "`policy_kwargs` has no `net_arch`: for widths of layers pass `form`, as "
                "icnn.rl.Form(state=(256, 256), hidden=(128, 128)), or for NAF icnn.rl.Quadratics"
            )
        super().__init__(observation_space, action_space, squash_output=True, **kwargs)
        self.noise, self.rules, form = noise, rules or Rules(), form or Form()
        self.options = {
            "form": form, "critics": critics, "standardised": standardised, "slow": slow,
            "weight_decay": weight_decay,
        }  # fmt: skip
        self.slow = slow
        self.dims = spaces.flatdim(observation_space), spaces.flatdim(action_space)
        self.agent = Agent(form.make(*self.dims, critics), standardised=standardised)
        self.domain: Domain | None = None
        for name in ("low", "high"):
            bound = torch.from_numpy(np.ravel(getattr(action_space, name))).float()
            self.register_buffer(name, bound, persistent=False)
        self.optimizer = self.agent.optimizer(lr_schedule(1), weight_decay)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        own = {"lr_schedule": self._dummy_schedule, "noise": self.noise, "rules": self.rules}
        return super()._get_constructor_parameters() | own | self.options

    @property
    def reach(self) -> Tensor:
        """Of the width of the action space."""
        return (self.high - self.low) / 2

    @property
    def center(self) -> Tensor:
        """Of the action space."""
        return (self.high + self.low) / 2

    def forward(self, obs: Any, deterministic: bool = False) -> Tensor:
        return self._predict(obs, deterministic)

    @torch.no_grad()
    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        """Actions between -1 and 1."""
        states, domain, rules = flat(observation), self.domain, self.rules
        start = states.new_zeros(1, len(states), self.dims[1])
        if domain is None or isinstance(domain, Box):
            bounds = self.bounds(domain)
            project = whole if domain is None else bounds.project
            f = self.agent.at(states[None], target=self.slow and deterministic)
            action = greedy(f, bounds.center(start), rules.steps, rules, project)
            if not deterministic:
                action = project(action + self.noise * torch.randn_like(action))
            return action[0]
        # Nearest points are not nearest in other units: in those of the environment.
        rules = replace(rules, rate=rules.rate * float(self.reach.mean()), entropy=0.0)

        def nearest(y: Tensor) -> Tensor:
            return domain.project(y[0])[None]

        start = nearest(start + self.center)
        f = InUnitsAt(self, states, self.slow and deterministic, rewards=False)
        y = greedy(f, start, MORE * rules.steps, rules, nearest, joint=True)
        if not deterministic:
            y = nearest(y + self.noise * self.reach * torch.randn_like(y))
        return (y[0] - self.center) / self.reach

    def bounds(self, domain: Box | None) -> Box:
        """A box in the units of critics, -1 to 1."""
        if domain is None:
            return Box(-1.0, 1.0)
        return Box(*(
            (torch.as_tensor(b, device=self.low.device) - self.center) / self.reach
            for b in (domain.low, domain.high)
        ))  # fmt: skip

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:  # fmt: skip
        """As everywhere; under a constraint actions satisfy it to the last bit."""
        action, state = super().predict(observation, state, episode_start, deterministic)
        return self.allowed(action), state

    def allowed(self, action: np.ndarray) -> np.ndarray:
        """The way to [-1, 1] and back is not exact: the nearest actions that are allowed."""
        if self.domain is None:
            return action
        rows = torch.from_numpy(action.reshape(-1, self.dims[1])).to(self.low.device)
        return self.domain.project(rows).cpu().numpy().reshape(action.shape)

    @torch.no_grad()
    def solve(self, states: Tensor, solver: Solver | None = None) -> Solution:
        """The best actions that are allowed, in the environment's units, with a certificate."""
        domain = Box(self.low, self.high) if self.domain is None else self.domain
        entropy = self.rules.entropy
        start = domain.project(self.center.expand(len(states), -1))
        solver = solver or (BundleEntropy() if entropy else SOLVER)
        # A tolerance is for values around one; certificates are in units of rewards.
        found = argmin(
            InUnits(self, rewards=False), states, domain, entropy=entropy, solver=solver,
            start=start,
        )  # fmt: skip
        scale = self.agent.seen.scale.double()[0]
        return replace(found, **{
            name: scale * getattr(found, name) for name in ("value", "lower", "gap", "gaps")
        })  # fmt: skip


class QuadraticPolicy(GreedyPolicy):
    """The same with one quadratic critic, unless you say otherwise."""

    def __init__(self, *args: Any, form: Any = None, critics: int = 1, **kwargs: Any):
        super().__init__(*args, form=form or Quadratics(), critics=critics, **kwargs)


class InUnits(Energy):
    """`-Q` of states, and of actions in the environment's units; in those of its rewards or not."""

    def __init__(self, policy: GreedyPolicy, rewards: bool = True):
        super().__init__()
        self.policy, self.rewards, self.y_shape = policy, rewards, (policy.dims[1],)

    def at(self, x: Tensor) -> EnergyAt:
        return InUnitsAt(self.policy, x, self.policy.slow, self.rewards)


class InUnitsAt:
    """With all that depends on the state at hand."""

    def __init__(self, policy: GreedyPolicy, states: Tensor, slow: bool, rewards: bool):
        self.f, scale = policy.agent.at(states[None], target=slow), policy.agent.seen.scale
        self.center, self.reach = policy.center, policy.reach
        self.scale = scale if rewards else torch.ones_like(scale)

    def inner(self, y: Tensor) -> Tensor:
        """Actions as critics take them."""
        return (y - self.center) / self.reach

    def __call__(self, y: Tensor) -> Tensor:
        return (self.scale * self.f.worst(self.inner(y)[None]))[0]

    def slope(self, y: Tensor) -> Tensor:
        """The gradient, for `greedy`."""
        return self.f.slope(self.inner(y)) / self.reach

    @torch.no_grad()
    def value_and_gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Without a graph."""
        value, slope = self.f.both(self.inner(y)[None])
        return (self.scale * value)[0], (self.scale[..., None] * slope)[0] / self.reach


def flat(observation: Any) -> Tensor:
    """Observations as rows."""
    return observation.flatten(start_dim=1).float()


def check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Boxes, with bounds for actions."""
    if not isinstance(action_space, spaces.Box):
        discrete = isinstance(action_space, spaces.Discrete)
        other = "DQN" if discrete else "PPO"
        raise ValueError(
            f"`env` must have actions in a bounded Box, got {action_space}: for discrete actions "
            f"take Stable-Baselines3's {other}"
        )
    if not (np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()):
        raise ValueError(
            f"`env` must have bounds on its actions, got {action_space}: wrap it in "
            "gymnasium.wrappers.TransformAction, with a bounded Box as its action space"
        )
    if not (action_space.low < action_space.high).all():
        raise ValueError(f"`env` must have actions with some room each, got {action_space}")
    if not isinstance(observation_space, spaces.Box):
        raise ValueError(
            f"`env` must have observations in a Box, got {observation_space}: wrap it in "
            "gymnasium.wrappers.FlattenObservation"
        )


def check_domain(domain: Domain, policy: GreedyPolicy) -> None:
    """Within the action space, as far as each coordinate by itself can tell."""
    if not isinstance(domain, Domain):
        raise ValueError(
            f"`domain` must be an icnn.Box, an icnn.rl.Budget or a domain of yours, got {domain!r}"
        )
    axes = torch.eye(policy.dims[1], device=policy.low.device)
    try:
        fits = domain.minimise(axes, 0.0).shape == axes.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"`domain` must be of {len(axes)} coordinates, got {domain!r}")
    for sign, bound in ((1, policy.low), (-1, policy.high)):
        end = domain.minimise(sign * axes, 0.0).diagonal()
        slack = 1e-6 * (1 + bound.abs())
        if bool((sign * (bound - end) > slack).any()):
            raise ValueError(
                f"`domain` must lie in the action space, {policy.low.tolist()} to "
                f"{policy.high.tolist()}, got {domain!r}, which reaches {end.tolist()}"
            )
