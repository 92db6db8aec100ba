"""Control: improvements are told apart, and limits are kept."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import SAC

from benchmarks import constraints
from icnn.experiments import control_algorithms as algorithms
from icnn.experiments import control_films
from icnn.experiments.control import Settings
from icnn.experiments.control_agents import model_of
from icnn.experiments.control_runs import Job, together
from icnn.experiments.control_tables import numbers
from icnn.rl.learning import PAPER, Training


def test_improvements_are_all_that_the_two_algorithms_do_not_share():
    names = tuple(name for fields in algorithms.IMPROVEMENTS.values() for name in fields)
    assert algorithms.taken(PAPER, Training(), names) == Training()
    assert algorithms.taken(Training(), PAPER, names) == PAPER
    assert len(set(algorithms.ABLATION.values()) | {PAPER, Training()}) == (
        2 + len(algorithms.ABLATION)
    ), "no two are alike"
    told = {name[1:] for name in (n.lstrip("ICNQ") for n in algorithms.ABLATION)}
    assert told == set(algorithms.WHAT)


def test_the_table_says_what_is_missing():
    settings = Settings(table=True, seed=10)
    jobs = settings.runs()
    assert jobs[0] == ("Ant", "ICNNQ", 10)
    assert jobs[-1] == ("Walker2d", "DDPG", 12)
    assert len(jobs) == 10 * sum(algorithms.TABLE.values())
    told = {
        (algo, seed): {
            "settings": {"task": "Hopper", "algo": algo, "seed": seed, "engine": "stack"},
            "made": {"device": "CPU", "seconds": 60}, "sizes": [11, 3],
            "final": [100.0 * seed, 100.0 * seed], "tests": [[0, 5.0 * seed, 1.0]],
        }
        for algo, seed in (("ICNNQ", 1), ("ICNNQ", 2), ("TD3", 0), ("TD3", 1), ("TD3", 2))
    }  # fmt: skip
    found = numbers(list(told.values()), algorithms.TABLE)
    (row,), (best,), (lead,) = (found[name] for name in ("rows", "maxima", "lead"))
    assert row["ICNNQ"] == "150 ± 70.71 (2 of 5)"
    assert best["ICNNQ"] == "7.5 ± 3.536 (2 of 5)"
    assert row["TD3"] == "100 ± 100 (3)"
    assert row["SAC"] == "missing"
    assert str(lead["than TD3"]).startswith("+50 [-")
    assert [cost["minutes each"] for cost in found["cost"]] == ["1", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Agents as the experiment leaves them: hardly trained."""
    out = tmp_path_factory.mktemp("control")
    together([Job("Hopper", "ICNNQ", 0, 120, 100, 1)], out, True, lambda step: None)
    model = SAC("MlpPolicy", "Hopper-v5", device="cpu", policy_kwargs={"net_arch": [8]})
    model.save(out / "agents" / "Hopper-SAC-0.zip")
    return out


def test_limits_are_kept(runs: Path):
    model = model_of(runs / "agents" / "Hopper-ICNNQ-0.pt", gym.make("Hopper-v5"))
    for limit in constraints.LIMITS.values():
        model.constrain(limit.domain)
        returns, actions = constraints.played(model, "Hopper", 50, np.asarray, 0)
        assert len(returns) == 10
        assert (limit.excess(np.concatenate(actions)) <= 0).all()
    wild = np.random.default_rng(0).uniform(-1, 1, (1000, 3)).astype(np.float32)
    for limit in constraints.LIMITS.values():
        assert (limit.excess(wild) > 0).any()
        for cut in (constraints.nearest(limit.domain), limit.smaller):
            assert (limit.excess(cut(wild)) <= 0).all()


def test_limits_as_a_table(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    options = ["constraints", "--runs", str(runs), "--out", str(tmp_path), "--steps", "10"]
    monkeypatch.setattr("sys.argv", options)
    monkeypatch.setattr(constraints, "TASKS", ("Hopper",))
    constraints.main()
    told = capsys.readouterr().out
    assert told.count("| ICNNQ |") == 3
    assert told.count("SAC, smaller action") == 2
    assert (tmp_path / "control-constraints.json").exists()
    monkeypatch.setattr("sys.argv", ["constraints", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit, match="agents of ICNNQ and SAC"):
        constraints.main()


def test_films_are_of_the_best_agents_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told = [
        {"settings": {"task": task, "algo": algo, "seed": seed}, "final": [float(final)]}
        for task, algo, seed, final in (
            ("Hopper", "ICNNQ", 0, 1), ("Hopper", "ICNN", 1, 2), ("Hopper", "ICNNQ", 2, 3),
            ("Hopper", "SAC", 0, 4), ("Swimmer", "NAF", 0, 1),
        )
    ]  # fmt: skip
    (tmp_path / "agents").mkdir()
    for name in ("Hopper-ICNNQ-0", "Hopper-ICNN-1", "Swimmer-NAF-0"):
        (tmp_path / "agents" / f"{name}.pt").touch()
    seen: list[str] = []

    def filmed(task: str, agent: Path) -> list[np.ndarray]:
        seen.append(agent.stem)
        return [np.full((8, 8, 3), i, np.uint8) for i in range(3)]

    monkeypatch.setattr(control_films, "filmed", filmed)
    paths = control_films.films(("Swimmer", "Ant", "Hopper"), told, tmp_path)
    assert seen == ["Swimmer-NAF-0", "Hopper-ICNN-1"]
    assert [path.name for path in paths] == ["Swimmer-NAF-0.gif", "Hopper-ICNN-1.gif", "films.png"]
    assert all(path.stat().st_size for path in paths)
