"""How many threads a training is worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 2e6  # multiplications in a layer of a step


@contextmanager
def threads(work: float) -> Iterator[None]:
    """One thread where the products of a step are small: more would wait for each other."""
    before = torch.get_num_threads()
    if work < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
