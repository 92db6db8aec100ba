"""Long runs go on where they were stopped, and note when they read the test set."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from icnn.experiments import runs


@dataclass(frozen=True)
class Settings:
    out: Path
    final: bool
    seed: int = 2**32 - 1
    seeds: int = 2


def double(x: int) -> int:
    print("computed")
    return 2 * x


@pytest.mark.parametrize("final", [False, True])
def test_what_is_done_is_kept_until_all_is(
    tmp_path: Path, final: bool, capsys: pytest.CaptureFixture[str]
):
    settings = Settings(tmp_path, final)
    assert runs.seeds(settings) == [2**32 - 1, 0]

    def stopped() -> None:
        with runs.resumed("some", settings) as kept:
            assert kept(double)(1) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with runs.resumed("some", settings) as kept:
        assert [kept(double)(x) for x in (1, 2)] == [2, 4]
    assert capsys.readouterr().out.count("computed") == 2
    assert not list(tmp_path.glob("unfinished*"))
    readings = tmp_path / "readings.jsonl"
    notes = [json.loads(line) for line in readings.read_text().splitlines()] if final else []
    assert [note["name"] for note in notes] == ["some"] * 2 * final
    assert all(note["begun"] for note in notes)
    assert readings.exists() == final
