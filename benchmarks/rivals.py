"""How long to a relative gap of 1e-4, against what else one could use?

**A network**: a PICNN of two layers of 200 units on the unit box in 159 dimensions, steepened such
that several cuts are active in most answers. With entropy 1 against CVXPY and Clarabel on the
network's own conic form (an epigraph for each layer), and against the paper's algorithm in NumPy
(`benchmarks/paper_numpy.py`); without entropy against CVXPY and HiGHS on the linear program. The
conic form is made once with parameters for all that depends on `x`; that time is apart, and its
answers have no gradients.

**Layers with gradients**: the maximum of 100 planes in 100 dimensions on the unit box, minus an
entropy or plus a quadratic, forward and backward, against cvxpylayers (by its default solver, SCS,
and by Clarabel) and, for the quadratic, qpth. For us that is a sum of the planes and an
`icnn.Quadratic`, of which `icnn.Bundle` cuts the planes only.

Every rival has the loosest of a few tolerances, powers of ten, whose true gap is at most 1e-4; ours
has to prove its gap. Gradients are those of a random linear loss, at a tolerance of 1e-8 in float64
for all; cosines are to the exact ones, from the optimality conditions of the active pieces that a
tight Clarabel found (for the network: those of the paper's Proposition 3 at 1e-11). `times` is how
many times as long the rival takes.

Run as `python -m benchmarks.rivals [--fast]`, after `pip install --group bench` and, by itself
since its requirements take NumPy back to 1.x, `pip install --no-deps qpth`. Who is missing is named
and left out.
"""

import time
from collections.abc import Callable
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

import icnn
from benchmarks import paper_numpy
from benchmarks.contest import TIGHT, certified, clarabel, cosine, loosest, ready, relative, row
from benchmarks.options import options
from benchmarks.rival_layers import layer_rows
from benchmarks.timing import medians
from icnn import report

SETTINGS: dict[str, Any] = {
    "tol": 1e-4, "batch": 128, "conic examples": 8, "rounds": 5, "threads": 2, "seed": 0,
    "network": {"dim_x": 200, "dim_y": 159, "hidden": (200, 200), "stretch": 2.0, "scale": 40.0},
    "layers": {"n": 100, "pieces": 100, "slope": 4.0, "weight": 1.0, "rounds": 3},
}  # fmt: skip
FAST = {"batch": 16, "conic examples": 2, "rounds": 1}
TIGHTER = 1e-11
PACKAGES = ("cvxpy", "clarabel", "highspy", "cvxpylayers", "diffcp", "scs", "qpth")


def network(dtype: torch.dtype = torch.float32) -> tuple[icnn.PICNN, Tensor]:
    """A PICNN as it is drawn, but steeper in `y`, and a batch of `x`; numbers are float32 ones."""
    numbers = SETTINGS["network"]
    torch.manual_seed(SETTINGS["seed"])
    energy = icnn.PICNN(numbers["dim_x"], numbers["dim_y"], numbers["hidden"])
    with torch.no_grad():
        for name, weight in energy.named_parameters():
            last = name.startswith(f"layers.{len(numbers['hidden'])}.")
            if last and not any(gate in name for gate in ("wyu", "wzu")):
                weight.mul_(numbers["scale"])
            elif not last and ".wy." in name:
                weight.mul_(numbers["stretch"])
    return energy.to(dtype), torch.randn(SETTINGS["batch"], numbers["dim_x"]).to(dtype)


class Conic:
    """The network's own conic form, compiled once; what depends on `x` are parameters."""

    def __init__(self, entropy: bool):
        self.energy, self.x = network(torch.float64)
        self.entropy, self.parameters = entropy, []
        with torch.no_grad():
            layers = self.energy.describe(self.x)
        y = z = self.y = cp.Variable(self.energy.dim_y)
        constraints: list[Any] = [y >= 0, y <= 1]
        for layer in layers:
            gate, bias = self.parameter(layer.gate_y), self.parameter(layer.bias)
            total: Any = layer.wy.detach().numpy() @ cp.multiply(gate, y) + bias
            if layer.wz is not None:
                gate = self.parameter(layer.gate_z)
                total = total + layer.wz.detach().numpy() @ cp.multiply(gate, z)
            z = total
            if layer is not layers[-1]:
                z = cp.Variable(total.shape, nonneg=True)
                constraints.append(z >= total)
        bend = cp.sum(cp.entr(y)) + cp.sum(cp.entr(1 - y)) if entropy else 0
        self.problem = cp.Problem(cp.Minimize(cp.sum(z) - bend), constraints)
        assert self.problem.is_dpp()
        start = time.perf_counter()
        self.set(0)
        self.problem.get_problem_data(cp.CLARABEL if entropy else cp.HIGHS)
        self.prepared = time.perf_counter() - start

    def parameter(self, values: Tensor | None) -> cp.Parameter:
        """A parameter, and its values for every example."""
        assert values is not None
        parameter = cp.Parameter(values.shape[1:])
        self.parameters.append((parameter, values.numpy()))
        return parameter

    def set(self, example: int) -> None:
        """Take the parameters of an example."""
        for parameter, values in self.parameters:
            parameter.value = values[example]

    def solve(self, count: int, tol: float | None) -> Tensor:
        """The answers of the first few examples; without a tolerance, tight ones."""
        answers = []
        for example in range(count):
            self.set(example)
            if self.entropy:
                self.problem.solve(solver=cp.CLARABEL, **clarabel(tol or 1e-9))
            else:
                names = ("primal_feasibility_tolerance", "dual_feasibility_tolerance")
                options = dict.fromkeys(names, tol or 1e-9)
                self.problem.solve(solver=cp.HIGHS, highs_options=options)
            answers.append(np.clip(np.asarray(self.y.value), 0, 1))
        return torch.from_numpy(np.stack(answers))

    def value(self, y: Tensor) -> Tensor:
        """The objective of the first few examples."""
        with torch.no_grad():
            value = self.energy(self.x[: len(y)], y.double())
        return value - icnn.Box().entropy(y.double()) if self.entropy else value


def network_rows(settings: dict[str, Any], entropy: bool) -> list[dict]:
    """The network against its conic form and, with an entropy, against the paper's algorithm."""
    energy, x = network()
    count, batch, tol = (settings[name] for name in ("conic examples", "batch", "tol"))
    solver: Any = icnn.BundleEntropy(tol=tol) if entropy else icnn.Bundle(tol=tol)
    problem = "network, entropy" if entropy else "network, bare"
    slope = torch.randn(batch, energy.dim_y)
    whole = slope.double().numpy()

    def ours() -> icnn.Solution:
        return icnn.argmin(energy, x, icnn.Box(), entropy=float(entropy), solver=solver)

    def forward() -> icnn.Solution:
        with torch.no_grad():
            return ours()

    def both() -> None:
        energy.zero_grad()
        (ours().y * slope).sum().backward()

    def paper() -> paper_numpy.Answer:
        return paper_numpy.minimise(energy, x, tol)

    def paper_both() -> None:
        energy.zero_grad()
        paper_numpy.backward(energy, x, paper(), whole)

    turns: dict[str, Callable[[], Any]] = {"icnn": forward}
    conic, optimum, loose = None, torch.empty(0), tol
    if entropy or ready("highspy", "pip install --group bench"):
        conic = Conic(entropy)
        optimum = conic.value(conic.solve(count, None))
        loose = loosest(lambda tol: relative(conic.value(conic.solve(count, tol)), optimum), tol)
        turns["conic"] = lambda: conic.solve(count, loose)
    if entropy:
        turns |= {"icnn, both": both, "paper": paper, "paper, both": paper_both}
    seconds = medians(turns, settings["rounds"], 1)

    solution, rows = forward(), []
    gap = {"gap_icnn": certified(solution)}
    print(f"{problem}: {solution.report()}")
    if conic is not None:
        true = relative(conic.value(solution.y[:count]), optimum)
        print(f"true gap of icnn on {count} examples: {true:.1e}; tolerance of the rival {loose:g}")
        gap["gap_rival"] = relative(conic.value(conic.solve(count, loose)), optimum)
        note = f"{batch} scaled from {count}"
        name, theirs = "CVXPY + " + ("Clarabel" if entropy else "HiGHS"), seconds["conic"]
        prepared = {"prepared": conic.prepared, "note": note}
        first = row(problem, "forward", name, seconds["icnn"], theirs * batch / count,
                    **gap, **prepared)  # fmt: skip
        rows.append(first)
    if not entropy:
        return rows
    answer = paper()
    active = [len(cuts.slopes) for cuts in answer.cuts]
    gap["gap_rival"] = float((answer.gap / np.maximum(1, abs(answer.value))).max())
    name, note = "the paper's, NumPy", f"active cuts: median {np.median(active):g}"
    note += f", three or more in {np.mean(np.array(active) >= 3):.0%}"
    cosines = network_cosine(slope)
    tight = {"cosine_icnn": cosines[0], "note": f"cosine at {TIGHTER:g}: {cosines[1]:.6f}"}
    return [
        *rows,
        row(problem, "forward", name, seconds["icnn"], seconds["paper"], **gap, note=note),
        row(
            problem,
            "forward and backward",
            name,
            seconds["icnn, both"],
            seconds["paper, both"],
            **gap,
            **tight,
        ),
    ]


def network_cosine(slope: Tensor) -> list[float]:
    """All parameters' gradients at two tolerances in float64, against Proposition 3 at the tighter.

    A gap of 1e-8 may still hide a piece of the energy from one example or another.
    """
    energy, x = network(torch.float64)
    slope, found = slope.double(), []
    for solver in (icnn.BundleEntropy(tol=TIGHT), icnn.BundleEntropy(tol=TIGHTER), None):
        energy.zero_grad()
        if solver is None:
            answer = paper_numpy.minimise(energy, x, TIGHTER)
            paper_numpy.backward(energy, x, answer, slope.numpy())
        else:
            (icnn.argmin(energy, x, icnn.Box(), solver=solver).y * slope).sum().backward()
        parts = [p.grad.flatten() for p in energy.parameters() if p.grad is not None]
        found.append([torch.cat(parts)])
    return [cosine(ours, found[2]) for ours in found[:2]]


def main() -> None:
    """Compare, print, and write `results/rivals.json`; a fast run is only printed."""
    arguments = options(__doc__)
    SETTINGS["seed"] = arguments.seed
    if arguments.fast:
        SETTINGS.update(FAST)
        SETTINGS["layers"]["rounds"] = 1
    torch.set_num_threads(SETTINGS["threads"])
    rows = []
    for part in (network_rows, layer_rows):
        for kind in (True, False):
            rows += part(SETTINGS, kind)
    print(report.table(rows))
    if not arguments.fast:
        versions = {name: report.installed(name) or "missing" for name in PACKAGES}
        print(report.write("rivals", SETTINGS | {"versions": versions}, rows, arguments.out))


if __name__ == "__main__":
    main()
