"""Results as JSON, and the tables that documents make from them: no number is typed.

A document holds `<!-- results: NAME -->` and `<!-- end -->` on lines of their own; what stands
between them is made from `results/NAME.json` by `python -m icnn.report README.md docs`.
"""

import json
import math
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path("results")
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn")
PLACE = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Mapping[str, str | float]


def write(
    name: str, settings: Mapping[str, Any], rows: Sequence[Row], folder: Path = RESULTS
) -> Path:
    """Store a table with all that it takes to make it again."""
    result = {
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
        "made": {
            "on": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            **{package: found for package in PACKAGES if (found := installed(package))},
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def installed(package: str) -> str | None:
    """The version of a package, if it is there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, numbers to the right and to three digits."""

    def cell(value: str | float) -> str:
        # Three digits, but never an exponent; counts as they are.
        if isinstance(value, str | int) or not math.isfinite(value):
            return str(value)
        digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:.{digits}f}"

    columns = list(rows[0])
    rules = ["---" if isinstance(rows[0][column], str) else "---:" for column in columns]
    lines = [columns, rules, *([cell(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def fill(text: str, folder: Path = RESULTS) -> str:
    """`text` with every table made anew from its results."""

    def made(place: re.Match[str]) -> str:
        result = json.loads((folder / f"{place[2]}.json").read_text())
        return f"{place[1]}{table(result['rows'])}{place[3]}"

    return PLACE.sub(made, text)


def documents(paths: Sequence[Path]) -> list[Path]:
    """The Markdown files among `paths` and below them."""
    return [file for path in paths for file in (sorted(path.rglob("*.md")) or [path])]


if __name__ == "__main__":
    for document in documents([Path(argument) for argument in sys.argv[1:]]):
        document.write_text(fill(document.read_text()))
