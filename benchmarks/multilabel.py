"""Is `MultiLabelClassifier` with default arguments as good as a tuned kernel ridge?

The rival: least squares with an RBF kernel, the same features, width and ridge by 5-fold
cross-validation, and the same rules of decoding, chosen on the same folds. F1 of examples on as
many fresh ones, and its difference with a 95 % interval by a paired bootstrap.

The data: a few examples and the most frequent tags of BibTeX's training set; scikit-learn's digits
with noise and six labels made of the digit; words and labels drawn by scikit-learn; random
functions of 103 and 72 measurements with 14 and 6 labels. Files of one's own come as
`--files yeast-train.arff yeast-test.arff ...`, pairs of them.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits, make_multilabel_classification

import icnn
from icnn import report
from icnn.data import mulan, read_arff
from icnn.estimators.decoding import choose, f1_examples, f1_labels
from icnn.estimators.features import Features
from icnn.estimators.kernel import RIDGES, WIDTHS, distances
from icnn.experiments.statistics import paired_bootstrap

Data = tuple[Any, np.ndarray, Any, np.ndarray]


def digits() -> Data:
    """What a digit is: even, prime, above four, a multiple of three, closed, a power of two."""
    found: Any = load_digits()
    kind, random = found.target, np.random.default_rng(0)
    Y = np.stack([kind % 2 == 0, np.isin(kind, (2, 3, 5, 7)), kind > 4, kind % 3 == 0,
                  np.isin(kind, (0, 6, 8, 9)), np.isin(kind, (1, 2, 4, 8))], axis=1)  # fmt: skip
    X, rows = found.data + 6 * random.normal(size=found.data.shape), random.permutation(len(kind))
    X, Y = X[rows], Y[rows].astype(int)
    return X[:900], Y[:900], X[900:], Y[900:]


def tags(count: int, labels: int) -> Data:
    """Publications that have one of the most frequent tags."""
    data, _ = mulan("bibtex")
    Y = data.Y[:, np.argsort(-data.Y.sum(axis=0))[:labels]]
    rows = np.random.default_rng(0).permutation(np.flatnonzero(Y.any(axis=1)))
    first, second = rows[:count], rows[count : count + 1500]
    return data.X[first], Y[first], data.X[second], Y[second]


def words() -> Data:
    """Counts of words, and up to fourteen topics."""
    X, Y = make_multilabel_classification(3000, 60, n_classes=14, n_labels=4, random_state=0)[:2]
    return X[:1500], np.asarray(Y)[:1500], X[1500:], np.asarray(Y)[1500:]


def functions(count: int, features: int, labels: int, noise: float, inner: int, seed: int) -> Data:
    """Random smooth functions of a few directions, six of them mixed to labels."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(2 * count, features))
    inside = X @ random.normal(size=(features, inner)) / np.sqrt(features)
    waves = np.cos(inside @ (0.7 * random.normal(size=(inner, 300))) + random.uniform(0, 7, 300))
    levels = waves @ random.normal(size=(300, 6)) @ random.normal(size=(6, labels))
    levels = levels / levels.std(axis=0) + noise * random.normal(size=levels.shape)
    Y = (levels > np.quantile(levels, random.uniform(0.55, 0.9, labels), axis=0).diagonal()) * 1
    return X[:count], Y[:count], X[count:], Y[count:]


def sets(files: list[Path]) -> Iterator[tuple[str, Data]]:
    """All of them, one after another."""
    yield "BibTeX, 50 tags", tags(1100, 50)
    yield "BibTeX, 6 tags", tags(500, 6)
    yield "digits with noise", digits()
    yield "words", words()
    yield "functions, many labels", functions(1500, 103, 14, 0.6, 12, 0)
    yield "functions, few examples", functions(400, 72, 6, 0.4, 6, 1)
    for first, second in zip(files[::2], files[1::2], strict=True):
        train, test = read_arff(first), read_arff(second)
        yield first.stem, (train.X, train.Y, test.X, test.Y)


def rival(X: Any, Y: np.ndarray, X_test: Any) -> np.ndarray:
    """The labels that a tuned kernel ridge gives."""
    features = Features(X)
    a, b = features(X), features(X_test)
    apart = distances(a, a)
    unit, count = 1 / np.median(apart[apart > 1e-9 * apart.max()]), len(Y)
    folds = np.array_split(np.random.default_rng(0).permutation(count), 5)

    def solved(near: np.ndarray, rows: np.ndarray, new: np.ndarray, ridge: float) -> np.ndarray:
        mean, own = Y[rows].mean(axis=0), near[np.ix_(rows, rows)] + ridge * np.eye(len(rows))
        return mean + new @ np.linalg.solve(own, Y[rows] - mean)

    best: tuple[Any, ...] = (-1.0,)
    for width in WIDTHS:
        near = np.exp(-width * unit * apart)
        for ridge in RIDGES:
            held = np.zeros(Y.shape)
            for out in folds:
                rest = np.setdiff1d(np.arange(count), out)
                held[out] = solved(near, rest, near[np.ix_(out, rest)], ridge)
            rule, score = choose(held, Y)
            if score > best[0]:
                best = (score, width, ridge, rule)
    _, width, ridge, rule = best
    near, new = (np.exp(-width * unit * d) for d in (apart, distances(b, a)))
    return rule(solved(near, np.arange(count), new, ridge))


def contest(name: str, data: Data) -> report.Row:
    """Both on the same data."""
    X, Y, X_test, true = data
    begin = time.perf_counter()
    model = icnn.MultiLabelClassifier(random_state=0).fit(X, Y)
    seconds = time.perf_counter() - begin
    own, other = model.predict(X_test), rival(X, Y, X_test)
    # An example without labels that is given none counts as right, as in the choice of rules.
    scores = [f1_examples(found, true, nothing=1.0) for found in (own, other)]
    apart = paired_bootstrap(scores[0], scores[1])
    return {
        "data": name, "examples": len(Y), "features": X.shape[1], "labels": Y.shape[1],
        "F1, kernel ridge": float(scores[1].mean()),
        "F1, icnn": float(scores[0].mean()), "difference": str(apart), "p": apart.p,
        "F1 (labels), kernel ridge": float(f1_labels(other, true).mean()),
        "F1 (labels), icnn": float(f1_labels(own, true).mean()), "fit, s": seconds,
    }  # fmt: skip


def main() -> None:
    """Print the table, and write it."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    settings = parser.parse_args()
    if len(settings.files) % 2:
        parser.error("`--files` must be pairs: a training and a test set")
    rows = []
    for name, data in sets(settings.files):
        rows.append(contest(name, data))
        print(report.table(rows[-1:]), flush=True)
    report.write(
        "multilabel",
        {"seed": 0, "files": [path.name for path in settings.files]},
        rows,
        settings.out,
    )


if __name__ == "__main__":
    main()
