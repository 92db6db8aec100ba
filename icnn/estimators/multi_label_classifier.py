"""Labels that are decided together: a scikit-learn classifier whose answers minimise an energy."""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import joblib
import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from icnn.checks import check_choice, check_count, check_device, check_number, check_widths
from icnn.energies.compose import Scale, Score
from icnn.energies.energy import Energy
from icnn.energies.picnn import PICNN
from icnn.estimators.decoding import METRICS, Decoding, choose, worth
from icnn.estimators.features import Features, tensor
from icnn.estimators.influence import Influence
from icnn.estimators.kernel import LabelKernel
from icnn.estimators.label_energy import (
    EXPLANATION,
    answers,
    cross_fit,
    label_energy,
    mean,
    unseen,
)
from icnn.estimators.networks import BATCH, go_on, logits, mixed, train_network
from icnn.estimators.portable import Portable
from icnn.estimators.threads import threads
from icnn.learning.progress import parts_done
from icnn.solvers.argmin import argmin
from icnn.solvers.domains import Box, Simplex
from icnn.solvers.solution import Solution

RATE = 2e-3  # of networks
ENERGIES = 5  # of which the mean is taken
PAPER = 600  # width of the first layer of the paper's network; the second has one unit a label
MANY = 10_000  # examples, from which on kernels are too large
EDGE = 0.01  # how near scores of the kernel come to 0 and 1
# By how much one of two experts, or energies, must be better alone than with the other.
EXPERT_MARGIN, ENERGY_MARGIN = 0.003, 0.005
EXPERTS, KINDS = ("networks", "kernel", "both"), ("local", "labels", "both")
ArrayLike = Any  # as scikit-learn takes it: arrays, sparse matrices, data frames, lists


class MultiLabelClassifier(ClassifierMixin, Portable):
    """Labels whose energy is least: each has a score, and a convex network sees them together.

    Features that look like counts of words are weighted by how rare they are, unless somebody has
    done so; others are standardised. Scores come from plain networks, from a kernel machine, or
    from both, whichever is best on data held out. From scores of examples that the scorer has not
    seen, energies `f(x, y)` that are convex in the labels `y` are learned through their minimum;
    the answer minimises their mean.

    One column of classes of any type is a problem of one label each; two dimensions of 0 and 1 are
    one of any number of labels. For these `score` is the share of examples with all labels right,
    as in scikit-learn; the decoding is chosen for `f1_score(..., average="samples",
    zero_division=1)`.

    Args:
        energy: "labels" as above; "local", where each label is decided by its own score; "both",
            the mean of these two; "auto", the best of the three on data held out, where "both" is
            taken unless another is better by 0.005; or "picnn", the
            paper's network of features and labels, without scores; it depends on `entropy`,
            `metric` and `energy_steps` alone.
        hidden: Widths of the networks that give scores; less where features are very many.
        label_hidden: Widths of the network over labels.
        entropy: The weight of the entropy in the objective: the less, the more decided answers are
            (but those of "local", which are the same for all).
        experts: What gives scores: "networks", "kernel", "both", or "auto", the best of them. For
            more than 10,000 examples a kernel is too large, and "auto" means networks.
        metric: What the decoding is chosen for: the F1 score of "examples" (one without labels that
            is given none counts as right), or of "labels".
        epochs: How often networks see the examples; more often where these are few.
        energy_steps: Of the optimiser, for each energy; fewer where examples are few.
        folds: Into how many parts examples are divided, to score each by the others; at most as
            many as there are examples.
        warm_start: Whether `fit` goes on from the last one, if that was of the same examples.
        device: Where to train, as PyTorch calls it.
        random_state: A seed, for the same result again.
        progress: Whether a bar shows how far `fit` is.

    Attributes:
        classes_: The classes, or the numbers of the labels; `label_names_`: their names, where `y`
            was a data frame.
        energy_: `f(x, y)`, a mean of energies, as a function of scores (of features: "picnn").
        kind_: Which energy it is; `energy_scores_`: how good each was on data held out.
        decoding_: How answers become labels.
        inputs_: The `x` of `energy_` for all examples of the training, from scorers that were not
            trained on them.
        held_out_: Answers to these, by energies that had not seen them.
        expert_: What gives scores; `expert_scores_`: how good each was on data held out.
        times_: How many seconds the training of scores and of energies took.

    Examples:
        >>> from sklearn.datasets import make_multilabel_classification
        >>> X, Y = make_multilabel_classification(random_state=0)
        >>> model = icnn.MultiLabelClassifier(hidden=(64,), random_state=0).fit(X, Y)
        >>> model.predict(X[:2]).shape
        (2, 5)
    """

    n_features_in_: int

    def __init__(
        self,
        *,
        energy: str = "auto",
        hidden: Sequence[int] = (2000,),
        label_hidden: Sequence[int] = (100,),
        entropy: float = 0.5,
        experts: str = "auto",
        metric: str = "examples",
        epochs: int = 10,
        energy_steps: int = 500,
        folds: int = 10,
        warm_start: bool = False,
        device: str = "cpu",
        random_state: Any = None,
        progress: bool = False,
    ):
        self.energy = energy
        self.hidden = hidden
        self.label_hidden = label_hidden
        self.entropy = entropy
        self.experts = experts
        self.metric = metric
        self.epochs = epochs
        self.energy_steps = energy_steps
        self.folds = folds
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: ArrayLike, y: ArrayLike) -> "MultiLabelClassifier":
        """Learn from examples.

        Args:
            X: One row for each, dense or sparse.
            y: A class of each, or 0 and 1 in a column for each label.
        """
        check_choice("energy", self.energy, ("auto", *KINDS, "picnn"))
        hidden = check_widths("hidden", self.hidden)
        check_widths("label_hidden", self.label_hidden)
        check_choice("experts", self.experts, ("auto", *EXPERTS))
        check_choice("metric", self.metric, METRICS)
        check_count("epochs", self.epochs)
        check_count("energy_steps", self.energy_steps)
        check_count("folds", self.folds, 2)
        if check_number("entropy", self.entropy) <= 0:
            raise ValueError(f"`entropy` must be above 0, got {self.entropy!r}")
        device = check_device("device", self.device)
        X, Y = self._read(X, y)
        if self.experts in ("kernel", "both") and self.energy != "picnn" and len(Y) > MANY:
            raise ValueError(
                f"`experts` must be 'networks' for more than {MANY} examples, got {self.experts!r} "
                f"for {len(Y)}"
            )
        random = check_random_state(self.random_state)
        old = self._old(X, Y) if self.warm_start else ([], [])
        if not any(old):
            self.folds_ = [divided(len(Y), count, random) for count in (self.folds, ENERGIES)]
        # What the answers to new examples depend on, whatever becomes of the parameters.
        self.entropy_, self.device_ = float(self.entropy), device
        self.data_ = joblib.hash((X, Y))
        self.features_ = Features(X)
        X = self.features_(X)
        parts = self._parts(len(Y))
        work = BATCH * X.shape[1] * max(hidden)
        rooms = [device] if device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=rooms),
            parts_done(self.progress, parts) as done,
            threads(work),
        ):
            torch.manual_seed(int(random.randint(2**31)))
            self.networks_, self.kernel_ = [], None
            since = time.perf_counter()
            x = tensor(X) if self.energy == "picnn" else self._score(X, Y, random, old[0], done)
            self.times_ = {"scores": time.perf_counter() - since}
            since = time.perf_counter()
            found = self._energies(x, Y, old[1], done)
            self.times_["energies"] = time.perf_counter() - since
        self.inputs_ = x
        if isinstance(self.domain_, Box):
            rules = {kind: choose(held, Y, self.metric) for kind, (_, held) in found.items()}
        else:
            rules = {kind: (Decoding(), self._worth(held, Y)) for kind, (_, held) in found.items()}
        self.energy_scores_ = {kind: score for kind, (_, score) in rules.items()}
        self.kind_ = (
            self.energy if self.energy in found else best(self.energy_scores_, ENERGY_MARGIN)
        )
        (self.energy_, self.held_out_), (self.decoding_, _) = found[self.kind_], rules[self.kind_]
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The labels of examples."""
        y = self.solve(X).y.numpy()
        found = self.decoding_(y)
        if isinstance(self.domain_, Box):
            return found
        return self.classes_[found.argmax(axis=1)]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """The answers, between 0 and 1: of each label, or of each class, where they sum to 1."""
        return self.solve(X).y.numpy()

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """The log odds of the answers; of two classes, those of the second."""
        y = self.solve(X).y.double().clamp(1e-9, 1 - 1e-9).logit().float().numpy()
        return y[:, 1] if isinstance(self.domain_, Simplex) and len(self.classes_) == 2 else y

    def solve(self, X: ArrayLike) -> Solution:
        """The answers with their certificates."""
        given = self._inputs(X)
        return answers(self.energy_, given, self.domain_, self.entropy_, device=self.device_)

    def explain(
        self, x: ArrayLike, count: int = 12, names: Sequence[str] | None = None
    ) -> Influence:
        """Which labels pull which, in one example.

        Each label is held at 1 and at 0 in turn, and all others are decided anew.

        Args:
            x: One row of features.
            count: For how many labels: those with the largest answers.
            names: Of all labels; by default those of the data frame that `fit` has seen.
        """
        check_count("count", count)
        given = self._inputs(x)
        if isinstance(self.domain_, Simplex):
            raise ValueError(
                "`explain` must be asked about several labels, got classes that exclude each other"
            )
        if len(given) != 1:
            raise ValueError(f"`x` must be one row, got {len(given)}")
        known = [str(name) for name in (self.label_names_ if names is None else names)]
        if len(known) != len(self.classes_):
            raise ValueError(f"`names` must be {len(self.classes_)} names, got {len(known)}")
        free = answers(
            self.energy_, given, self.domain_, self.entropy_, EXPLANATION, self.device_
        ).y[0]
        shown = free.argsort(descending=True)[:count]
        ways = []
        for level in (1.0, 0.0):
            mask = F.one_hot(shown, len(free)).bool()
            mask = mask.to(self.device_)
            each = given.expand(len(shown), -1).to(self.device_)
            with torch.no_grad():
                found = argmin(
                    self.energy_, each, self.domain_, entropy=self.entropy_, solver=EXPLANATION,
                    fixed=(mask, torch.where(mask, level, 0.0)),
                )  # fmt: skip
            ways.append(found.y.cpu())
        moves = (ways[0] - ways[1])[:, shown]
        if self.kind_ == "local":
            warnings.warn(
                "labels were decided each for itself (`kind_` is 'local', the best on data held "
                "out): no label moves another; fit with energy='labels' to see pulls",
                stacklevel=2,
            )
        return Influence([known[j] for j in shown], free[shown].numpy(), moves.numpy())

    def _read(self, X: Any, y: Any) -> tuple[Any, np.ndarray]:
        """Features, and ones and zeros in a column for each label or class."""
        names = getattr(y, "columns", None)
        if tagged(y):
            raise ValueError(
                "`y` must be classes, or 0 and 1 in a column for each label, got lists of labels: "
                "sklearn.preprocessing.MultiLabelBinarizer makes columns of them"
            )
        y = y.toarray() if sparse.issparse(y) else y
        X, y = validate_data(  # pyright: ignore
            self, X, y, accept_sparse="csr", dtype=np.float64, multi_output=True,
            ensure_min_samples=3,
        )  # fmt: skip
        if y.ndim == 2 and y.shape[1] > 1:
            if not np.isin(y, (0, 1)).all():
                odd = y[~np.isin(y, (0, 1))].tolist()[0]
                raise ValueError(f"`y` of two dimensions must be 0 or 1, got {odd!r}")
            self.classes_, self.domain_ = np.arange(y.shape[1]), Box()
            self.label_names_ = self.classes_ if names is None else np.asarray(names)
            return X, y.astype(np.int64)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, places = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"`y` must have two classes or more, got one class: {y[0]}")
        self.domain_, self.label_names_ = Simplex(), self.classes_
        return X, np.eye(len(self.classes_), dtype=np.int64)[places]

    def _parts(self, count: int) -> int:
        """How many things are trained."""
        energies = min(ENERGIES, count) if self.energy != "local" else 0
        if self.energy == "picnn":
            return energies
        kernel, networks = self._wanted(count)
        return energies + kernel + networks * min(self.folds, count)

    def _wanted(self, count: int) -> tuple[bool, bool]:
        """Whether to have a kernel, and networks."""
        kernel = count <= MANY and self.experts != "networks"
        return kernel, self.experts != "kernel"

    def _score(
        self, X: Any, Y: np.ndarray, random: Any, old: list[nn.Module], done: Callable[[str], None]
    ) -> Tensor:
        """Scores of all examples, by who has not seen them."""
        true, found = torch.from_numpy(Y).float(), {}
        kernel, networks = self._wanted(len(Y))
        if networks:
            found["networks"] = torch.zeros(Y.shape)
            for i, (rest, out) in enumerate(self.folds_[0]):
                done(f"scores, part {i + 1}")
                loss = mixed if isinstance(self.domain_, Box) else F.cross_entropy
                net = train_network(
                    X[rest], true[rest], self.hidden, loss, self.epochs, RATE, self.device_,
                    old[i] if i < len(old) else None,
                )  # fmt: skip
                found["networks"][out] = logits([net], X[out], self.device_)
                self.networks_.append(net)
        if kernel:
            done("scores of a kernel")
            self.kernel_ = LabelKernel(X, Y.astype(np.float64), self._worth, random)
            found["kernel"] = unbounded(self.kernel_.held_out)
        if len(found) == 2:
            found["both"] = (found["networks"] + found["kernel"]) / 2
        self.expert_scores_ = {
            name: self._worth(scores.sigmoid().numpy(), Y) for name, scores in found.items()
        }
        given = self.experts in found
        self.expert_ = self.experts if given else best(self.expert_scores_, EXPERT_MARGIN)
        if self.expert_ == "networks":
            self.kernel_ = None
        elif self.expert_ == "kernel":
            self.networks_ = []
        return found[self.expert_]

    def _energies(
        self, x: Tensor, Y: np.ndarray, old: list[nn.Module], done: Callable[[str], None]
    ) -> dict[str, tuple[Energy, np.ndarray]]:
        """The energies to choose from, and their answers to examples that they have not seen."""
        labels, before, found = Y.shape[1], iter(old), {}
        # Labels that know nothing of each other.
        local = Scale(Score(nn.Identity()), self.entropy_)
        local.y_shape = (labels,)
        self.energies_ = []
        if self.energy in ("auto", "local"):
            held = x.sigmoid() if isinstance(self.domain_, Box) else x.softmax(dim=1)
            found["local"] = local, held.numpy()
        if self.energy == "local":
            return found

        def make() -> nn.Module:
            if self.energy == "picnn":
                energy = PICNN(x.shape[1], labels, (PAPER, labels), x_norm="batch")
            else:
                energy = label_energy(labels, self.label_hidden)
            go_on(energy, next(before, None))
            return energy.to(self.device_)

        folds, about = self.folds_[1], (self.domain_, self.entropy_)
        self.energies_ = cross_fit(
            make, x, torch.from_numpy(Y).float(), folds, *about, self.energy_steps, done=done
        )
        if self.energy != "both":
            kind = "picnn" if self.energy == "picnn" else "labels"
            found[kind] = mean(self.energies_), unseen(self.energies_, x, folds, *about)
        if self.energy in ("auto", "both"):
            halves = [mean([local, energy]) for energy in self.energies_]
            whole = mean([local, mean(self.energies_)])
            found["both"] = whole, unseen(halves, x, folds, *about)
        return found

    def _worth(self, y: np.ndarray, Y: np.ndarray) -> float:
        """How good answers are."""
        return worth(y, Y, self.metric if isinstance(self.domain_, Box) else None)

    def _inputs(self, X: ArrayLike) -> Tensor:
        """The `x` of the energy."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=np.float64)
        X = self.features_(X)
        if self.kind_ == "picnn":
            return tensor(X)
        parts = []
        if self.networks_:
            parts.append(logits(self.networks_, X, self.device_))
        if self.kernel_ is not None:
            parts.append(unbounded(self.kernel_(X)))
        return torch.stack(parts).mean(dim=0)

    def _old(self, X: Any, Y: np.ndarray) -> tuple[list[nn.Module], list[nn.Module]]:
        """What was trained before, to go on from: networks and energies.

        Their folds stay as they are, so that nobody scores what it has seen: examples and the
        number of parts must be those of before.
        """
        same = getattr(self, "data_", None) == joblib.hash((X, Y))
        if not same or len(self.folds_[0]) != min(self.folds, len(Y)):
            return [], []
        return getattr(self, "networks_", []), getattr(self, "energies_", [])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = True
        return tags


def divided(count: int, folds: int, random: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Examples to learn from and the others, for each part of them."""
    parts = np.array_split(random.permutation(count), min(folds, count))
    return [(np.setdiff1d(np.arange(count), out), np.sort(out)) for out in parts]


def tagged(y: Any) -> bool:
    """Whether these are labels of each example, some more, some fewer."""
    rows = list(y) if isinstance(y, list | tuple) else []
    sizes = {len(row) for row in rows if isinstance(row, list | tuple)}
    return any(isinstance(row, set) for row in rows) or len(sizes) > 1


def best(scores: dict[str, float], margin: float) -> str:
    """The name of the best one, but both of two, if in doubt.

    What is scored is less than what will answer: one network or energy in the place of a mean.
    """
    even = {name: score - margin * (name != "both") for name, score in scores.items()}
    return max(even, key=lambda name: even[name])


def unbounded(scores: np.ndarray) -> Tensor:
    """Numbers about between 0 and 1 as log odds."""
    return torch.from_numpy(scores).float().clamp(EDGE, 1 - EDGE).logit()
