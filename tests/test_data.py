"""Data: what files say, and what is told when they say it badly."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import icnn.data
from icnn.data import files, mulan, read_arff

SPARSE = """% a comment
@relation 'some data: -C 2'

@attribute word {0,1}
@attribute 'two words' numeric
@attribute third REAL
@attribute A {0,1}
@attribute B {0,1}
@DATA
% another one
{0 1,2 0.5,3 1}
{1 3,3 1,4 1}
{}
"""
DENSE = """@relation d
@attribute a numeric
@attribute color {red,green,blue}
@attribute sure {YES,NO}
@attribute L1 {0,1}
@attribute L2 {0,1}
@data
1.5,red,YES,0,1
?,blue,NO,1,1
"""
LABELS = """<?xml version="1.0"?><labels xmlns="http://mulan.sourceforge.net/labels">
<label name="L2"></label><label name="L1"></label></labels>"""


def stored(folder: Path, text: str, name: str = "some-train.arff") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_sparse_files(tmp_path: Path):
    data = read_arff(stored(tmp_path, SPARSE), 2)
    assert data.features == ("word", "two words", "third")
    assert data.labels == ("A", "B")
    np.testing.assert_array_equal(data.X.toarray(), [[1, 0, 0.5], [0, 3, 0], [0, 0, 0]])
    np.testing.assert_array_equal(data.Y, [[1, 0], [1, 1], [0, 0]])
    assert data.Y.dtype == np.int64


def test_dense_files_with_words_and_gaps(tmp_path: Path):
    path = stored(tmp_path, DENSE)
    stored(tmp_path, LABELS, "some.xml")
    for labels in (None, tmp_path / "some.xml", ["L2", "L1"]):
        data = read_arff(path, labels)
        assert data.labels == ("L2", "L1")
        np.testing.assert_array_equal(data.Y, [[1, 0], [1, 1]])
    assert data.features == ("a", "color=red", "color=green", "color=blue", "sure")
    np.testing.assert_array_equal(data.X, [[1.5, 1, 0, 0, 0], [np.nan, 0, 0, 1, 1]])
    data = read_arff(stored(tmp_path, DENSE.replace("?,blue", "1,?")), 2)
    np.testing.assert_array_equal(data.X[1], [1, np.nan, np.nan, np.nan, 1])


@pytest.mark.parametrize(
    ("text", "labels", "told"),
    [
        (SPARSE[:-8], 2, "line 12"),  # cut short
        (SPARSE.replace("{1 3,", "{1 x,"), 2, "line 12"),
        (SPARSE.replace("{1 3,", "{9 3,"), 2, "line 12"),
        (SPARSE.replace("3 1,4 1", "3 1,4 7"), 2, "line 12"),
        (DENSE.replace("0,1\n", "0\n"), 2, "line 8"),
        (DENSE.replace("1.5", "one"), 2, "line 8"),
        ("something else", 2, "line 1"),
        (DENSE[: DENSE.index("1.5")], 2, "has no examples"),
        (DENSE, None, r"`labels` must be given, as there is no .*some\.xml"),
        (DENSE, 5, "`labels` must be at most 4, got 5"),
        (DENSE, 0, "`labels` must be an integer of at least 1, got 0"),
        (DENSE, ["L3"], r"`labels` must be attributes of .*\['L3'\]"),
        (DENSE, ["a"], "labels must be 0 or 1, got 1.5 for `a` in example 1, line 8"),
        (DENSE.replace("NO,1,1", "NO,1,?"), 2, "got nan for `L2` in example 2, line 9"),
        (DENSE, ["L1", "L1"], "`labels` must be attributes of .*, each once"),
        (DENSE, 2.0, "`labels` must be an integer of at least 1, got 2.0"),
        (DENSE, "L1", "`labels` must be an XML file, a number or a list, got 'L1'"),
        (DENSE.replace("a numeric", "a string"), 2, "`a` must be numeric or nominal, got STRING"),
        ("\n\n" + DENSE.replace("1.5", "one"), 2, "line 10"),
        ("\n\n" + DENSE.replace("NO,1,1", "NO,1,?"), 2, "line 11"),
        (DENSE, ["color"], "label `color` must be 0 or 1, got values red, green, blue"),
        (SPARSE.replace("word {0,1}", "word {1,0}"), 2, "`word` is sparse, so that its first"),
    ],
)
def test_files_that_cannot_be_read(text: str, labels: Any, told: str, tmp_path: Path):
    with pytest.raises(ValueError, match=told):
        read_arff(stored(tmp_path, text), labels)


@pytest.mark.parametrize("values", ["{YES,NO}", "{NO,YES}"])
def test_labels_that_are_words(values: str, tmp_path: Path):
    data = read_arff(stored(tmp_path, DENSE.replace("{YES,NO}", values)), ["sure", "L1"])
    np.testing.assert_array_equal(data.Y, [[1, 0], [0, 1]])


def test_counts_of_labels_and_marks_of_encodings(tmp_path: Path):
    data = read_arff(stored(tmp_path, "\ufeff" + DENSE), np.int64(2))  # pyright: ignore
    assert data.labels == ("L1", "L2")


def test_sparse_words_have_columns_of_their_own(tmp_path: Path):
    text = SPARSE.replace("word {0,1}", "word {no,some,more}").replace("{0 1,", "{0 more,")
    text = text.replace("{1 3,", "{0 some,1 3,")
    data = read_arff(stored(tmp_path, text), 2)
    assert data.features == ("word=no", "word=some", "word=more", "two words", "third")
    np.testing.assert_array_equal(
        data.X.toarray(), [[0, 0, 1, 0, 0.5], [0, 1, 0, 3, 0], [1, 0, 0, 0, 0]]
    )


def test_xml_that_is_none(tmp_path: Path):
    with pytest.raises(ValueError, match="`labels` must be an XML file"):
        read_arff(stored(tmp_path, DENSE), stored(tmp_path, "<labels>", "a.xml"))


@pytest.mark.parametrize(("count", "names"), [(2, ("word", "third")), (-2, ("A", "B"))])
def test_files_of_meka_say_where_labels_are(count: int, names: Any, tmp_path: Path):
    text = SPARSE.replace("-C 2", f"-C {count}").replace("@attribute 'two words' numeric\n", "")
    text = text.replace("third REAL", "third {0,1}").replace("{1 3,3 1,4 1}", "{1 1,3 1}")
    text = text.replace("{0 1,2 0.5,3 1}", "{0 1,2 1}")
    assert read_arff(stored(tmp_path, text)).labels == names


@pytest.mark.data
def test_bibtex():
    train, test = icnn.data.mulan("bibtex")
    assert repr(train) == "MultiLabel(4880 examples, 1836 features, 159 labels)"
    assert train.X.shape == (4880, 1836)
    assert test.X.shape == (2515, 1836)
    assert train.Y.shape == (4880, 159)
    assert train.labels == test.labels
    assert all(name.startswith("TAG_") for name in train.labels)
    assert (train.Y.sum(axis=1) > 0).all()
    np.testing.assert_allclose(train.Y.sum() / 4880, 2.380, atol=1e-3)
    assert set(train.X.data) == {1.0}


def test_a_set_that_nobody_knows():
    with pytest.raises(ValueError, match="`name` must be one of 'bibtex', 'delicious', got 'yeas"):
        mulan("yeast")


def test_a_wrong_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(files.FOLDER, str(tmp_path))
    path = stored(tmp_path, SPARSE, "a.arff")
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert files.fetched("a.arff", "https://example.org/a.arff", right) == path
    with pytest.raises(ValueError, match=r"a\.arff has another checksum than https://example\.org"):
        files.fetched("a.arff", "https://example.org/a.arff", "0" * 64)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(files.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match=r"Put the file at .*a\.arff, or into a folder that the"):
        files.fetched("a.arff", "http://localhost:9/a.arff", "0" * 64)


def test_fetched_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    monkeypatch.delenv(files.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = stored(tmp_path, SPARSE, "a.arff").read_bytes()
    right = hashlib.sha256(text).hexdigest()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://localhost:{server.server_port}/a.arff"
    with pytest.raises(ValueError, match="has another checksum than the file we know"):
        files.fetched("a.arff", url, "0" * 64)
    path = files.fetched("a.arff", url, right)
    server.shutdown()
    server.server_close()
    assert path.read_bytes() == text
    assert files.fetched("a.arff", url, right) == path, "now without a network"


@pytest.mark.data
def test_olivetti(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    faces = icnn.data.olivetti()
    assert repr(faces) == "Faces(400 pictures of 40 people)"
    assert faces.images.shape == (400, 64, 64)
    assert faces.images.dtype == np.uint8
    assert (faces.images.min(), faces.images.max()) == (0, 242)
    train, test = faces.split()
    assert (len(train), len(test)) == (350, 50)
    assert not set(train.people) & set(test.people)
    # scikit-learn's copy, as it keeps it once it has fetched it.
    import joblib

    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path))
    monkeypatch.delenv(files.FOLDER)
    columns = faces.images.transpose(0, 2, 1).reshape(400, -1)
    joblib.dump(columns, tmp_path / "olivetti_py3.pkz", compress=6)
    np.testing.assert_array_equal(icnn.data.olivetti().images, faces.images)
    joblib.dump(columns // 2, tmp_path / "olivetti_py3.pkz", compress=6)
    with pytest.raises(ValueError, match="scikit-learn's copy holds other pixels than the Oliv"):
        icnn.data.olivetti()


def test_olivetti_from_a_wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from scipy.io import savemat

    monkeypatch.setenv(files.FOLDER, str(tmp_path))
    (tmp_path / "olivettifaces.mat").write_text("nothing")
    with pytest.raises(ValueError, match=r"olivettifaces\.mat must be a MATLAB file"):
        icnn.data.olivetti()
    savemat(tmp_path / "olivettifaces.mat", {"faces": np.zeros((4096, 400), dtype=np.uint8)})
    with pytest.raises(ValueError, match=r"olivettifaces\.mat holds other pixels"):
        icnn.data.olivetti()
