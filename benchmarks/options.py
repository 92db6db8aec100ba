"""The options that every benchmark of speed has."""

import argparse
from pathlib import Path

from icnn import report


def options(description: str | None, **more: dict) -> argparse.Namespace:
    """Read `--fast`, `--seed`, `--out`, `--rounds`, and what else a benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="less of everything: a smoke test")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the numbers")
    parser.add_argument("--rounds", type=int, default=15, help="a median is over so many")
    for name, keywords in more.items():
        parser.add_argument(f"--{name}", **keywords)
    found = parser.parse_args()
    found.rounds = min(found.rounds, 2) if found.fast else found.rounds
    return found
