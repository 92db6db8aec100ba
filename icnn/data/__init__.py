"""Data sets: read from files, or fetched once and checked."""

from icnn.data.arff import MultiLabel, read_arff
from icnn.data.mulan import mulan

__all__ = ["MultiLabel", "mulan", "read_arff"]
