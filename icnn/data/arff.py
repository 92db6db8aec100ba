"""Multi-label data in ARFF files, sparse or dense, as Mulan and Meka have them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from scipy import sparse

from icnn.checks import check_count
from icnn.extras import require

NUMERIC = ("REAL", "NUMERIC", "INTEGER")
WORDS = {"false": 0, "true": 1, "no": 0, "yes": 1, "f": 0, "t": 1, "n": 0, "y": 1}


@dataclass(frozen=True)
class MultiLabel:
    """Examples with any number of labels each.

    Attributes:
        X: Features, one row for each example: a sparse array where the file is sparse.
        Y: Ones where an example has a label, else zeros.
        features: Names of the columns of `X`.
        labels: Names of the columns of `Y`.
    """

    X: Any
    Y: np.ndarray
    features: tuple[str, ...]
    labels: tuple[str, ...]

    def __repr__(self) -> str:
        examples, features = self.X.shape
        return f"MultiLabel({examples} examples, {features} features, {len(self.labels)} labels)"


def read_arff(
    path: str | Path, labels: int | str | Path | Sequence[str] | None = None
) -> MultiLabel:
    """Read a file.

    Args:
        path: The file.
        labels: Which attributes are labels: how many at the end; their names; or an XML file that
            lists them. By default the XML file beside it: "yeast.xml" for "yeast-train.arff".

    Raises:
        ValueError: It is no such file. The message tells the line.
    """
    arff = require("arff", "data")
    path = Path(path)
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    data = re.search(r"^\s*@data\s*$(?:\s*(?:%.*)?\n)*\s*(\{)?", text, re.MULTILINE | re.IGNORECASE)
    thin = data is not None and data[1] is not None
    try:
        # As lines: of a text it would leave out blank ones at the top, and count from there.
        found = arff.loads(text.split("\n"), return_type=arff.LOD if thin else arff.DENSE)
    except arff.ArffException as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    attributes, rows = found["attributes"], found["data"]
    if not rows:
        raise ValueError(f"{path} has no examples")
    names = [name for name, _ in attributes]
    chosen = which(path, names, labels, found["relation"])
    columns = [number(path, name, kind, thin, name in chosen) for name, kind in attributes]
    table: Any = scattered(rows, columns) if thin else dense(rows, columns)
    own = np.array([names.index(name) for name in chosen])
    others = np.setdiff1d(np.arange(len(names)), own)
    Y = table[:, own].toarray() if thin else table[:, own]
    odd = np.argwhere(~np.isin(Y, (0, 1)))
    if len(odd):
        row, j = odd[0]
        got = f"{Y[row, j]:g} for `{chosen[j]}` in example {row + 1}, line {lines(text)[row]}"
        raise ValueError(f"{path}: labels must be 0 or 1, got {got}")
    X, features = table[:, others], [names[j] for j in others]
    X, features = spread(X, features, [attributes[j][1] for j in others])
    return MultiLabel(X, Y.astype(np.int64), tuple(features), tuple(chosen))


def lines(text: str) -> list[int]:
    """The number of the line of each example."""
    below, found = False, []
    for place, line in enumerate(text.split("\n"), start=1):
        if below and line.strip() and not line.lstrip().startswith("%"):
            found.append(place)
        below = below or line.strip().lower().startswith("@data")
    return found


def which(path: Path, names: Sequence[str], labels: Any, relation: str) -> list[str]:
    """The names of the labels."""
    if labels is None:
        stem = re.sub(r"[-_]?(train|test)$", "", path.stem, flags=re.IGNORECASE)
        labels, meka = path.with_name(f"{stem}.xml"), re.search(r"-C\s+(-?\d+)", relation)
        if not labels.is_file():
            if meka is None:
                raise ValueError(
                    f"`labels` must be given, as there is no {labels}: 14 for the last 14 "
                    "attributes, or a list of names"
                )
            count = int(meka[1])  # Meka's labels come first, or, with a minus, last
            labels = names[:count] if count > 0 else names[count:]
    if isinstance(labels, str | Path):
        try:
            root = ElementTree.parse(labels).getroot()
        except (ElementTree.ParseError, OSError) as error:
            got = repr(str(labels))
            told = (
                f"`labels` must be an XML file, a number or a list, got {got}: {error}; one name "
                f"is [{got}]"
            )
            raise ValueError(told) from error
        labels = [part.get("name") for part in root.iter() if part.tag.endswith("label")]
    elif isinstance(labels, float) or hasattr(labels, "__index__"):
        count = check_count("labels", labels)
        if count >= len(names):
            raise ValueError(f"`labels` must be at most {len(names) - 1}, got {labels}")
        labels = names[-count:]
    found: list[str] = list(labels)
    absent = [name for name in found if name not in names]
    if absent or not found or len(found) == len(names) or len(set(found)) < len(found):
        raise ValueError(
            f"`labels` must be attributes of {path}, each once and not all, got {absent or found}"
        )
    return found


def number(path: Path, name: str, kind: Any, thin: bool, label: bool) -> dict[Any, float] | None:
    """What stands for each value of an attribute; `None` where the value is a number itself."""
    if isinstance(kind, str):
        if kind.upper() in NUMERIC:
            return None
        raise ValueError(f"{path}: attribute `{name}` must be numeric or nominal, got {kind}")
    try:
        table = {value: float(value) for value in kind}
    except ValueError:
        table = {value: float(place) for place, value in enumerate(kind)}
        if label:  # which of two words is a yes must not depend on their order
            if not {value.lower() for value in kind} <= set(WORDS):
                told = f"{path}: label `{name}` must be 0 or 1, got values {', '.join(kind)}"
                raise ValueError(told) from None
            table = {value: float(WORDS[value.lower()]) for value in kind}
    if thin and table[kind[0]] != 0:  # what is left out is the first value
        raise ValueError(f"{path}: `{name}` is sparse, so that its first value must be 0")
    return table


def scattered(rows: list[dict[int, Any]], columns: Sequence[dict[Any, float] | None]) -> Any:
    """A sparse table."""
    starts = np.cumsum([0, *(len(row) for row in rows)])
    places = np.array([j for row in rows for j in row], dtype=np.int64)
    values = np.array([value(v, columns[j]) for row in rows for j, v in row.items()], dtype=float)
    found = sparse.csr_array((values, places, starts), shape=(len(rows), len(columns)))
    found.sort_indices()
    return found


def dense(rows: list[list[Any]], columns: Sequence[dict[Any, float] | None]) -> np.ndarray:
    """A full table."""
    return np.array([[value(v, c) for v, c in zip(row, columns, strict=True)] for row in rows])


def value(raw: Any, column: dict[Any, float] | None) -> float:
    """A value as a number; what is missing is none."""
    if raw is None:
        return float("nan")
    return float(raw) if column is None else column[raw]


def spread(X: Any, names: list[str], kinds: list[Any]) -> tuple[Any, list[str]]:
    """A column of its own for each value of an attribute that has three or more, not numbers."""
    parts, found, last = [], [], 0
    for j, kind in enumerate(kinds):
        if isinstance(kind, str) or sum(not is_number(v) for v in kind) < 3:
            continue
        column = X[:, [j]].toarray() if sparse.issparse(X) else X[:, [j]]
        each = np.where(np.isnan(column), np.nan, column == np.arange(len(kind)))
        parts += [X[:, last:j], sparse.csr_array(each) if sparse.issparse(X) else each]
        found += names[last:j] + [f"{names[j]}={v}" for v in kind]
        last = j + 1
    parts.append(X[:, last:])
    found += names[last:]
    return (sparse.hstack(parts, format="csr") if sparse.issparse(X) else np.hstack(parts)), found


def is_number(text: str) -> bool:
    """Whether a nominal value is one."""
    try:
        float(text)
    except ValueError:
        return False
    return True
