"""`check_convexity` proves what is convex by construction, and is not fooled by the rest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import ACTIVATIONS, DIM_X, DIM_Y, EVERY_FAMILY, POSITIVITIES, Make, train_on_noise
from torch import Tensor, nn

import icnn
from icnn.energies.convexity import ConvexityReport, Counterexample, check_convexity
from icnn.energies.proof import prove

X = torch.rand(4, DIM_Y) + 0.5  # positive: a proof must hold for every x all the same


def energy_of(f: Callable[[Any, Tensor], Tensor], y_shape: tuple[int, ...] = (DIM_Y,)):
    """A plain function as an energy."""
    f.y_shape = y_shape  # type: ignore[attr-defined]
    return f


def violation(energy: Callable[[Any, Tensor], Tensor], found: Counterexample) -> float:
    """Jensen's inequality at a counterexample, computed anew in float64."""
    x = None if found.x is None else found.x[None]
    t, y, y2 = found.t, found.y[None], found.y2[None]
    with torch.no_grad():
        chord = t * energy(x, y) + (1 - t) * energy(x, y2)
        return float(energy(x, t * y + (1 - t) * y2) - chord)


def refuted(energy: Any, x: Any = None, exact: bool = True, **options) -> ConvexityReport:
    """Not proved, and with a counterexample that is one."""
    report = check_convexity(energy, x, **options)
    assert not report.proved, str(report)
    found = report.counterexample
    assert found is not None, str(report)
    assert found.violation > 0
    assert found.y.dtype == torch.float64
    double = energy.double().eval() if isinstance(energy, nn.Module) and exact else energy
    assert violation(double, found) == pytest.approx(found.violation, rel=1e-6 if exact else 1e-2)
    return report


# --- What is convex ----------------------------------------------------------------------------


def proved_before_and_after_training(make: Make, **options):
    energy = make(**options).double()
    assert check_convexity(energy).proved, str(check_convexity(energy))
    train_on_noise(energy, steps=50)
    assert check_convexity(energy).proved, str(check_convexity(energy))


@pytest.mark.parametrize("positivity", POSITIVITIES)
@EVERY_FAMILY
def test_every_positivity_is_proved(make: Make, positivity: str):
    proved_before_and_after_training(make, positivity=positivity)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])  # relu is in all of the above
@EVERY_FAMILY
def test_every_activation_is_proved(make: Make, activation: str):
    proved_before_and_after_training(make, activation=activation, positivity="softplus")


class Users(nn.Module):
    """An ICNN as a user writes it."""

    y_shape = (DIM_Y,)

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu):
        super().__init__()
        self.a, self.b = nn.Linear(DIM_Y, 8), nn.Linear(DIM_Y, 8)
        self.w, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self.activation = activation
        self.project()

    def project(self):
        for weight in (self.w.weight, self.out.weight):
            weight.data.clamp_(min=0)

    def forward(self, x: Any, y: Tensor) -> Tensor:
        z = F.softplus(self.a(y))
        z = self.activation(self.w(z) + self.b(y))
        return self.out(z).squeeze(1)


class UsersConvolution(nn.Module):
    y_shape = (1, 8, 8)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.second.weight.data.abs_()

    def forward(self, x: Any, y: Tensor) -> Tensor:
        z = F.max_pool2d(F.elu(self.norm(self.first(y))), 2) + F.avg_pool2d(y, 2)
        z = F.celu(self.second(z)) + F.interpolate(y, (1, 1), mode="bilinear")
        return F.adaptive_avg_pool2d(z, 1).flatten(1).logsumexp(1)


SEMIDEFINITE = torch.randn(5, DIM_Y, generator=torch.Generator().manual_seed(1))
CONVEX: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "norm": lambda x, y: torch.linalg.vector_norm(y - x, dim=1),
    "norm of a non-negative convex part": lambda x, y: (y.abs() + 1).norm(dim=1),
    "distance": lambda x, y: torch.cdist(y, SEMIDEFINITE).sum(1),
    "quadratic": lambda x, y: (y @ SEMIDEFINITE.T).square().sum(1),
    "einsum": lambda x, y: torch.einsum("bi,ki->bk", y, SEMIDEFINITE).exp().sum(1),
    "a factor times itself": lambda x, y: (y * y).sum(1),
    "log-sum-exp": lambda x, y: torch.logsumexp(y * x, dim=1),
    "cross entropy": lambda x, y: F.cross_entropy(y, torch.arange(len(y)) % 3, reduction="none"),
    "logistic": lambda x, y: F.binary_cross_entropy_with_logits(y, x, reduction="none").sum(1),
    "logsigmoid": lambda x, y: -F.logsigmoid(y).sum(1),
    "mean squared error": lambda x, y: F.mse_loss(y, x, reduction="none").mean(1),
    "huber": lambda x, y: F.huber_loss(y, x, reduction="none").mean(1),
    "minus log": lambda x, y: -(y + 2 * x).log().sum(1),
    "minus root of a concave part": lambda x, y: -(2 - y.exp()).sqrt().sum(1),
    "minus minimum": lambda x, y: -torch.minimum(y, x).sum(1) - y.amin(1),
    "convex of minus concave": lambda x, y: F.relu(-(1 - y.square())).sum(1),
    "falling of concave": lambda x, y: torch.exp(-torch.clamp(y, max=1.0)).sum(1),
    "gates": lambda x, y: (y.exp() * (x.sigmoid() + x.square() + (x > 0)) / x.exp()).sum(1),
    "a shifted gate": lambda x, y: ((F.elu(x) + 1) * y.abs()).sum(1),
    "negative over negative": lambda x, y: (-y.abs() / -(1 + x.abs())).sum(1),
    "choice by x": lambda x, y: torch.where(x > 0, y.exp(), y.abs()).sum(1),
    "maximum along": lambda x, y: y.cummax(1).values.sum(1) + y.max(1).values,
    "joined and taken apart": lambda x, y: torch.cat([y, y.exp()], 1)[:, [0, 4]].flip(1).sum(1),
    "cubed where it is positive": lambda x, y: y.relu().pow(3).sum(1) + 2 ** y[:, 0],
    "spread": lambda x, y: y.std(1) + y.var(1),
    "detached": lambda x, y: (y.detach().square() + y.data.abs()).sum(1),
    "cumulated": lambda x, y: F.pad(y.cumsum(1), (1, 1)).abs().sum(1),
    "another precision": lambda x, y: y.double().square().sum(1).to(y.dtype),
    "tanh that is never read": lambda x, y: y.sum(1) + 0 * len(torch.tanh(y)),
}


@pytest.mark.parametrize("name", CONVEX)
def test_a_users_function_is_proved(name: str):
    report = check_convexity(energy_of(lambda x, y: CONVEX[name](x, y)), X)
    assert report.proved, str(report)


@pytest.mark.parametrize("energy", [Users(), Users(F.leaky_relu), UsersConvolution()], ids=repr)
def test_a_users_module_is_proved(energy: nn.Module):
    report = check_convexity(energy)
    assert report.proved, str(report)
    assert "eval mode" in report.reasons
    assert "proved" in str(report)


def test_compositions_of_a_users_parts_are_proved():
    energy = icnn.Sum(icnn.Scale(Users(), 2.0), icnn.Max(Users(), icnn.Quadratic(0.5)))
    assert check_convexity(energy).proved
    assert check_convexity(icnn.Sum(icnn.Score(nn.Linear(DIM_X, 2)), icnn.FICNN(2, dim_x=4))).proved


def test_a_compiled_energy_is_proved():
    assert check_convexity(torch.compile(icnn.FICNN(DIM_Y, (8,)))).proved


def test_in_place_operators_are_followed():
    def energy(x, y):
        z = y * 2
        z.mul_(-1).add_(x)
        z[:, 0] = 3.0
        z[:, 1] += y[:, 2].exp()
        return z.clamp_(min=0).sum(1)

    assert check_convexity(energy_of(energy), X).proved


# --- What is not -------------------------------------------------------------------------------


def test_one_flipped_weight():
    energy = Users()
    with torch.no_grad():
        energy.w.weight.fill_(0.1)
        energy.out.weight.fill_(1.0)
        energy.w.weight[2, 3] = -2.0
    report = refuted(energy)
    (reason,) = report.reasons
    assert "weights of both signs (minimum -2)" in reason
    assert "test_energies_proof.py" in reason
    assert "self.w(z)" in reason


def test_a_tiny_negative_weight_is_seen():
    energy = Users()
    with torch.no_grad():
        energy.w.weight[2, 3] = -1e-30
    assert not check_convexity(energy).proved


def test_a_users_icnn_trained_without_projection():
    energy = Users()
    train_on_noise(energy.double(), steps=200)  # type: ignore[arg-type]
    refuted(energy)
    energy.project()
    assert check_convexity(energy).proved


@EVERY_FAMILY
def test_no_positivity(make: Make):
    energy = make(positivity=None).double()
    train_on_noise(energy, steps=50)
    refuted(energy)


class Changed(Users):
    """Convex layers, and a forward that spoils them."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]):
        super().__init__()
        self.spoil = spoil

    def forward(self, x: Any, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.spoil(super().forward(x, 0.3 * y + 1))


@pytest.mark.parametrize(
    "spoil",
    [lambda z: -3 * z, lambda z: -z * z.abs(), torch.sin, torch.tanh, lambda z: z.neg().exp()],
)
def test_convex_layers_and_a_forward_that_is_not(spoil):
    refuted(Changed(spoil))


class Buffered(Users):
    def __init__(self):
        super().__init__()
        self.sign = nn.Buffer(torch.tensor([1.0] * 7 + [-1.0]))

    def forward(self, x: Any, y: Tensor) -> Tensor:
        return (F.relu(self.a(y)) * self.sign).sum(1)


def test_a_weight_that_is_negative_through_a_buffer():
    refuted(Buffered())


TABLE = torch.tensor([1.0, 2.0])
NOT_CONVEX: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "tanh": (lambda x, y: torch.tanh(y).sum(1), "tanh of an affine argument"),
    "sin": (lambda x, y: torch.sin(y).sum(1), "sin of an affine argument"),
    "negative": (lambda x, y: -y.abs().sum(1), "concave"),
    "difference": (lambda x, y: (y.abs() - y.square()).sum(1), "a convex and a concave"),
    "gate": (lambda x, y: (x * y.abs()).sum(1), "may have either sign"),
    "gate of another layer": (
        lambda x, y: ((x.tanh() - 0.1)[:, None] @ y.abs()[:, :, None]).flatten(),
        "either sign",
    ),
    "divisor": (lambda x, y: (y.abs() / x).sum(1), "either sign"),
    "product": (lambda x, y: y[:, 0] * y[:, 1], "both depend on y"),
    "product of views": (lambda x, y: (y * y.flip(1)).sum(1), "both depend on y"),
    "product of parts": (lambda x, y: torch.mul(*y[:, :2].unbind(1)), "both depend"),
    "bilinear": (lambda x, y: (y[:, None] @ y.roll(1, 1)[:, :, None]).flatten(), "both depend"),
    "minimum": (lambda x, y: torch.minimum(y, x).sum(1), "concave"),
    "minimum of convex parts": (lambda x, y: torch.minimum(y.exp(), y.abs()).sum(1), "minimum of"),
    "least": (lambda x, y: y.abs().amin(1), "amin of a convex"),
    "where": (lambda x, y: torch.where(y > 0, y, 2 * y).sum(1), "no rule for gt"),
    "masked": (lambda x, y: y.masked_fill(y < 0, 1.0).sum(1), "no rule for lt"),
    "square of both signs": (lambda x, y: (y.exp() - 3).square().sum(1), "both rises and falls"),
    "norm of both signs": (lambda x, y: (y.exp() - 3).norm(dim=1), "both rises and falls"),
    "distance of convex parts": (
        lambda x, y: torch.cdist(y.exp(), 0 * y[:2].detach() + 3).sum(1),
        "",
    ),
    "cube": (lambda x, y: y.pow(3).sum(1), "pow of an affine"),
    "inverse": (lambda x, y: (1 / (y + 0.1)).sum(1), "reciprocal of an affine"),
    "root": (lambda x, y: y.abs().sqrt().sum(1), "which is concave"),
    "log of convex": (lambda x, y: torch.log1p(y.square()).sum(1), "which is concave"),
    "a steep elu": (lambda x, y: F.elu(y, alpha=2.0).sum(1), "elu of an affine"),
    "selu": (lambda x, y: F.selu(y).sum(1), "elu of an affine"),
    "a steep leaky relu": (lambda x, y: F.leaky_relu(y, 1.5).sum(1), "concave"),
    "a rough softplus": (lambda x, y: F.softplus(y, threshold=0.5).sum(1), "softplus of"),
    "clipped": (lambda x, y: y.clamp(-1, 1).sum(1), "clamp of a convex"),
    "relu6": (lambda x, y: F.relu6(y).sum(1), "hardtanh of a convex"),
    "gelu": (lambda x, y: F.gelu(y).sum(1), "gelu of an affine"),
    "softmax": (lambda x, y: y.softmax(1)[:, 0], "softmax of an affine"),
    "rounded": (lambda x, y: y.round().sum(1), "no rule for round"),
    "whole": (lambda x, y: y.int().float().sum(1), "whole numbers"),
    "index of the greatest": (lambda x, y: y.max(1).indices.float(), "no rule"),
    "sorted": (lambda x, y: y.sort(1).values[:, 0] ** 2, "no rule for sort"),
    "layer norm": (lambda x, y: F.layer_norm(y, (DIM_Y,))[:, 0], ""),
    "a negative power": (lambda x, y: (y.abs() + 1).pow(-0.5).sum(1), "which is convex and falls"),
    "a negative mean": (lambda x, y: F.avg_pool1d(-y.abs(), 2).sum(1), "concave"),
    "nan hidden": (lambda x, y: torch.fmax(-y.log(), y.new_zeros(())).sum(1), "no rule for fmax"),
    "numpy": (lambda x, y: torch.as_tensor(y.numpy()).sin().sum(1), "cannot be traced"),
    "if": (lambda x, y: y.sum(1) if y.sum() > 0 else 2 * y.sum(1), "cannot be traced"),
    "index by x": (
        lambda x, y: y.abs().sum(1) * (-x.abs()).max(1).indices.sub(1).to(y.dtype),
        "either sign",
    ),
    "rows by x": (
        lambda x, y: y.abs().sum(1) * (TABLE[(x[:, 0] > 0).long()] - TABLE[0] - 0.5).to(y.dtype),
        "either sign",
    ),
    "truth of x": (lambda x, y: (y.abs() * (-x.relu()).bool() * -1).sum(1), "concave"),
}


@pytest.mark.parametrize("name", NOT_CONVEX)
def test_a_users_function_is_not_proved(name: str):
    f, reason = NOT_CONVEX[name]
    report = refuted(energy_of(lambda x, y: f(x, y)), X)
    assert reason in str(report), str(report)


def test_in_place_operators_do_not_hide_a_sign():
    def energy(x, y):
        z = y.exp()
        z[:, 0].neg_()
        return z.sum(1)

    refuted(energy_of(energy))


def test_an_energy_that_changes_its_buffer_is_not_proved():
    class Counting(Users):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, y):
            self.calls += 1
            return super().forward(x, y) * (5 - self.calls)

    energy = Counting()
    assert not check_convexity(energy).proved
    assert energy.calls == 0


def test_random_numbers_are_not_taken_for_weights():
    energy = energy_of(lambda x, y: (y.abs() * torch.randn(1)).sum(1))
    assert not check_convexity(energy).proved


def test_what_cannot_be_proved_and_is_convex_has_no_counterexample():
    report = check_convexity(energy_of(lambda x, y: torch.log(y.exp().sum(1))))
    assert not report.proved
    assert report.counterexample is None
    assert "no counterexample" in str(report)


class Cube:
    """A domain by its protocol alone."""

    low, high = -1.0, torch.zeros(DIM_Y)

    def project(self, y: Tensor) -> Tensor:
        return y.clamp(-1, 0)


def test_the_domain_bounds_proof_and_search():
    assert check_convexity(lambda x, y: torch.tanh(y).sum(1), domain=Cube()).proved
    report = refuted(lambda x, y: -torch.tanh(y).sum(1), domain=Cube())
    assert report.counterexample is not None
    for y in (report.counterexample.y, report.counterexample.y2):
        assert bool(((y >= -1) & (y <= 0)).all())
    assert (
        "y between -1 and 0"
        in check_convexity(energy_of(lambda x, y: y.sum(1)), domain=Cube()).reasons
    )


# --- Manners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("positivity", ["project", None])
def test_nothing_is_touched(positivity: str | None):
    net = nn.Sequential(nn.Linear(DIM_X, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, DIM_Y))
    energy = icnn.Sum(icnn.Score(net), icnn.PICNN(DIM_X, DIM_Y, (8,), positivity=positivity))
    net[1].eval()
    modes = [module.training for module in energy.modules()]
    before = {name: value.clone() for name, value in energy.state_dict().items()}
    state = torch.get_rng_state()
    check_convexity(energy)
    assert [module.training for module in energy.modules()] == modes
    assert all(parameter.requires_grad for parameter in energy.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in energy.state_dict().items())


def test_the_same_answer_twice():
    energy = icnn.FICNN(DIM_Y, (8,), positivity=None)
    first, second = (check_convexity(energy).counterexample for _ in range(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first.y, second.y)
    assert first.violation == second.violation


def test_bad_input_is_met_at_the_door():
    with pytest.raises(ValueError, match="`energy` must be a module or a function"):
        check_convexity(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"set energy.y_shape = \(n,\)"):
        check_convexity(lambda x, y: y.sum(1))
    with pytest.raises(ValueError, match=r"one value per example, shape \(2,\), got \(2, 3\)"):
        check_convexity(energy_of(lambda x, y: y))
    with pytest.raises(ValueError, match="`x` must be a batch that `energy` takes"):
        check_convexity(energy_of(lambda x, y: (x * y).sum(1)))
    with pytest.raises(ValueError, match="`x` must have shape"):
        check_convexity(icnn.PICNN(DIM_X, DIM_Y), torch.zeros(2, DIM_X + 1))


def test_x_may_be_anything():
    energy = energy_of(lambda x, y: (y * x["a"]).abs().sum(1) * x["b"][0].square() + len(x["c"]))
    x = {"a": X, "b": (torch.randn(4), 3), "c": "word"}
    report = check_convexity(energy, x)
    assert report.proved
    assert "not tensors" in report.reasons[-1]
    report = check_convexity(energy_of(lambda x, y: torch.sin(y).sum(1)), "word")
    assert not report.proved
    assert report.counterexample is None


# --- Soundness: random programs -----------------------------------------------------------------

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.neg, torch.abs, torch.exp, torch.square, torch.relu, torch.tanh, torch.sigmoid,
    F.softplus, F.elu, F.leaky_relu, F.logsigmoid, torch.sin, torch.reciprocal, torch.asinh,
    lambda z: z.pow(3), lambda z: z.pow(-2), lambda z: z.clamp(max=1.0), lambda z: z.clamp(-1, 2),
    lambda z: torch.log1p(z.relu()), lambda z: z.square().add(1).sqrt(), lambda z: 1 - z,
    lambda z: z * z, lambda z: z.flip(1), lambda z: z[:, :1] - z, lambda z: z.cumsum(1),
    lambda z: z.amax(1, keepdim=True) + 0 * z, lambda z: z.amin(1, keepdim=True) + 0 * z,
    lambda z: z.norm(dim=1, keepdim=True) + z, lambda z: z.logsumexp(1, keepdim=True) + z,
    lambda z: z @ SEMIDEFINITE[:3].to(z), lambda z: z @ SEMIDEFINITE[:3].to(z).abs(),
    lambda z: z @ -SEMIDEFINITE[:3].to(z).square(), lambda z: z / (1 + z.detach().abs()),
    lambda z: F.log_softmax(z, 1), lambda z: torch.where(z > 0, z, 0.5 * z),
    lambda z: z.add(1).mul_(0.5).abs_(), lambda z: 2 ** z, lambda z: z.sinh(),
    lambda z: F.avg_pool1d(z, 3, 1, 1), lambda z: F.max_pool1d(z, 3, 1, 1),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.logaddexp,
    lambda a, b: torch.cat([a, b], 1)[:, 1:4], lambda a, b: a.clamp(min=b), F.mse_loss,
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_proved_obeys_jensen(steps: list[tuple[int, int, int]]):
    def energy(x: Tensor, y: Tensor) -> Tensor:
        stack = [y, x, y.abs()]
        for operator, i, j in steps:
            a, b = stack[-1 - i % len(stack)], stack[-1 - j % len(stack)]
            stack.append(
                UNARY[operator](a)
                if operator < len(UNARY)
                else BINARY[operator - len(UNARY)](a, b) + 0 * a
            )
        return stack[-1].sum(1)

    generator = torch.Generator().manual_seed(0)
    report = proof_alone(energy, X)
    if not report:
        return
    draw = torch.randn(3, 2000, DIM_Y, generator=generator, dtype=torch.float64)
    x, y, y2 = draw * torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)[:, None, None]
    t = torch.rand(2000, generator=generator, dtype=torch.float64)
    p, q = energy(x, y), energy(x, y2)
    above = energy(x, t[:, None] * y + (1 - t[:, None]) * y2) - t * p - (1 - t) * q
    relative = above / (1 + p.abs() + q.abs())
    assert bool((relative.nan_to_num(0.0, 0.0, 0.0) <= 1e-8).all())


def proof_alone(energy: Callable[[Any, Tensor], Tensor], x: Tensor) -> bool:
    """The proof without the search, which takes longer."""
    return not prove(energy, x, torch.randn(len(x), DIM_Y), -torch.inf, torch.inf).doubts


@pytest.mark.parametrize(
    ("energy", "reason"),
    [
        (lambda x, y: y.square().sum(1) + torch.randn(len(y)), "draw random numbers"),
        (lambda x, y: (y @ torch.randn(3, 2)).square().sum(1), "draw random numbers"),
        (lambda x, y: F.dropout(F.softplus(y), 0.5).sum(1), "draw random numbers"),
        (lambda x, y: (y - y.mean(0)).square().sum(1), "depends on the other examples"),
    ],
    ids=["noise", "random weights", "dropout", "mean of the batch"],
)
def test_what_is_no_function_of_each_example_is_not_judged(energy, reason: str):
    energy.y_shape = (3,)
    report = icnn.check_convexity(energy)
    assert not report.proved
    assert report.counterexample is None
    assert reason in str(report)


class Negated(nn.Module):
    """Looks like a module that torch.compile made."""

    y_shape = (2,)

    def __init__(self):
        super().__init__()
        self._orig_mod = icnn.FICNN(dim_y=2)

    def forward(self, x, y):
        return -self._orig_mod(x, y)


class KeepsTheFirst(nn.Module):
    """What depends on x is computed at the first call, for good."""

    y_shape, dim_x = (2,), 2
    kept = None

    def forward(self, x, y):
        if self.kept is None:
            self.kept = x.sum() + 10
        return self.kept * y.square().sum(1)


def data_assigned(x, y):
    z = y.abs()
    z.data = -z.data
    return z.sum(1)


def by_the_size_of_the_batch(x, y):
    return y.square().sum(1) if len(y) == 2 else -y.square().sum(1)


def compiled_with_a_hook() -> Any:
    compiled = torch.compile(icnn.FICNN(dim_y=2), backend="eager")
    compiled.register_forward_hook(lambda module, inputs, value: -value)  # type: ignore[union-attr]
    return compiled


@pytest.mark.parametrize(
    "energy",
    [
        Negated(),
        KeepsTheFirst(),
        data_assigned,
        by_the_size_of_the_batch,
        compiled_with_a_hook(),
        lambda x, y: (y.square() if y.requires_grad else -y.square()).sum(1),
        lambda x, y: y.double().contiguous().view(torch.float32).sum(1),
        lambda x, y: y.to(torch.float8_e5m2).float().sum(1),
        lambda x, y: -(y**0.25).clamp(min=1).sum(1),
        lambda x, y: -torch.sigmoid(y**0.25 - 3).sum(1),
        lambda x, y: (y.abs() / torch.tensor([1.0, -0.0])).sum(1),
        lambda x, y: y[0].square().sum().expand(len(y)),
    ],
    ids=[
        "wrapped", "kept", "data", "batch", "hook", "mode", "bits", "coarse", "root", "root inside",
        "negative zero", "one example for all",
    ],
)  # fmt: skip
def test_tricks_are_not_proved(energy):
    if not isinstance(energy, nn.Module):
        energy.y_shape = (2,)
    assert not icnn.check_convexity(energy).proved
