"""What does the gradient of an argmin cost beyond a double backward over its active cuts?

Both start from a finished search, on the same `at(x)` with its graph, and end with the gradients
of all parameters:

- icnn: `differentiate` (which cuts count, their slopes with a graph, the equations of the answer)
  and `backward` of a random linear loss of the answers;
- bare: for each of the most active cuts a value and its slope with a graph, and one `backward`
  of a random linear function of both. That is Proposition 3 without solving for its weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import icnn
from benchmarks.argmin import NETS, At, Net, inputs, steep, threads, trained, with_entropy
from benchmarks.options import options
from benchmarks.timing import medians
from icnn import report
from icnn.energies.energy import at
from icnn.solvers.differentiate import differentiate
from icnn.solvers.graph import Watched
from icnn.solvers.problem import Problem, Record

SETTINGS: dict[str, Any] = {"seed": 0, "steps": 10, "dtype": "float32"}


def solved(net: Net, weights: str, device: str) -> tuple[icnn.Energy, Problem, Record]:
    """A search whose answer is to be differentiated."""
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(SETTINGS["seed"])
    energy = steep(net.make().to(device))
    if weights == "trained":
        energy = trained(net, energy, device)
    x = inputs(net, net.batches[0], device)
    y = torch.full((len(x), *energy.y_shape), 0.5, device=device)
    with torch.no_grad():
        frozen = At(energy.at(x), energy.y_shape)
    entropy = with_entropy(net, weights, len(x), frozen, x).entropy
    f = Watched(at(energy, x))
    problem = Problem(f, icnn.Box(), entropy, y, None, energy, x, "auto")
    with torch.no_grad():
        record = icnn.BundleEntropy(max_steps=SETTINGS["steps"], tol=0).solve(problem)
    return energy, problem, record


def bare(problem: Problem, points: Tensor, lam: Tensor, parameters: Sequence[Tensor]) -> None:
    """Value and slope of every slot, and back."""
    total = torch.zeros((), device=lam.device)
    for point, share in zip(points.unbind(dim=1), lam.unbind(dim=1), strict=True):
        point = point.detach().requires_grad_()
        value = problem.energy(point)
        (slope,) = torch.autograd.grad(value.sum(), point, create_graph=True)
        total = total + (share * (value + slope.flatten(start_dim=1).sum(dim=1))).sum()
    torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)


def row(net: Net, weights: str, device: str, rounds: int) -> report.Row:
    """One line of the table."""
    energy, problem, record = solved(net, weights, device)
    assert record.pieces is not None
    lam = record.pieces.lam
    most = int((lam > 0).sum(dim=1).max())
    order = lam.argsort(dim=1, descending=True)[:, :most]
    rows = torch.arange(len(lam), device=lam.device)[:, None]
    points = record.pieces.points[rows, order].unflatten(2, record.y.shape[1:])
    shares = lam[rows, order].to(points.dtype)
    parameters = [p for p in energy.parameters() if p.requires_grad]
    loss = torch.randn_like(record.y)

    def ours() -> None:
        y = differentiate(problem, record, lambda problem: record).y
        torch.autograd.grad(y, parameters, loss, retain_graph=True, allow_unused=True)

    seconds = medians(
        {"icnn": ours, "bare": lambda: bare(problem, points, shares, parameters)}, rounds, 1
    )
    return {
        "network": net.name,
        "n": points[0, 0].numel(),
        "B": len(lam),
        "weights": weights,
        "active cuts": float((lam > 0).double().sum(dim=1).mean()),
        "at most": most,
        "icnn, ms": 1e3 * seconds["icnn"],
        "bare, ms": 1e3 * seconds["bare"],
        "ratio": seconds["icnn"] / seconds["bare"],
    }


def main() -> None:
    """Measure, print, write `results/backward-cpu.json`, or `-cuda`."""
    arguments = options(__doc__)
    SETTINGS["seed"] = arguments.seed
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for net in NETS[:1] if arguments.fast else NETS:
        for weights in ("random", "trained"):
            rows.append(row(net, weights, device, arguments.rounds))
            print(report.table(rows[-1:]).splitlines()[2], flush=True)
    print(report.table(rows))
    if not arguments.fast:
        where = torch.cuda.get_device_name() if device == "cuda" else threads()
        print(report.write(f"backward-{device}", {**SETTINGS, "where": where}, rows, arguments.out))


if __name__ == "__main__":
    main()
