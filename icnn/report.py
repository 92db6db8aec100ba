"""Results as JSON, and the tables that documents make from them: no number is typed.

A document holds `<!-- results: NAME -->` and `<!-- end -->` on lines of their own; what stands
between them is made from `results/NAME.json` by `python -m icnn.report README.md docs`.
"""

import base64
import hashlib
import json
import math
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path("results")
PACKAGES = ("torch-icnn", "torch", "numpy", "scipy", "scikit-learn")
PLACE = re.compile(r"(<!-- results: ([\w/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

INNERMOST = re.compile(r"\[[^][{}\"]*\]")  # a list of numbers: on one line

Row = Mapping[str, str | float]

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto;
  padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }}
td, th {{ padding: 0.2rem 0.8rem; border-bottom: 1px solid #8884 }}
img {{ max-width: 100%; background: white }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181a1f; color: #ddd }} }}
</style></head><body>
{body}
</body></html>
"""


def shown(settings: Any) -> dict[str, Any]:
    """The settings of an experiment, for a file."""
    return {**vars(settings), "out": str(settings.out)}


def result(settings: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """A table with all that it takes to make it again."""
    return {
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
        "made": {
            "on": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            **{package: found for package in PACKAGES if (found := installed(package))},
        },
    }


def write(
    name: str, settings: Mapping[str, Any], rows: Sequence[Row], folder: Path = RESULTS
) -> Path:
    """Store a table."""
    return store(name, result(settings, rows), folder)


def store(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write a result to its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    text = INNERMOST.sub(lambda found: " ".join(found[0].split()), json.dumps(result, indent=2))
    part.write_text(text + "\n", encoding="utf-8")
    return part.replace(path)  # at once: half a file is none


def publish(
    name: str,
    title: str,
    result: Mapping[str, Any],
    parts: Sequence[str | Path | Sequence[Row]],
    folder: Path,
    *,
    reading: bool,
) -> list[Path]:
    """What an experiment leaves behind: its JSON, a page to look at, and a note of each reading.

    Args:
        name: Of the files.
        title: Of the page.
        result: As `result` makes it, with what else there is to keep.
        parts: Of the page, in turn: text, a picture's path, or the rows of a table.
        folder: Where to.
        reading: Whether the test set was looked at: then a line in `readings.jsonl` says so.
    """
    made = store(name, result, folder)
    if reading:
        note(folder, {"name": name, **{key: result[key] for key in ("made", "settings", "rows")}})
    path = folder / f"{name}.html"
    path.write_text(page(title, result, parts), encoding="utf-8")
    return [made, path]


def note(folder: Path, what: Mapping[str, Any]) -> None:
    """Add a line to the list of readings of test sets."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "readings.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def code() -> str:
    """A name for all code of this package, and the versions that it runs on."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    found.update(repr([installed(package) for package in PACKAGES]).encode())
    return found.hexdigest()[:12]


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


def page(title: str, result: Mapping[str, Any], parts: Sequence[Any]) -> str:
    """One HTML file, pictures within it."""
    body = [f"<h1>{escape(title)}</h1>"]
    for part in parts:
        if isinstance(part, str):
            body += [paragraph(text) for text in part.strip().split("\n\n")]
        elif isinstance(part, Path):
            data = base64.b64encode(part.read_bytes()).decode()
            body.append(f'<img alt="{escape(part.stem)}" src="data:image/png;base64,{data}">')
        else:
            head, rule, *lines = (line[2:-2].split(" | ") for line in table(part).splitlines())
            sides = ["right" if cell.endswith(":") else "left" for cell in rule]
            rows = [("th", head), *(("td", line) for line in lines)]
            cells = (
                "".join(
                    f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
                    for side, cell in zip(sides, line, strict=True)
                )
                for tag, line in rows
            )
            body.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    for key in ("settings", "made"):
        lines = "".join(
            f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
            for name, value in result[key].items()
        )
        body.append(f"<h2>{key.capitalize()}</h2><table>{lines}</table>")
    return PAGE.format(title=escape(title), body="\n".join(body))


def paragraph(text: str) -> str:
    """A paragraph, or a numbered list, of a docstring."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    first, *items = re.split(r"^\d+\. ", text, flags=re.MULTILINE)
    if first or not items:
        return f"<p>{text}</p>"
    return f"<ol>{''.join(f'<li>{item.strip()}</li>' for item in items)}</ol>"


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
