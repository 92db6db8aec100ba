"""What all tests share: the data folder, one thread per process, one seed."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Tests run in several processes; one thread each keeps sums the same to the bit.
torch.set_num_threads(1)

# Kernels are imported where their compiler is.
collect_ignore_glob = [
    f"icnn/kernels/{name}_*.py" for name in ("numba", "triton") if find_spec(name) is None
]

DATA = Path(os.environ.get("ICNN_DATA") or "/nowhere")
NO_DATA = "the real data files are missing: set $ICNN_DATA to the absolute path of their folder"
IN_CI = os.environ.get("CI") == "true"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the data tests where there is no data; in CI they stay, and fail."""
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
