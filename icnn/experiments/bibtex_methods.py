"""What the BibTeX experiment compares: the paper's networks, rivals, energies over labels."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import icnn
from icnn import losses
from icnn.data import MultiLabel
from icnn.estimators.decoding import Decoding, choose, f1_examples, worth
from icnn.estimators.features import Features
from icnn.estimators.influence import Influence
from icnn.estimators.kernel import LabelKernel
from icnn.estimators.label_energy import (
    PREDICTION,
    TRAINING,
    Own,
    answers,
    cross_fit,
    label_energy,
    mean,
    unseen,
)
from icnn.estimators.networks import CROSS
from icnn.learning.batches import batches
from icnn.solvers.argmin import Solver

HALF = Decoding(0.5, relative=False, top=False)
RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0)
# The methods of the honest table, in its order.
FEED, RIDGE, KERNEL = "feed-forward", "TF-IDF ridge", "TF-IDF kernel ridge"
LOCAL, TUNED = "local term alone", "local term, factors learned"
PICNN = "the paper's network, bundle entropy"
STEPS, BUNDLE = "ICNN, gradient descent", "ICNN, bundle entropy"
DEFAULT = "MultiLabelClassifier, default arguments"
METHODS = (FEED, RIDGE, KERNEL, LOCAL, TUNED, PICNN, STEPS, BUNDLE, DEFAULT)
# The paper's table has one more: what gates know of words passes through the 600 units.
HELD = f"{BUNDLE}, gates do not see words"
PAPER = (FEED, STEPS, BUNDLE, HELD)


@dataclass(frozen=True)
class Settings:
    """What the experiment depends on."""

    seed: int = 0
    seeds: int = 5
    out: Path = Path("icnn-bibtex")
    fast: bool = False
    final: bool = False
    epochs: int = 20  # of the paper's networks
    rate: float = 3e-3
    feed_epochs: int = 30
    feed_rate: float = 1e-2


@dataclass
class Answers:
    """What a method says of examples held out, to choose a decoding by, and of those measured."""

    held: np.ndarray
    true: np.ndarray
    y: np.ndarray
    seconds: float
    gap: float | None = None
    predict_seconds: float | None = None


def feed_forward(words: int, labels: int) -> nn.Sequential:
    """The paper's."""
    return nn.Sequential(
        nn.Linear(words, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, labels)
    )


def cross(energy: Any, x: Tensor, y: Tensor) -> Tensor:
    """Its loss."""
    return F.binary_cross_entropy_with_logits(energy.net(x), y)


def paper_network(words: int, labels: int, held: bool) -> icnn.PICNN:
    """600 units and one for each label; where `held`, gates do not see words themselves."""
    energy = icnn.PICNN(words, labels, (600, labels), x_norm="batch")
    if held:
        first: Any = energy.layers[0]
        for gate in (first.wyu, first.wu):
            nn.init.zeros_(gate.weight)
            gate.weight.requires_grad_(False)
    return energy


@dataclass
class Curve:
    """F1 over epochs, with a threshold of 0.5."""

    train: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The paper's number: of the best epoch on the test set."""
        return max(self.test)


Answer = Callable[[Any, Tensor], Tensor]


def followed(
    energy: nn.Module, answer: Answer, loss: Callable[..., Any], train: MultiLabel,
    test: MultiLabel, epochs: int, rate: float, batch: int,
) -> Curve:  # fmt: skip
    """Train, and look at the test set after each epoch: the paper's protocol."""
    curve = Curve()
    (x, y), (x_test, _) = (tensors(part) for part in (train, test))

    def look(run: Any) -> None:
        run.energy.eval()
        with torch.no_grad():
            for values, given, true in (
                (curve.train, x[:1000], train.Y[:1000]),
                (curve.test, x_test, test.Y),
            ):
                found = np.concatenate([answer(run.energy, p).numpy() for p in given.split(1024)])
                values.append(float(f1_examples(HALF(found), true).mean()))

    optimizer = torch.optim.Adam([p for p in energy.parameters() if p.requires_grad], lr=rate)
    icnn.fit(
        energy, batches(x, y, size=batch, drop_last=True), loss, epochs=epochs,
        optimizer=optimizer, callbacks=[look], progress=False,
    )  # fmt: skip
    return curve


def tensors(data: MultiLabel) -> tuple[Tensor, Tensor]:
    """Words and labels."""
    return torch.from_numpy(data.X.toarray()).float(), torch.from_numpy(data.Y).float()


def paper(name: str, settings: Settings, train: MultiLabel, test: MultiLabel) -> Curve:
    """A row of the paper's table, in its own protocol."""
    words, labels = train.X.shape[1], train.Y.shape[1]
    # The labels of a box so wide that no step leaves it start at one half.
    wide, gradient = icnn.Box(-4.0, 5.0), icnn.ProjectedGradient(15, step_size=0.2, momentum=0.3)
    bundle = icnn.BundleEntropy(max_steps=10, tol=1e-3)

    def feed(energy: Any, x: Tensor) -> Tensor:
        return energy.net(x).sigmoid()

    def by_gradient(energy: Any, x: Tensor) -> Tensor:
        return icnn.argmin(energy, x, wide, entropy=0.0, solver=gradient).y

    def by_bundle(energy: Any, x: Tensor) -> Tensor:
        return icnn.argmin(energy, x, icnn.Box(), solver=bundle).y

    def squares(energy: Any, x: Tensor, y: Tensor) -> Tensor:
        found = by_gradient(energy, x)
        return losses.soft_f1(found.clamp(0, 1), y) + (found - y).square().mean()

    def entropies(energy: Any, x: Tensor, y: Tensor) -> Tensor:
        found = by_bundle(energy, x)
        entropy = F.binary_cross_entropy(found.clamp(1e-6, 1 - 1e-6), y)
        return losses.soft_f1(found, y) + CROSS * entropy

    torch.manual_seed(settings.seed)
    if name == FEED:
        net = icnn.Score(feed_forward(words, labels))
        epochs, rate = settings.feed_epochs, settings.feed_rate
        return followed(net, feed, cross, train, test, epochs, rate, 128)
    energy = paper_network(words, labels, held=name == HELD)
    epochs, rate = settings.epochs, settings.rate
    if name == STEPS:
        return followed(energy, by_gradient, squares, train, test, epochs, rate, 64)
    return followed(energy, by_bundle, entropies, train, test, epochs, rate, 128)


def by_feed_forward(train: MultiLabel, test: MultiLabel, seed: int, settings: Settings) -> Answers:
    """The paper's network; epoch and decoding are chosen on a tenth of the examples."""
    since = time.perf_counter()
    x, y = tensors(train)
    rows = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    held, rest = rows[: len(y) // 10], rows[len(y) // 10 :]
    true = train.Y[held.numpy()]

    def learned(rows: Tensor, epochs: int, validation: Any = None) -> tuple[Any, int]:
        torch.manual_seed(seed)
        energy = icnn.Score(feed_forward(x.shape[1], y.shape[1]))
        history = icnn.fit(
            energy, batches(x[rows], y[rows], size=128, drop_last=True), cross, epochs=epochs,
            optimizer=torch.optim.Adam(energy.parameters(), lr=settings.feed_rate),
            validation=validation, progress=False,
        )  # fmt: skip
        return energy, history.best

    def answer(energy: Any, given: Tensor) -> np.ndarray:
        with torch.no_grad():
            return energy.net(given).sigmoid().numpy()

    energy, epochs = learned(
        rest, settings.feed_epochs, lambda energy: -choose(answer(energy, x[held]), true)[1]
    )
    chosen = answer(energy, x[held])
    energy, _ = learned(rows, epochs)  # with all examples
    y_test = answer(energy, tensors(test)[0])
    return Answers(chosen, true, y_test, time.perf_counter() - since)


def by_ridge(train: MultiLabel, test: MultiLabel) -> Answers:
    """A linear function of TF-IDF; its parameter is chosen by cross-validation."""
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import cross_val_predict

    since = time.perf_counter()
    features = Features(train.X)
    x, x_test = (features(part.X).toarray() for part in (train, test))
    found = []
    for ridge in RIDGES:
        held = np.asarray(cross_val_predict(Ridge(ridge), x, train.Y, cv=5))  # pyright: ignore
        found.append((choose(held, train.Y)[1], ridge, held))
    _, ridge, held = max(found, key=lambda part: part[0])
    y = Ridge(ridge).fit(x, train.Y).predict(x_test)  # pyright: ignore
    return Answers(held, train.Y, y, time.perf_counter() - since)


def by_kernel(train: MultiLabel, test: MultiLabel, seed: int) -> Answers:
    """Least squares with an RBF kernel of TF-IDF; parameters by leaving out each example.

    They are chosen on all examples, where `MultiLabelClassifier` takes half of them for its own.
    """
    since = time.perf_counter()
    features = Features(train.X)
    x, x_test = features(train.X), features(test.X)
    by = partial(worth, metric="examples")
    random, all_of_them = np.random.RandomState(seed), len(train.Y)
    machine = LabelKernel(x, train.Y.astype(float), by, random, few=all_of_them)
    return Answers(machine.held_out, train.Y, machine(x_test), time.perf_counter() - since)


@dataclass
class Ours:
    """The energy over labels, and what it is compared with."""

    answers: dict[str, Answers]
    linear: Answers  # the energy over labels is a plane that touches at the local term's answer
    pulls: Influence  # between labels of one example


def by_energy(train: MultiLabel, test: MultiLabel, seed: int, fast: bool) -> Ours:
    """The local term alone, and with an energy over labels, from the same scores."""
    less: Any = {"hidden": (32,), "epochs": 1, "folds": 2, "energy_steps": 5} if fast else {}
    model = icnn.MultiLabelClassifier(random_state=seed, **less).fit(train.X, train.Y)
    since = time.perf_counter()
    solution = model.solve(test.X)
    predicted = time.perf_counter() - since
    x, x_test = model.inputs_, model._inputs(test.X)
    folds, about = model.folds_[1], (icnn.Box(), model.entropy)
    scores, pulls = model.times_["scores"], model.times_["energies"]
    found = {
        LOCAL: Answers(x.sigmoid().numpy(), train.Y, x_test.sigmoid().numpy(), scores),
        DEFAULT: Answers(
            model.held_out_, train.Y, solution.y.numpy(), scores + pulls,
            float(solution.gap.max()), predicted,
        ),
    }  # fmt: skip

    def told(name: str, energies: Any, solver: Solver, seconds: float) -> None:
        """What these energies answer."""
        held = unseen(energies, x, folds, *about, solver)
        y = answers(mean(energies), x_test, *about, solver)
        found[name] = Answers(held, train.Y, y.y.numpy(), scores + seconds, float(y.gap.max()))

    def learned(name: str, make: Any, training: Solver, answering: Solver) -> None:
        """The same, by other energies or solvers."""
        torch.manual_seed(seed)
        since, true = time.perf_counter(), torch.from_numpy(train.Y).float()
        energies = cross_fit(make, x, true, folds, *about, model.energy_steps, solver=training)
        told(name, energies, answering, time.perf_counter() - since)

    labels = train.Y.shape[1]
    told(BUNDLE, model.energies_, PREDICTION, pulls)
    learned(TUNED, lambda: alone(labels), TRAINING, PREDICTION)
    # Steps of one length do not converge where the entropy is steep: these are spectral.
    training = icnn.ProjectedGradient(max_steps=15, rule="spectral", unrolled=5)
    answering = icnn.ProjectedGradient(max_steps=30, rule="spectral")
    learned(STEPS, partial(label_energy, labels, model.label_hidden), training, answering)
    plain = icnn.MultiLabelClassifier(energy="picnn", random_state=seed, **less)
    plain.fit(train.X, train.Y)
    y = plain.solve(test.X)
    found[PICNN] = Answers(
        plain.held_out_, train.Y, y.y.numpy(), plain.times_["energies"], float(y.gap.max())
    )
    linear = Answers(
        np.concatenate([
            linearised([energy], x[out], model.entropy)
            for energy, (_, out) in zip(model.energies_, folds, strict=True)
        ])[np.argsort(np.concatenate([out for _, out in folds]))],
        train.Y, linearised(model.energies_, x_test, model.entropy), found[BUNDLE].seconds,
    )  # fmt: skip
    # An example with several labels says most.
    row = int(test.Y[:200].sum(axis=1).argmax())
    names = [name.removeprefix("TAG_") for name in train.labels]
    return Ours(found, linear, model.explain(test.X[[row]], names=names))


def alone(labels: int) -> icnn.Score:
    """The local term, whose factors and offsets are learned as those of the energy over labels."""
    energy = icnn.Score(Own(labels))
    energy.y_shape = (labels,)
    return energy


def linearised(energies: Any, x: Tensor, entropy: float) -> np.ndarray:
    """Answers where the energy over labels is a plane: it touches at the local term's minimum."""
    with torch.no_grad():
        score = torch.stack([energy.energies[0].net(x) for energy in energies]).mean(dim=0)
    y = (score / entropy).sigmoid().requires_grad_()
    values = torch.stack([energy.energies[1](x, y) for energy in energies])
    (slope,) = torch.autograd.grad(values.mean(dim=0).sum(), y)
    return ((score - slope) / entropy).sigmoid().numpy()
