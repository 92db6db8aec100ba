"""What each operator of PyTorch does to curvature and bounds: one rule per name of ATen.

A rule is called with the call and the operator's own arguments, in which every tensor is a
`Value`. It is never called with an argument of unknown curvature, and an operator without a rule
is not known. To teach the proof an operator, write its rule here.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import torch

from icnn.energies.curvature import (
    CONCAVE,
    CONSTANT,
    CONVEX,
    UNKNOWN,
    Call,
    NotKnown,
    Shape,
    Value,
    composed,
    constant,
    extreme,
    hull,
    negated,
    product,
    scaled,
    summed,
    total,
    value_of,
)

RULES: dict[str, Callable[..., Any]] = {}


def rule(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of these operators, all overloads of each."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def _s_shaped(low: float, high: float, *_: Any) -> Shape:
    return Shape(convex=high <= 0, concave=low >= 0, rising=True)


def _even(low: float, high: float, *_: Any) -> Shape:
    return Shape(convex=True, rising=low >= 0, falling=high <= 0, low=0.0)


def _rising_convex(low: float, high: float, *_: Any) -> Shape:
    return Shape(convex=True, rising=True)


def _rising_concave(low: float, high: float, *_: Any) -> Shape:
    # Where the function is not defined (log and sqrt below zero) the energy is NaN, not convex or
    # concave; on what is left, the usual convention, it is.
    return Shape(concave=True, rising=True)


def _leaky_relu(low: float, high: float, slope: float = 0.01) -> Shape:
    return Shape(convex=slope <= 1, concave=slope >= 1, rising=slope >= 0)


def _elu(low: float, high: float, alpha: float = 1.0, scale: float = 1.0, input: float = 1.0):
    # The slope below zero ends at alpha * input, in units of the slope above.
    rising = alpha >= 0 and scale >= 0 and input >= 0
    return Shape(convex=rising and alpha * input <= 1, rising=rising)


def _softplus(low: float, high: float, beta: float = 1.0, threshold: float = 20.0) -> Shape:
    # Above the threshold PyTorch returns the argument, which is less by exp(-threshold) / beta:
    # at its default of 20 that counts as rounding.
    return Shape(convex=threshold >= 20, rising=threshold >= 20) if beta > 0 else Shape()


def _power(low: float, high: float, p: float) -> Shape:
    whole = float(p).is_integer()
    if p == 1:
        return Shape(convex=True, concave=True, rising=True)
    if p > 1 and whole and p % 2 == 0:
        return _even(low, high)
    if p > 1 and whole:
        return _s_shaped(-high, -low)
    if p > 1:
        return Shape(convex=True, rising=low >= 0, low=0.0)
    if 0 < p < 1:
        return Shape(concave=True, rising=True, low=0.0)
    if p == 0:
        return Shape(convex=True, concave=True, low=1.0, high=1.0)
    return Shape(convex=low >= 0, falling=low >= 0, low=0.0 if low >= 0 else -inf)


ELEMENTWISE: dict[str, Callable[..., Shape]] = {
    **dict.fromkeys(["exp", "exp2", "expm1"], _rising_convex),
    **dict.fromkeys(["log", "log2", "log10", "log1p"], _rising_concave),
    **dict.fromkeys(["sigmoid", "tanh", "erf", "atan", "asinh"], _s_shaped),
    **dict.fromkeys(["sin", "cos"], lambda low, high: Shape(low=-1.0, high=1.0)),
    **dict.fromkeys(["gelu", "silu"], lambda low, high, *_: Shape(low=-0.3)),
    "relu": lambda low, high: Shape(convex=True, rising=True, low=0.0),
    "celu": lambda low, high, alpha=1.0: Shape(convex=alpha > 0, rising=alpha > 0),
    "_softmax": lambda low, high, *_: Shape(low=0.0, high=1.0),
    "abs": _even,
    "cosh": _even,
    "sinh": lambda low, high: _s_shaped(-high, -low),
    "sqrt": lambda low, high: Shape(concave=True, rising=True, low=0.0),
    "rsqrt": lambda low, high: Shape(convex=True, falling=True, low=0.0),
    "reciprocal": lambda low, high: _power(low, high, -1.0),
    "special_entr": lambda low, high: Shape(concave=True),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "softplus": _softplus,
}


@rule(" ".join(ELEMENTWISE))
def _elementwise(call: Call, value: Value, *rest: Any, **options: Any) -> Value:
    numbers = (*rest, *(v for k, v in options.items() if k != "approximate"))
    return composed(call, value, ELEMENTWISE[call.name](value.low, value.high, *numbers), *numbers)


@rule("log_sigmoid_forward")
def _log_sigmoid(call: Call, value: Value) -> tuple[Value, Value]:
    as_one = Call(call.name, torch.nn.functional.logsigmoid)
    return composed(as_one, value, Shape(concave=True, rising=True, high=0.0)), Value(UNKNOWN)


@rule("pow")
def _pow(call: Call, base: Any, exponent: Any) -> Value:
    base, exponent = value_of(base), value_of(exponent)
    if exponent.is_constant and exponent.low == exponent.high:
        p = exponent.low
        if not float(p).is_integer():  # defined above zero alone
            base = replace(base, low=max(base.low, 0.0), high=max(base.high, 0.0))
        as_power = Call(call.name, torch.pow)
        return composed(as_power, base, _power(base.low, base.high, p), p)
    if base.is_constant and base.low > 0:
        rises, falls = base.low >= 1, base.high <= 1
        as_exp = Call(call.name, lambda ends: torch.full_like(ends, torch.nan))
        return composed(as_exp, exponent, Shape(convex=True, rising=rises, falling=falls, low=0.0))
    raise NotKnown(f"{call.name} with an exponent that depends on y or differs by element")


@rule("neg")
def _neg(call: Call, value: Value) -> Value:
    return negated(value)


@rule("add sub rsub")
def _add(call: Call, a: Any, b: Any, alpha: Any = 1) -> Value:
    a, b = value_of(a), value_of(b)
    if call.name == "rsub":
        a, b = b, a
    b = scaled(call, b, value_of(alpha))
    return total(call, a, b if call.name == "add" else negated(b))


@rule("mul")
def _mul(call: Call, a: Any, b: Any) -> Value:
    a, b = value_of(a), value_of(b)
    if a is b:
        return composed(Call("square", torch.square), a, _even(a.low, a.high))
    return product(call, a, b)


@rule("div")
def _div(call: Call, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    a, b = value_of(a), value_of(b)
    if rounding_mode is not None:
        raise NotKnown(f"{call.name} with rounding")
    inverse = Call(call.name, torch.reciprocal)
    if b.numbers is not None and bool((b.numbers == 0).any()):  # which may be -0.0
        raise NotKnown(f"{call.name} by zero")
    if b.is_constant and b.low < 0 and b.high <= 0:
        return negated(product(call, a, composed(inverse, negated(b), _power(-b.high, -b.low, -1))))
    return product(call, a, composed(inverse, b, _power(b.low, b.high, -1)))


@rule("mm bmm mv dot matmul")
def _matmul(call: Call, a: Value, b: Value) -> Value:
    return summed(product(call, a, b))


@rule("addmm baddbmm addmv addbmm")
def _addmm(call: Call, c: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    with_bias = scaled(call, c, value_of(beta))
    return total(call, with_bias, scaled(call, summed(product(call, a, b)), value_of(alpha)))


@rule("convolution linear")
def _affine_map(call: Call, a: Value, weight: Value, bias: Value | None = None, *_: Any) -> Value:
    mapped = summed(product(call, a, weight))
    return mapped if bias is None else total(call, mapped, bias)


@rule("native_batch_norm _native_batch_norm_legit_no_training")
def _batch_norm(
    call: Call,
    a: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    *rest: Any,
) -> tuple[Value, Value, Value]:
    if rest[0] is True or not (mean.is_constant and var.is_constant):
        raise NotKnown(f"{call.name} with statistics of y")
    value = a if weight is None else product(call, a, weight)
    value = Value(value.curvature) if bias is None else total(call, Value(value.curvature), bias)
    return value, Value(UNKNOWN), Value(UNKNOWN)


@rule("sum cumsum")
def _sum(call: Call, value: Value, *_: Any, **__: Any) -> Value:
    return summed(value)


@rule(
    """mean avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_avg_pool1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d"""
)
def _average(call: Call, value: Value, *rest: Any, **options: Any) -> Value:
    divisor = rest[5] if call.name.startswith("avg_pool") and len(rest) > 5 else None
    divisor = options.get("divisor_override", divisor)
    if divisor is not None:
        if divisor <= 0:
            raise NotKnown(f"{call.name} with a divisor_override below zero")
        return summed(value)
    # Pooling pads with zeros.
    return value if call.name == "mean" else hull(value, constant(0.0))


@rule("maximum")
def _maximum(call: Call, *values: Value) -> Value:
    return extreme(call, CONVEX, *values)


@rule("minimum")
def _minimum(call: Call, *values: Value) -> Value:
    return extreme(call, CONCAVE, *values)


@rule(
    """amax max cummax max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d
    adaptive_max_pool3d"""
)
def _greatest(call: Call, *values: Any, **_: Any) -> Value:
    return extreme(call, CONVEX, *(v for v in values if isinstance(v, Value)))


@rule("amin min cummin")
def _least(call: Call, *values: Any, **_: Any) -> Value:
    return extreme(call, CONCAVE, *(v for v in values if isinstance(v, Value)))


@rule("logsumexp logaddexp logaddexp2 logcumsumexp")
def _log_sum_exp(call: Call, *values: Any, **_: Any) -> Value:
    found = extreme(call, CONVEX, *(v for v in values if isinstance(v, Value)))
    return Value(found.curvature, found.low)


@rule("clamp clamp_min clamp_max hardtanh")
def _clamp(call: Call, value: Value, *limits: Any, **named: Any) -> Value:
    least, most = limits if len(limits) == 2 else (*limits, None) if limits else (None, None)
    if call.name == "clamp_max":
        least, most = None, least
    elif call.name == "hardtanh":
        least, most = (-1.0 if least is None else least), (1.0 if most is None else most)
    least, most = named.get("min", named.get("min_val", least)), named.get("max", most)
    most = named.get("max_val", most)
    if least is not None and not value.low >= value_of(least).high:
        value = extreme(call, CONVEX, value, value_of(least))
    if most is not None and not value.high <= value_of(most).low:
        value = extreme(call, CONCAVE, value, value_of(most))
    return value


@rule("linalg_vector_norm norm")
def _norm(call: Call, value: Value, p: Any = 2, *_: Any, **__: Any) -> Value:
    p = 2 if p is None else p
    shape = _even(value.low, value.high) if p >= 1 else Shape(low=0.0)
    found = composed(Call(f"{call.name} of order {p:g}", torch.abs), value, shape)
    return Value(found.curvature, 0.0)


@rule("var std")
def _spread(call: Call, value: Value, *_: Any, **__: Any) -> Value:
    as_even = Call(call.name, torch.abs)
    return Value(composed(as_even, value, Shape(convex=True)).curvature, 0.0)


@rule("_cdist_forward _euclidean_dist")
def _distance(call: Call, a: Value, b: Value, p: float = 2.0, *_: Any) -> Value:
    return _norm(call, total(call, a, negated(b)), p)


@rule("mse_loss huber_loss smooth_l1_loss")
def _loss(call: Call, a: Value, b: Value, *_: Any, **__: Any) -> Value:
    difference = total(call, a, negated(b))
    shape = _even(difference.low, difference.high)
    return Value(composed(Call(call.name, torch.abs), difference, shape).curvature, 0.0)


@rule("_log_softmax")
def _log_softmax(call: Call, value: Value, *_: Any) -> Value:
    found = composed(call, Value(value.curvature), Shape(concave=True))
    return Value(found.curvature, high=0.0)


@rule("nll_loss_forward nll_loss2d_forward")
def _nll(call: Call, value: Value, target: Value, weight: Value | None, *_: Any):
    if weight is not None:
        raise NotKnown(f"{call.name} with weights")
    return summed(negated(value)), Value(UNKNOWN)


@rule("binary_cross_entropy_with_logits")
def _bce(call: Call, value: Value, target: Value, weight=None, pos_weight=None, *_: Any) -> Value:
    # -t log s(u) - (1 - t) log s(-u) = softplus(-u) + (1 - t) u
    if weight is not None or pos_weight is not None:
        raise NotKnown(f"{call.name} with weights")
    slope = total(call, constant(1.0), negated(target))
    curve = composed(Call(call.name, torch.abs), Value(value.curvature), Shape(convex=True))
    return Value(total(call, curve, product(call, value, slope)).curvature)


@rule(
    """view _unsafe_view reshape expand permute t transpose slice select squeeze unsqueeze clone
    _to_copy detach alias lift_fresh lift_fresh_copy flip roll repeat unbind split split_with_sizes
    diagonal index index_select embedding gather as_strided unfold take take_along_dim pixel_shuffle
    pixel_unshuffle reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d movedim
    view_copy contiguous narrow repeat_interleave _reshape_alias squeeze_copy _unsafe_index"""
)
def _rearranged(call: Call, value: Value, *_: Any, **options: Any) -> Value:
    dtype = options.get("dtype")
    if getattr(call.target, "_overloadname", "") == "dtype":
        raise NotKnown(f"{call.name} as another dtype, which reads bits")
    if dtype is not None and dtype.is_floating_point and torch.finfo(dtype).eps > 0.01:
        raise NotKnown(f"{call.name} to {dtype}, whose steps are coarse")
    return value


@rule("constant_pad_nd tril triu im2col diag_embed")
def _padded(call: Call, value: Value, *rest: Any, **_: Any) -> Value:
    pad = rest[1] if call.name == "constant_pad_nd" and len(rest) > 1 else 0.0
    return hull(value, value_of(pad), constant(0.0))


@rule("cat stack")
def _joined(call: Call, values: list[Value], *_: Any) -> Value:
    return hull(*values)


@rule("select_scatter slice_scatter diagonal_scatter")
def _written(call: Call, value: Value, source: Value, *_: Any, **__: Any) -> Value:
    return hull(value, source)


@rule("copy")
def _copy(call: Call, value: Value, source: Value, *_: Any) -> Value:
    return source


@rule("where")
def _where(call: Call, condition: Value, *values: Any) -> Value:
    if not condition.is_constant:
        raise NotKnown(f"{call.name} with a condition that depends on y")
    return hull(*map(value_of, values))


@rule("masked_fill")
def _masked_fill(call: Call, value: Value, mask: Value, fill: Any) -> Value:
    return _where(call, mask, fill, value)


@rule("index_put")
def _index_put(call: Call, value: Value, at: Any, source: Value, accumulate: bool = False) -> Value:
    return hull(value, total(call, value, summed(source)) if accumulate else source)


@rule("full_like new_full fill")
def _full(call: Call, value: Value, *rest: Any, **_: Any) -> Value:
    return value_of(rest[-1])


@rule("zeros_like new_zeros ones_like new_ones")
def _filled(call: Call, *_: Any, **__: Any) -> Value:
    return constant(1.0 if "ones" in call.name else 0.0)


@rule("empty_like new_empty new_empty_strided rand_like randn_like")
def _arbitrary(call: Call, *_: Any, **__: Any) -> Value:
    return Value(CONSTANT)
