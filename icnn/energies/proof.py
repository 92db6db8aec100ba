"""A proof of convexity on the traced graph, which judges an energy by what it computes.

The trace is made on fake tensors that have shapes and no numbers: nothing in the graph can depend
on the `x` and `y` of the example, and code that asks for their numbers cannot be traced. In-place
operators come out as ordinary ones.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from icnn.energies.curvature import (
    AFFINE,
    CONCAVE,
    CONSTANT,
    CONVEX,
    UNKNOWN,
    Call,
    Curvature,
    NotKnown,
    Value,
    constant,
)
from icnn.energies.operators import RULES

TORCH = str(Path(torch.__file__).parent)
FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)\n\s*(?P<code>.+)')


@dataclass
class Proof:
    """What an attempt found: `doubts` is empty if and only if the energy is convex."""

    doubts: list[str] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    signs: int = 0


def prove(
    energy: Callable[[Any, Tensor], Tensor], x: Any, y: Tensor, low: float, high: float
) -> Proof:
    """Try to prove that `energy` is convex in `y` between the bounds, at every `x` of these shapes.

    Exceptions from the trace pass through.
    """
    graph = trace(energy, x, y)
    proof = judge(graph, Value(AFFINE, low, high))
    if not proof.doubts and not agrees(graph, energy, x, y):
        proof.doubts.append(
            "what it computes is not what was traced: does it assign `.data`, keep state between "
            "calls, or branch on the size of the batch or on modes?"
        )
    return proof


def agrees(graph: GraphModule, energy: Callable[[Any, Tensor], Tensor], x: Any, y: Tensor) -> bool:
    """Whether the graph and the energy give the same numbers, at other points and other sizes."""
    generator = torch.Generator().manual_seed(1)

    def drawn(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        return value

    def first(value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.ndim and value.shape[0] == y.shape[0]
        return value[:1] if alike else value

    for _ in range(3):
        own_x, own_y = pytree.tree_map(drawn, x), drawn(y)
        tensors = [leaf for leaf in pytree.tree_leaves(own_x) if isinstance(leaf, Tensor)]
        traced = graph(*(t.clone() for t in tensors), own_y.clone())
        learned = energy(own_x, own_y.clone().requires_grad_()).detach()
        alone = energy(pytree.tree_map(first, own_x), own_y[:1].clone())
        for found, expected in ((learned, traced), (alone, traced[:1])):
            if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
                return False
    return True


def trace(energy: Callable[[Any, Tensor], Tensor], x: Any, y: Tensor) -> GraphModule:
    """The operators that `energy(x, y)` calls, with its parameters as constants and `y` last."""
    leaves, structure = pytree.tree_flatten(x)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def flat(*tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors[:-1], strict=True):
            filled[place] = tensor
        return energy(pytree.tree_unflatten(filled, structure), tensors[-1])

    traced = make_fx(
        dispatch_functionalize(flat),
        decomposition_table=decompositions(),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
        record_stack_traces=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return traced(*(leaves[i] for i in places), y)


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Take apart what we have no rule for, into what we may have one for."""
    return {op: f for op, f in core_aten_decompositions().items() if named(op) not in RULES}


def judge(graph: GraphModule, y: Value) -> Proof:
    """Walk through the graph and describe each value by the rule of its operator."""
    proof, values, changes = Proof(), {}, []
    *_, last = graph.graph.find_nodes(op="placeholder")
    needed = ancestors(graph)
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            changes.append(f"{named(node.target)} changes a tensor of the energy{where(node)}")
        if node not in needed:
            continue
        if is_random(node.target):
            changes.append(f"{named(node.target)} draws random numbers{where(node)}")
        if node.op == "placeholder":
            values[node] = y if node is last else anything(CONSTANT, node)
        elif node.op == "get_attr":
            values[node] = constant(getattr(graph, str(node.target)))
        elif node.op == "call_function":
            values[node] = describe(node, values, proof)
    result = values[graph.graph.output_node().args[0]]
    if result.curvature == CONCAVE:
        proof.doubts.append("the energy is concave in y and not affine")
    elif CONVEX not in result.curvature and not proof.doubts:
        proof.doubts.append("the energy depends on a result of an operator that no rule describes")
    proof.doubts += changes
    return proof


def describe(node: Node, values: dict[Node, Any], proof: Proof) -> Any:
    """The value of one call, or what is left where its rule does not know."""
    args, kwargs = pytree.tree_map_only(Node, values.__getitem__, (node.args, dict(node.kwargs)))
    if node.target is getitem:
        found = args[0][args[1]] if isinstance(args[0], tuple | list) else args[0]
        if is_floating(node) or found.numbers is not None:
            return replace(found)
        return anything(CONSTANT if found.is_constant else UNKNOWN, node)
    inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
    target: Any = node.target
    name = named(target)
    if all(v.numbers is not None for v in inputs) and is_repeatable(target):
        numbers = pytree.tree_map_only(Value, lambda v: v.numbers, (args, kwargs))
        return pytree.tree_map_only(Tensor, constant, target(*numbers[0], **numbers[1]))
    free = all(v.is_constant for v in inputs)
    if any(not v.curvature for v in inputs):
        return Value(UNKNOWN)
    call = Call(name, target)
    try:
        if name not in RULES:
            bends = " and ".join(sorted({str(v.curvature) for v in inputs if not v.is_constant}))
            raise NotKnown(f"no rule for {name} of {bends} argument")
        found = RULES[name](call, *args, **kwargs)
        if not is_floating(node):
            raise NotKnown(f"{name} makes whole numbers or truth values of what depends on y")
    except NotKnown as reason:
        if free:
            return anything(CONSTANT, node)
        proof.doubts.append(f"{reason}{where(node)}")
        return Value(UNKNOWN)
    if not free:
        proof.operators[name] += 1
        proof.signs += call.signs
    # A value of its own for each node: two slices of y are two values, and only the same value
    # times itself is a square. Nor has what depends on x the numbers of a tensor it was taken from.
    return pytree.tree_map_only(Value, lambda v: replace(v, numbers=None), found)


def ancestors(graph: GraphModule) -> set[Node]:
    """What the output depends on, itself included."""
    needed: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if node.op == "output" or any(user in needed for user in node.users):
            needed.add(node)
    return needed


def anything(curvature: Curvature, node: Node) -> Value:
    """All that the dtype tells: truth values lie between 0 and 1."""
    example = node.meta.get("val")
    truth = isinstance(example, Tensor) and example.dtype == torch.bool
    return Value(curvature, 0.0, 1.0) if truth else Value(curvature)


def is_floating(node: Node) -> bool:
    """Whether all (or, of several results, the first) are floating-point numbers."""
    example = node.meta.get("val")
    example = example[0] if isinstance(example, tuple | list) else example
    return isinstance(example, Tensor) and example.is_floating_point()


def is_random(target: Any) -> bool:
    """Whether an operator gives other numbers each time."""
    return isinstance(target, OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags or "rand" in named(target)
    )


def is_repeatable(target: Any) -> bool:
    """Whether an operator gives the same numbers each time: not random, changed, uninitialised."""
    return (
        isinstance(target, OpOverload)
        and not target._schema.is_mutable
        and not is_random(target)
        and "empty" not in named(target)
    )


def named(target: Any) -> str:
    """An operator's name without its overload; other people's keep their namespace."""
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def where(node: Node) -> str:
    """The innermost line of `forward` that is not PyTorch's, in brackets."""
    frames = [m for m in FRAME.finditer(node.stack_trace or "") if not m["file"].startswith(TORCH)]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({Path(last['file']).name}:{last['line']}: {last['code'].strip()})"
