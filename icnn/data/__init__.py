"""Data sets: read from files, or fetched once and checked."""

from icnn.data.arff import MultiLabel, read_arff
from icnn.data.mulan import mulan
from icnn.data.olivetti import Faces, olivetti

__all__ = ["Faces", "MultiLabel", "mulan", "olivetti", "read_arff"]
