"""Curvature and sign of what a traced computation holds: disciplined convex programming on ATen.

Each tensor of the graph is described by one `Value`: how it bends in `y`, and numbers that bound
it. Parameters are numbers and are computed; what depends on `x` is constant in `y`, and of it we
use only bounds that hold for every `x`. Here is the calculus of such values (sums, products,
maxima, compositions), in `operators` the rule for each operator of PyTorch. What cannot derive a
curvature raises `NotKnown` with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag
from functools import reduce
from math import inf, isnan
from numbers import Number
from operator import and_
from typing import Any

import torch
from torch import Tensor


class Curvature(Flag):
    """What is known of the bend in `y`; `a & b` is what holds for both."""

    UNKNOWN = 0
    CONVEX = 1
    CONCAVE = 2
    AFFINE = 3
    FREE = 4  # of y
    CONSTANT = 7

    def __str__(self) -> str:
        word = str(self.name).lower()
        return f"{'an' if word[0] in 'au' else 'a'} {word}"


CONVEX, CONCAVE, AFFINE = Curvature.CONVEX, Curvature.CONCAVE, Curvature.AFFINE
UNKNOWN, CONSTANT = Curvature.UNKNOWN, Curvature.CONSTANT


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor's curvature in `y`, bounds for all its elements, and its numbers where it has any.

    Only tensors that depend on neither `x` nor `y` have numbers.
    """

    curvature: Curvature
    low: float = -inf
    high: float = inf
    numbers: Tensor | None = None

    @property
    def is_constant(self) -> bool:
        return self.curvature == CONSTANT


class NotKnown(Exception):
    """No rule tells the curvature; the message says why."""


@dataclass
class Call:
    """One operator of the graph as its rule sees it, and how many weights' signs it relied on."""

    name: str
    target: Callable[..., Any]
    signs: int = 0


def constant(numbers: Any) -> Value:
    """The value of a tensor or number that depends on neither `x` nor `y`."""
    if isinstance(numbers, Number):
        number = numbers if isinstance(numbers, int | float) else None
        return Value(CONSTANT) if number is None else Value(CONSTANT, number, number)
    if numbers.is_complex():
        return Value(CONSTANT, numbers=numbers)
    if not numbers.numel():
        return Value(CONSTANT, 0.0, 0.0, numbers)
    low, high = numbers.detach().double().aminmax()
    return Value(CONSTANT, low.item(), high.item(), numbers)


def value_of(argument: Any) -> Value:
    """An operator's argument, which may be a plain number."""
    return argument if isinstance(argument, Value) else constant(argument)


def bounds(low: float, high: float) -> tuple[float, float]:
    """Bounds whose computation may have met `inf - inf`, which bounds nothing."""
    return -inf if isnan(low) else low, inf if isnan(high) else high


def total(call: Call, *values: Value) -> Value:
    """A sum."""
    curvature = reduce(and_, (v.curvature for v in values))
    if not curvature:
        raise NotKnown(f"{call.name} of {' and '.join(str(v.curvature) for v in values)} argument")
    return Value(curvature, *bounds(sum(v.low for v in values), sum(v.high for v in values)))


def scaled(call: Call, value: Value, factor: Value) -> Value:
    """A product with what is constant in `y`: it keeps the curvature, or turns it over."""
    if factor.numbers is not None and not bool(factor.numbers.isfinite().all()):
        raise NotKnown(f"{call.name} with weights that are not finite")
    curvature = value.curvature
    if AFFINE not in curvature:
        if factor.low < 0 < factor.high or isnan(factor.low):
            known = f"weights of both signs (minimum {factor.low:.3g})"
            unknown = "a factor that does not depend on y and may have either sign"
            by = unknown if factor.numbers is None else known
            raise NotKnown(f"{call.name} with {by} of {curvature} argument")
        call.signs += 0 if factor.numbers is None else factor.numbers.numel()
        if factor.low < 0:
            curvature = flipped(curvature)
    ends = [
        a * b if a and b else 0.0  # 0 * inf is 0 here: a bound is never reached
        for a in (value.low, value.high)
        for b in (factor.low, factor.high)
    ]
    return Value(curvature, *bounds(min(ends), max(ends)))


def flipped(curvature: Curvature) -> Curvature:
    """The curvature of the negative."""
    return {CONVEX: CONCAVE, CONCAVE: CONVEX}.get(curvature, curvature)


def negated(value: Value) -> Value:
    """`-value`."""
    return Value(flipped(value.curvature), -value.high, -value.low)


def product(call: Call, a: Value, b: Value) -> Value:
    """A product, of which at most one factor may depend on `y`."""
    if a.is_constant or b.is_constant:
        return scaled(call, a, b) if b.is_constant else scaled(call, b, a)
    raise NotKnown(f"{call.name} of two factors that both depend on y")


def summed(value: Value) -> Value:
    """A sum of any number of such elements."""
    return Value(value.curvature, 0.0 if value.low >= 0 else -inf, 0.0 if value.high <= 0 else inf)


def hull(*values: Value) -> Value:
    """Elements that are each one of these, whatever `y`."""
    curvature = reduce(and_, (v.curvature for v in values))
    if not curvature:
        raise NotKnown("a tensor that holds both convex and concave elements")
    return Value(curvature, min(v.low for v in values), max(v.high for v in values))


def extreme(call: Call, kind: Curvature, *values: Value) -> Value:
    """A maximum, which keeps convexity, or a minimum, which keeps concavity."""
    curvature = reduce(and_, (v.curvature for v in values))
    if curvature != CONSTANT:
        curvature &= kind
    if not curvature:
        raise NotKnown(f"{call.name} of {' and '.join(str(v.curvature) for v in values)} argument")
    pick = max if kind == CONVEX else min
    return Value(curvature, pick(v.low for v in values), pick(v.high for v in values))


@dataclass(frozen=True)
class Shape:
    """A function of one number on an interval, and bounds of what it returns there."""

    convex: bool = False
    concave: bool = False
    rising: bool = False
    falling: bool = False
    low: float = -inf
    high: float = inf


def composed(call: Call, value: Value, shape: Shape, *rest: Any) -> Value:
    """`h(u)` is convex if h is, and u is affine, or convex and h rises, or concave and h falls."""
    low, high = shape.low, shape.high
    if shape.rising or shape.falling:
        # Adding zero turns -0.0 into 0.0, whose reciprocal is the right infinity.
        ends = torch.tensor([value.low, value.high], dtype=torch.float64) + 0.0
        first, last = call.target(ends, *rest).tolist()
        first, last = bounds(*((first, last) if shape.rising else (last, first)))
        low, high = max(low, first), min(high, last)
        if low > high:  # ends where the function is not defined bound nothing
            low, high = shape.low, shape.high
    if value.is_constant:
        return Value(CONSTANT, low, high)

    def bends(same: bool, kind: Curvature) -> bool:
        follows = AFFINE in value.curvature or (
            (shape.rising and kind in value.curvature)
            or (shape.falling and flipped(kind) in value.curvature)
        )
        return same and follows

    curvature = UNKNOWN
    for same, kind in ((shape.convex, CONVEX), (shape.concave, CONCAVE)):
        curvature |= kind if bends(same, kind) else UNKNOWN
    if curvature:
        return Value(curvature, low, high)
    if not (shape.convex or shape.concave):
        raise NotKnown(f"{call.name} of {value.curvature} argument is neither convex nor concave")
    bend = "convex" if shape.convex else "concave"
    slope = "rises" if shape.rising else "falls" if shape.falling else "both rises and falls"
    raise NotKnown(f"{call.name}, which is {bend} and {slope}, of {value.curvature} argument")
