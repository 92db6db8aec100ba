"""How many threads a training is worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

SMALL = 2e6  # multiplications in a layer of a step


@contextmanager
def threads(work: float) -> Iterator[None]:
    """One thread where the products of a step are small: more would wait for each other."""
    if work >= SMALL:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):  # of NumPy, SciPy and scikit-learn
            yield
    finally:
        torch.set_num_threads(before)
