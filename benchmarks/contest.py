"""What comparisons with rivals share: gaps, tolerances, cosines, lines of a table."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import cvxpy as cp
import torch
from torch import Tensor

import icnn

TIGHT = 1e-8  # the tolerance at which gradients are compared
GRID = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)  # tolerances of rivals, loose first


def ready(module: str, how: str) -> bool:
    """Whether a rival is here; one that is missing is named."""
    found = find_spec(module) is not None
    if not found:
        print(f"{module} is not installed ({how}): left out")
    return found


def relative(value: Tensor, optimum: Tensor) -> float:
    """The largest true gap. The optimum is a solver's, so that it may be missed from below."""
    return float(((value - optimum) / value.abs().clamp(min=1)).abs().max())


def certified(solution: icnn.Solution) -> float:
    """The largest gap that was proven."""
    return float((solution.gap / solution.value.detach().abs().clamp(min=1)).max())


def loosest(gap: Callable[[float], float], enough: float) -> float:
    """The first tolerance of the grid with a small enough gap."""
    for tol in GRID:
        try:
            if gap(tol) <= enough:
                return tol
        except (cp.SolverError, ValueError):
            continue  # that loose, some solvers give no answer at all
    return GRID[-1]


def clarabel(tol: float) -> dict[str, float]:
    """Clarabel's tolerances."""
    return dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tol)


def cosine(found: Sequence[Tensor], known: Sequence[Tensor]) -> float:
    """The smallest over the parameters."""
    pairs = zip(found, known, strict=True)
    return min(float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) for a, b in pairs)


def row(problem: str, what: str, rival: str, ours: float, theirs: float, **more: Any) -> dict:
    """One line of the table, from seconds."""
    gaps = {f"gap {who}": f"{more.pop(f'gap_{who}'):.0e}" for who in ("icnn", "rival")}
    cosines = {
        f"cosine {who}": f"{more.pop(f'cosine_{who}'):.6f}" if f"cosine_{who}" in more else ""
        for who in ("icnn", "rival")
    }
    return {
        "problem": problem, "what": what, "rival": rival,
        "icnn, ms": 1e3 * ours, "rival, ms": 1e3 * theirs, "times": theirs / ours,
        **gaps, **cosines,
        "made once, ms": f"{1e3 * more['prepared']:.0f}" if "prepared" in more else "",
        "note": more.get("note", ""),
    }  # fmt: skip
