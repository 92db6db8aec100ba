"""The bootstrap, against what is known of means."""

import numpy as np
import pytest
from scipy import stats

from icnn.experiments.statistics import paired_bootstrap


def test_it_is_the_interval_of_a_mean():
    random = np.random.default_rng(0)
    a, b = random.normal(0.1, 1, 2000), random.normal(0, 1, 2000)
    found = paired_bootstrap(a, b)
    apart = a - b
    half = 1.96 * apart.std() / np.sqrt(len(apart))
    assert found.mean == pytest.approx(apart.mean())
    assert found.low == pytest.approx(apart.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(apart.mean() + half, abs=0.1 * half)
    assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.01)  # pyright: ignore
    assert str(found).startswith("+0.0")


def test_what_is_the_same_does_not_differ():
    same = np.ones(50)
    assert paired_bootstrap(same, same).p == 1.0
    assert paired_bootstrap(same, 0 * same).p == pytest.approx(2 / 10_001)
    assert paired_bootstrap(same, same, seed=1) == paired_bootstrap(same, same, seed=2)
