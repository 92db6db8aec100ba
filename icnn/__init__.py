"""Input convex neural networks: energies `f(x, y)` that are convex in `y` by construction."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from icnn import losses
from icnn.energies import activations
from icnn.energies.activations import Activation
from icnn.energies.calibration import calibrate_
from icnn.energies.compose import Max, Quadratic, Scale, Score, Sum
from icnn.energies.conv import ConvPICNN
from icnn.energies.convexify import convexify
from icnn.energies.convexity import check_convexity
from icnn.energies.energy import Energy
from icnn.energies.ficnn import FICNN
from icnn.energies.files import load, save
from icnn.energies.gaussian import Gaussian
from icnn.energies.layers import NonNegative, keep_convex, project_
from icnn.energies.picnn import PICNN
from icnn.learning.fit import fit
from icnn.learning.history import History
from icnn.solvers.argmin import argmin
from icnn.solvers.bundle import Bundle
from icnn.solvers.bundle_entropy import BundleEntropy
from icnn.solvers.domains import Box, Simplex
from icnn.solvers.exact import LinearProgram
from icnn.solvers.gradient import ProjectedGradient
from icnn.solvers.solution import Solution, Status
from icnn.solvers.stream import stream

if TYPE_CHECKING:
    from icnn import data as data
    from icnn import rl as rl
    from icnn.estimators.convex_regressor import ConvexRegressor
    from icnn.estimators.imputer import Imputer
    from icnn.estimators.multi_label_classifier import MultiLabelClassifier

__version__ = "0.1.0"

__all__ = [
    "FICNN",
    "PICNN",
    "Activation",
    "Box",
    "Bundle",
    "BundleEntropy",
    "ConvPICNN",
    "ConvexRegressor",
    "Energy",
    "Gaussian",
    "History",
    "Imputer",
    "LinearProgram",
    "Max",
    "MultiLabelClassifier",
    "NonNegative",
    "ProjectedGradient",
    "Quadratic",
    "Scale",
    "Score",
    "Simplex",
    "Solution",
    "Status",
    "Sum",
    "activations",
    "argmin",
    "calibrate_",
    "check_convexity",
    "convexify",
    "fit",
    "keep_convex",
    "load",
    "losses",
    "project_",
    "save",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Estimators, data and control need packages that are not needed for all the rest."""
    rooms = {
        "ConvexRegressor": "convex_regressor",
        "Imputer": "imputer",
        "MultiLabelClassifier": "multi_label_classifier",
    }
    if name in ("data", "rl"):
        return import_module(f"icnn.{name}")
    if name in rooms:
        from icnn.extras import require

        require("sklearn", "sklearn")
        return getattr(import_module(f"icnn.estimators.{rooms[name]}"), name)
    raise AttributeError(f"module 'icnn' has no attribute {name!r}")
