"""Estimators fitted on a device that is not here."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import icnn

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4))


@pytest.mark.parametrize(
    ("model", "target", "ask"),
    [
        (icnn.ConvexRegressor(max_steps=5, random_state=0), X[:, 0], "predict"),
        (
            icnn.MultiLabelClassifier(epochs=1, random_state=0),
            (X[:, :2] > 0).astype(int),
            "predict_proba",
        ),
        (icnn.Imputer(random_state=0), None, "transform"),
        (icnn.Imputer(image_shape=(2, 2), random_state=0), None, "transform"),
    ],
)
def test_a_device_that_is_not_here_becomes_the_cpu(model: Any, target: Any, ask: str):
    model.fit(X, target)
    rows = X[:5].copy()
    if ask == "transform":
        rows[:, 0] = np.nan
    before = getattr(model, ask)(rows)
    model.device_ = torch.device("cuda:99")
    file = pickle.dumps(model)
    with pytest.warns(UserWarning, match="fitted on cuda:99, which is not here"):
        again = pickle.loads(file)
    assert again.device_ == torch.device("cpu")
    np.testing.assert_array_equal(getattr(again, ask)(rows), before)
