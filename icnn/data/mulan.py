"""Multi-label data of the Mulan project, with its own splits."""

from dataclasses import dataclass
from typing import Any

from icnn.checks import check_choice
from icnn.data.arff import MultiLabel, read_arff
from icnn.data.files import fetched

HOME = "https://raw.githubusercontent.com/tsoumakas/mulan/master/data/multi-label"


@dataclass(frozen=True)
class Source:
    """How many labels there are, in the last columns, and the sha256 of both files."""

    labels: int
    train: str
    test: str


SETS = {
    "bibtex": Source(
        159,
        "8dcc9de6e0b2cebaec8c1f4fac78431adeeb73cfd3ab879b530a66d366e59174",
        "9b03329cde64d3f994bdf7fbbac3f3b10fe185c311cb9ae725475f59c7f3f922",
    ),
    "delicious": Source(
        983,
        "030186cdb542ebdd32052fcdbb1ebe30115b3a22518c1b4b198c45eb827aebe1",
        "2dfb01723a819914b0ca83361177ed413ce3f2169851d9f228d4692915d63944",
    ),
}


def mulan(name: Any) -> tuple[MultiLabel, MultiLabel]:
    """The training and the test part of "bibtex" or "delicious".

    The files are taken from the folder that `$ICNN_DATA` names, if they are there; else they are
    fetched, once.
    """
    check_choice("name", name, list(SETS))
    source = SETS[name]
    parts = []
    for part, sha256 in (("train", source.train), ("test", source.test)):
        file = f"{name}-{part}.arff"
        parts.append(read_arff(fetched(file, f"{HOME}/{name}/{file}", sha256), source.labels))
    train, test = parts
    return train, test
