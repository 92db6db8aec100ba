"""Optional dependencies, imported where they are used; one that is missing is named."""

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra of the distribution brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'torch-icnn[{extra}]'", name=error.name
        ) from error
