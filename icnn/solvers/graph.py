"""What PyTorch's graph of a value tells: whether it has kinks, and what it was made of."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

KINKS = re.compile(
    "relu|threshold|abs|(?<!soft)max|min|clamp|hard|sort|topk|kthvalue|median|where|norm|dist|l1|"
    "shrink|sign|round|floor|ceil|trunc|frac|fmod|remainder|heaviside|margin|hinge|quantile|"
    "copyslices"
)
"""Parts of the names of operations whose derivative jumps somewhere, or may do so."""

CREASES = re.compile(
    "p?relu|threshold|abs|a?max|a?min|f?maximum|f?minimum|fmax|fmin|clamp(min|max)?|hardtanh|sort|"
    "topk|kthvalue|(nan)?median|where|l1loss|(adaptive)?maxpool.*|cummax|cummin|softshrink"
)
"""Those of them that are straight between their kinks."""

ONCE = re.compile(".*(cdist|rnn|flashattention|efficientattention|ctcloss).*")
"""Operations of PyTorch that have no second derivative."""

STRAIGHT = re.compile(
    "add|sub|rsub|neg|sum|mean|cumsum|trace|clone|copy|tocopy|alias|view|unsafeview|reshape|expand|"
    "squeeze|unsqueeze|permute|transpose|t|flatten|slice|select|narrow|split|splitwithsizes|unbind|"
    "cat|stack|unfold|index|indexselect|indexadd|indexput|scatter|scatteradd|gather|flip|roll|"
    "repeat|constantpadnd|asstrided|diagonal|tril|triu|maskedfill|avgpool[123]d|upsamplenearest.*"
)
"""Operations that are linear in all their arguments together."""

PRODUCTS = re.compile("mul|mm|mv|bmm|dot|convolution|div|addmm|addmv|baddbmm|addbmm|addcmul")
"""Operations that are linear in each of their arguments, but for sums that come first."""


class Traits(NamedTuple):
    """What the graph says of a value as a function of `y`."""

    kinked: bool
    curved: bool
    opaque: bool  # holds operations that PyTorch cannot look into


class Watched:
    """An energy at `x`. Its first pass with a graph tells whether more than `y` is in it."""

    def __init__(self, energy: Callable[[Tensor], Tensor]):
        self.energy, self.live = energy, None

    def __call__(self, y: Tensor) -> Tensor:
        value = self.energy(y)
        if self.live is None and torch.is_grad_enabled() and value.requires_grad:
            own = {id(leaf) for leaf in leaves(y)} | {id(y)}
            self.live = any(id(leaf) not in own for leaf in leaves(value))
        return value

    def __getattr__(self, name: str) -> Any:
        # What the energy can do besides: `value_and_gradient`, `select`.
        return getattr(self.energy, name)


def traits(value: Tensor, y: Tensor) -> Traits:
    """Read the operations between `y`, a leaf, and a value.

    Names that are not known count as curved. That is safe: curvature is then measured, and found
    to be none.
    """
    kinked = curved = opaque = False
    for node, operation, used in between(value, y):
        if isinstance(node, BackwardCFunction) or ONCE.fullmatch(operation):
            opaque = True
        elif operation == "elu":
            kinked, curved = kinked or node._saved_alpha != 1, True
        elif operation == "leakyrelu":
            kinked = kinked or node._saved_negative_slope != 1
        elif KINKS.search(operation):
            kinked, curved = True, curved or not CREASES.fullmatch(operation)
        elif PRODUCTS.fullmatch(operation):
            factors = used[1:] if operation.startswith(("add", "badd")) else used
            curved = curved or sum(factors) > 1 or (operation == "div" and factors[1])
        elif not STRAIGHT.fullmatch(operation):
            curved = True
    return Traits(kinked, curved, opaque)


def leaves(value: Tensor, stop: Sequence[Tensor] = ()) -> Iterator[Tensor]:
    """The tensors that a value was made of: those of `stop` that it uses, and other leaves."""
    ends = {get_gradient_edge(tensor).node: tensor for tensor in stop if tensor.requires_grad}
    seen, nodes = set(), [value.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in ends:
            yield ends[node]
        elif hasattr(node, "variable"):
            yield node.variable
        else:
            nodes.extend(below for below, _ in node.next_functions)


def between(value: Tensor, y: Tensor) -> Iterator[tuple[Any, str, list[bool]]]:
    """Nodes that lead to `y`: each with its name, and which of its inputs do."""
    target = get_gradient_edge(y).node
    reaches: dict[Any, bool] = {None: False, target: True}
    stack = [value.grad_fn]
    while stack:
        node: Any = stack[-1]
        if node in reaches:
            stack.pop()
            continue
        below = [child for child, _ in node.next_functions]
        unseen = [child for child in below if child not in reaches]
        if unseen:
            stack.extend(unseen)
            continue
        used = [reaches[child] for child in below]
        reaches[node] = any(used)
        if reaches[node]:
            yield node, node.name().split("Backward")[0].lower(), used
