"""What long experiments share: they go on where they were stopped, and readings are noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

from icnn import report


class Settings(Protocol):
    """Of an experiment."""

    @property
    def seed(self) -> int: ...
    @property
    def seeds(self) -> int: ...
    @property
    def out(self) -> Path: ...
    @property
    def final(self) -> bool: ...


def seeds(settings: Settings) -> list[int]:
    """All of them."""
    return [(settings.seed + i) % 2**32 for i in range(settings.seeds)]


@contextmanager
def resumed(name: str, settings: Settings) -> Iterator[Any]:
    """Gives what keeps finished parts until all is done: `kept(function)(*args)`.

    Parts that other code made are not taken up. A run on the test set is noted as it begins: one
    that is stopped has read it, too.
    """
    from joblib import Memory

    if settings.final:
        report.note(settings.out, {"name": name, "begun": True, "settings": report.shown(settings)})
    done_before = settings.out / f"unfinished-{name}-{report.code()}"
    yield Memory(done_before, verbose=0).cache
    rmtree(done_before)
