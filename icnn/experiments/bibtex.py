"""Section 6.2 and supplement J of the paper: tags of publications, 1,836 words and 159 labels.

Two protocols. The paper's: labels where the answer is above 0.5, and the best epoch on the test
set. And an honest one: every choice is made on data held out of the training set, and all methods
are decoded by the same rules, chosen for each on data held out.

Where it differs from the paper:

1. F1 is printed in both ways, averaged over examples (which the paper calls macro) and over labels,
   each with a decoding of its own.
2. The paper's network has gates that are linear in the words: they know the training set by heart
   after two epochs. Their weights on words are zero here (`held`), so that words enter through the
   600 units with batch norm alone; without it, the row is there too.
3. The loss has the F1 of the answer in it: besides a squared error for gradient steps, which make
   no use of an entropy or of bounds, as those of the paper's code; besides a cross entropy for
   bundles, which do.
4. The better energy: `-y . score(x) + pull(score(x), y)`, see `icnn.MultiLabelClassifier`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import icnn
from icnn import losses, report
from icnn.data import MultiLabel, mulan
from icnn.estimators.decoding import Decoding, choose, f1_examples, f1_labels, worth
from icnn.estimators.features import Features
from icnn.estimators.influence import Influence
from icnn.estimators.kernel import Kernel
from icnn.estimators.label_energy import PREDICTION, TRAINING, Own, cross_fit, label_energy
from icnn.estimators.networks import CROSS
from icnn.experiments.statistics import Difference, paired_bootstrap
from icnn.extras import require
from icnn.learning.batches import batches
from icnn.learning.progress import parts_done
from icnn.solvers.argmin import Solver

PUBLISHED = {"SPEN": 0.422, "DVN": 0.447}
HALF = Decoding(0.5, relative=False, top=False)
RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0)
# The methods of the honest table, in its order.
FEED, RIDGE, KERNEL = "feed-forward", "TF-IDF ridge", "TF-IDF kernel ridge"
LOCAL, TUNED = "local term alone", "local term, factors learned"
STEPS, BUNDLE = "ICNN, gradient descent", "ICNN, bundle entropy"
METHODS = (FEED, RIDGE, KERNEL, LOCAL, TUNED, STEPS, BUNDLE)
DRAWN = "as drawn: gates see words"
# Rows of the paper's table: the name, whether by bundles, whether gates see words.
PAPER = {
    STEPS: (False, False), BUNDLE: (True, False), f"{STEPS}, {DRAWN}": (False, True),
    f"{BUNDLE}, {DRAWN}": (True, True),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the experiment depends on."""

    seed: int = 0
    seeds: int = 5
    out: Path = Path("icnn-bibtex")
    fast: bool = False
    final: bool = False
    epochs: int = 10  # of the paper's networks
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


@dataclass
class Scores:
    """How good answers are, each F1 with the decoding that is best for it on examples held out."""

    examples: np.ndarray  # of each example
    labels: np.ndarray  # of each label
    rule: Decoding

    @property
    def both(self) -> tuple[float, float]:
        """The means."""
        return float(self.examples.mean()), float(self.labels.mean())


def scored(answers: Answers, true: np.ndarray) -> Scores:
    """Decoded by what was best on examples held out."""
    rule, _ = choose(answers.held, answers.true, "examples")
    other, _ = choose(answers.held, answers.true, "labels")
    return Scores(f1_examples(rule(answers.y), true), f1_labels(other(answers.y), true), rule)


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
    wide, gradient = icnn.Box(-4.0, 5.0), icnn.ProjectedGradient(30, step_size=0.1, momentum=0.3)
    bundle = icnn.BundleEntropy(max_steps=10, tol=1e-3)

    def feed(energy: Any, x: Tensor) -> Tensor:
        return energy.net(x).sigmoid()

    def by_gradient(energy: Any, x: Tensor) -> Tensor:
        return icnn.argmin(energy, x, wide, entropy=0.0, solver=gradient).y

    def by_bundle(energy: Any, x: Tensor) -> Tensor:
        return icnn.argmin(energy, x, icnn.Box(), solver=bundle).y

    def squares(energy: Any, x: Tensor, y: Tensor) -> Tensor:
        found = by_gradient(energy, x)
        return losses.soft_f1(found.clamp(0, 1), y) + 2 * (found - y).square().mean()

    def entropies(energy: Any, x: Tensor, y: Tensor) -> Tensor:
        found = by_bundle(energy, x)
        entropy = F.binary_cross_entropy(found.clamp(1e-6, 1 - 1e-6), y)
        return losses.soft_f1(found, y) + CROSS * entropy

    torch.manual_seed(settings.seed)
    if name == FEED:
        net = icnn.Score(feed_forward(words, labels))
        epochs, rate = settings.feed_epochs, settings.feed_rate
        return followed(net, feed, cross, train, test, epochs, rate, 128)
    bundles, gates = PAPER[name]
    energy = paper_network(words, labels, held=not gates)
    epochs, rate = settings.epochs, settings.rate
    if bundles:
        return followed(energy, by_bundle, entropies, train, test, epochs, rate, 128)
    return followed(energy, by_gradient, squares, train, test, epochs, rate, 64)


def by_feed_forward(train: MultiLabel, test: MultiLabel, seed: int, settings: Settings) -> Answers:
    """The paper's network; its epoch is chosen on a tenth of the examples."""
    since = time.perf_counter()
    x, y = tensors(train)
    rows = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    held, rest = rows[: len(y) // 10], rows[len(y) // 10 :]
    true = train.Y[held.numpy()]
    torch.manual_seed(seed)
    energy = icnn.Score(feed_forward(x.shape[1], y.shape[1]))

    def answer(given: Tensor) -> np.ndarray:
        with torch.no_grad():
            return energy.net(given).sigmoid().numpy()

    icnn.fit(
        energy, batches(x[rest], y[rest], size=128, drop_last=True), cross,
        epochs=settings.feed_epochs,
        optimizer=torch.optim.Adam(energy.parameters(), lr=settings.feed_rate),
        validation=lambda _: -choose(answer(x[held]), true)[1], progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - since
    return Answers(answer(x[held]), true, answer(tensors(test)[0]), seconds)


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
    """Least squares with an RBF kernel of TF-IDF; parameters by leaving out each example."""
    since = time.perf_counter()
    features = Features(train.X)
    x, x_test = features(train.X), features(test.X)
    by = partial(worth, metric="examples")
    machine = Kernel(x, train.Y.astype(float), by, np.random.RandomState(seed))
    return Answers(machine.held_out, train.Y, machine(x_test), time.perf_counter() - since)


@dataclass
class Ours:
    """The energy over labels, and what it is compared with."""

    answers: dict[str, Answers]
    linear: np.ndarray  # answers with the energy over labels linearised at those of the local term
    pulls: Influence  # between labels of one example


def by_energy(train: MultiLabel, test: MultiLabel, seed: int, fast: bool) -> Ours:
    """The local term alone, and with an energy over labels, from the same scores."""
    less: Any = {"hidden": (32,), "epochs": 1, "folds": 2, "energy_steps": 5} if fast else {}
    model = icnn.MultiLabelClassifier(energy="labels", random_state=seed, **less)
    model.fit(train.X, train.Y)
    since = time.perf_counter()
    solution = model.solve(test.X)
    predicted = time.perf_counter() - since
    x, x_test, scores = model.inputs_, model._inputs(test.X), model.times_["scores"]
    found = {
        LOCAL: Answers(x.sigmoid().numpy(), train.Y, x_test.sigmoid().numpy(), scores),
        BUNDLE: Answers(
            model.held_out_, train.Y, solution.y.numpy(), scores + model.times_["energies"],
            float(solution.gap.max()), predicted,
        ),
    }  # fmt: skip

    def learned(name: str, make: Any, steps: int, *solvers: Solver) -> None:
        """The same, by other energies or solvers."""
        torch.manual_seed(seed)
        since, true, box = time.perf_counter(), torch.from_numpy(train.Y).float(), icnn.Box()
        training, answering = solvers or (TRAINING, PREDICTION)
        energies, held = cross_fit(
            make, x, true, model.folds_[1], box, model.entropy, steps, solver=training,
            answering=answering,
        )  # fmt: skip
        mean: Any = icnn.Scale(icnn.Sum(*energies), 1 / len(energies))
        mean.y_shape = (train.Y.shape[1],)
        with torch.no_grad():
            answer = icnn.argmin(mean, x_test, box, entropy=model.entropy, solver=answering)
        seconds = scores + time.perf_counter() - since
        found[name] = Answers(held, train.Y, answer.y.numpy(), seconds, float(answer.gap.max()))

    labels = train.Y.shape[1]
    learned(TUNED, lambda: alone(labels), model.energy_steps)
    # Steps of one length do not converge where the entropy is steep: these are spectral. They take
    # long to learn through, so that gradients go through the last five, in half as many steps.
    spectral = icnn.ProjectedGradient(max_steps=30, rule="spectral", unrolled=5)
    pulls = partial(label_energy, labels, model.label_hidden)
    learned(STEPS, pulls, model.energy_steps // 2, spectral, spectral)
    # An example with several labels says most.
    row = int(test.Y[:200].sum(axis=1).argmax())
    model.label_names_ = np.array([name.removeprefix("TAG_") for name in train.labels])
    return Ours(found, linearised(model, x_test), model.explain(test.X[[row]]))


def alone(labels: int) -> icnn.Score:
    """The local term, whose factors and offsets are learned as those of the energy over labels."""
    energy = icnn.Score(Own(labels))
    energy.y_shape = (labels,)
    return energy


def linearised(model: Any, x: Tensor) -> np.ndarray:
    """Answers where the energy over labels is a plane: it touches at the local term's minimum."""
    parts = model.energy_.energy.energies
    with torch.no_grad():
        score = torch.stack([part.energies[0].net(x) for part in parts]).mean(dim=0)
    y = (score / model.entropy).sigmoid().requires_grad_()
    values = torch.stack([part.energies[1](x, y) for part in parts])
    (slope,) = torch.autograd.grad(values.mean(dim=0).sum(), y)
    return ((score - slope) / model.entropy).sigmoid().numpy()


def run(settings: Settings) -> dict[str, Any]:
    """Train, measure, draw: `bibtex.json`, pictures and `bibtex.html` in `out`."""
    needs = (("rich", "cli"), ("sklearn", "sklearn"), ("matplotlib", "viz"), ("arff", "data"))
    for module, extra in needs:
        require(module, extra)
    from joblib import Memory
    from rich.console import Console

    console = Console()
    if settings.fast:
        console.print("A smoke test: one seed of a few examples. Its numbers mean nothing.")
        settings = replace(settings, seeds=1, epochs=1, feed_epochs=1)
    train, test = parts(settings)
    # What an interrupted run of this code has done already; at the end it is thrown away.
    done_before = settings.out / f"unfinished-{report.code()}"
    if settings.final:
        report.note(settings.out, {"name": "bibtex", "begun": True, "settings": shown(settings)})
    kept: Any = Memory(done_before, verbose=0).cache
    seeds = [(settings.seed + i) % 2**32 for i in range(settings.seeds)]
    rows = (FEED, *PAPER) if settings.final else ()
    with parts_done(True, len(rows) + 2 + 2 * len(seeds)) as done:
        curves: dict[str, Curve] = {}
        for name in rows:
            done(f"paper: {name}")
            curves[name] = kept(paper)(name, settings, train, test)
        done(RIDGE)
        found: dict[str, list[Answers]] = {RIDGE: [kept(by_ridge)(train, test)]}
        done(KERNEL)
        found[KERNEL] = [kept(by_kernel)(train, test, settings.seed)]
        ours: list[Ours] = []
        for seed in seeds:
            done(f"{FEED}, seed {seed}")
            found.setdefault(FEED, []).append(kept(by_feed_forward)(train, test, seed, settings))
            done(f"energies over labels, seed {seed}")
            ours.append(kept(by_energy)(train, test, seed, fast=settings.fast))
            for name, answers in ours[-1].answers.items():
                found.setdefault(name, []).append(answers)
    scores = {name: [scored(a, test.Y) for a in found[name]] for name in METHODS}
    told = numbers(settings, seeds, curves, found, scores, ours, test.Y)
    pictures = drawn(settings.out, curves, scores, train, ours[0].pulls)
    paths = report.publish(
        "bibtex", "Tags of publications: BibTeX", told, page(told, pictures, settings.final),
        settings.out, reading=settings.final,
    )  # fmt: skip
    for name in ("paper", "label energy") if settings.final else ():  # tables of the documents
        table = {key: told[key] for key in ("settings", "made")} | told[name]
        report.store(f"bibtex-{name.replace(' ', '-')}", table, settings.out)
    print(report.table(told["rows"]))  # a console would break its lines
    rmtree(done_before)
    if settings.final:
        print(report.table(told["paper"]["rows"]))
    else:
        console.print("On examples held out: --final measures on the test set, once all is chosen.")
    console.print(f"Look at [bold]{paths[-1]}[/]; the numbers are in {paths[0].name}")
    return told


def shown(settings: Settings) -> dict[str, Any]:
    """Settings for a file."""
    return {**vars(settings), "out": str(settings.out)}


def parts(settings: Settings) -> tuple[MultiLabel, MultiLabel]:
    """What to learn from, and what to measure on: a fifth of the training set, until the end."""
    train, test = mulan("bibtex")
    if not settings.final:
        rows = np.random.default_rng(settings.seed).permutation(len(train.Y))
        held, rest = rows[: len(rows) // 5], rows[len(rows) // 5 :]
        test = replace(train, X=train.X[held], Y=train.Y[held])
        train = replace(train, X=train.X[rest], Y=train.Y[rest])
    if settings.fast:
        train, test = (replace(part, X=part.X[:150], Y=part.Y[:150]) for part in (train, test))
    return train, test


def numbers(
    settings: Settings, seeds: list[int], curves: dict[str, Curve],
    found: dict[str, list[Answers]], scores: dict[str, list[Scores]], ours: list[Ours],
    true: np.ndarray,
) -> dict[str, Any]:  # fmt: skip
    """All that is kept."""
    rows: list[report.Row] = []
    for name in METHODS:
        both = np.array([score.both for score in scores[name]])
        seconds = float(np.mean([answers.seconds for answers in found[name]]))
        rows.append({
            "method": name,
            "F1 (examples)": spread(both[:, 0]), "F1 (labels)": spread(both[:, 1]),
            "less kernel ridge": "" if name == KERNEL else told_of(against(scores, name, KERNEL)),
            "training, s": seconds,
        })  # fmt: skip
    for name, value in PUBLISHED.items():
        rows.append({"method": f"{name} (published)", "F1 (examples)": f"{value}",
                     "F1 (labels)": "", "less kernel ridge": "", "training, s": ""})  # fmt: skip
    told = report.result(shown(settings), rows)
    told["differences"] = {
        f"{name} - {other}": asdict(against(scores, name, other))
        for name, other in ((BUNDLE, KERNEL), (BUNDLE, LOCAL), (BUNDLE, TUNED), (STEPS, KERNEL))
    }
    told["label energy"] = {
        "rows": [used(o, s, true) for o, s in zip(ours, scores[BUNDLE], strict=True)]
    }
    told["runs"] = [
        {
            "method": name, "seed": seeds[i] if len(found[name]) > 1 else None,
            "F1 (examples)": score.both[0], "F1 (labels)": score.both[1],
            "decoding": asdict(score.rule), "seconds": answers.seconds,
            "worst gap": answers.gap, "prediction, s": answers.predict_seconds,
        }
        for name in METHODS
        for i, (score, answers) in enumerate(zip(scores[name], found[name], strict=True))
    ]  # fmt: skip
    published = {FEED: 0.396, f"{STEPS}, {DRAWN}": 0.415}
    told["paper"] = {
        "rows": [
            {"method": name, "F1 (examples), best test epoch": curve.best,
             "published": f"{published[name]}" if name in published else ""}
            for name, curve in curves.items()
        ],
        "curves": {name: asdict(curve) for name, curve in curves.items()},
    }  # fmt: skip
    return told


def told_of(difference: Difference) -> str:
    """With its p."""
    return (
        f"{difference}, p = {difference.p:.4f}"
        if difference.p > 1e-4
        else f"{difference}, p < 0.001"
    )


def spread(values: np.ndarray) -> str:
    """Mean and standard deviation over seeds."""
    return f"{values.mean():.4f}" + (f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else "")


def against(scores: dict[str, list[Scores]], name: str, other: str) -> Difference:
    """The F1 of examples, each a mean over seeds, less that of another method."""
    own, rival = (np.mean([s.examples for s in scores[n]], axis=0) for n in (name, other))
    return paired_bootstrap(own, rival)


def used(ours: Ours, scores: Scores, true: np.ndarray) -> report.Row:
    """What is lost where the energy over labels is a plane."""
    whole = scores.rule(ours.answers[BUNDLE].y)
    flat = scores.rule(ours.linear)
    # To be more than fair: with the rule that is best for it on what is measured.
    best = choose(ours.linear, true)[1]
    either = np.maximum(whole, flat).sum()
    return {
        "F1 (examples)": float(scores.examples.mean()),
        "linearised": float(f1_examples(flat, true).mean()),
        "linearised, best threshold": best,
        "examples whose labels change": float((whole != flat).any(axis=1).mean()),
        "changes / labels of either": float((whole != flat).sum() / either),
    }


def page(told: dict[str, Any], pictures: dict[str, Path], final: bool) -> list[Any]:
    """The parts of the report."""
    where = "on the test set" if final else "on a fifth of the training set, held out"
    found: list[Any] = [
        __doc__ or "",
        f"The honest protocol, {where}: mean and standard deviation over seeds; the difference in "
        "F1 (examples) to the kernel ridge has its 95 % interval (paired bootstrap over examples)",
        told["rows"],
        "F1 of each label over how often it occurs in training.",
        pictures["labels"],
        "Whether the energy over labels is used, seed by seed: replaced by the plane that touches "
        "it at the answer of the local term.",
        told["label energy"]["rows"],
        "Which labels pull which, in one example: rows are held at 1 and at 0, columns move.",
        pictures["pulls"],
    ]
    if final:
        found += [
            "The paper's protocol: a threshold of 0.5, the best epoch on the test set.",
            told["paper"]["rows"],
            pictures["curves"],
        ]
    found += ["Every run: F1, time, the worst gap of an answer.", [
        {key: "" if value is None else value for key, value in run.items() if key != "decoding"}
        for run in told["runs"]
    ]]  # fmt: skip
    return found


def drawn(
    out: Path, curves: dict[str, Curve], scores: dict[str, list[Scores]], train: MultiLabel,
    pulls: Influence,
) -> dict[str, Path]:  # fmt: skip
    """Pictures: the paper's figure, F1 of labels, and pulls between them."""
    from matplotlib.figure import Figure

    found = {"labels": out / "bibtex-labels.png", "pulls": out / "bibtex-pulls.png"}
    if curves:
        found["curves"] = out / "bibtex-curves.png"
        figure = Figure(figsize=(3 * len(curves), 3), layout="constrained")
        grid: Any = figure.subplots(1, len(curves), sharey=True, squeeze=False)
        for axes, (name, curve) in zip(grid[0], curves.items(), strict=True):
            epochs = range(1, len(curve.test) + 1)
            axes.plot(epochs, curve.train, label="training")
            axes.plot(epochs, curve.test, label="test")
            axes.set_title(name.replace(", ", ",\n"), fontsize="medium")
            axes.set(xlabel="epoch", ylim=(0, 1))
            axes.spines[["top", "right"]].set_visible(False)
        grid[0, 0].set_ylabel("F1 (examples)")
        grid[0, 0].legend(frameon=False)
        figure.savefig(found["curves"], dpi=130)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes: Any = figure.add_subplot(xlabel="examples with the label", ylabel="F1 of the label")
    often = train.Y.sum(axis=0)
    for name, color in ((KERNEL, "tab:gray"), (LOCAL, "tab:blue"), (BUNDLE, "tab:red")):
        f1 = np.mean([score.labels for score in scores[name]], axis=0)
        axes.plot(often, f1, ".", color=color, label=name, alpha=0.7)
    axes.set_xscale("log")
    axes.set_xticks([30, 100, 300], ["30", "100", "300"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(found["labels"], dpi=130)
    pulls.plot(found["pulls"])
    return found
