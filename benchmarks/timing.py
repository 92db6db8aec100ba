"""Fair timing: everything that is compared runs in turn, after a warm-up; medians count."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def medians(
    functions: Mapping[str, Callable[[], object]], rounds: int = 60, calls: int = 10
) -> dict[str, float]:
    """The median seconds of a call of each function.

    In every round each function has its turn of a few calls in a row, as a solver would make
    them: called once each in turn, they would throw each other's weights out of the cache.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(-rounds // 10, rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_ >= 0:
                seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(measured) for name, measured in seconds.items()}
