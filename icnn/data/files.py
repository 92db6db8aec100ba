"""Files of public data sets: in a folder of yours, or fetched once; checked by their sha256."""

import hashlib
import os
from pathlib import Path

from icnn.extras import require

FOLDER = "ICNN_DATA"  # the variable that names a folder with the files


def fetched(name: str, url: str, sha256: str) -> Path:
    """Where a file is: in the folder `$ICNN_DATA`, else in a cache, to which it is fetched once.

    Args:
        name: Of the file.
        url: Its public home.
        sha256: Of what is to be in it.
    """
    own = os.environ.get(FOLDER)
    if own and (Path(own) / name).is_file():
        path = Path(own) / name
        if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise ValueError(f"{path} has another checksum than {url}: put the right file there")
        return path
    pooch = require("pooch", "data")
    folder = Path(pooch.os_cache("torch-icnn"))
    try:
        return Path(pooch.retrieve(url, known_hash=f"sha256:{sha256}", fname=name, path=folder))
    except ValueError as error:
        raise ValueError(f"{url} has another checksum than the file we know: {error}") from error
    except OSError as error:  # those of the network among them
        raise OSError(
            f"cannot fetch {url} ({type(error).__name__}). Put the file at {folder / name}, or "
            f"into a folder that the variable {FOLDER} names"
        ) from None  # what the network said is long, and says no more
