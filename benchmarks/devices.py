"""Do estimators do on a GPU what they do on a CPU, and do their pickles open without one?

Each is fitted on both devices. What was fitted on the GPU is pickled, and asked again in a process
that sees none. Imputers learn the same on both; networks are trained from other random numbers, and
it is their error that can be compared.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits, make_multilabel_classification

import icnn
from icnn import report

AGAIN = """
import pickle, sys, warnings, numpy as np, torch
assert not torch.cuda.is_available()
warnings.simplefilter("ignore")
model, ask, rows = pickle.load(open(sys.argv[1], "rb"))
np.save(sys.argv[2], getattr(model, ask)(rows))
"""


def cases() -> dict[str, tuple[Any, str, np.ndarray, Any]]:
    """An estimator, what to ask it, and what it learns from."""
    random = np.random.default_rng(0)
    made: Any = (
        load_diabetes(return_X_y=True),
        make_multilabel_classification(400, 30, random_state=0),
    )
    (table, target), (words, tags) = made
    images = np.reshape(load_digits(return_X_y=True)[0], (-1, 8, 8))[:600]
    faces = random.normal(size=(120, 64, 64)).cumsum(axis=1).cumsum(axis=2) / 64
    gaps = np.where(random.uniform(size=table.shape) < 0.3, np.nan, table)
    return {
        "ConvexRegressor": (icnn.ConvexRegressor(random_state=0), "predict", table, target),
        "MultiLabelClassifier": (
            icnn.MultiLabelClassifier(random_state=0), "predict_proba", words, tags,
        ),
        "Imputer, table": (icnn.Imputer(random_state=0), "transform", gaps, None),
        "Imputer, 8 x 8 pictures": (
            icnn.Imputer(image_shape=(8, 8), random_state=0), "transform", images, None,
        ),
        "Imputer, 64 x 64 pictures": (
            icnn.Imputer(image_shape=(64, 64), random_state=0), "transform", faces, None,
        ),
    }  # fmt: skip


def asked(ask: str, X: np.ndarray) -> np.ndarray:
    """Rows of which something is missing, if that is what is asked for."""
    if ask != "transform" or np.isnan(X).any():
        return X
    holes = X[:50].copy()
    holes[:, X.shape[1] // 2 :] = np.nan
    return holes


def main() -> None:
    """Measure, print, write `results/devices.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the numbers")
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    rows: list[report.Row] = []
    for name, (model, ask, X, y) in cases().items():
        questions, answers, seconds = asked(ask, X), {}, {}
        for device in ("cuda", "cpu"):
            model.set_params(device=device)
            begin = time.perf_counter()
            model.fit(X, y)
            seconds[device] = time.perf_counter() - begin
            answers[device] = getattr(model, ask)(questions)
            if device == "cuda":
                answers["again"] = reopened(model, ask, questions)
        unit = float(np.nanstd(answers["cpu"]))
        apart = {
            d: np.nanmax(np.abs(answers["cuda"] - answers[d])) / unit for d in ("again", "cpu")
        }
        row: dict[str, str | float] = {"estimator": name}
        row |= {f"fit, {d}, s": f"{seconds[d]:.1f}" for d in ("cpu", "cuda")}
        row["opened without a GPU: largest difference"] = f"{apart['again']:.1e}"
        row["fitted on the CPU: largest difference"] = (
            f"{apart['cpu']:.1e}" if "Imputer" in name else ""
        )
        rows.append(row)
        print(report.table([row]), flush=True)
    told = report.result({"gpu": torch.cuda.get_device_name()}, rows)
    report.store("devices", told, out)


def reopened(model: Any, ask: str, questions: np.ndarray) -> np.ndarray:
    """What its pickle answers where no GPU is."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("model", "answers.npy")]
        files[0].write_bytes(pickle.dumps((model, ask, questions)))
        command = [sys.executable, "-c", AGAIN, *map(str, files)]
        subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        return np.load(files[1])


if __name__ == "__main__":
    main()
