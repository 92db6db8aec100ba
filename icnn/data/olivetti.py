"""The Olivetti faces: 40 people, ten pictures of each, by AT&T Laboratories Cambridge."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icnn.data.files import FOLDER
from icnn.extras import require

FILE = "olivettifaces.mat"
SHA256 = "a3f75007cc103363b61a63e06bec8ea4846407682ef6e7c9ae1eb9c1bd0e8a00"  # of the pixels
MOST = 242  # the largest grey level, by which scikit-learn's copy is divided
TRAINING = 350  # the split of Poon and Domingos (2011): the last five people are the test


@dataclass(frozen=True)
class Faces:
    """Grey pictures of faces.

    Attributes:
        images: `(400, 64, 64)`, grey levels from 0 to 242.
        people: Whose face it is, from 0 to 39.
    """

    images: np.ndarray
    people: np.ndarray

    def split(self) -> "tuple[Faces, Faces]":
        """Training and test part as in Poon and Domingos (2011): no person is in both."""
        return self[:TRAINING], self[TRAINING:]

    def __getitem__(self, rows: slice | np.ndarray) -> "Faces":
        return Faces(self.images[rows], self.people[rows])

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"Faces({len(self)} pictures of {len(np.unique(self.people))} people)"


def olivetti() -> Faces:
    """All 400 faces.

    From the file `olivettifaces.mat` in the folder that `$ICNN_DATA` names, if it is there; else by
    scikit-learn, which fetches them once. Either way the pixels are checked.
    """
    own = os.environ.get(FOLDER)
    if own and (Path(own) / FILE).is_file():
        path = Path(own) / FILE
        images, source = read_mat(path), str(path)
    else:
        images, source = from_scikit_learn(), "scikit-learn's copy"
    found = hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()
    if images.shape != (400, 64, 64) or found != SHA256:
        raise ValueError(f"{source} holds other pixels than the Olivetti faces that we know")
    return Faces(images, np.repeat(np.arange(40), 10))


def read_mat(path: Path) -> np.ndarray:
    """The faces of a MATLAB file, in which each is a column, itself column by column."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        columns = loadmat(path)["faces"]
        return columns.T.reshape(-1, 64, 64).transpose(0, 2, 1).astype(np.uint8)
    except (MatReadError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{path} must be a MATLAB file with `faces` of 64 x 64: {error}") from None


def from_scikit_learn() -> np.ndarray:
    """The faces as scikit-learn has them: float32, divided by the largest grey level."""
    require("sklearn", "sklearn")
    from sklearn.datasets import fetch_olivetti_faces

    try:
        images = np.asarray(fetch_olivetti_faces().images)  # pyright: ignore
    except OSError as error:  # those of the network among them
        raise OSError(
            f"scikit-learn cannot fetch the faces ({type(error).__name__}). Put {FILE} into a "
            f"folder that the variable {FOLDER} names"
        ) from None
    return np.rint(images * MOST).astype(np.uint8)
