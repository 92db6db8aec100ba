"""The classifier: what it learns, decides, explains and refuses."""

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_iris, make_multilabel_classification
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, LeaveOneOut, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import icnn
from icnn.estimators import features, label_energy, multi_label_classifier
from icnn.estimators.decoding import Decoding, choose, f1_examples, f1_labels, worth
from icnn.estimators.features import Features
from icnn.estimators.kernel import RIDGES, Kernel
from icnn.estimators.label_energy import mean
from icnn.estimators.multi_label_classifier import best

FAST: Any = {"hidden": (32,), "label_hidden": (16,), "epochs": 2, "energy_steps": 30, "folds": 3}


def made(**options: Any) -> Any:
    return icnn.MultiLabelClassifier(**FAST | {"random_state": 0} | options)


def data(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    X, Y = make_multilabel_classification(count, 20, n_classes=6, random_state=0)[:2]
    return np.asarray(X), np.asarray(Y)


@parametrize_with_checks([made()])
def test_scikit_learn(estimator: Any, check: Any):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([icnn.MultiLabelClassifier()])
def test_scikit_learn_with_default_arguments(estimator: Any, check: Any):
    check(estimator)


def test_scores_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    found, true = (random.integers(0, 2, (50, 7)) for _ in range(2))
    true[0], found[0], true[:, 3] = 0, 0, 0
    for own, average in ((f1_examples, "samples"), (f1_labels, "macro")):
        usual = f1_score(true, found, average=average, zero_division=0)  # pyright: ignore
        assert own(found, true).mean() == pytest.approx(usual)


def test_decoding():
    y = np.array([[0.9, 0.5, 0.2], [0.1, 0.05, 0.04]])
    assert Decoding(0.5)(y).tolist() == [[1, 1, 0], [1, 1, 0]]
    assert Decoding(0.5, relative=False, top=True)(y).tolist() == [[1, 1, 0], [1, 0, 0]]
    assert Decoding(0.5, relative=False, top=False)(y).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert Decoding()(y).tolist() == [[1, 0, 0], [1, 0, 0]]
    rule, score = choose(y, np.array([[1, 1, 0], [0, 0, 1]]))
    assert score == pytest.approx(0.75)
    assert rule(y)[0].tolist() == [1, 1, 0]
    assert worth(y, np.array([[1, 0, 0], [0, 1, 0]]), None) == 0.5
    nothing, score = choose(y, np.zeros((2, 3), dtype=int))
    assert score == 1
    assert not nothing(y / 2).any(), "of rules that are as good, one that gives fewer labels"


def test_the_kernel_knows_what_it_would_say_without_an_example():
    random = np.random.RandomState(0)
    X, Y = random.normal(size=(40, 3)).astype(np.float32), random.randint(0, 2, (40, 4)) * 1.0
    found = Kernel(X, Y, lambda y, true: -np.square(y - true).mean(), random)
    middle = Y.mean(axis=0)
    rivals: list[Any] = [
        KernelRidge(alpha=ridge, kernel="rbf", gamma=found.width)  # pyright: ignore
        for ridge in RIDGES
    ]
    outs = [cross_val_predict(rival, X, Y - middle, cv=LeaveOneOut()) + middle for rival in rivals]
    best = int(np.argmin([np.square(out - Y).mean() for out in outs]))
    np.testing.assert_allclose(found.held_out, outs[best], atol=1e-6)
    whole = rivals[best].fit(X, Y - middle).predict(X) + middle
    np.testing.assert_allclose(found(X), whole, atol=1e-6)


def test_kernels_of_twins_and_of_columns_with_long_tails():
    random = np.random.RandomState(0)
    X, Y = random.normal(size=(90, 3)), random.randint(0, 2, (90, 2)) * 1.0
    twins = X.copy()
    twins[20:] = 0
    for rows in (twins, np.exp(5 * X), np.ones_like(X)):
        found = Kernel(rows.astype(np.float32), Y, lambda y, true: 0.0, random)
        assert np.isfinite(found.held_out).all()
        assert found.width < 1e3


def test_features_of_words_and_of_measurements():
    words = sparse.csr_array(np.array([[1.0, 0, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0]]))
    features = Features(words)
    assert features.counts
    rows = features(words).toarray()
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 1, 0], atol=1e-6)
    np.testing.assert_array_equal(rows, features(words.toarray()).toarray())
    mixed = np.zeros((30, 5))
    mixed[::7, :4], mixed[::3, 4] = 1.0, 50000.0
    for kind in (np.asarray, sparse.csr_array):  # one large column would hide all others
        assert not Features(kind(mixed)).counts
    np.testing.assert_array_equal(Features(rows)(rows).toarray(), rows)  # weighted already
    numbers = np.random.default_rng(0).normal(3, 2, (50, 4))
    numbers[:, 3] = 7.0
    found = Features(numbers)(numbers)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(axis=0), [1, 1, 1, 0], atol=1e-5)


def test_a_table_too_large_keeps_its_zeros(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(features, "ROOM", 100)
    random = np.random.default_rng(0)
    X = sparse.random_array((40, 30), density=0.5, rng=random) - 2 * sparse.eye_array(40, 30)
    found = Features(X)(sparse.csr_matrix(X))
    assert sparse.issparse(found)
    np.testing.assert_allclose((found * found).mean(axis=0), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("energy", "kind"),
    [("auto", np.asarray), ("local", sparse.csc_array), ("picnn", sparse.csr_matrix)],
)
def test_it_learns(energy: str, kind: Any):
    X, Y = data(400)
    model = made(energy=energy, epochs=5, energy_steps=100).fit(kind(X[:300]), Y[:300])
    found = model.predict(kind(X[300:]))
    assert found.dtype == Y.dtype
    assert f1_examples(found, Y[300:], nothing=1.0).mean() > 0.6
    solution = model.solve(kind(X[300:]))
    np.testing.assert_array_equal(model.predict_proba(kind(X[300:])), solution.y.numpy())
    assert bool(solution.converged.all())
    assert model.held_out_.shape == (300, 6)
    assert icnn.check_convexity(model.energy_, model._inputs(kind(X[:3]))).proved


def test_scores_of_examples_that_were_not_seen():
    """Labels without any sense: who had seen them would know them."""
    random = np.random.default_rng(0)
    X, Y = random.normal(size=(150, 30)), random.integers(0, 2, (150, 4))
    model = made(epochs=10, energy_steps=100).fit(X, Y)
    assert np.abs(np.corrcoef(model.held_out_.ravel(), Y.ravel())[0, 1]) < 0.2


@pytest.mark.parametrize("experts", ["networks", "kernel", "both"])
def test_experts_by_name(experts: str):
    X, Y = data()
    model = made(experts=experts).fit(X, Y)
    assert model.expert_ == experts
    assert (model.kernel_ is None) == (experts == "networks")
    assert bool(model.networks_) == (experts != "kernel")
    assert model.predict(X).shape == Y.shape


def test_energies_by_name():
    X, Y = data(120)
    model = made().fit(X, Y)
    assert set(model.energy_scores_) == {"local", "labels", "both"}
    assert best(model.energy_scores_, 0.005) == model.kind_
    halves = made(energy="both").fit(X, Y)
    assert halves.kind_ == "both"
    x, y = halves.inputs_[:3], torch.rand(3, 6)
    local, pulled = -halves.entropy * (x * y).sum(dim=1), mean(halves.energies_)(x, y)
    torch.testing.assert_close(halves.energy_(x, y), (local + pulled) / 2)


def test_kernels_of_too_many_examples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multi_label_classifier, "MANY", 50)
    X, Y = data(60)
    for experts in ("kernel", "both"):
        with pytest.raises(ValueError, match="`experts` must be 'networks' for more than 50"):
            made(experts=experts).fit(X, Y)
    assert made().fit(X, Y).expert_ == "networks"


def test_examples_without_labels_are_left_without():
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 5))
    Y = (X[:, :2] > 1.5).astype(int)  # nine of ten have none
    found = made(epochs=10).fit(X[:200], Y[:200]).predict(X[200:])
    assert (found.any(axis=1) == Y[200:].any(axis=1)).mean() > 0.9


def test_many_examples_are_answered_part_by_part(monkeypatch: pytest.MonkeyPatch):
    X, Y = data(150)
    model = made().fit(X, Y)
    whole = model.solve(X)
    monkeypatch.setattr(label_energy, "MANY", 64)
    parts = model.solve(X)
    assert parts.gaps.shape[1] == len(parts.y) == 150
    assert len(parts.gaps) == int(parts.steps.max())
    torch.testing.assert_close(parts.y, whole.y, atol=1e-2, rtol=0)
    torch.testing.assert_close(parts.gaps[-1], parts.gap, check_dtype=False)


@pytest.mark.parametrize("tags", [[{"a"}, {"b"}, {"a", "b"}], [["a"], ["a", "b"], []]])
def test_lists_of_tags_are_to_be_made_columns(tags: Any):
    with pytest.raises(ValueError, match="MultiLabelBinarizer makes columns of them"):
        made().fit(np.eye(3), tags)


def test_nothing_pulls_where_labels_are_decided_each_for_itself():
    X, Y = data(60)
    model = made(energy="local").fit(X, Y)
    with pytest.warns(UserWarning, match="fit with energy='labels' to see pulls"):
        assert model.explain(X[:1]).report() == "no label moves another"


def test_both_if_in_doubt():
    assert best({"kernel": 0.503, "networks": 0.5, "both": 0.5}, 0.005) == "both"
    assert best({"kernel": 0.51, "networks": 0.5, "both": 0.5}, 0.005) == "kernel"
    assert best({"kernel": 0.51}, 0.005) == "kernel"


@pytest.mark.parametrize("names", [["a", "b", "c"], [3, 1, 2], [True, False]])
def test_one_label_each_of_any_type(names: list[Any]):
    X, y = load_iris(return_X_y=True)
    rows = y < len(names)
    X, y = X[rows], np.array(names)[y[rows]]
    model = made(epochs=4, energy_steps=100).fit(X, y)
    assert model.score(X, y) > 0.85
    assert model.classes_.tolist() == sorted(names)
    chances = model.predict_proba(X)
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(model.classes_[chances.argmax(axis=1)], model.predict(X))


def test_names_of_labels_and_what_they_do():
    X, Y = data(300)
    Y[:, 1] = Y[:, 0]  # one label is another
    Y[:, 3] = 1 - Y[:, 2]  # and one excludes another
    frame = pd.DataFrame(Y, columns=list("abcdef"))
    model = made(energy="labels", energy_steps=100).fit(X, frame)
    told = model.explain(X[:1], count=4)
    assert len(told.labels) == 4
    assert set(told.labels) <= set("abcdef")
    assert told.moves.shape == (4, 4)
    np.testing.assert_allclose(told.moves.diagonal(), 1)
    assert (np.diff(told.answers) <= 0).all()
    assert len(told.report(3).splitlines()) == 3
    # Held at a value, and all others decided anew: what `fixed` says.
    x, place = model._inputs(X[:1]), "abcdef".index(told.labels[0])
    mask = torch.zeros(1, 6, dtype=torch.bool)
    mask[0, place] = True
    one, zero = (
        icnn.argmin(model.energy_, x, icnn.Box(), entropy=0.5, fixed=(mask, mask * level)).y[0]
        for level in (1.0, 0.0)
    )
    others = ["abcdef".index(name) for name in told.labels]
    np.testing.assert_allclose(told.moves[0], (one - zero).detach()[others], atol=0.05)


def test_what_is_fitted_does_not_hang_on_parameters():
    X, Y = data(100)
    model = made(energy="labels").fit(X, Y)
    before = model.predict_proba(X)
    model.set_params(entropy=5.0, energy="picnn", device="nowhere")
    np.testing.assert_array_equal(model.predict_proba(X), before)
    assert np.isfinite(model.decision_function(X)).all()


def test_a_heat_map(tmp_path: Any):
    X, Y = data()
    told = made().fit(X, Y).explain(X[:1])
    assert told.plot(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_among_others_of_its_kind():
    X, Y = data(120)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), made()),
        {"multilabelclassifier__entropy": [0.5, 1.0]},
        scoring="f1_samples",
        cv=2,
    )
    search.fit(X, Y)
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict(X), search.predict(X))


def test_the_same_again_and_nobody_elses_numbers():
    X, Y = data(100)
    before = torch.get_rng_state()
    first = made().fit(X, Y).predict_proba(X)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again: Any = clone(made())
    np.testing.assert_array_equal(again.fit(X, Y).predict_proba(X), first)


@pytest.mark.parametrize("energy", ["labels", "picnn"])
def test_it_goes_on_where_it_was(energy: str):
    X, Y = data(150)
    options: Any = {"energy": energy, "experts": "networks", "warm_start": True}
    model = made(**options).fit(X, Y)
    weights = [w.clone() for part in model.energies_ for w in part.parameters()]
    model.set_params(epochs=1, energy_steps=1).fit(X, Y)
    now = [w for part in model.energies_ for w in part.parameters()]
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(weights, now, strict=True))
    assert 0 < moved < 0.05
    names = [name for name, _ in model.energy_.named_parameters()]
    model.fit(X[::-1], Y[::-1])  # other parts: from the start, or it would know what it scores
    assert [name for name, _ in model.energy_.named_parameters()] == names
    now = [w for part in model.energies_ for w in part.parameters()]
    assert max(float((a - b).detach().abs().max()) for a, b in zip(weights, now, strict=True)) > 0.1
    model.fit(X[:, :10], Y[:, :3])
    assert model.predict(X[:, :10]).shape == (150, 3)


def test_labels_that_never_or_always_occur_and_examples_without_labels():
    X, Y = data()
    Y[:, 0], Y[:, 1], Y[:20] = 0, 1, 0
    Y[:20, 1] = 1
    found = made(epochs=5).fit(X, Y).predict(X)
    assert not found[:, 0].any()
    assert found[:, 1].all()
    Y[:, 1] = 0
    assert made().fit(X, Y).predict(X).shape == Y.shape


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"energy": "other"}, "`energy` must be one of 'auto', 'local', 'labels', 'both', 'picnn'"),
        ({"hidden": 5}, "`hidden` must be a non-empty sequence of widths"),
        ({"label_hidden": ()}, "`label_hidden` must be a non-empty sequence of widths"),
        ({"entropy": 0.0}, "`entropy` must be above 0"),
        ({"experts": "all"}, "`experts` must be one of"),
        ({"metric": "accuracy"}, "`metric` must be one of 'examples', 'labels'"),
        ({"epochs": 0}, "`epochs` must be an integer of at least 1"),
        ({"energy_steps": 0}, "`energy_steps` must be an integer of at least 1"),
        ({"folds": 1}, "`folds` must be an integer of at least 2"),
        ({"device": "nowhere"}, "`device` must be a device"),
    ],
)
def test_bad_options(options: Any, told: str):
    with pytest.raises(ValueError, match=told):
        made(**options).fit(*data(20))


def test_bad_data():
    X, Y = data(30)
    with pytest.raises(ValueError, match="`y` of two dimensions must be 0 or 1, got 2"):
        made().fit(X, 2 * Y)
    with pytest.raises(ValueError, match="`y` of two dimensions must be 0 or 1"):
        made().fit(X, Y - 0.5)
    with pytest.raises(ValueError, match="minimum of 3 is required"):
        made().fit(X[:2], Y[:2])
    with pytest.raises(ValueError, match="two classes or more, got one class"):
        made().fit(X, np.ones(30))
    model = made().fit(X, Y)
    with pytest.raises(ValueError, match="`x` must be one row, got 2"):
        model.explain(X[:2])
    with pytest.raises(ValueError, match="got classes that exclude each other"):
        made().fit(X, Y[:, 0]).explain(X[:1])
