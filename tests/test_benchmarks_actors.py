"""Rivals in stacks: they compute what Stable-Baselines3 does."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from benchmarks import control_rivals
from benchmarks.actors import ALGORITHMS, ActorStack, model_of
from icnn.rl.lockstep import run

SIZE = 32


def filled(stack: ActorStack, agent: int, count: int) -> ReplayBufferSamples:
    """Transitions of an agent, in its memory and as Stable-Baselines3 has them."""
    S, n = stack.sizes[agent]
    rng = np.random.default_rng(agent)
    state, action, following = (
        torch.from_numpy(rng.normal(size=(count, size)).astype(np.float32)) for size in (S, n, S)
    )
    action = action.tanh()
    rest = torch.from_numpy(rng.normal(size=(count, 3)).astype(np.float32))
    rest[:, 1] = rest[:, 2] = (rest[:, 1] > 1).float()
    memory = stack.memory
    for part, values in ((memory.state, state), (memory.action, action),
                         (memory.following, following), (memory.rest, rest)):  # fmt: skip
        part[agent, :count, : values.shape[1]] = values
    memory.size.fill_(count)
    return ReplayBufferSamples(state, action, following, rest[:, 1:2], rest[:, :1])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_updates_are_those_of_stable_baselines(algo: str, monkeypatch: pytest.MonkeyPatch):
    """From the same weights, transitions and noise, beside an agent of other sizes."""
    agents = [("Hopper-v5", 0), ("Swimmer-v5", 1)]
    stack = ActorStack(agents, replace(ALGORITHMS[algo], batch_size=SIZE), total=50)
    data = [filled(stack, i, SIZE) for i in range(2)]
    stack.picks.copy_((torch.arange(SIZE) + 0.5) / SIZE)
    models: list[Any] = []
    for i, (task, _) in enumerate(agents):
        model = model_of(stack.one(i), gym.make(task))
        assert type(model) is getattr(stable_baselines3, algo)
        model.set_logger(Logger(None, []))
        monkeypatch.setattr(model.replay_buffer, "sample", lambda *a, d=data[i], **k: d)
        models.append(model)
    for update in range(1, 5):
        for i, model in enumerate(models):
            eps = stack.eps[:, i, :, : stack.sizes[i][1]]
            torch.manual_seed(update)
            model.train(1, SIZE)
            torch.manual_seed(update)  # what they have drawn
            if algo == "SAC":
                for part in eps:
                    part.copy_(torch.normal(torch.zeros(part.shape), torch.ones(part.shape)))
            else:
                eps[1] = torch.empty(eps[1].shape).normal_(0, 0.2) / 0.2
        stack._update(update % stack.training.delay == 0)
        for i, model in enumerate(models):
            assert_same(stack, i, model, data[i])


def assert_same(stack: ActorStack, i: int, model: Any, data: ReplayBufferSamples) -> None:
    """Values of all critics and their slow copies, actions, and the weight of the entropy."""
    (S, n), (wide, long) = stack.sizes[i], stack.worlds.wide
    close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)
    states, actions = torch.zeros(2, SIZE, wide), torch.zeros(2, SIZE, long)
    states[i, :, :S], actions[i, :, :n] = data.observations, data.actions
    for mine, theirs in ((stack.agent.critics, model.critic),
                         (stack.agent.slow_critics, model.critic_target)):  # fmt: skip
        values = torch.cat(theirs(data.observations, data.actions), dim=1).T
        close(stack.agent.values(mine, states, actions)[i], values)
    stack.state.copy_(states[:, 0])
    stack._copy(1)
    stack.act()
    action, _ = model.predict(data.observations[:1].numpy(), deterministic=True)
    close(stack.action[1, i, :n], torch.from_numpy(action[0]) / model.action_space.high[0])
    if stack.training.soft:
        close(stack.agent.log_alpha[i], model.log_ent_coef)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_runs_go_on_where_they_were_stopped(algo: str):
    settings = replace(ALGORITHMS[algo], widths=(16, 16), batch_size=8)
    agents = [("Hopper-v5", 0), ("Ant-v5", 1)]
    whole, first, second = (ActorStack(agents, settings, 500, 200) for _ in range(3))
    run([whole])
    first.total = 250
    run([first])
    second.restore(first.kept())
    run([second])
    assert torch.equal(whole.memory.rest, second.memory.rest)
    assert whole.tests == second.tests
    assert not whole.memory.action[0, :, 3:].any()
    assert whole.memory.action[1, :, 3:].any()
    assert np.isfinite(whole.finish(1)).all()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_update_has_noise_of_its_own(algo: str):
    """And actors learn in every second one in TD3, else in all."""
    told: list[tuple[bool, torch.Tensor]] = []

    class Telling(ActorStack):
        def _update(self, actors: bool) -> None:
            told.append((actors, self.eps.clone()))
            super()._update(actors)

    settings = replace(ALGORITHMS[algo], widths=(16,), batch_size=8)
    gammas = {"Swimmer-v5": 0.5}
    pair = Telling([("Swimmer-v5", 3), ("Hopper-v5", 4)], settings, 110, 60, gammas=gammas)
    assert pair.agent.gamma[:, 0].tolist() == pytest.approx([0.5, 0.99])
    run([pair])
    kinds, noises = zip(*told, strict=True)
    assert list(kinds) == [k % settings.delay == 0 for k in range(1, 11)]
    assert len({float(noise.sum()) for noise in noises}) == 10
    assert 0.9 < float(torch.stack(noises).std()) < 1.1
    # Alone, an agent does the same; up to the rounding of larger products.
    alone = ActorStack([("Hopper-v5", 4)], settings, 110, 60)
    run([alone])
    torch.testing.assert_close(alone.memory.rest[0], pair.memory.rest[1], atol=1e-4, rtol=1e-4)
    # In learning actors explore, under test they do not.
    for learning in (0, 1):
        values = set()
        for _ in range(3):
            pair.jitter.normal_()
            pair.act()
            values.add(float(pair.action[1 - learning].sum()))
        assert len(values) == (3 if learning else 1)


def test_runs_are_made_once_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    small = replace(ALGORITHMS["TD3"], widths=(8,), batch_size=8)
    monkeypatch.setitem(ALGORITHMS, "TD3", small)
    options = ["rivals", "--task", "Reacher", "--algo", "TD3", "--seeds", "2", "--steps", "2000",
               "--out", str(tmp_path / "stacked")]  # fmt: skip
    monkeypatch.setattr("sys.argv", options)
    control_rivals.main()
    path = tmp_path / "stacked" / "Reacher-TD3-1.json"
    written = path.read_bytes()
    # The same runs as if they were of Stable-Baselines3, and better by one.
    (tmp_path / "plain").mkdir()
    for i in range(2):
        told = json.loads((tmp_path / "stacked" / f"Reacher-TD3-{i}.json").read_text())
        told["final"] = [x - 1 for x in told["final"]]
        (tmp_path / "plain" / f"Reacher-TD3-{i}.json").write_text(json.dumps(told))
    beside = "--beside", str(tmp_path / "plain"), "--tables", str(tmp_path / "tables")
    monkeypatch.setattr("sys.argv", [*options, *beside])
    capsys.readouterr()
    control_rivals.main()
    told = capsys.readouterr()
    assert "2 of 2 runs are there" in told.err
    assert path.read_bytes() == written
    assert "| Reacher | TD3 | at the end |" in told.out
    assert (tmp_path / "tables" / "control-agreement.json").exists()
    assert "| +1 [" in told.out
    # With other settings it is another run.
    monkeypatch.setitem(ALGORITHMS, "TD3", replace(small, noise=0.3))
    monkeypatch.setattr("sys.argv", options)
    control_rivals.main()
    assert path.read_bytes() != written
    model = model_of(torch.load(path.parent / "agents/Reacher-TD3-1.pt", weights_only=False),
                     gym.make("Reacher-v5"))  # fmt: skip
    assert model.gamma == 0.99


def test_updates_are_checked(monkeypatch: pytest.MonkeyPatch):
    for name, settings in ALGORITHMS.items():
        monkeypatch.setitem(ALGORITHMS, name, replace(settings, widths=(16,), batch_size=16))
    rows = control_rivals.checked()
    assert [row["algorithm"] for row in rows] == list(ALGORITHMS)
    assert all(row["finite"] for row in rows)
    if not torch.cuda.is_available():
        for row in rows:
            assert not any(value for name, value in row.items() if "difference" in name)
