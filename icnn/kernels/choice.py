"""Which version of a kernel computes: compiled where that is possible, else plain PyTorch."""

from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

KERNELS = ["auto", "torch", "numba", "triton"]
DEVICES = {"numba": "cpu", "triton": "cuda"}


@cache
def present(package: str) -> bool:
    """Whether a compiler is installed, and works."""
    try:
        import_module(package)
    except Exception:  # Numba, for one, refuses versions of NumPy that it does not know
        return False
    return True


def chosen(kernel: str, domain: Any, like: Tensor) -> str:
    """ "torch", "numba" or "triton" for a domain and for tensors `like` these.

    With "auto" Numba on a CPU and Triton on a GPU, where they are installed and know the domain,
    else PyTorch. A version that is asked for by name and cannot be had is an error.
    """
    # By itself, and not from its parent, whose entropy it may have changed.
    ours = "ground" in vars(type(domain))
    fits = [
        name
        for name, device in DEVICES.items()
        if ours and like.device.type == device and present(name)
    ]
    if kernel == "auto":
        return fits[0] if fits else "torch"
    if kernel != "torch" and kernel not in fits:
        why = f"for {domain!r}, a domain that it does not know"
        if like.device.type != DEVICES[kernel]:
            why = f"on {like.device}: it is for tensors on {DEVICES[kernel]}"
        elif not present(kernel):
            why = f"without the package {kernel}"
        others = " or ".join(f'"{name}"' for name in ("auto", "torch", *fits))
        raise ValueError(f"`kernel` must be {others} here, got {kernel!r} {why}")
    return kernel
