"""Fitted estimators in files, for machines with other devices."""

import io
import warnings
from typing import Any

import torch
from sklearn.base import BaseEstimator

from icnn.checks import check_device


class Portable(BaseEstimator):
    """Pickles of what was fitted on a GPU are read without one, too."""

    device: Any
    device_: torch.device

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        if getattr(self, "device_", torch.device("cpu")).type == "cpu":
            return state
        buffer = io.BytesIO()
        torch.save(state, buffer)  # which says of tensors where they were
        return {"saved": buffer.getvalue(), "device_": str(self.device_)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "saved" in state:
            place, to = state["device_"], None
            try:
                check_device("device", place)
            except ValueError:
                warnings.warn(f"fitted on {place}, which is not here: on the CPU now", stacklevel=2)
                to = torch.device("cpu")
            state = torch.load(io.BytesIO(state["saved"]), to, weights_only=False)
            state["device_"] = to or state["device_"]
        super().__setstate__(state)
