"""Gradients of the argmin against finite differences of the exact argmin, in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import icnn
from tests.optimality import SEARCH, Optimum

B, X = 3, 2
STEP = 1e-6


@dataclass(frozen=True)
class Case:
    """A problem with all that its answer depends on.

    Args:
        name: What it tests.
        make: Its energy.
        domain: "box", "bounds" (a box whose bounds are tensors with gradients) or "simplex".
        entropy: The weight of the entropy.
        shape: Of one `y`.
        given: How many coordinates are given.
        curved: Whether the energy has curvature.
        kinked: Whether it has kinks.
        meet: How many pieces meet in an answer, at least.
    """

    name: str
    make: Callable[[], Any]
    domain: str = "box"
    entropy: float = 0.3
    shape: tuple[int, ...] = (5,)
    given: int = 0
    curved: bool = False
    kinked: bool = True
    meet: int = 1

    def setting(self) -> "Setting":
        torch.manual_seed(sum(map(ord, self.name)))
        energy = self.make().double()
        x = torch.randn(B, X, dtype=torch.float64, requires_grad=True)
        bounds, values, mask = [], None, None
        if self.domain == "bounds":
            low = -1 - torch.rand(*self.shape, dtype=torch.float64)
            bounds = [low, 1 + torch.rand(B, *self.shape, dtype=torch.float64)]
        if self.given:
            mask = torch.rand(B, *self.shape).flatten(1).argsort(1).argsort(1) < self.given
            mask = mask.reshape(B, *self.shape)
            values = torch.rand(B, *self.shape, dtype=torch.float64) / (2 * self.given)
            values.requires_grad_()
        return Setting(self, energy, x, [b.requires_grad_() for b in bounds], mask, values)


@dataclass(frozen=True)
class Setting:
    """The parts of a case."""

    case: Case
    energy: Any
    x: Tensor
    bounds: list[Tensor]
    mask: Tensor | None
    values: Tensor | None

    @property
    def domain(self) -> Any:
        if self.case.domain == "simplex":
            return icnn.Simplex()
        return icnn.Box(*self.bounds) if self.bounds else icnn.Box(-1, 1)

    @property
    def fixed(self) -> tuple[Tensor, Tensor] | None:
        return None if self.mask is None or self.values is None else (self.mask, self.values)

    def leaves(self) -> dict[str, Tensor]:
        """All that the answer depends on, by name."""
        found = dict(self.energy.named_parameters()) | {"x": self.x}
        found |= {f"bound {i}": bound for i, bound in enumerate(self.bounds)}
        return found if self.values is None else found | {"values": self.values}

    def argmin(self, **options: Any) -> icnn.Solution:
        options = {"solver": SEARCH} | options
        return icnn.argmin(
            self.energy, self.x, self.domain, entropy=self.case.entropy, fixed=self.fixed, **options
        )

    def optimum(self) -> Optimum:
        smooth = not self.case.kinked
        return Optimum(self.energy, self.x, self.case.entropy, self.domain, self.fixed, smooth)


class Valley(nn.Module):
    """A PICNN of `y` and `-y`: its answers lie in a valley, where pieces meet."""

    def __init__(self, activation: str = "relu", scale: float = 6.0, **options: Any):
        super().__init__()
        options = {"hidden": (24,), "positivity": "softplus"} | options
        self.net = icnn.PICNN(X, 10, activation=activation, **options)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.y_shape = (5,)
        # Gates that see x from the start, and kinks across the domain.
        for name, weight in self.net.named_parameters():
            if "raw" not in name:
                nn.init.normal_(weight, std=0.4)
        # No slope across all of it that would press answers against a bound.
        nn.init.normal_(self.net.get_parameter("layers.1.wy.weight"), std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * self.net(x, torch.cat([y, -y], dim=1))


class Folds(nn.Module):
    """`sum_k relu(w_k . y + b_k(x))`, and the same straight on for each choice of units."""

    def __init__(self):
        super().__init__()
        self.units, self.offsets = nn.Parameter(torch.randn(4, 5)), nn.Linear(X, 4)
        self.y_shape = (5,)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        return y @ self.units.t() + self.offsets(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y).relu().sum(dim=1)


def relu_and(smooth: Callable[[], nn.Module]) -> icnn.Sum:
    """Kinks and curvature; its members are the pieces."""
    folds, other = Folds(), smooth()
    energy = icnn.Sum(folds, other)
    choices = torch.cartesian_prod(*(torch.arange(2.0) for _ in range(4))).double()
    energy.__dict__["members"] = [
        lambda x, y, c=c: (folds.inner(x, y) * c).sum(dim=1) + other(x, y) for c in choices
    ]
    return energy


def quadratic() -> icnn.Quadratic:
    center = nn.Linear(X, 5)
    nn.init.normal_(center.bias, std=0.2)
    return icnn.Quadratic(center, nn.Parameter(torch.rand(5) + 0.5))


def largest() -> icnn.Max:
    energy = icnn.Max(*(Valley("softplus", hidden=(6,)) for _ in range(3)))
    energy.__dict__["members"] = list(energy.energies)
    return energy


def sum_of_squares(scale: float) -> "Planes":
    return Planes(lambda z: z.square().sum(dim=1), scale)


class Planes(nn.Module):
    """A user's function of planes whose offsets `x` moves."""

    def __init__(self, join: Callable[[Tensor], Tensor], scale: float = 1.0):
        super().__init__()
        self.slopes = nn.Parameter(scale * torch.randn(8, 5))
        self.offsets, self.join = nn.Linear(X, 8), join
        self.y_shape = (5,)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.join(y @ self.slopes.t() + self.offsets(x))


class Kinks(nn.Module):
    """`sum_j w_j |y_j - c_j(x)|`."""

    def __init__(self, weight: float = 2.0):
        super().__init__()
        self.weight, self.center = nn.Parameter(weight * (0.5 + torch.rand(5))), nn.Linear(X, 5)
        self.y_shape = (5,)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.weight * (y - self.center(x).tanh()).abs()).sum(dim=1)


def score(*shape: int) -> icnn.Score:
    net = nn.Sequential(nn.Linear(X, torch.Size(shape).numel()), nn.Unflatten(1, shape))
    energy = icnn.Score(net)
    energy.y_shape = shape
    return energy


class Image(nn.Module):
    """Convolutions over an image `y`, and one that is made of `x`."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(X, 16)
        shape, convs = (1, 4, 4), ((3, 3, 1), (3, 2, 1))
        self.net = icnn.ConvPICNN(shape, shape, convs=convs, hidden=(6,), positivity="softplus")
        self.y_shape = shape

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 4 * self.net(self.inner(x).unflatten(1, (1, 4, 4)), y)


CASES = [
    Case("softmax", lambda: score(5), "simplex", 1.0, kinked=False),
    Case("sigmoid", lambda: score(5), "bounds", 1.0, kinked=False),
    Case("rows of softmax", lambda: score(2, 5), "simplex", 0.5, (2, 5), kinked=False),
    Case("relu box", Valley, entropy=1.0, meet=2),
    Case("relu box, low entropy", Valley, entropy=0.05, meet=2),
    Case("relu simplex", Valley, "simplex", 0.2, meet=2),
    Case("relu bounds", Valley, "bounds", meet=2),
    Case("relu box, some given", Valley, given=2, meet=2),
    Case("relu bounds, some given", Valley, "bounds", given=2, meet=3),
    Case("relu simplex, some given", Valley, "simplex", 0.1, given=2, meet=2),
    Case("leaky relu network", lambda: Valley("leaky_relu"), "bounds", meet=2),
    Case("relu with projected weights", lambda: Valley(positivity="project"), meet=2),
    Case("jointly convex", lambda: icnn.FICNN(5, (8, 8), dim_x=X, positivity="exp"), "bounds"),
    Case("image", Image, shape=(1, 4, 4)),
    Case("planes of a user", lambda: Planes(lambda z: z.amax(dim=1)), "bounds", 0.2, meet=5),
    Case("planes, simplex", lambda: Planes(lambda z: z.amax(dim=1)), "simplex", 0.1, meet=2),
    Case("absolute values", Kinks, meet=6),
    Case("softplus box", lambda: Valley("softplus"), curved=True, kinked=False),
    Case("softplus simplex", lambda: Valley("softplus"), "simplex", curved=True, kinked=False),
    Case("softplus bounds, one given", lambda: Valley("softplus"), "bounds", given=1, curved=True,
         kinked=False),
    Case("elu", lambda: Valley("elu"), "bounds", curved=True, kinked=False),
    Case("log-sum-exp", lambda: Planes(lambda z: z.logsumexp(1)), "bounds", curved=True,
         kinked=False),
    Case("coupled quadratic", lambda: sum_of_squares(0.4), "bounds", curved=True, kinked=False),
    Case("relu and quadratic", lambda: relu_and(quadratic), "bounds", curved=True, meet=2),
    Case("relu and quadratic, given", lambda: relu_and(quadratic), curved=True, given=1, meet=3),
    Case("relu and quadratic, simplex", lambda: relu_and(quadratic), "simplex", 0.1, curved=True,
         meet=2),
    Case("relu and coupled quadratic", lambda: relu_and(lambda: sum_of_squares(0.3)), "bounds",
         curved=True, meet=2),
    Case("relu and softplus", lambda: relu_and(lambda: Valley("softplus", 2.0)), "bounds",
         curved=True, meet=3),
    Case("max of softplus", largest, "bounds", curved=True, meet=2),
]  # fmt: skip


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_gradients_are_those_of_the_exact_argmin(case: Case):
    setting = case.setting()
    v = torch.randn(B, *case.shape, dtype=torch.float64)
    solution, optimum = setting.argmin(), setting.optimum()
    assert max(map(len, optimum.active)) >= case.meet
    exact = optimum.follow(setting.domain, setting.fixed)
    torch.testing.assert_close(solution.y, exact, atol=1e-5, rtol=0)
    leaves = setting.leaves()
    found = torch.autograd.grad((v * solution.y).sum(), list(leaves.values()), allow_unused=True)
    errors, sizes = {}, {}
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        slopes, differences = [], []
        for _ in range(2):
            way = torch.randn_like(leaf)
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    leaf.add_(way, alpha=sign * STEP)
                ends.append((v * optimum.follow(setting.domain, setting.fixed)).sum())
                with torch.no_grad():
                    leaf.sub_(way, alpha=sign * STEP)
            differences.append((ends[0] - ends[1]) / (2 * STEP))
            slopes.append(torch.zeros(()) if gradient is None else (gradient * way).sum())
        sizes[name] = torch.stack(differences).abs().max()
        errors[name] = (torch.stack(slopes) - torch.stack(differences)).abs().max()
    # Relative to each tensor's own gradient, but for those that hardly matter.
    least = 0.01 * max(sizes.values())
    worst = {name: float(errors[name] / max(sizes[name], least)) for name in leaves}
    assert max(worst.values()) <= 1e-5, worst


def test_the_cases_cover_what_they_should():
    assert sum(case.meet > 1 for case in CASES) >= 5
    assert sum(case.curved for case in CASES) >= 3
    assert sum(case.curved and case.meet > 1 for case in CASES) >= 3
