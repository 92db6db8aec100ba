"""Q-learning without an actor, as Stable-Baselines3 algorithms."""

from typing import Any, ClassVar, Self

import numpy as np
import torch
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from torch import Tensor

from icnn.checks import check_count, check_instance, check_number
from icnn.energies.energy import Energy
from icnn.rl.learning import Batch, Rules, check_batch_size, is_far, parts, td_goal, td_loss, worth
from icnn.rl.policy import (
    GreedyPolicy,
    InUnits,
    QuadraticPolicy,
    check_domain,
    check_spaces,
    flat,
)
from icnn.solvers.argmin import Solver
from icnn.solvers.domains import Domain
from icnn.solvers.solution import Solution


class ICNNQ(OffPolicyAlgorithm):
    """Deep Q-learning with input convex critics.

    There is no actor: `-Q(s, a)` is convex in `a`, and the greedy action is its minimiser.

    Args:
        policy: `"MlpPolicy"`.
        env: An environment, or its name. Actions must lie in a bounded box.
        learning_rate: Of AdamW; a number or a schedule.
        n_steps: Of some targets, see `icnn.rl.Rules`; 3, or 1 with a replay buffer of your own.
        minibatches: A batch is learned from in as many parts, an update each; targets of all of it
            are found at once, which is what makes this cheaper than more `gradient_steps`.
        noise: The standard deviation of what is added to actions in training; the box is 2 wide.
        rules: How to learn and to look for actions, see `icnn.rl.Rules`.
        policy_kwargs: `form` of critics, see `icnn.rl.Form`; how many `critics`; whether states are
            `standardised`; whether their `slow` copies act when there is no noise; `weight_decay`.

    All other arguments are those of Stable-Baselines3's off-policy algorithms.

    Examples:
        >>> model = icnn.rl.ICNNQ("MlpPolicy", "Pendulum-v1", learning_starts=50, seed=0)
        >>> model = model.learn(60)
        >>> action, _ = model.predict(model.observation_space.sample(), deterministic=True)
        >>> action.shape
        (1,)
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"MlpPolicy": GreedyPolicy}
    policy: GreedyPolicy

    def __init__(
        self,
        policy: str | type[GreedyPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 8e-4,
        buffer_size: int = 1_000_000,
        learning_starts: int = 5000,
        batch_size: int = 256,
        tau: float = 0.02,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: ActionNoise | None = None,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        n_steps: int | None = None,
        minibatches: int = 1,
        noise: float = 0.2,
        rules: Rules | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        env = maybe_make_env(env, verbose)
        if env is not None:  # as in `load`
            check_spaces(env.observation_space, env.action_space)
        self.rules = Rules() if rules is None else check_instance("rules", rules, Rules)
        self.noise = check_number("noise", noise, minimum=0)
        self.minibatches = check_count("minibatches", minibatches)
        self.domain: Domain | None = None
        self._last: Tensor | None = None  # what is known of the last step
        self.own_buffer = replay_buffer_class is None
        if n_steps is None:
            n_steps = 3 if self.own_buffer else 1
        check_count("n_steps", n_steps)
        super().__init__(
            policy, env, learning_rate, buffer_size, learning_starts, batch_size, tau, gamma,
            train_freq, gradient_steps, action_noise, replay_buffer_class, replay_buffer_kwargs,
            n_steps=n_steps, policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size, tensorboard_log=tensorboard_log, verbose=verbose,
            device=device, seed=seed, sde_support=False, support_multi_env=True,
        )  # fmt: skip
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        kind = self.policy_aliases["MlpPolicy"]
        if not issubclass(self.policy_class, kind):  # perhaps from a file of another algorithm
            raise ValueError(
                f"`policy` of {type(self).__name__} must be a {kind.__name__}, got "
                f"{self.policy_class.__name__}"
            )
        if self.own_buffer:
            # A model that was saved has its class: chosen anew, for discount and steps of this one.
            self.replay_buffer_class = None
            self.replay_buffer_kwargs = {
                name: value for name, value in self.replay_buffer_kwargs.items()
                if name not in ("n_steps", "gamma")
            }  # fmt: skip
        super()._setup_model()
        check_batch_size(self.batch_size, self.policy.options["critics"], self.minibatches)
        if self.rules.bounded and self.gamma >= 1:
            raise ValueError(
                f"`gamma` must be below 1 for targets that are bounded, got {self.gamma}: pass "
                "`rules=icnn.rl.Rules(bounded=False)`"
            )
        # Not among `policy_kwargs`: `load` may be given others.
        policy = self.policy
        policy.rules, policy.noise, policy.domain = self.rules, self.noise, self.domain
        policy.agent.seen.settled = self.learning_starts
        policy.agent.gamma.fill_(self.gamma)

    def constrain(self, domain: Domain | None) -> None:
        """From now on actions come from a part of the action space, in its units; `None`: all.

        Nothing is learned anew: the best action of the part is found in the same energy. An agent
        that goes on to learn tries such actions only, but values what all of the box is good for.
        """
        if domain is not None:
            check_domain(domain, self.policy)
        self.domain = self.policy.domain = domain

    def solve(self, observation: np.ndarray, solver: Solver | None = None) -> Solution:
        """The best actions, minus their `Q`, and how far from optimal they can be at most.

        By the critics that `predict` takes without noise: the slow copies, unless `slow` is off.
        """
        states, _ = self.policy.obs_to_tensor(observation)
        return self.policy.solve(flat(states), solver)

    @property
    def energy(self) -> Energy:
        """`-Q(s, a)` of observations and actions as the environment has them: convex in `a`.

        By the critics of `solve`, as they are at each call.
        """
        return InUnits(self.policy)

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Sample, learn, follow."""
        policy, agent = self.policy, self.policy.agent
        policy.set_training_mode(True)
        self._update_learning_rate(policy.optimizer)
        losses, values = [], []
        for _ in range(gradient_steps):
            batch = self._sample(batch_size)
            goal = td_goal(agent, batch, self.rules)
            for part, own in parts(batch, goal, self.minibatches):
                loss, value = td_loss(agent, part, own, self.rules)
                policy.optimizer.zero_grad()
                loss.sum().backward()
                policy.optimizer.step()
                agent.follow(self.tau)
                losses.append(loss.detach())
                values.append(value)
        self._n_updates += len(losses)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", float(torch.stack(losses).mean()))
        if self._judges:
            self.logger.record("train/caution", float(agent.seen.caution))
        self.logger.record("train/q", float(torch.stack(values).mean()))

    def _sample(self, size: int) -> Batch:
        """Transitions, some of several steps and the rest of one."""
        buffer = self.replay_buffer
        if not isinstance(buffer, NStepReplayBuffer) or self.rules.far == 1:
            return self._drawn(size)
        far, n_steps = is_far(size, self.rules.far), buffer.n_steps
        count = int(far.sum())
        try:
            buffer.n_steps = 1
            near = self._drawn(size - count)
        finally:
            buffer.n_steps = n_steps
        if not count:
            return near
        # Where each stands: the k-th that is far is the k-th of those drawn last.
        order = torch.where(far, size - count + far.cumsum(0), (~far).cumsum(0)) - 1
        order = order.to(self.device)
        pairs = zip(near, self._drawn(count), strict=True)
        return Batch(*(torch.cat(pair, dim=1)[:, order] for pair in pairs))

    def _drawn(self, size: int) -> Batch:
        """Transitions as the buffer has them."""
        assert self.replay_buffer is not None
        data = self.replay_buffer.sample(size, env=self._vec_normalize_env)
        discounts = self.gamma if data.discounts is None else data.discounts.flatten()
        return Batch(
            flat(data.observations)[None], data.actions[None], data.rewards.T,
            flat(data.next_observations)[None], ((1 - data.dones.flatten()) * discounts)[None],
        )  # fmt: skip

    def _sample_action(self, *args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        action, scaled = super()._sample_action(*args, **kwargs)
        if self.domain is None:
            return action, scaled
        action = self.policy.allowed(action)
        return action, self.policy.scale_action(action)

    def _store_transition(
        self, replay_buffer: ReplayBuffer, buffer_action: np.ndarray, new_obs: Any,
        reward: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        states = flat(torch.as_tensor(self._last_obs, device=self.device))[None]
        rewards, ended = (
            torch.as_tensor(part, dtype=torch.float32, device=self.device)[None]
            for part in (reward, dones)
        )
        self.policy.agent.seen.add(states, rewards)
        cut = torch.tensor([[info.get("TimeLimit.truncated", False) for info in infos]])
        terminated = ended * (1 - cut.to(ended))
        self._judge(states, buffer_action, rewards, ended, terminated)
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)

    @property
    def _judges(self) -> bool:
        return self.rules.judges(self.policy.options["critics"])

    @torch.no_grad()
    def _judge(
        self, states: Tensor, actions: np.ndarray, rewards: Tensor, ended: Tensor,
        terminated: Tensor,
    ) -> None:  # fmt: skip
        """Learn how cautious targets should be, from actions that critics have chosen."""
        agent, rules = self.policy.agent, self.rules
        drawn = self.num_timesteps - self.n_envs < self.learning_starts
        # Under a constraint less comes than targets say, which are of all actions: nobody is wrong.
        if drawn or not self._judges or self.domain is not None:
            self._last = None
            return
        taken = torch.as_tensor(actions, dtype=torch.float32, device=self.device)[None]
        believed = worth(agent.at(states), taken, rules, agent.real).mean(dim=1)
        last = torch.zeros(3, *rewards.shape).to(rewards) if self._last is None else self._last
        self._last = agent.seen.judge(agent.gamma, last, believed, rewards, terminated, ended)

    def learn(
        self, total_timesteps: int, callback: MaybeCallback = None, log_interval: int = 4,
        tb_log_name: str | None = None, reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:  # fmt: skip
        name = type(self).__name__ if tb_log_name is None else tb_log_name
        if reset_num_timesteps or self._last_obs is None:
            self._last = None  # episodes begin
        return super().learn(
            total_timesteps, callback, log_interval, name, reset_num_timesteps, progress_bar
        )

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_last"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer"], []


class NAF(ICNNQ):
    """Normalized advantage functions (Gu et al., 2016): `-Q` is a quadratic of the action.

    Its minimiser is known in closed form. Arguments are those of `icnn.rl.ICNNQ`; here `form` is an
    `icnn.rl.Quadratics`, and there is one critic unless you say otherwise.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"MlpPolicy": QuadraticPolicy}
