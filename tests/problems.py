"""A catalogue of problems with exact answers, for every solver that applies.

The reference of a problem is independent of our solvers: a closed form where the problem falls
apart into coordinates, else HiGHS for straight pieces without entropy, else Clarabel, which read
the energy as an expression of CVXPY. Weights, inputs and bounds are float32 numbers held in
float64, so that the problem is the same in both.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor, nn

import icnn
from icnn.energies.activations import IDENTITY, Activation
from icnn.energies.energy import Apply, LayeredEnergy

Domain = icnn.Box | icnn.Simplex
Numbers = Any  # an array, or an expression of CVXPY

CLOSED, HIGHS, CLARABEL = 1e-13, 1e-9, 1e-8
"""How far above the optimum a reference may be, relative to `1 + |value|`."""


class MaxAffine(nn.Module):
    """`max_i (G_i . y + x_i)`: `x` holds the offsets."""

    slopes: Tensor

    def __init__(self, slopes: Tensor):
        super().__init__()
        self.register_buffer("slopes", slopes)
        self.y_shape = (slopes.shape[1],)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (y @ self.slopes.t() + x).amax(dim=1)


class LogSumExp(MaxAffine):
    """`log sum_i exp(G_i . y + x_i)`."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (y @ self.slopes.t() + x).logsumexp(dim=1)


class Coupled(MaxAffine):
    """`|G y - x|^2 / 2`: a quadratic whose coordinates are not apart."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (y @ self.slopes.t() - x).square().sum(dim=1)


class Absolute(nn.Module):
    """`sum_j w_j |y_j - x_j|`."""

    weight: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        self.register_buffer("weight", weight)
        self.y_shape = (weight.shape[0],)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.weight * (y - x).abs()).sum(dim=1)


class Answer(NamedTuple):
    """What a reference found: `value` is the objective there, at most `slack` above the optimum."""

    y: Tensor
    value: Tensor
    slack: Tensor


class Parts(NamedTuple):
    """An energy, the batch that it is at, and a domain."""

    energy: Any  # a module
    x: Any  # a tensor, or None
    domain: Domain

    def to(self, dtype: torch.dtype) -> "Parts":
        bounds = [b.to(dtype) if isinstance(b, Tensor) else b for b in limits(self.domain)]
        domain = icnn.Box(*bounds) if bounds else self.domain
        x = None if self.x is None else self.x.to(dtype)
        # A copy: `Module.to` changes the module itself.
        return Parts(copy.deepcopy(self.energy).to(dtype), x, domain)


def limits(domain: Domain) -> list[float | Tensor]:
    """The bounds of a box; none for the simplex."""
    return [domain.low, domain.high] if isinstance(domain, icnn.Box) else []


@dataclass(frozen=True)
class Problem:
    """Minimise `energy(x, y) - entropy * H(y)` over a domain; the parts are made when needed.

    Args:
        name: What it tests, in a word or two.
        n: Coordinates of `y`.
        batch: Examples.
        entropy: Weight of the entropy.
        make: Its parts, in float32.
        smooth: Whether the energy is differentiable.
        piecewise_linear: Whether it consists of straight pieces.
        inside: Whether a solver can look inside: the energy is one of the library's, throughout.
        unique: Whether there is one minimiser; always with an entropy.
    """

    name: str
    n: int
    batch: int
    entropy: float
    make: Callable[[], Parts]
    smooth: bool = False
    piecewise_linear: bool = False
    inside: bool = False
    unique: bool = True

    @cached_property
    def parts(self) -> Parts:
        with torch.random.fork_rng():
            torch.manual_seed(sum(map(ord, self.name)))
            energy, x, domain = self.make()
        energy.requires_grad_(False).eval()
        # Some learn the shape of y from x only.
        energy.y_shape = getattr(energy, "y_shape", None) or (self.n,)
        return Parts(energy, x, domain).to(torch.float64)

    @property
    def energy(self) -> Any:
        return self.parts.energy

    @property
    def x(self) -> Any:
        return self.parts.x

    @property
    def domain(self) -> Domain:
        return self.parts.domain

    @property
    def y_shape(self) -> tuple[int, ...]:
        return tuple(self.energy.y_shape)

    def objective(self, y: Tensor) -> Tensor:
        """In float64, for points `(B, *y_shape)`."""
        value = self.energy(self.x, y.double())
        return value - self.entropy * self.domain.entropy(y.double())

    def rounding(self, y: Tensor) -> Tensor:
        """`32 * eps * (|value| + sum |g_i y_i|)`, what certificates are promised up to."""
        point = y.detach().double().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(self.x, point).sum(), point)
        size = (slope * point).detach().abs().flatten(start_dim=1).sum(dim=1)
        return 32 * torch.finfo(y.dtype).eps * (self.objective(y).abs() + size)

    @cached_property
    def answer(self) -> Answer:
        """The reference; `y` is the minimiser where the problem is `unique`."""
        y, slack = reference(self)
        value = self.objective(y)
        return Answer(y, value, slack * (1 + value.abs()))

    def __repr__(self) -> str:
        return self.name


# References.


def reference(problem: Problem) -> tuple[Tensor, float]:
    """A minimiser and its relative error, by the first method that can."""
    found = closed_form(problem)
    if found is not None:
        return found, CLOSED
    shape = (problem.batch, *problem.y_shape)
    rows = [conic(problem, row) for row in range(problem.batch)]
    y = torch.from_numpy(np.stack(rows)).reshape(shape)
    exact = problem.piecewise_linear and not problem.entropy
    return problem.domain.project(y), HIGHS if exact else CLARABEL


def closed_form(problem: Problem) -> Tensor | None:
    """Coordinate by coordinate, where the energy is a sum over them."""
    energy, x, domain = problem.parts
    e = problem.entropy
    if isinstance(energy, icnn.Score):
        return domain.minimise(-energy.net(x), e)
    if not isinstance(domain, icnn.Box):
        return None
    low, width = domain.low, domain.width
    if isinstance(energy, Absolute):
        if not e:
            return domain.project(x)
        # The slopes -w and w of the two sides, each with its own minimiser; the kink between.
        left, right = (domain.minimise(s * energy.weight + 0 * x, e) for s in (1, -1))
        return torch.minimum(torch.maximum(x, left), right)
    if isinstance(energy, icnn.Quadratic) and callable(energy.center):
        assert isinstance(energy.weight, icnn.NonNegative)
        center, weight = energy.center(x), energy.weight()
        if not e:
            return domain.project(center)
        # width * weight * (y - center) + e * s = 0 with u = sigmoid(s): it rises with s.
        a, b = torch.full_like(center, -1e9), torch.full_like(center, 1e9)
        for _ in range(200):
            s = (a + b) / 2
            slope = width * weight * (low + width * s.sigmoid() - center) + e * s
            a, b = torch.where(slope < 0, s, a), torch.where(slope < 0, b, s)
        return low + width * ((a + b) / 2).sigmoid()
    return None


def conic(problem: Problem, row: int) -> np.ndarray:
    """One example by HiGHS, where it is a linear program, else by Clarabel."""
    energy, x, domain = problem.parts
    u = cp.Variable(problem.n, nonneg=True)
    constraints: list[Any]
    if isinstance(domain, icnn.Box):
        shape = (problem.batch, *problem.y_shape)
        ends = (torch.as_tensor(b, dtype=torch.float64) for b in limits(domain))
        low, high = (b.expand(shape)[row].flatten().numpy() for b in ends)
        y, constraints = low + cp.multiply(high - low, u), [u <= 1]
        entropy = cp.sum(cp.entr(u)) + cp.sum(cp.entr(1 - u))
    else:
        y, constraints, entropy = u, [cp.sum(u) == 1], cp.sum(cp.entr(u))
    cost = express(energy, None if x is None else x[row : row + 1], y)
    if problem.entropy:
        cost = cost - problem.entropy * entropy
    task = cp.Problem(cp.Minimize(cost), constraints)
    if problem.piecewise_linear and not problem.entropy:
        task.solve(solver=cp.SCIPY, scipy_options={"method": "highs"})
    else:
        tight = {f"tol_{name}": 1e-10 for name in ("gap_abs", "gap_rel", "feas")}
        task.solve(solver=cp.CLARABEL, **tight)
    assert y.value is not None, task.status
    return np.asarray(y.value)


def express(energy: Any, x: Tensor | None, y: Numbers) -> Numbers:
    """An energy at one example, as an expression of CVXPY that is convex in the vector `y`."""
    if isinstance(energy, icnn.Sum):
        return sum(express(part, x, y) for part in energy.energies)
    if isinstance(energy, icnn.Max):
        return cp.maximum(*(express(part, x, y) for part in energy.energies))
    if isinstance(energy, icnn.Scale):
        assert isinstance(energy.c, float)
        return energy.c * express(energy.energy, x, y)
    if isinstance(energy, LayeredEnergy):
        return network(energy, x, y)
    assert x is not None
    if isinstance(energy, icnn.Score):
        return -energy.net(x)[0].numpy() @ y
    row = x[0].numpy()
    if isinstance(energy, icnn.Quadratic):
        weight = torch.as_tensor(energy.weight() if callable(energy.weight) else energy.weight)
        center = energy.center(x)[0] if callable(energy.center) else torch.as_tensor(energy.center)
        shape = center.shape or y.shape
        root = (weight.double() / 2).sqrt().expand(shape).flatten().numpy()
        center = center.double().expand(shape).flatten().numpy()
        return cp.sum_squares(cp.multiply(root, y - center))
    if isinstance(energy, Absolute):
        return energy.weight.numpy() @ cp.abs(y - row)
    assert isinstance(energy, MaxAffine), f"no expression for {type(energy).__name__}"
    planes = energy.slopes.numpy() @ y
    if isinstance(energy, Coupled):
        return cp.sum_squares(planes - row) / 2
    return cp.log_sum_exp(planes + row) if isinstance(energy, LogSumExp) else cp.max(planes + row)


def network(energy: LayeredEnergy, x: Tensor | None, y: Numbers) -> Numbers:
    """The epigraph of a network, layer by layer; each is a matrix on the layer below and on y."""
    assert energy.y_shape is not None
    z: Numbers = None
    shape, basis = energy.y_shape, torch.eye(y.shape[0], dtype=torch.float64)
    places = basis.reshape(-1, *shape)
    none = torch.zeros_like(places[:1])
    maps: tuple[int, ...] = ()  # the shape of z
    for layer in energy.describe(x):
        if isinstance(layer, Apply):
            z, maps = pooled(layer, z, maps)
            continue
        kwargs = layer._asdict()
        activation, bias = kwargs["activation"], kwargs["bias"]
        plain = layer._replace(activation=IDENTITY, bias=torch.zeros_like(bias))
        # With no z below, `wz` is None: the part of y alone.
        above = plain._replace(wz=None)(None, places)
        total = above.flatten(start_dim=1).t().numpy() @ y
        if kwargs["wz"] is not None:
            below = torch.eye(z.shape[0], dtype=torch.float64).reshape(-1, *maps)
            part = plain(below, none.expand(len(below), *shape))
            total = part.flatten(start_dim=1).t().numpy() @ z + total
        bias = bias.expand(1, *above.shape[1:])
        z, maps = bent(activation, total + bias.flatten().numpy()), tuple(above.shape[1:])
    return cp.sum(z)


def bent(activation: Activation, z: Numbers) -> Numbers:
    """An activation of CVXPY."""
    if activation.name.startswith("leaky_relu"):
        return cp.maximum(z, float(activation(torch.tensor(-1.0, dtype=torch.float64))) * -z)
    return {"relu": cp.pos, "softplus(1)": cp.logistic, "identity": lambda z: z}[activation.name](z)


def pooled(layer: Apply, z: Numbers, maps: tuple[int, ...]) -> tuple[Numbers, tuple[int, ...]]:
    """Max-pooling: which units share a window is seen from what a large number in each does."""
    seen = layer.function(torch.eye(z.shape[0], dtype=torch.float64).reshape(-1, *maps))
    windows = seen.flatten(start_dim=1).t() > 0
    parts = [cp.max(z[window.nonzero().flatten().numpy()]) for window in windows]
    return cp.hstack(parts), tuple(seen.shape[1:])


# Ingredients.


def stretched(energy: Any, y: float = 1.0, c: float = 1.0) -> Any:
    """A network that sees `y` times a factor in its hidden layers and is `c` times as steep.

    That puts many kinks inside of the box, several of which meet at the answer.
    """
    last = energy.layers[-1]
    with torch.no_grad():
        for name, weight in energy.named_parameters():
            if ".wy." in name and name.endswith("weight") and weight is not last.wy.weight:
                weight.mul_(y)
        weights = [p for n, p in last.named_parameters() if not n.startswith(("wyu", "wzu"))]
        for weight in weights:
            weight.mul_(c)
    return energy


def fitted(energy: Any, target: Callable[[Any, Tensor], Tensor], x: Tensor | None) -> Any:
    """A network after three hundred steps of Adam towards a convex function on [-1, 1]^n."""
    optimizer = torch.optim.Adam(energy.parameters(), lr=1e-2)
    icnn.keep_convex(energy, optimizer)
    for _ in range(300):
        y = 2 * torch.rand(128, *energy.y_shape) - 1
        given = None if x is None else torch.randn(128, *x.shape[1:])
        loss = (energy(given, y) - target(given, y)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return energy


def valley(x: Any, y: Tensor) -> Tensor:
    """Three folds whose place depends on `x`."""
    flat = y.flatten(start_dim=1)
    shift = 0.2 if x is None else 0.5 * torch.tanh(x.flatten(start_dim=1)[:, :1])
    folds = (flat - shift).abs().sum(dim=1) + (flat.mean(dim=1) - 0.3).abs()
    return 3 * folds + flat.diff(dim=1).abs().sum(dim=1)


def planes(k: int, n: int, scale: float = 1.0) -> MaxAffine:
    return MaxAffine(scale * torch.randn(k, n))


def ficnn(n: int, y: float = 6.0, c: float = 3.0, hidden=(24, 24), **options) -> icnn.FICNN:
    return stretched(icnn.FICNN(n, hidden, **options), y, c)


def picnn(n: int, y: float = 6.0, c: float = 3.0, hidden=(24, 24), **options) -> icnn.PICNN:
    return stretched(icnn.PICNN(3, n, hidden, **options), y, c)


def conv(y_shape: tuple[int, ...], **options) -> icnn.ConvPICNN:
    convs = ((4, 3, 1), ("max", 2), (4, 2, 1))
    return stretched(icnn.ConvPICNN((1, 6, 6), y_shape, convs, (8,), **options), 8.0, 4.0)


@cache
def trained(kind: str, activation: str = "relu") -> Any:
    """One network each, shared by the problems that use it."""
    if kind == "ficnn":
        return fitted(icnn.FICNN(6, (24, 24), activation=activation), valley, None)
    if kind == "picnn":
        x = torch.empty(0, 3)
        return fitted(icnn.PICNN(3, 2, (24, 24), activation=activation), valley, x)
    x = torch.empty(0, 1, 6, 6)
    return fitted(icnn.ConvPICNN((1, 6, 6), (6,), ((4, 3, 1), ("max", 2)), (8,)), valley, x)


def kink(n: int, *bounds: Any, weight: float = 1.0, inside: float = 0.7) -> Parts:
    """Kinks at points that are mostly inside of the box, and answers there."""
    domain = icnn.Box(*bounds)
    weights = weight * (0.1 + torch.rand(n))
    low, width = torch.as_tensor(domain.low), torch.as_tensor(domain.width)
    at = low + width * (0.5 + inside * (torch.rand(2, n) - 0.5))
    return Parts(Absolute(weights), at, domain)


def bowl(n: int, *bounds: Any, weight: float = 1.0, spread: float = 2.0) -> Parts:
    """A diagonal quadratic, with centres inside and outside of the box."""
    domain = icnn.Box(*bounds)
    low, width = torch.as_tensor(domain.low), torch.as_tensor(domain.width)
    center = low + width * (0.5 + spread * (torch.rand(2, n) - 0.5))
    return Parts(icnn.Quadratic(nn.Identity(), weight * (0.1 + torch.rand(n))), center, domain)


def bounds_of_each(batch: int, n: int) -> icnn.Box:
    low = -2 * torch.rand(batch, n)
    return icnn.Box(low, low + 0.1 + 3 * torch.rand(batch, n))


def edge(n: int) -> Parts:
    """Planes with a steep slope in common: the answer is at 1e-12 of the bounds."""
    tilt = 1.4 * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)
    tilt[: n // 4] = 0
    return Parts(MaxAffine(tilt + 0.1 * torch.randn(12, n)), 0.01 * torch.randn(3, 12), icnn.Box())


def twice() -> Parts:
    """Planes that are there twice, combinations of others, and one that is flat."""
    slopes = torch.randn(6, 6)
    slopes = torch.cat([slopes, slopes, (slopes[:3] + slopes[3:]) / 2, torch.zeros(1, 6)])
    x = torch.randn(3, 6)
    x = torch.cat([x, x, (x[:, :3] + x[:, 3:]) / 2, torch.zeros(3, 1)], dim=1)
    return Parts(MaxAffine(slopes), x, icnn.Box(-1.0, 2.0))


def composed(smooth: bool) -> Parts:
    """Sums, maxima and scales of networks."""
    part: Any = icnn.Quadratic(0.3, 2.0) if smooth else icnn.Score(nn.Linear(3, 2))
    inner = icnn.Sum(picnn(2), part)
    return Parts(icnn.Scale(icnn.Max(inner, ficnn(2)), 2.0), torch.randn(4, 3), icnn.Box(-1.0, 1.0))


def around(energy: Any, center: nn.Module, weight: Any, *x_shape: int, domain: Domain) -> Parts:
    """A network and a quadratic, which `Bundle` does not cut."""
    whole = icnn.Sum(energy, icnn.Quadratic(center, weight))
    return Parts(whole, torch.randn(3, *x_shape), domain)


def tied(n: int, domain: Domain) -> Parts:
    """Half of the slopes are zero (on the simplex: equal and lowest): faces of minimisers."""
    scores = -1 - torch.rand(3, n)
    scores[:, ::2] = 0
    return Parts(icnn.Score(nn.Identity()), scores, domain)


def with_x(make: Callable[[], Any], batch: int, *x_shape: int, domain: Domain | None = None):
    """The parts of an energy at random inputs; none where it takes none."""
    domain = icnn.Box(-1.0, 1.0) if domain is None else domain
    return Parts(make(), torch.randn(batch, *x_shape) if x_shape else None, domain)


def entry(name: str, n: int, batch: int, entropy: float, make: Any, flags: str = "") -> Problem:
    """A problem whose flags are words."""
    words = ("smooth", "piecewise_linear", "inside")
    known = {word: word in flags.split() for word in words}
    return Problem(name, n, batch, entropy, make, **known, unique="tied" not in flags.split())


LINEAR, PIECES, SMOOTH = "smooth piecewise_linear", "piecewise_linear", "smooth"
INSIDE = "piecewise_linear inside"
simplex = icnn.Simplex()

PROBLEMS = [
    # With an entropy.
    entry("linear-1", 1, 3, 1.0, lambda: with_x(lambda: icnn.Score(nn.Identity()), 3, 1), LINEAR),
    entry("kink-1", 1, 2, 0.05, lambda: kink(1), PIECES),
    entry("bowl-1", 1, 2, 10.0, lambda: bowl(1, -3.0, 4.0), SMOOTH),
    entry("planes-2", 2, 4, 0.05, lambda: with_x(lambda: planes(6, 2), 4, 6), PIECES),
    entry(
        "planes-6-simplex",
        6,
        4,
        0.1,
        lambda: with_x(lambda: planes(12, 6, 3.0), 4, 12, domain=simplex),
        PIECES,
    ),
    entry(
        "planes-17-wide",
        17,
        2,
        1.0,
        lambda: with_x(lambda: planes(40, 17), 2, 40, domain=icnn.Box(-500.0, 500.0)),
        PIECES,
    ),
    entry("planes-17-edge", 17, 3, 0.05, lambda: edge(17), PIECES),
    entry("planes-6-twice", 6, 3, 0.3, twice, PIECES),
    entry("kink-159", 159, 2, 0.1, lambda: kink(159), PIECES),
    entry("bowl-6-tight", 6, 2, 0.1, lambda: bowl(6, -0.0003, 0.0007, weight=1e6), SMOOTH),
    entry("bowl-17-wide", 17, 2, 0.5, lambda: bowl(17, -400.0, 600.0, weight=1e-4), SMOOTH),
    entry(
        "coupled-6-low",
        6,
        2,
        0.02,
        lambda: with_x(lambda: Coupled(torch.randn(8, 6)), 2, 8),
        SMOOTH,
    ),
    entry(
        "coupled-17",
        17,
        3,
        1.0,
        lambda: with_x(
            lambda: Coupled(torch.randn(20, 17) / 2), 3, 20, domain=bounds_of_each(3, 17)
        ),
        SMOOTH,
    ),
    entry(
        "coupled-6-simplex",
        6,
        3,
        0.05,
        lambda: with_x(lambda: Coupled(torch.randn(8, 6)), 3, 8, domain=simplex),
        SMOOTH,
    ),
    entry(
        "logsumexp-17",
        17,
        3,
        0.2,
        lambda: with_x(lambda: LogSumExp(2 * torch.randn(30, 17)), 3, 30),
        SMOOTH,
    ),
    entry(
        "logsumexp-159-simplex",
        159,
        2,
        0.05,
        lambda: with_x(lambda: LogSumExp(5 * torch.randn(30, 159)), 2, 30, domain=simplex),
        SMOOTH,
    ),
    entry("ficnn-6", 6, 1, 0.05, lambda: with_x(lambda: ficnn(6), 1), INSIDE),
    entry(
        "ficnn-17-softplus-simplex",
        17,
        1,
        0.5,
        lambda: with_x(lambda: ficnn(17, 30.0, activation="softplus"), 1, domain=simplex),
        SMOOTH + " inside",
    ),
    entry("picnn-17", 17, 4, 0.05, lambda: with_x(lambda: picnn(17), 4, 3), INSIDE),
    entry(
        "picnn-17-bounds",
        17,
        3,
        0.5,
        lambda: with_x(lambda: picnn(17), 3, 3, domain=bounds_of_each(3, 17)),
        INSIDE,
    ),
    entry(
        "picnn-159-leaky",
        159,
        2,
        0.3,
        lambda: with_x(lambda: picnn(159, activation="leaky_relu"), 2, 3),
        INSIDE,
    ),
    entry(
        "picnn-159-softplus",
        159,
        2,
        0.05,
        lambda: with_x(lambda: picnn(159, activation="softplus"), 2, 3),
        SMOOTH + " inside",
    ),
    entry("ficnn-6-trained", 6, 1, 0.1, lambda: with_x(lambda: trained("ficnn"), 1), INSIDE),
    entry("picnn-2-trained", 2, 4, 0.05, lambda: with_x(lambda: trained("picnn"), 4, 3), INSIDE),
    entry(
        "picnn-2-trained-softplus",
        2,
        4,
        0.05,
        lambda: with_x(lambda: trained("picnn", "softplus"), 4, 3),
        SMOOTH + " inside",
    ),
    entry("conv-36-image", 36, 2, 0.1, lambda: with_x(lambda: conv((1, 6, 6)), 2, 1, 6, 6), INSIDE),
    entry(
        "conv-6-trained", 6, 3, 0.05, lambda: with_x(lambda: trained("conv"), 3, 1, 6, 6), INSIDE
    ),
    entry("composed-2", 2, 4, 0.2, lambda: composed(True), "inside"),
    entry(
        "linear-2048-simplex",
        2048,
        2,
        0.05,
        lambda: with_x(lambda: icnn.Score(nn.Identity()), 2, 2048, domain=simplex),
        LINEAR,
    ),
    entry("bowl-2048", 2048, 2, 1.0, lambda: bowl(2048), SMOOTH),
    entry("kink-2048", 2048, 2, 10.0, lambda: kink(2048), PIECES),
    entry(
        "ficnn-2048",
        2048,
        1,
        1.0,
        lambda: with_x(lambda: ficnn(2048, 20.0, hidden=(16, 16)), 1),
        INSIDE,
    ),
    # Without.
    entry("kink-17-bare", 17, 2, 0.0, lambda: kink(17), PIECES),
    entry("kink-2048-bare", 2048, 2, 0.0, lambda: kink(2048, -500.0, 500.0, inside=1.3), PIECES),
    entry("bowl-159-bare", 159, 2, 0.0, lambda: bowl(159), SMOOTH),
    entry("tied-6-bare", 6, 3, 0.0, lambda: tied(6, icnn.Box()), LINEAR + " tied"),
    entry("tied-17-simplex-bare", 17, 3, 0.0, lambda: tied(17, simplex), LINEAR + " tied"),
    entry("planes-1-bare", 1, 3, 0.0, lambda: with_x(lambda: planes(5, 1), 3, 5), PIECES + " tied"),
    entry(
        "planes-6-bare", 6, 4, 0.0, lambda: with_x(lambda: planes(12, 6), 4, 12), PIECES + " tied"
    ),
    entry("planes-6-twice-bare", 6, 3, 0.0, twice, PIECES + " tied"),
    entry(
        "planes-17-simplex-bare",
        17,
        3,
        0.0,
        lambda: with_x(lambda: planes(40, 17), 3, 40, domain=simplex),
        PIECES + " tied",
    ),
    entry(
        "coupled-6-simplex-bare",
        6,
        3,
        0.0,
        lambda: with_x(lambda: Coupled(torch.randn(8, 6)), 3, 8, domain=simplex),
        SMOOTH,
    ),
    entry(
        "logsumexp-2-bare",
        2,
        3,
        0.0,
        lambda: with_x(lambda: LogSumExp(3 * torch.randn(8, 2)), 3, 8),
        SMOOTH + " tied",
    ),
    entry("ficnn-6-bare", 6, 1, 0.0, lambda: with_x(lambda: ficnn(6), 1), INSIDE + " tied"),
    entry(
        "ficnn-159-leaky-bare",
        159,
        1,
        0.0,
        lambda: with_x(lambda: ficnn(159, activation="leaky_relu"), 1),
        INSIDE + " tied",
    ),
    entry(
        "picnn-17-bounds-bare",
        17,
        3,
        0.0,
        lambda: with_x(lambda: picnn(17), 3, 3, domain=bounds_of_each(3, 17)),
        INSIDE + " tied",
    ),
    entry(
        "picnn-2-trained-bare",
        2,
        4,
        0.0,
        lambda: with_x(lambda: trained("picnn"), 4, 3),
        INSIDE + " tied",
    ),
    entry(
        "picnn-6-softplus-bare",
        6,
        3,
        0.0,
        lambda: with_x(lambda: picnn(6, activation="softplus"), 3, 3),
        SMOOTH + " inside tied",
    ),
    entry(
        "conv-36-image-bare",
        36,
        2,
        0.0,
        lambda: with_x(lambda: conv((1, 6, 6)), 2, 1, 6, 6),
        INSIDE + " tied",
    ),
    entry("composed-2-bare", 2, 4, 0.0, lambda: composed(False), INSIDE + " tied"),
    entry(
        "picnn-17-around-bare",
        17,
        3,
        0.0,
        lambda: around(
            picnn(17), nn.Linear(3, 17), 0.1 + torch.rand(17), 3, domain=bounds_of_each(3, 17)
        ),
        "inside",
    ),
    entry(
        "conv-36-around-bare",
        36,
        3,
        0.0,
        lambda: around(
            conv((1, 6, 6)), nn.Identity(), torch.rand(6, 1) + 0.5, 1, 6, 6, domain=icnn.Box()
        ),
        "inside",
    ),
    entry(
        "planes-12-around-bare",
        12,
        3,
        0.0,
        lambda: around(planes(12, 12), nn.Identity(), 1e-3, 12, domain=icnn.Box()),
    ),
]
