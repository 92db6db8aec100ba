"""Does a certificate ever lie, and is it worth having?

Random problems in batches: planes, quadratics, log-sum-exp and networks, of up to ten dimensions,
on boxes and simplices, with entropies from 0.05 to 10 or none and slopes from 1e-3 to 1e5, in
float32 and float64, each solved by a random solver that is stopped after a random number of steps.
`lower` is compared with the objective at 1,000 random points, and at the answer of a bundle method
after many more steps. Other problems, made of planes, have an exact optimum by Clarabel: how much
larger is a gap than the true error? Excesses are in units of the rounding that certificates are
promised up to, `32 * eps * (|value| + sum |g_i y_i|)`: above one is a lie.

Run as `python -m benchmarks.certificates [bounds | exact]`; both by default.
"""

import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import icnn
from icnn import report

SETTINGS = {
    "problems": 100_000, "exact": 1000, "batch": 250, "points": 1000, "tight": 15, "seed": 0
}  # fmt: skip
KINDS = ("planes", "quadratic", "logsumexp", "network")


@dataclass
class Case:
    """A batch of random problems of one kind; `x` is a tuple, one row for each."""

    kind: str
    energy: Callable[[Any, Tensor], Tensor]
    x: tuple[Tensor, ...]
    n: int
    domain: Any
    entropy: float
    solver: Any
    dtype: torch.dtype

    def value(self, y: Tensor) -> Tensor:
        """The objective in float64, for points `(P, B, n)`: `(P, B)`."""
        count = y.shape[0]
        x = tuple(part.double().repeat(count, *(1 for _ in part.shape[1:])) for part in self.x)
        energy = self.energy.double() if isinstance(self.energy, icnn.Energy) else self.energy
        with torch.no_grad():
            values = energy(x, y.double().flatten(0, 1)).reshape(count, -1)
        return values - self.entropy * torch.stack([self.domain.entropy(p.double()) for p in y])

    def solve(self, solver: Any, dtype: torch.dtype) -> icnn.Solution:
        """The answers of a solver, in a dtype."""
        x = tuple(part.to(dtype) for part in self.x)
        domain = self.domain
        if isinstance(domain, icnn.Box):
            domain = icnn.Box(*(torch.as_tensor(b).to(dtype) for b in (domain.low, domain.high)))
        start = domain.center(torch.empty(len(x[0]), self.n, dtype=dtype))
        energy = self.energy.to(dtype) if isinstance(self.energy, icnn.Energy) else self.energy
        return icnn.argmin(energy, x, domain, entropy=self.entropy, solver=solver, start=start)

    def rounding(self, y: Tensor) -> Tensor:
        """What the certificate is promised up to."""
        energy = self.energy.double() if isinstance(self.energy, icnn.Energy) else self.energy
        point = y.detach().double().requires_grad_()
        x = tuple(part.double() for part in self.x)
        (slope,) = torch.autograd.grad(energy(x, point).sum(), point)
        size = (slope * point).detach().abs().sum(dim=1)
        return 32 * torch.finfo(y.dtype).eps * (self.value(y[None])[0].abs() + size)


class Scaled(icnn.Energy):
    """A network, times a number for each example."""

    def __init__(self, net: icnn.Energy):
        super().__init__()
        self.net = net

    def forward(self, x: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        """`x` is the network's and the factor."""
        return x[1] * self.net(x[0], y)


def planes(x: Any, y: Tensor) -> Tensor:
    """`max_i (G_i . y + c_i)`."""
    return ((x[0] @ y[:, :, None]).squeeze(2) + x[1]).amax(dim=1)


def logsumexp(x: Any, y: Tensor) -> Tensor:
    """`s log sum_i exp((G_i . y + c_i) / s)`."""
    return x[2] * (((x[0] @ y[:, :, None]).squeeze(2) + x[1]) / x[2][:, None]).logsumexp(dim=1)


def quadratic(x: Any, y: Tensor) -> Tensor:
    """`|G y - c|^2 / 2`."""
    return 0.5 * ((x[0] @ y[:, :, None]).squeeze(2) - x[1]).square().sum(dim=1)


def draw(rng: random.Random, batch: int, kind: str | None = None) -> Case:
    """A random case; numbers are float32 ones, so that both dtypes see one problem."""
    kind = kind or rng.choice(KINDS)
    n, k = rng.randint(1, 10), rng.randint(1, 20)
    dtype = rng.choice((torch.float32, torch.float64))
    wild = rng.random() < 0.5
    scale = 10 ** (8 * torch.rand(batch) - 3) if wild else 10 ** (2 * torch.rand(batch) - 1)
    energy: Any = {"planes": planes, "logsumexp": logsumexp, "quadratic": quadratic}.get(kind)
    slopes, offsets = torch.randn(batch, k, n), torch.randn(batch, k)
    x: tuple[Tensor, ...] = (slopes * scale[:, None, None], offsets * scale[:, None])
    if kind == "logsumexp":
        x = (*x, scale * 10 ** (2 * torch.rand(batch) - 2))
    if kind == "quadratic":
        root = scale.clamp(max=1e3).sqrt()
        x = (slopes * root[:, None, None], offsets * root[:, None])
    if kind == "network":
        activation = rng.choice(("relu", "softplus", "leaky_relu"))
        net = icnn.PICNN(3, n, (16, 16), activation=activation)
        energy, x = Scaled(net.requires_grad_(False)), (torch.randn(batch, 3), scale)
    domain: Any = icnn.Simplex()
    if rng.random() < 0.7 or n == 1:
        width = 10 ** rng.uniform(-2, 2)
        low = width * torch.randn(batch, n)
        domain = icnn.Box(low.double(), (low + width * (0.1 + torch.rand(batch, n))).double())
    entropy = 10 ** rng.uniform(-1.3, 1) if rng.random() < 0.7 else 0.0
    # Planes are found in few steps: stop before.
    steps = rng.randint(1, 3 if kind == "planes" else 20)
    solver: Any = icnn.BundleEntropy(steps) if entropy else icnn.Bundle(steps)
    if rng.random() < 0.4:
        rule = rng.choice(("momentum", "spectral", "adam"))
        solver = icnn.ProjectedGradient(rng.randint(1, 20), rule=rule)
    return Case(kind, energy, x, n, domain, entropy, solver, dtype)


def points(case: Case, around: Tensor, count: int) -> Tensor:
    """Random points of the domain, `(count, B, n)`: corners, the inside, and near `around`."""
    shape = (count, *around.shape)
    spread = 10 ** (6 * torch.rand(count, around.shape[0], 1, dtype=torch.float64) - 3)
    ends = torch.randn(shape, dtype=torch.float64) * spread
    ends = torch.stack([case.domain.minimise(end, 1.0) for end in ends])
    near = 10 ** (-8 * torch.rand(count, around.shape[0], 1, dtype=torch.float64))
    near[: count // 2] = 1
    return around.double() + near * (ends - around.double())


@dataclass
class Tally:
    """What was found for one kind."""

    problems: int = 0
    lies: int = 0
    worst: float = -float("inf")
    statuses: dict[str, int] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)

    def add(self, excess: Tensor) -> None:
        """Excesses over the objective somewhere, in units of rounding."""
        self.lies += int((excess > 1).sum())
        self.worst = max(self.worst, float(excess.max()))


def optimum(case: Case, row: int) -> Tensor:
    """The exact minimiser of a problem made of planes, by Clarabel."""
    import cvxpy as cp

    slopes, offsets = (part[row].double().numpy() for part in case.x)
    u = cp.Variable(case.n, nonneg=True)
    constraints: list[Any]
    y, constraints, entropy = u, [cp.sum(u) == 1], cp.sum(cp.entr(u))
    if isinstance(case.domain, icnn.Box):
        low, high = (torch.as_tensor(b)[row].numpy() for b in (case.domain.low, case.domain.high))
        y, constraints = low + cp.multiply(high - low, u), [u <= 1]
        entropy = cp.sum(cp.entr(u)) + cp.sum(cp.entr(1 - u))
    # In units of the slopes, which may be large.
    unit = max(1.0, float(abs(slopes).max()))
    cost = cp.max(slopes / unit @ y + offsets / unit) - case.entropy / unit * entropy
    tight = {f"tol_{name}": 1e-11 for name in ("gap_abs", "gap_rel", "feas")}
    cp.Problem(cp.Minimize(cost), constraints).solve(solver=cp.CLARABEL, **tight)
    assert y.value is not None
    return torch.from_numpy(y.value)


def name_of(solver: Any) -> str:
    """A solver without its numbers."""
    rule = getattr(solver, "rule", "")
    return type(solver).__name__ + (f", {rule}" if rule else "")


def check(case: Case, tally: Tally, count: int, exact: bool = False) -> None:
    """Stop early, and hold the bound against points, a tight answer and perhaps an exact one."""
    found = case.solve(case.solver, case.dtype)
    long: Any = icnn.BundleEntropy if case.entropy else icnn.Bundle
    best_known = case.solve(long(SETTINGS["tight"], 1e-9), torch.float64)
    rounding = case.rounding(found.y)
    for status in found.status.tolist():
        name = icnn.Status(status).name
        tally.statuses[name] = tally.statuses.get(name, 0) + 1
    tally.problems += len(rounding)
    best = torch.minimum(
        case.value(points(case, best_known.y, count)).amin(dim=0), best_known.value
    )
    for row in range(len(rounding) if exact else 0):
        y = case.domain.project(optimum(case, row).expand(best_known.y.shape))
        value = case.value(y[None])[0, row]
        # The reference is right up to 1e-8; the bounds of a tight answer are better.
        under = torch.maximum(value - 1e-8 * value.abs().clamp(min=1), best_known.lower[row])
        best[row] = torch.minimum(best[row], value)
        true = found.value[row] - torch.maximum(torch.minimum(value, best_known.value[row]), under)
        if true > rounding[row] and true > 1e-7 * value.abs().clamp(min=1):
            tally.ratios.append(float(found.gap[row] / true))
    tally.add((found.lower - best) / rounding)


def chunk(seed: int, problems: int, exact: bool) -> dict[str, Tally]:
    """Some of the problems, by the names of their solvers."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tallies: dict[str, Tally] = {}
    for _ in range(problems // SETTINGS["batch"]):
        case = draw(rng, SETTINGS["batch"], "planes" if exact else None)
        check(case, tallies.setdefault(name_of(case.solver), Tally()), SETTINGS["points"], exact)
    return tallies


def run(problems: int, exact: bool) -> list[dict[str, Any]]:
    """All problems, on all cores, as a table."""
    size = SETTINGS["batch"] * (1 if exact else 4)
    seeds = range(SETTINGS["seed"], SETTINGS["seed"] + problems // size)
    # Seeds of their own for the exact ones.
    seeds = range(seeds.start + 10**6, seeds.stop + 10**6) if exact else seeds
    whole: dict[str, Tally] = {}
    with ProcessPoolExecutor() as pool:
        for done, found in enumerate(
            pool.map(chunk, seeds, [size] * len(seeds), [exact] * len(seeds)), 1
        ):
            print(f"\r{done * size} of {problems}", end="", file=sys.stderr, flush=True)
            for name, part in found.items():
                tally = whole.setdefault(name, Tally())
                tally.problems += part.problems
                tally.lies += part.lies
                tally.worst = max(tally.worst, part.worst)
                tally.ratios += part.ratios
                for status, number in part.statuses.items():
                    tally.statuses[status] = tally.statuses.get(status, 0) + number
    rows = []
    for name, tally in sorted(whole.items()):
        row: dict[str, Any] = {
            "solver": name, "problems": tally.problems, "bounds above the optimum": tally.lies,
            "worst excess, in roundings": tally.worst,
            "NONCONVEX": tally.statuses.get("NONCONVEX", 0),
        }  # fmt: skip
        if exact:
            ratios = sorted(tally.ratios) or [float("nan")]
            row["not converged"] = len(tally.ratios)
            row["gap / true error, median"] = ratios[len(ratios) // 2]
        rows.append(row)
    print("\n" + report.table(rows))
    return rows


def main(*parts: str) -> None:
    """Check, print, and write `results/certificates.json` and `results/certificates-exact.json`."""
    for part in parts or ("bounds", "exact"):
        rows = run(SETTINGS["exact" if part == "exact" else "problems"], part == "exact")
        name = "certificates-exact" if part == "exact" else "certificates"
        print(report.write(name, SETTINGS, rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
