"""Passes through our own networks on a GPU as CUDA graphs: launched at once, not one by one.

A pass of a small network is some thirty kernels, and the host needs longer to launch them than the
GPU to run them. Recorded once, they are launched together. A recording is for fixed addresses: it
has tensors of its own for all that an energy is at its `x`, and these are filled before a search.
So it serves all energies of one shape, whatever their weights and `x`.
"""

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from icnn.energies.energy import LayeredAt
from icnn.solvers.problem import Problem

MOST = 8  # recordings that are kept, for each thread: those used last
KEPT = threading.local()
"""A recording serves one search at a time: two may run in two threads, or on two streams."""
RECORDING = threading.Lock()  # to begin, one thread waits for the whole GPU: not while another is


class Replay:
    """A recorded pass: `value` and `slope` at `y`, after a call."""

    def __init__(self, f: LayeredAt, y: Tensor):
        leaves, spec = pytree.tree_flatten(list(f.layers))
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.y = y.clone()

        def both() -> tuple[Tensor, Tensor]:
            own = LayeredAt(pytree.tree_unflatten(leaves, spec), tuple(y.shape[1:]))
            assert own.value_and_gradient is not None, "asked before"
            value, slope = own.value_and_gradient(self.y)
            return value.double(), slope.flatten(start_dim=1).contiguous()

        # What libraries set up at a first call must not be part of the recording.
        stream = torch.cuda.Stream(y.device)
        stream.wait_stream(torch.cuda.current_stream(y.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                both()
        torch.cuda.current_stream(y.device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with RECORDING, torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.value, self.slope = both()

    def load(self, f: LayeredAt, y: Tensor) -> None:
        """Another energy of the same shape, and where its search starts."""
        tensors = [leaf for leaf in pytree.tree_leaves(list(f.layers)) if isinstance(leaf, Tensor)]
        torch._foreach_copy_([*self.tensors, self.y], [*tensors, y])  # pyright: ignore

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.graph.replay()
        return self.value, self.slope


def recorded(problem: Problem) -> Replay | None:
    """A recording for the energy of a problem; made when one of this shape comes again."""
    f: Any = getattr(problem.energy, "energy", problem.energy)
    f = getattr(f, "f", f)
    start = problem.start
    if not start.is_cuda or problem.free is not None or type(f) is not LayeredAt:
        return None
    if problem.gradient is not None and getattr(problem.energy, "live", True) is None:
        with torch.enable_grad():
            # A recording has no graph that would tell whether there are gradients to come.
            problem.energy(start.detach().clone().requires_grad_())
    if problem.own is None or torch.cuda.is_current_stream_capturing():
        return None
    kept: OrderedDict[Any, Replay | None] = KEPT.__dict__.setdefault("replays", OrderedDict())
    key = shape_of(f, start)
    if key not in kept:
        kept[key] = None
        while len(kept) > MOST:
            kept.popitem(last=False)
        return None
    kept.move_to_end(key)
    found = kept[key]
    if found is None:
        found = kept[key] = Replay(f, start)
    found.load(f, start)
    return found


def shape_of(f: LayeredAt, y: Tensor) -> tuple[Any, ...]:
    """All that two energies must share to share a recording."""
    leaves = pytree.tree_leaves(list(f.layers))
    kinds = (
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    names = (type(layer).__name__ for layer in f.layers)
    stream = torch.cuda.current_stream(y.device).cuda_stream
    return (y.shape, y.dtype, y.device, stream, *names, *kinds)
