"""Algorithms of Stable-Baselines3: what users of it expect, and what is ours."""

import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import icnn
from icnn.rl import ICNNQ, NAF, PAPER, Budget, Checkpoint, Form, Quadratics, Rules, resume
from icnn.rl.learning import Batch, Training, td_goal, td_loss
from icnn.rl.policy import GreedyPolicy

ALGORITHMS = [ICNNQ, NAF]
SMALL: dict[Any, dict[str, Any]] = {
    ICNNQ: {"policy_kwargs": {"form": Form((32,), (16,))}, "batch_size": 64},
    NAF: {"policy_kwargs": {"form": Quadratics((32,))}, "batch_size": 64},
}


class Identity(gym.Env):
    """The reward is largest where the action is the state, stretched to a box that is not even."""

    LOW, HIGH = np.array([-1.0, 2.0], np.float32), np.array([3.0, 3.0], np.float32)

    def __init__(self, length: int = 10, truncated: bool = True):
        self.observation_space = spaces.Box(-1, 1, (2,))
        self.action_space = spaces.Box(self.LOW, self.HIGH)
        self.length, self.truncated = length, truncated

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.steps = 0
        return self._next(), {}

    def _next(self) -> np.ndarray:
        self.state = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.state

    def step(self, action: np.ndarray):
        assert self.action_space.contains(action)
        wanted = self.LOW + (self.state + 1) / 2 * (self.HIGH - self.LOW)
        away = (action - wanted) / (self.HIGH - self.LOW)
        reward = 1 - 4 * float(np.square(away).sum())
        self.steps += 1
        end = self.steps >= self.length
        return self._next(), reward, end and not self.truncated, end and self.truncated, {}


def small(algorithm: Any, env: Any = None, **options: Any) -> ICNNQ:
    given: dict[str, Any] = {"learning_starts": 100, "seed": 0, "learning_rate": 3e-3, "noise": 0.3}
    given["tau"] = 0.005
    return algorithm(
        "MlpPolicy", env or Identity(), **(given | {"gamma": 0.5} | SMALL[algorithm] | options)
    )


@pytest.fixture(scope="module", params=ALGORITHMS, ids=lambda a: a.__name__)
def learned(request: pytest.FixtureRequest) -> ICNNQ:
    return small(request.param).learn(2000)


def test_identity_is_solved(learned: ICNNQ):
    mean, _ = evaluate_policy(learned, Identity(), n_eval_episodes=20, warn=False)
    assert float(np.asarray(mean)) > 9.5, "of 10 at most"
    value = -learned.solve(np.zeros((1, 2), np.float32)).value
    assert float(value) == pytest.approx(2, abs=0.3), "1 / (1 - gamma)"


def test_values_know_truncated_from_terminated():
    """One step an episode: what ended by itself is worth 1, what was cut off goes on."""
    for truncated, worth in ((True, 2.0), (False, 1.0)):
        model = small(ICNNQ, Identity(1, truncated), tau=0.02).learn(1000)
        value = -model.solve(np.zeros((1, 2), np.float32)).value
        assert float(value) == pytest.approx(worth, abs=0.3)


@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize("envs", [1, 3])
def test_caution_is_learned_from_steps_that_critics_chose(truncated: bool, envs: int):
    """By hand, with critics that stay as they are; then where it must not be learned."""
    env = make_vec_env(lambda: Identity(10, truncated), envs, seed=0)
    model = small(ICNNQ, env, learning_rate=0.0, learning_starts=30 * envs)
    found: list[list[torch.Tensor]] = []
    seen = model.policy.agent.seen
    judge = seen.judge

    def noted(*told: torch.Tensor) -> torch.Tensor:
        found.append([t.clone() for t in told])
        return judge(*told)

    seen.judge = noted  # pyright: ignore[reportAttributeAccessIssue]
    seen.caution.fill_(0.5)
    model.learn(80 * envs)
    assert len(found) == 50, "not of actions that were drawn"
    total = 0.0
    for k, (gamma, _, q, rewards, terminated, ended) in enumerate(found):
        assert q.shape == (1, envs)
        assert ended.all() == (k % 10 == 9)
        assert torch.equal(terminated, ended * (not truncated)), "cut off, and no more"
        if k % 10:
            before = found[k - 1]
            total += float((before[3] / seen.scale + gamma * q - before[2]).mean())
        if terminated.any():
            total += float((rewards / seen.scale - q).mean())
    assert float(seen.caution) == pytest.approx(0.5 - 1e-3 * total, abs=1e-5)
    assert abs(1e-3 * total) > 1e-3, "or the test says nothing"
    model.constrain(icnn.Box(torch.tensor([0.0, 2.5]), torch.tensor([1.0, 3.0])))
    model.learn(20 * envs, reset_num_timesteps=False)
    assert len(found) == 50, "less comes under a constraint, and nobody was wrong"


def test_targets_without_calibration_are_of_the_least(tmp_path: Path):
    model = small(ICNNQ)
    model.policy.agent.seen.caution.fill_(0.2)
    model.save(tmp_path / "agent")
    model = ICNNQ.load(tmp_path / "agent", Identity(), rules=Rules(calibrated=False)).learn(200)
    assert float(model.policy.agent.seen.caution) == pytest.approx(0.2), "nothing is learned"
    batch, agent = model._sample(64), model.policy.agent
    goal = td_goal(agent, batch, model.rules)
    agent.seen.caution.fill_(1.0)
    torch.testing.assert_close(goal, td_goal(agent, batch, Rules()))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_batch_is_learned_from_in_parts(algorithm: Any):
    torch.manual_seed(0)
    model = small(algorithm, minibatches=4).learn(100)
    agent = model.policy.agent
    alone, batch = deepcopy(agent), model._sample(model.batch_size)
    model._sample = lambda size: batch
    goal, rate = td_goal(alone, batch, model.rules), model.policy.optimizer.param_groups[0]["lr"]
    optimizer = alone.optimizer(rate, model.policy.options["weight_decay"])
    optimizer.load_state_dict(deepcopy(model.policy.optimizer.state_dict()))
    for k in range(4):
        rows = slice(k * model.batch_size // 4, (k + 1) * model.batch_size // 4)
        part = Batch(*(tensor[:, rows] for tensor in batch))
        optimizer.zero_grad()
        td_loss(alone, part, goal[:, rows], model.rules)[0].sum().backward()
        optimizer.step()
        alone.follow(model.tau)
    updates = model._n_updates
    model.train(1, model.batch_size)
    assert model._n_updates == updates + 4
    for mine, other in zip(agent.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of 5 minibatches"):
        small(algorithm, minibatches=5)


def test_the_same_seed_gives_the_same_agent():
    found = [small(a).learn(200).policy.state_dict() for a in ALGORITHMS for _ in range(2)]
    for one, other in ((found[0], found[1]), (found[2], found[3])):
        assert all(torch.equal(one[k], other[k]) for k in one)
    other = small(ICNNQ, seed=1).learn(200).policy.state_dict()
    assert not all(torch.equal(found[0][k], other[k]) for k in other)


def test_save_and_load(learned: ICNNQ, tmp_path: Path):
    learned.save(tmp_path / "agent")
    again = type(learned).load(tmp_path / "agent", env=Identity())
    states = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)
    for a, b in zip(
        *(m.predict(states, deterministic=True) for m in (learned, again)), strict=True
    ):
        assert np.array_equal(a, b) if a is not None else b is None
    assert again.rules == learned.rules
    moments = [m.policy.optimizer.state_dict()["state"][0]["exp_avg"] for m in (learned, again)]
    assert torch.equal(*moments)
    again.learn(20, reset_num_timesteps=False)
    assert again.num_timesteps == learned.num_timesteps + 20
    learned.policy.save(str(tmp_path / "policy"))
    policy = type(learned.policy).load(str(tmp_path / "policy"))
    assert np.array_equal(policy.predict(states, deterministic=True)[0],
                          learned.predict(states, deterministic=True)[0])  # fmt: skip


@pytest.mark.parametrize("own_buffer", [False, True])
@pytest.mark.parametrize("algorithm", [ICNNQ, SAC])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(
    algorithm: Any, own_buffer: bool, tmp_path: Path
):
    """Ours, and others: nothing in it is about ours."""
    options: dict[str, Any] = {"seed": 0, "learning_starts": 50, "batch_size": 16, "device": "cpu"}
    options |= {"buffer_size": 1000}
    if own_buffer:
        options["replay_buffer_class"] = NStepReplayBuffer
        options["replay_buffer_kwargs"] = {"n_steps": 3, "gamma": 0.5}
    whole = algorithm("MlpPolicy", Identity(7), **options)
    whole.learn(150, callback=Checkpoint(tmp_path / "whole", 40))
    first = algorithm("MlpPolicy", Identity(7), **options)
    first.learn(110, callback=Checkpoint(tmp_path / "first", 40))
    second = resume(algorithm, tmp_path / "first", Identity(7), device="cpu")
    assert second.num_timesteps == 84, "the end of an episode of 7 steps"
    second.learn(150 - 84, callback=Checkpoint(tmp_path / "first", 40), reset_num_timesteps=False)
    assert np.array_equal(whole.replay_buffer.actions, second.replay_buffer.actions)
    for a, b in zip(whole.policy.state_dict().values(), second.policy.state_dict().values(),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_checkpoints_keep_what_normalisation_has_learned(tmp_path: Path):
    def env() -> VecNormalize:
        return VecNormalize(DummyVecEnv([lambda: Identity(7)]))

    whole: Any = small(ICNNQ, env()).learn(150, callback=Checkpoint(tmp_path / "whole", 40))
    small(ICNNQ, env()).learn(130, callback=Checkpoint(tmp_path / "first", 40))
    again: Any = resume(ICNNQ, tmp_path / "first", env())
    again.learn(150 - again.num_timesteps, callback=Checkpoint(tmp_path / "first", 40),
                reset_num_timesteps=False)  # fmt: skip
    ours, theirs = (vars(m.get_vec_normalize_env().ret_rms) for m in (whole, again))
    assert ours == theirs
    for a, b in zip(whole.policy.state_dict().values(), again.policy.state_dict().values(),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_two_quadratics_learn():
    options = SMALL[NAF]["policy_kwargs"] | {"critics": 2}
    model = small(NAF, policy_kwargs=options).learn(130)
    assert all(bool(p.isfinite().all()) for p in model.policy.parameters())


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_targets_has_several_steps(share: float):
    model = small(ICNNQ, Identity(10), rules=Rules(far=share), learning_starts=200).learn(200)
    buffer = model.replay_buffer
    assert isinstance(buffer, NStepReplayBuffer)
    batch = model._sample(63)
    assert buffer.n_steps == 3
    states, rewards = (torch.from_numpy(x[:200, 0]) for x in (buffer.observations, buffer.rewards))
    for j in range(63):
        first = int((states == batch.states[0, j]).all(dim=1).nonzero())
        far = int((j + 1) * share) > int(j * share)
        steps = min(3, 10 - first % 10) if far else 1
        expected = sum(0.5**k * rewards[first + k] for k in range(steps))
        assert float(batch.rewards[0, j]) == pytest.approx(float(expected), abs=1e-5)
        assert float(batch.discounts[0, j]) == pytest.approx(0.5**steps)
        assert torch.equal(
            batch.next_states[0, j],
            torch.from_numpy(buffer.next_observations[first + steps - 1, 0]),
        )


def test_a_buffer_of_your_own_stays():
    given = {"n_steps": 3, "gamma": 0.5}
    model = small(ICNNQ, replay_buffer_class=NStepReplayBuffer, replay_buffer_kwargs=given)
    assert isinstance(model.replay_buffer, NStepReplayBuffer)
    assert model.replay_buffer.n_steps == 3
    assert given == {"n_steps": 3, "gamma": 0.5}
    plain = small(ICNNQ, replay_buffer_class=ReplayBuffer)
    assert type(plain.replay_buffer) is ReplayBuffer
    assert plain.n_steps == 1


def test_settings_that_do_not_fit_are_refused_at_the_door():
    options = SMALL[ICNNQ]["policy_kwargs"] | {"critics": 3}
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of 3 critics, got 64"):
        small(ICNNQ, policy_kwargs=options)
    with pytest.raises(ValueError, match="`gamma` must be below 1 for targets that are bounded"):
        small(ICNNQ, gamma=1.0)
    small(ICNNQ, gamma=1.0, rules=Rules(bounded=False))
    with pytest.raises(ValueError, match="has no `net_arch`: for widths of layers pass `form`"):
        small(ICNNQ, policy_kwargs={"net_arch": [64]})
    for name, value in (("n_steps", 0), ("noise", -1.0), ("rules", {"steps": 3})):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            small(ICNNQ, **{name: value})
    bad: dict[str, Any] = {"steps": 0, "target_steps": -1, "rate": -1.0, "entropy": -0.1}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            Rules(**{name: value})


def test_a_file_of_another_algorithm_is_refused(tmp_path: Path):
    small(ICNNQ).save(tmp_path / "model")
    with pytest.raises(ValueError, match="`policy` of NAF must be a QuadraticPolicy"):
        NAF.load(tmp_path / "model")


def test_checkpoints_of_several_environments_are_refused(tmp_path: Path):
    model = small(ICNNQ, make_vec_env(Identity, n_envs=2))
    with pytest.raises(ValueError, match="`env` must be one environment, got 2"):
        model.learn(10, callback=Checkpoint(tmp_path / "no"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_users_of_stable_baselines3_expect(algorithm: Any, tmp_path: Path):
    """Vectorised environments, n steps, evaluation while it learns, TensorBoard, normalisation."""
    env = make_vec_env(Identity, n_envs=3, seed=0)
    callback = EvalCallback(Identity(), eval_freq=50, best_model_save_path=str(tmp_path),
                            verbose=0, warn=False)  # fmt: skip
    model = small(algorithm, env, n_steps=2, tensorboard_log=str(tmp_path / "logs"))
    model.learn(450, callback=callback)
    assert (tmp_path / "best_model.zip").exists()
    assert list((tmp_path / "logs").glob(f"{algorithm.__name__}_1/events*"))
    assert int(model.policy.agent.seen.count) == 450
    normalised = VecNormalize(DummyVecEnv([Identity]), norm_obs=True, norm_reward=True)
    small(algorithm, normalised).learn(120)


def test_a_certified_action(learned: ICNNQ):
    states = np.random.default_rng(0).uniform(-1, 1, (20, 2)).astype(np.float32)
    solution = learned.solve(states)
    assert solution.converged.all()
    assert solution.gap.max() < 1e-2
    # By another solver, which is slow at the kinks of two critics, within the bounds of both.
    other = learned.solve(states, icnn.ProjectedGradient(rule="spectral", max_steps=300, tol=1e-4))
    assert (other.value >= solution.lower - 1e-6).all()
    assert (solution.value >= other.lower - 1e-6).all()
    assert other.gap.max() < 1e-2
    assert other.gap.median() < 1e-3
    quick = torch.from_numpy(learned.predict(states, deterministic=True)[0])
    away = (quick - solution.y) / learned.policy.reach
    assert away.abs().max() < 0.1
    energy = learned.energy(torch.from_numpy(states), solution.y)
    torch.testing.assert_close(energy.double(), solution.value, rtol=1e-4, atol=1e-4)


def test_constraints_without_learning_anew(learned: ICNNQ, tmp_path: Path):
    low, high = torch.tensor([0.0, 2.2]), torch.tensor([1.0, 2.4])
    learned.constrain(icnn.Box(low, high))
    env = Identity(50)
    state, _ = env.reset(seed=0)
    for i in range(50):
        action, _ = learned.predict(state, deterministic=i % 2 == 0)
        assert (action >= low.numpy()).all()
        assert (action <= high.numpy()).all()
        state, *_ = env.step(action)
    middle = learned.predict(np.array([-0.5, -0.4], np.float32), deterministic=True)[0]
    edge = learned.predict(np.array([0.9, 0.9], np.float32), deterministic=True)[0]
    np.testing.assert_allclose(middle, [0.0, 2.3], atol=0.1)
    np.testing.assert_allclose(edge, [1.0, 2.4], atol=0.01)
    learned.save(tmp_path / "limited")
    again = type(learned).load(tmp_path / "limited")
    assert np.array_equal(again.predict(np.ones(2, np.float32), deterministic=True)[0], edge)
    learned.constrain(None)
    assert learned.predict(np.array([0.9, 0.9], np.float32), deterministic=True)[0][0] > 2


class Symmetric(Identity):
    LOW, HIGH = np.array([-1.0, -0.5], np.float32), np.array([1.0, 0.5], np.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_budget_without_learning_anew(algorithm: Any):
    model = small(algorithm, Symmetric()).learn(700)
    budget = Budget(0.6, torch.tensor([1.0, 0.5]))
    states = np.random.default_rng(0).uniform(-1, 1, (60, 2)).astype(np.float32)
    model.constrain(budget)
    for deterministic in (True, False):
        actions, _ = model.predict(states, deterministic=deterministic)
        assert (np.abs(actions.astype(float)).sum(axis=1) <= 0.6).all()
    found = model.solve(states)
    quick = torch.from_numpy(model.predict(states, deterministic=True)[0])
    energy = model.energy(torch.from_numpy(states), quick).double()
    assert float((energy - found.value).mean()) < 0.01
    model.learn(30, reset_num_timesteps=False)  # also while it learns, at random and not
    assert model.replay_buffer is not None
    last = model.replay_buffer.actions[model.replay_buffer.pos - 30 : model.replay_buffer.pos, 0]
    assert (np.abs(last * Symmetric.HIGH).sum(axis=1) <= 0.6 + 1e-6).all()
    for bad, told in (
        (0.5, "an icnn.Box, an icnn.rl.Budget or a domain of yours"),
        (spaces.Box(0, 1), "an icnn.Box, an icnn.rl.Budget or a domain of yours"),
        (icnn.Box(torch.zeros(3), torch.ones(3)), "must be of 2 coordinates"),
        (icnn.Box(torch.zeros(1, 3), torch.ones(1, 3)), "must be of 2 coordinates"),
    ):
        with pytest.raises(ValueError, match=told):
            model.constrain(bad)  # pyright: ignore[reportArgumentType]
    for domain in (Budget(0.6), icnn.Box(-2.0, 0.0)):
        with pytest.raises(ValueError, match="`domain` must lie in the action space"):
            model.constrain(domain)


def test_loading_with_other_settings(learned: ICNNQ, tmp_path: Path):
    learned.save(tmp_path / "agent")
    again = type(learned).load(tmp_path / "agent", gamma=0.9, noise=0.7, n_steps=3)
    assert float(again.policy.agent.gamma) == pytest.approx(0.9)
    assert again.policy.noise == 0.7
    assert again.replay_buffer_kwargs == {"n_steps": 3, "gamma": 0.9}
    again.save(tmp_path / "other")
    assert type(learned).load(tmp_path / "other", n_steps=1).replay_buffer_kwargs == {}
    same = type(learned).load(
        tmp_path / "agent", policy_kwargs=SMALL[type(learned)]["policy_kwargs"]
    )
    assert same.policy.noise == 0.3


def test_defaults_are_the_same_everywhere():
    options, given = Training().options(), inspect.signature(ICNNQ).parameters
    policy = inspect.signature(GreedyPolicy).parameters
    for name, value in options.items():
        if name not in ("policy_kwargs", "rules", "n_steps"):
            assert given[name].default == value, name
    assert small(ICNNQ).n_steps == options["n_steps"], "unless there is a buffer of one's own"
    for name, value in options["policy_kwargs"].items():
        assert name == "form" or policy[name].default == value, name


def test_the_energy_is_convex(learned: ICNNQ):
    x, box = torch.rand(4, 2), icnn.Box(*map(torch.from_numpy, (Identity.LOW, Identity.HIGH)))
    report = icnn.check_convexity(learned.energy, x, box)
    assert report.counterexample is None


def test_the_paper_s_algorithm():
    options: dict[str, Any] = PAPER | {"learning_starts": 50, "batch_size": 32}
    model = ICNNQ("MlpPolicy", Identity(), seed=0, **options)
    model.learn(80)
    assert model.rules.entropy == 1
    assert len(model.policy.agent.critics.weights["head0"]) == 1
    assert not model.policy.agent.seen.used
    assert model.rules == Rules(
        entropy=1.0, bounded=False, calibrated=False, far=1.0, steps=30, target_steps=30
    )
    assert model.n_steps == 1


class Refused(Identity):
    def __init__(self, **spaces_: spaces.Space):
        super().__init__()
        self.__dict__.update(spaces_)


@pytest.mark.parametrize(("given", "told"), [
    ({"action_space": spaces.Discrete(3)}, "for discrete actions take Stable-Baselines3's DQN"),
    ({"action_space": spaces.Box(-np.inf, np.inf, (2,))}, "must have bounds on its actions"),
    ({"action_space": spaces.Box(*np.array([[0, 0], [0, 1]], np.float32))}, "with some room each"),
    ({"action_space": spaces.MultiBinary(3)}, "must have actions in a bounded Box"),
    ({"observation_space": spaces.Discrete(3)}, "gymnasium.wrappers.FlattenObservation"),
    ({"observation_space": spaces.Dict({"a": spaces.Box(0, 1)})}, "observations in a Box"),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_spaces_that_it_is_not_for(algorithm: Any, given: Any, told: str):
    with pytest.raises(ValueError, match=told):
        algorithm("MlpPolicy", DummyVecEnv([lambda: Refused(**given)]))
