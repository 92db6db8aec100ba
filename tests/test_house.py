"""The house around the rooms: the command, the reports, the documents, missing extras and data."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import icnn
from benchmarks.energies import bare_value_and_gradient
from icnn import report
from icnn.cli import app
from icnn.experiments import demo
from icnn.extras import require

ROOT = Path(__file__).parent.parent


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_version_and_help():
    assert command("--version").startswith(f"icnn {icnn.__version__} (torch {torch.__version__}")
    assert "demo" in command("--help")
    assert all(option in command("demo", "--help") for option in ("--seed", "--out", "--fast"))
    shown = subprocess.check_output([sys.executable, "-m", "icnn", "--version"], text=True)
    assert shown == command("--version")


def test_wrong_options_are_refused_before_any_work(tmp_path: Path):
    (tmp_path / "file").touch()
    assert "--seed" in command("demo", "--seed", "-1")
    assert "--out" in command("demo", "--out", str(tmp_path / "file"))
    assert "--out" in command("demo", "--out", str(tmp_path / "file" / "below"))


def test_demo_draws_and_repeats_itself(tmp_path: Path):
    runs = [demo.run(demo.Settings(seed=5, out=tmp_path / str(i), fast=True)) for i in range(2)]
    assert runs[0]["numbers"] == runs[1]["numbers"]
    for i in range(2):
        assert json.loads((tmp_path / str(i) / "demo.json").read_text()) == runs[i]
        assert (tmp_path / str(i) / "demo.png").read_bytes().startswith(b"\x89PNG")
    bowl, valley, _, gaps = runs[0]["numbers"].values()
    assert bowl["FICNN, 64-64: chords below the curve"] == 0
    assert valley["slices f(x, .) that bend down, of 241"] == 0
    assert gaps["60 % of pixels, Imputer: largest certified gap"] < 1e-4


def test_synthetic_writes_numbers_a_picture_and_a_page(tmp_path: Path):
    told = command("reproduce", "synthetic", "--fast", "--final", "--out", str(tmp_path))
    result = json.loads((tmp_path / "synthetic.json").read_text())
    assert [row["data"] for row in result["rows"]] == ["moons", "circles", "linear", "blobs"]
    assert len(result["runs"]) == 16
    assert result["made"]["torch"] == torch.__version__
    assert result["rows"][0]["PICNN"] in told
    assert (tmp_path / "synthetic.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "synthetic.html").read_text()
    assert "data:image/png;base64," in page
    assert result["rows"][0]["RBF SVM"] in page
    assert "weight decay" in page
    (reading,) = (tmp_path / "readings.jsonl").read_text().splitlines()
    assert json.loads(reading)["rows"] == result["rows"]


@pytest.mark.data
def test_bibtex_writes_numbers_pictures_and_a_page(tmp_path: Path):
    told = command("reproduce", "bibtex", "--fast", "--final", "--out", str(tmp_path))
    result = json.loads((tmp_path / "bibtex.json").read_text())
    assert len(result["rows"]) == 11
    assert result["rows"][-1] == {
        "method": "DVN (published)", "F1 (examples)": "0.447", "F1 (labels)": "",
        "less kernel ridge": "", "training, s": "",
    }  # fmt: skip
    assert result["rows"][6]["F1 (examples)"] in told
    for name in ("labels", "pulls", "curves"):
        assert (tmp_path / f"bibtex-{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "bibtex.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "TF-IDF kernel ridge" in page
    for name in ("paper", "label-energy"):
        assert json.loads((tmp_path / f"bibtex-{name}.json").read_text())["rows"]
    begun, reading = (tmp_path / "readings.jsonl").read_text().splitlines()
    assert json.loads(begun)["begun"]
    assert json.loads(reading)["rows"] == result["rows"]
    assert not list(tmp_path.glob("unfinished*"))


@pytest.mark.data
def test_olivetti_writes_numbers_pictures_and_a_page(tmp_path: Path):
    told = command("reproduce", "olivetti", "--fast", "--final", "--out", str(tmp_path))
    result = json.loads((tmp_path / "olivetti.json").read_text())
    assert [row["method"] for row in result["rows"]][-2:] == [
        "same centre, no energy", "icnn.Imputer",
    ]  # fmt: skip
    assert result["rows"][-1]["left"] in told
    for name in ("left", "bottom", "gaps", "curves"):
        assert (tmp_path / f"olivetti-{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "olivetti.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "AT&amp;T Laboratories Cambridge" in page
    for name, count in (("paper", 4), ("gain", 4), ("people", 6), ("gaps", 4)):
        assert len(json.loads((tmp_path / f"olivetti-{name}.json").read_text())["rows"]) == count
    gaps = [gap for kind in result["gap of each face"].values() for gap in kind]
    assert 0 <= min(gaps) <= max(gaps) < 1e-3
    begun, reading = (tmp_path / "readings.jsonl").read_text().splitlines()
    assert json.loads(begun)["begun"]
    assert json.loads(reading)["rows"] == result["rows"]
    assert not list(tmp_path.glob("unfinished*"))


def test_control_writes_runs_tables_and_a_page(tmp_path: Path):
    options = ("--fast", "--task", "Hopper", "--algo", "ICNNQ", "--algo", "SAC", "--seeds", "2")
    told = command("reproduce", "control", *options, "--out", str(tmp_path))
    result = json.loads((tmp_path / "control.json").read_text())
    (row,) = result["rows"]
    assert row["ICNNQ"] in told
    assert "(2)" in row["SAC"]
    assert result["lead"][0]["than SAC"] in told
    assert row["state, action (paper)"] == "11, 3 (11, 3)"
    run = json.loads((tmp_path / "Hopper-ICNNQ-1.json").read_text())
    assert [test[0] for test in run["tests"]] == [0, 250]
    assert len(run["final"]) == 2
    assert run["settings"]["form"]["hidden"] == [8]
    assert (tmp_path / "agents" / "Hopper-ICNNQ-0.pt").exists()
    assert "data:image/png;base64," in (tmp_path / "control.html").read_text()
    again = command("reproduce", "control", *options, "--out", str(tmp_path))
    assert "4 of 4 runs are there already" in again
    assert not (tmp_path / "unfinished").exists()
    # A run with other settings is none of these.
    path = tmp_path / "Hopper-ICNNQ-0.json"
    path.write_text(path.read_text().replace('"tau": 0.0', '"tau": 0.1'))
    more = command("reproduce", "control", *options, "--out", str(tmp_path))
    assert "3 of 4 runs are there already" in more
    assert "`--task` must be one of" in command("reproduce", "control", "--task", "Hoper")
    film = command("reproduce", "control", "--algo", "SAC", "--film")
    assert "`--film` needs one of" in film


def test_control_is_the_same_spread_by_ray(tmp_path: Path):
    options = ("--fast", "--task", "Reacher", "--algo", "ICNNQ", "--algo", "SAC", "--seeds", "1")
    runs: list[dict[str, Any]] = []
    for engine in ("stack", "ray"):
        out = tmp_path / engine
        command("reproduce", "control", *options, "--engine", engine, "--out", str(out))
        runs.append({path.name: json.loads(path.read_text())["tests"]
                     for path in out.glob("Reacher-*-0.json")})  # fmt: skip
    assert len(runs[0]) == 2
    assert runs[0] == runs[1]


def test_estimators_are_found_by_name():
    from icnn.estimators.convex_regressor import ConvexRegressor

    assert icnn.ConvexRegressor is ConvexRegressor
    code = "import icnn; print(icnn.data.olivetti.__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "olivetti"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        icnn.Nothing  # noqa: B018  # pyright: ignore


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torch-icnn\[viz\]'"):
        require("no_such_module", "viz")
    monkeypatch.setitem(sys.modules, "typer", None)
    main = importlib.import_module("icnn.__main__").main
    with pytest.raises(SystemExit, match=r"icnn: typer is not installed: .*torch-icnn\[cli\]"):
        main()


def test_the_core_imports_no_extra():
    extras = "typer rich sklearn matplotlib gymnasium cvxpy onnx numba ray pooch tensorboard"
    code = f"import sys, icnn; print([m for m in {extras.split()} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_name_is_in_the_reference():
    reference = (ROOT / "docs/reference.md").read_text()
    assert {n for n in icnn.__all__ if f"::: icnn.{n}\n" not in reference} == set()


def test_tables_are_made_from_results(tmp_path: Path):
    row = {"": "a", "x": 1.23456, "y": 1234.5, "z": 0.0, "n": 7, "w": float("nan")}
    report.write("few", {"seed": 0}, [row], tmp_path)
    text = "before\n<!-- results: few -->\nold\n<!-- end -->\nafter\n"
    filled = report.fill(text, tmp_path)
    assert "| a | 1.23 | 1234 | 0 | 7 | nan |" in filled
    assert "old" not in filled
    assert report.fill(filled, tmp_path) == filled
    made = json.loads((tmp_path / "few.json").read_text())
    assert made["settings"] == {"seed": 0}
    assert made["made"]["torch"] == torch.__version__


def test_tables_in_the_documents_are_up_to_date():
    for document in report.documents([ROOT / "README.md", ROOT / "docs"]):
        text = document.read_text()
        assert report.fill(text, ROOT / "results") == text, f"{document}: run `make tables`"


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert all((ROOT / link).exists() for link in links if not link.startswith("http"))


def test_the_benchmark_compares_the_same_function():
    energy = icnn.PICNN(20, 7, (11, 5)).double()
    x, y = torch.randn(9, 20).double(), torch.randn(9, 7).double().requires_grad_()
    value, gradient = bare_value_and_gradient(energy.describe(x), y)
    torch.testing.assert_close(energy(x, y), value)
    torch.testing.assert_close(torch.autograd.grad(energy(x, y).sum(), y)[0], gradient)


DATA_TEST = "import pytest\n@pytest.mark.data\ndef test_data(): pass\ndef test_other(): pass\n"


@pytest.mark.parametrize(
    ("ci", "data", "outcome", "line"),
    [
        (
            "",
            False,
            {"passed": 1, "deselected": 1},
            "tests marked `data`, if any, are deselected: *",
        ),
        ("true", False, {"passed": 1, "errors": 1}, "*the real data files are missing*"),
        ("", True, {"passed": 2}, "*2 passed*"),
        ("true", True, {"passed": 2}, "*2 passed*"),
    ],
)
def test_data_tests_are_left_out_or_fail_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci, data, outcome, line
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("ICNN_DATA", str(pytester.path) if data else "")
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makepyfile(DATA_TEST)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines([line])
