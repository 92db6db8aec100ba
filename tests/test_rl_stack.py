"""Many agents in one process: each is on its own, and goes on where it was stopped."""

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from icnn.rl import Form, Quadratics, Rules
from icnn.rl import stack as module
from icnn.rl.learning import Batch, Training, is_far
from icnn.rl.lockstep import run
from icnn.rl.memory import Memory
from icnn.rl.stack import Stack
from icnn.rl.worlds import RESET, Worlds

TRAINING = Training(form=Form((16,), (8,)), batch_size=16, learning_starts=100)


def stack_of(
    seeds: list[int], total: int = 500, training: Training = TRAINING, **more: Any
) -> Stack:
    agents = [("Hopper-v5", seed) for seed in seeds]
    return Stack(agents, training, total=total, every=200, **more)


@pytest.fixture(scope="module")
def two() -> Any:
    stack = stack_of([0, 1])
    run([stack])
    return stack, stack.finish(2)


def test_what_happens_does_not_depend_on_processes(two: Any):
    stack, final = two
    other = stack_of([0, 1], workers=2)
    run([other])
    assert torch.equal(stack.memory.rest, other.memory.rest)
    assert np.array_equal(final, other.finish(2))
    assert stack.tests == other.tests
    other.worlds.close()


def test_agents_are_on_their_own(two: Any):
    stack, final = two
    alone = stack_of([1])
    run([alone])
    torch.testing.assert_close(alone.memory.rest[0], stack.memory.rest[1], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(alone.finish(2)[0], final[1], rtol=1e-3)


@pytest.mark.parametrize(
    "training",
    [
        TRAINING,
        replace(TRAINING, form=Form((8,), (8,), "relu", norm=False, bowl=False), critics=1,
                rules=Rules(entropy=0.3), standardised=False),
        replace(TRAINING, form=Quadratics((16,)), critics=1),
    ],
    ids=["ICNNQ", "paper", "NAF"],
)  # fmt: skip
def test_tasks_of_other_sizes_in_one_stack(training: Training):
    agents = [("Hopper-v5", 3), ("Ant-v5", 4), ("Swimmer-v5", 5)]
    mixed = Stack(agents, training, total=120, every=60)
    run([mixed])
    for i, agent in enumerate(agents):
        alone = Stack([agent], training, total=120, every=60)
        run([alone])
        torch.testing.assert_close(alone.memory.rest[0], mixed.memory.rest[i], atol=1e-4, rtol=1e-4)
        one, other = alone.one(0), mixed.one(i)
        assert one["sizes"] == other["sizes"]
        for name, value in one["agent"].items():
            torch.testing.assert_close(other["agent"][name], value, atol=1e-4, rtol=1e-3)
    # What is always zero has no weights, and no action.
    assert not mixed.memory.action[0, :, 3:].any()
    if isinstance(training.form, Form):
        assert not mixed.agent.critics.weights["wy0"][: training.critics, 3:].any()


def test_tests_are_made_in_time(two: Any):
    stack, final = two
    assert [[test[0] for test in one] for one in stack.tests] == [[0, 200, 400]] * 2
    assert final.shape == (2, 2)
    assert int(stack.agent.seen.count[0]) == 500


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("at", [250, 500])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(at: int, workers: int):
    """Stopped in the middle of episodes, of learning and of tests."""
    training = Training(form=Form((16,), (8,)), batch_size=16, learning_starts=100, n_steps=2)
    whole, first, second = (
        stack_of([0, 1], 750, training, workers=w) for w in (0, workers, workers)
    )
    run([whole])
    first.total = at
    run([first])
    kept = first.kept()
    second.restore(kept)
    run([second])
    assert torch.equal(whole.memory.rest, second.memory.rest)
    assert whole.tests == second.tests
    assert np.array_equal(whole.finish(2), second.finish(2))
    for a, b in zip(whole.agent.state_dict().values(), second.agent.state_dict().values(),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)
    for stack in (first, second):
        stack.worlds.close()


@pytest.mark.parametrize(
    "task", ["Ant-v5", "Humanoid-v5", "Reacher-v5", "InvertedDoublePendulum-v5"]
)
def test_worlds_go_on_where_they_were(task: str):
    one, other = (Worlds([task] * 2) for _ in range(2))
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (30, 2, one.wide[1])).astype(np.float32)

    def move(worlds: Worlds, action: np.ndarray) -> list[np.ndarray]:
        worlds.moves.what[:], worlds.moves.action[:] = 1, action
        worlds.start()
        return [m.copy() for m in worlds.wait()[2:]]  # all but what it is told

    one.moves.what[:], one.moves.seed[:] = 2, [3, 4]
    one.wait()
    for action in actions[:15]:
        move(one, action)
    other.restore(one.kept())
    other.moves.state[:] = one.moves.state
    for action in actions[15:]:
        for a, b in zip(move(one, action), move(other, action), strict=True):
            assert np.array_equal(a, b)


def test_worlds_are_those_of_gymnasium():
    worlds, env = Worlds(["Hopper-v5"]), gym.make("Hopper-v5")
    worlds.moves.what[:], worlds.moves.seed[:] = 2, 5
    worlds.wait()
    state, _ = env.reset(seed=5)
    rng, high = np.random.default_rng(0), 1.0
    for _ in range(60):
        np.testing.assert_array_equal(worlds.moves.state[0], state.astype(np.float32))
        action = rng.uniform(-high, high, 3).astype(np.float32)
        worlds.moves.what[:], worlds.moves.action[:] = 1, action
        moves = worlds.wait()
        state, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(moves.following[0], state.astype(np.float32))
        assert moves.reward[0] == np.float32(reward)
        assert (moves.terminated[0], moves.truncated[0]) == (terminated, truncated)
        if terminated or truncated:
            state, _ = env.reset()
    worlds.moves.what[:], worlds.moves.seed[:] = 2, RESET
    worlds.wait()
    np.testing.assert_array_equal(worlds.moves.state[0], env.reset()[0].astype(np.float32))


def by_hand(
    memory: Memory, agent: int, first: int, n: int, gamma: float
) -> tuple[float, int, float]:
    reward, k = 0.0, 0
    while True:
        gain, terminated, ended = memory.rest[agent, first + k].tolist()
        reward += gamma**k * gain
        k += 1
        if ended or k == n:
            return reward, first + k - 1, 0.0 if terminated else gamma**k


@pytest.mark.parametrize(("n", "share"), [(1, 1.0), (3, 1.0), (3, 0.5), (3, 0.0)])
def test_n_steps_end_with_the_episode(n: int, share: float):
    torch.manual_seed(0)
    memory = Memory(2, 40, (3, 2)).double()
    for _ in range(30):
        ended = (torch.rand(2) < 0.3).double()
        terminated = ended * (torch.rand(2) < 0.5)
        memory.add(
            state=torch.rand(2, 3).double(), action=torch.rand(2, 2).double(),
            following=torch.rand(2, 3).double(),
            rest=torch.stack([torch.rand(2).double(), terminated, ended], dim=1),
        )  # fmt: skip
    picks = torch.rand(2, 200, dtype=torch.float64)
    far = is_far(200, share)
    assert int(far.sum()) == 200 * share
    batch: Batch = memory.sample(picks, n, 0.9, far)
    first = (picks * (30 - n + 1)).long()
    assert int(first.max()) == 30 - n
    for agent in range(2):
        for j in range(200):
            i = int(first[agent, j])
            reward, last, discount = by_hand(memory, agent, i, n if far[j] else 1, 0.9)
            assert float(batch.rewards[agent, j]) == pytest.approx(reward)
            assert float(batch.discounts[agent, j]) == pytest.approx(discount)
            assert torch.equal(batch.states[agent, j], memory.state[agent, i])
            assert torch.equal(batch.actions[agent, j], memory.action[agent, i])
            assert torch.equal(batch.next_states[agent, j], memory.following[agent, last])


def test_caution_is_learned_from_steps_that_agents_chose():
    """By hand, from what is remembered, with critics that stay as they are."""
    training = replace(TRAINING, learning_rate=0.0, weight_decay=0.0, standardised=False)
    stack = stack_of([0, 1], 400, training)
    stack.agent.seen.caution.fill_(0.5)
    begin, caution = training.learning_starts, torch.full((2, 1), 0.5)
    believed = torch.zeros(400, 2, 1)
    chosen = stack.store

    def store() -> None:
        believed[stack.step] = stack.believed
        chosen()

    stack.store = store
    run([stack])
    f = stack.agent.at(stack.memory.state)
    means = -f.values(stack.memory.action).mean(dim=1).T[..., None]
    torch.testing.assert_close(believed[begin:], means[begin:], atol=1e-5, rtol=1e-5)
    for i in range(2):
        size = stack.memory.rest[i, :begin, 0].square().mean().sqrt()  # it has settled
        for k in range(begin, 400):
            gain, terminated, _ = stack.memory.rest[i, k].tolist()
            q, off = believed[k, i], 0.0
            if terminated:
                off = gain - q
            # When the next is made, what came of this one is known.
            if k > begin and not stack.memory.rest[i, k - 1, 2]:
                off = off + stack.memory.rest[i, k - 1, 0] + 0.99 * q - believed[k - 1, i]
            caution[i] = (caution[i] - 1e-3 * off / size).clamp(0, 1)
    torch.testing.assert_close(stack.agent.seen.caution, caution, rtol=1e-4, atol=1e-4)
    assert float((caution - 0.5).abs().min()) > 0.01, "or the test says nothing"


def test_other_algorithms_in_stacks():
    for training in (
        Training(form=Quadratics((16,)), critics=1, batch_size=16, learning_starts=50),
        Training(rules=Rules(entropy=1.0), form=Form((8,), (8,)), standardised=False, batch_size=16,
                 learning_starts=50, gradient_steps=2),
    ):  # fmt: skip
        stack = stack_of([3], 120, training)
        run([stack])
        assert all(bool(p.isfinite().all()) for p in stack.agent.parameters())


def test_what_is_compiled_does_the_same(monkeypatch: pytest.MonkeyPatch):
    training = replace(
        TRAINING, batch_size=64, form=Form((256,), (256,)), learning_starts=60, minibatches=2
    )
    plain = stack_of([0], 70, training)
    run([plain])
    monkeypatch.setattr(module, "LONG", 70)
    quick = stack_of([0], 70, training)
    assert (quick.act != quick._act) == module.compiles(torch.device("cpu"))
    run([quick])
    torch.testing.assert_close(quick.memory.rest, plain.memory.rest, atol=1e-4, rtol=1e-3)
    for name, value in plain._tensors().items():
        torch.testing.assert_close(quick._tensors()[name], value, atol=1e-3, rtol=1e-2)


def test_without_a_compiler_runs_are_slower(monkeypatch: pytest.MonkeyPatch):
    def broken(function: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(module, "compiled", broken)
    monkeypatch.setattr(module, "LONG", 12)
    module.compiles.cache_clear()
    with pytest.warns(UserWarning, match="PyTorch cannot compile here, .*: no compiler"):
        stack = stack_of([0], 12, TRAINING)
    module.compiles.cache_clear()
    run([stack])
    assert stack.act == stack._act
