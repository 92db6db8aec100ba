"""What all tests share: the code in the documents, the data folder, one thread per process."""

import os
from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Tests run in several processes; one thread each keeps sums the same to the bit.
torch.set_num_threads(1)

DATA = Path(os.environ.get("ICNN_DATA") or "/nowhere")
NO_DATA = "the real data files are missing: set $ICNN_DATA to the absolute path of their folder"
IN_CI = os.environ.get("CI") == "true"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a page's blocks in one process; leave out data tests where there is no data."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    # In CI they stay, and fail.
    if not DATA.is_dir() and not IN_CI:
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("data")])
        items[:] = [i for i in items if not i.get_closest_marker("data")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("data") and not DATA.is_dir():
        pytest.fail(NO_DATA, pytrace=False)


def pytest_terminal_summary(terminalreporter) -> None:
    if not DATA.is_dir() and not IN_CI:
        terminalreporter.write_line(f"tests marked `data`, if any, are deselected: {NO_DATA}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def names_in_docstrings(doctest_namespace) -> None:
    import icnn

    doctest_namespace.update(icnn=icnn, torch=torch)


@pytest.fixture(scope="module")
def in_a_folder_of_its_own(tmp_path_factory):
    """Documents may write files: not into the checkout."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("documents"))
    yield
    os.chdir(before)


# Every Python block of README and docs runs, the blocks of one page in one namespace.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    fixtures=["in_a_folder_of_its_own"],
).pytest()
