"""A policy without an actor: the action of the least energy, of the whole box or a part of it."""

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
from icnn.rl.learning import Rules, greedy
from icnn.rl.quadratics import Quadratics
from icnn.solvers.argmin import Solver, argmin
from icnn.solvers.domains import Box, Domain
from icnn.solvers.gradient import ProjectedGradient
from icnn.solvers.solution import Solution

SOLVER = ProjectedGradient(max_steps=100, rule="spectral", tol=1e-3)


class GreedyPolicy(BasePolicy):
    """Takes the action of the least energy.

    Args:
        observation_space: A `Box`.
        action_space: A bounded `Box`.
        lr_schedule: As everywhere in Stable-Baselines3.
        form: What a critic looks like.
        critics: How many.
        standardised: Whether states are standardised by what was seen of them so far.
        noise: The standard deviation of what is added to actions in training; the box is 2 wide.
        rules: How to look for an action.
        weight_decay: Of the optimiser, AdamW.
    """

    width: Tensor
    center: Tensor

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Box, lr_schedule: Schedule,
        form: Form | Quadratics | None = None, critics: int = 2, standardised: bool = True,
        noise: float = 0.1, rules: Rules | None = None, weight_decay: float = 0.0, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(observation_space, action_space, squash_output=True, **kwargs)
        self.rules, self.noise, form = rules or Rules(), noise, form or Form()
        self.options = {
            "form": form, "critics": critics, "standardised": standardised, "noise": noise,
            "rules": self.rules, "weight_decay": weight_decay,
        }  # fmt: skip
        self.dims = spaces.flatdim(observation_space), spaces.flatdim(action_space)
        self.agent = Agent(form.make(*self.dims, critics), standardised=standardised)
        self.domain: Domain | None = None
        low, high = (
            torch.from_numpy(np.ravel(b)).float() for b in (action_space.low, action_space.high)
        )
        for name, value in (("width", high - low), ("center", (high + low) / 2)):
            self.register_buffer(name, value, persistent=False)
        self.optimizer = torch.optim.AdamW(
            self.agent.critics.parameters(), lr=lr_schedule(1), weight_decay=weight_decay,
            fused=True,
        )  # fmt: skip

    def _get_constructor_parameters(self) -> dict[str, Any]:
        own = {"lr_schedule": self._dummy_schedule} | self.options
        return super()._get_constructor_parameters() | own

    def forward(self, obs: Any, deterministic: bool = False) -> Tensor:
        return self._predict(obs, deterministic)

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        """Actions between -1 and 1."""
        states = flat(observation)
        if self.domain is not None:
            action = self.inside(self.solve(states).y, deterministic)
            return (action - self.center) / (self.width / 2)
        start = states.new_zeros(1, len(states), self.dims[1])
        one = torch.ones_like(self.width)
        action = greedy(self.agent.at(states[None]), start, one, self.rules.steps, self.rules)[0]
        return action if deterministic else self.noisy(action).clamp(-1, 1)

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:  # fmt: skip
        """As everywhere; under a constraint actions satisfy it to the last bit."""
        action, state = super().predict(observation, state, episode_start, deterministic)
        if self.domain is None:
            return action, state
        # The way to [-1, 1] and back is not exact.
        rows = torch.from_numpy(action.reshape(-1, self.dims[1])).to(self.device)
        return self.domain.project(rows).cpu().numpy().reshape(action.shape), state

    def inside(self, action: Tensor, deterministic: bool) -> Tensor:
        """With noise, if wanted, in the part of the box that is allowed."""
        assert self.domain is not None
        if deterministic:
            return action
        return self.domain.project(action + self.width / 2 * self.noisy(torch.zeros_like(action)))

    def noisy(self, action: Tensor) -> Tensor:
        """What explores."""
        return action + self.noise * torch.randn_like(action)

    @torch.no_grad()
    def solve(self, states: Tensor, solver: Solver | None = None) -> Solution:
        """The best actions that are allowed, in the environment's units, with a certificate."""
        domain = self.domain
        if domain is None:
            domain = Box(self.center - self.width / 2, self.center + self.width / 2)
        start = domain.project(self.center.expand(len(states), -1))
        solver = SOLVER if solver is None else solver
        return argmin(InUnits(self), states, domain, entropy=0, solver=solver, start=start)


class InUnits(Energy):
    """`-Q` of states and actions in the environment's units, in units of its rewards."""

    def __init__(self, policy: GreedyPolicy):
        super().__init__()
        self.policy, self.y_shape = policy, (policy.dims[1],)

    def at(self, x: Tensor) -> EnergyAt:
        return InUnitsAt(self.policy, x)


class InUnitsAt:
    """With all that depends on the state at hand."""

    def __init__(self, policy: GreedyPolicy, states: Tensor):
        self.f, self.scale = policy.agent.at(states[None]), policy.agent.seen.scale
        self.center, self.half = policy.center, policy.width / 2

    def __call__(self, y: Tensor) -> Tensor:
        return (self.scale * self.f.worst(((y - self.center) / self.half)[None]))[0]

    @torch.no_grad()
    def value_and_gradient(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Without a graph."""
        action = ((y - self.center) / self.half)[None]
        value, slope = self.f.both(action)
        return (self.scale * value)[0], (self.scale[..., None] * slope)[0] / self.half


def flat(observation: Any) -> Tensor:
    """Observations as rows."""
    return observation.flatten(start_dim=1).float()


def check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Boxes, with bounds for actions."""
    if not isinstance(action_space, spaces.Box):
        raise ValueError(
            f"`env` must have actions in a bounded Box, got {action_space}: for discrete actions "
            "take Stable-Baselines3's DQN"
        )
    if not (np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()):
        raise ValueError(
            f"`env` must have bounds on its actions, got {action_space}: wrap it in "
            "gymnasium.wrappers.RescaleAction"
        )
    if not isinstance(observation_space, spaces.Box):
        raise ValueError(
            f"`env` must have observations in a Box, got {observation_space}: wrap it in "
            "gymnasium.wrappers.FlattenObservation"
        )
