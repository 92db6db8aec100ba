"""Launches of Triton kernels that cost the host little."""

from typing import Any

from torch import Tensor

KNOWN: dict[tuple[Any, ...], Any] = {}


def submit(
    kernel: Any, programs: int, varying: tuple[Any, ...], fixed: tuple[Any, ...], **options: int
) -> None:
    """Launch a kernel, as it was compiled before for arguments such as these.

    Triton looks at every argument of every launch to tell which version of a kernel it needs: on a
    GPU that waits for the host, that is a good part of a step.

    Args:
        kernel: A function under `triton.jit`.
        programs: How many of it are to run.
        varying: Its first arguments, those of `do_not_specialize`.
        fixed: All others: what they are, but for the addresses of tensors, decides on the version.
        options: Such as `num_warps`.
    """
    tensors = [part for part in fixed if isinstance(part, Tensor)]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    kinds = (part.dtype if isinstance(part, Tensor) else part for part in fixed)
    key = (id(kernel), tensors[0].device, *kinds, *options.values())
    known = KNOWN.get(key) if aligned else None
    if known is not None:
        known[(programs, 1, 1)](*varying, *fixed)
        return
    known = kernel[(programs,)](*varying, *fixed, **options)
    if aligned and known is not None:  # Triton's interpreter compiles nothing
        KNOWN[key] = known
