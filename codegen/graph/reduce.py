"""Operators that run over an axis: reductions, softmax, normalisations, cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atsc.codegen.graph.elementwise import FLOATS, cast, elementwise
from atsc.codegen.graph.kernels import rows_call
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import axes_of, axis_of, expanded, reshaped
from atsc.codegen.graph.tensor import (
    DEAR,
    Code,
    Index,
    Tensor,
    c_index,
    c_type,
    known_tensor,
    stored,
)
from atsc.codegen.tail import ElementType
from atsc.compiler.dims import Dim, product
from atsc.compiler.tensor_graph import OnnxNode

_LANES = 16
Combine = Callable[[str, str], str]


def reduced(
    g: Lowering,
    x: Tensor,
    axes: Sequence[int],
    start: str,
    combine: Combine,
    dtype: ElementType | None = None,
) -> Tensor:
    """Elements along `axes` combined; those dimensions become 1.

    The last axis is combined in several lanes, which compilers turn into vectors, so `combine` must
    be associative and commutative, up to rounding.

    Args:
        g: the lowering.
        x: what is reduced; computed once an element if nothing reads the result twice.
        axes: each once, counted from the start.
        start: C expression of the neutral element.
        combine: two partial results into one.
        dtype: of the result, if not x's; the type that is accumulated in.
    """
    dtype = dtype or x.dtype
    kind = c_type(dtype)
    last = max(axes, default=-1)
    by_lanes = last == x.rank - 1 and x.rank > 0
    x = x if x.cost < DEAR else g.store(x)

    def at(code: Code, index: Index) -> str:
        own = list(index)
        loops = [axis for axis in sorted(axes) if axis != last or not by_lanes]
        total = code.fresh("sum")
        if by_lanes:
            code.line(f"{kind} {total}[{_LANES}];")
            code.line(f"for (int l = 0; l < {_LANES}; ++l) {total}[l] = {start};")
        else:
            code.line(f"{kind} {total} = {start};")
        run(code, own, loops, total)
        if not by_lanes:
            return total
        result = code.fresh("sum")
        code.line(f"{kind} {result} = {total}[0];")
        with code.block(f"for (int l = 1; l < {_LANES}; ++l)"):
            code.line(f"{result} = {combine(result, f'{total}[l]')};")
        return result

    def run(code: Code, own: list[str], loops: list[int], total: str) -> None:
        if loops:
            name, size = code.fresh("r"), x.shape[loops[0]]
            with code.block(f"for (int64_t {name} = 0; {name} < {code.dim(size)}; ++{name})"):
                own[loops[0]] = c_index(size, name)
                run(code, own, loops[1:], total)
            return
        if not by_lanes:
            code.line(f"{total} = {combine(total, x.at(code, own))};")
            return
        name, limit = code.fresh("r"), code.dim(x.shape[last])
        code.line(f"int64_t {name} = 0;")
        with (
            code.block(f"for (; {name} + {_LANES} <= {limit}; {name} += {_LANES})"),
            code.block(f"for (int l = 0; l < {_LANES}; ++l)"),
        ):
            own[last] = c_index(x.shape[last], code.let("int64_t", f"{name} + l", "i"))
            code.line(f"{total}[l] = {combine(f'{total}[l]', x.at(code, own))};")
        with code.block(f"for (; {name} < {limit}; ++{name})"):
            own[last] = c_index(x.shape[last], name)
            code.line(f"{total}[0] = {combine(f'{total}[0]', x.at(code, own))};")

    shape = tuple(Dim.of(1) if axis in axes else size for axis, size in enumerate(x.shape))
    length = product(x.shape[axis] for axis in axes).constant or 256
    return Tensor(dtype, shape, at, cost=max(DEAR, length * (1 + x.cost)))


def plus(kind: str) -> Combine:
    """Sums."""
    return lambda a, b: f"({kind})({a} + {b})"


def total_of(g: Lowering, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Sums along axes."""
    kind = c_type(x.dtype)
    return reduced(g, x, axes, f"({kind})0", plus(kind))


def mean_of(g: Lowering, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Means along axes."""
    kind, count = c_type(x.dtype), product(x.shape[axis] for axis in axes)
    total = total_of(g, x, axes)

    def at(code: Code, index: Index) -> str:
        value = total.at(code, index)
        return code.rounded(x.dtype, f"({kind})({value} / ({kind}){code.dim(count)})")

    return Tensor(x.dtype, total.shape, at, cost=total.cost + 1)


def largest_of(g: Lowering, x: Tensor, axes: Sequence[int], sign: str = "larger") -> Tensor:
    """The largest (or smallest) along axes."""
    kind = c_type(x.dtype)
    return reduced(g, x, axes, _limit(x.dtype, sign), lambda a, b: f"{sign}<{kind}>({a}, {b})")


def _limit(dtype: ElementType, sign: str) -> str:
    """The neutral element of max or min."""
    kind, is_max = c_type(dtype), sign == "larger"
    if dtype in FLOATS:
        return f"({kind}){'-' if is_max else ''}__builtin_inf()"
    if dtype == "bool":
        return "false" if is_max else "true"
    limits = np.iinfo(dtype)
    number = int(limits.min if is_max else limits.max)
    if number == -(2**63):
        return "(int64_t)(-9223372036854775807LL - 1)"
    return f"({kind}){number}{'ULL' if number > 2**63 - 1 else 'LL'}"


def unary(g: Lowering, x: Tensor, text: str, cost: int = 1) -> Tensor:
    """A C expression of {0}, in x's type."""
    kind = c_type(x.dtype)
    suffix = "f" if kind == "float" else ""
    return elementwise(g, [x], x.dtype, lambda v: text.format(v, f=suffix, kind=kind), cost)


def binary(g: Lowering, x: Tensor, y: Tensor, text: str, cost: int = 1) -> Tensor:
    """A C expression of {0} and {1}, in x's type."""
    return elementwise(g, [x, y], x.dtype, lambda a, b: text.format(a, b), cost)


def _reduce(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data, kind = x[0], c_type(x[0].dtype)
    axes = axes_of(g, node, x)
    if not axes:
        axes = [] if node.attrs.get("noop_with_empty_axes", 0) else list(range(data.rank))
    axes = [axis_of(axis, data.rank) for axis in axes]
    if node.op == "ReduceProd" and data.known is not None and data.rank == 1 and axes:
        known = np.array(product(data.known), object)
        shape = (1,) if node.attrs.get("keepdims", 1) else ()
        return known_tensor(known.reshape(shape), data.dtype)
    result = _REDUCTIONS[node.op](g, data, axes, kind)
    if node.attrs.get("keepdims", 1):
        return result
    kept = tuple(size for axis, size in enumerate(result.shape) if axis not in axes)
    return reshaped(g, result, kept)


def _log_sum_exp(g: Lowering, x: Tensor, axes: list[int], kind: str) -> Tensor:
    x = g.store(x)
    top = unary(
        g, g.store(largest_of(g, x, axes)), "({0} - {0} == 0 ? {0} : ({kind})0)"
    )  # infinities would cancel to NaN
    total = total_of(g, binary(g, x, top, "atsc::graph::exp({0} - {1})", 8), axes)
    return binary(g, unary(g, total, "__builtin_log{f}({0})", 16), top, "{0} + {1}")


_REDUCTIONS: dict[str, Callable[[Lowering, Tensor, list[int], str], Tensor]] = {
    "ReduceSum": lambda g, x, axes, kind: total_of(g, x, axes),
    "ReduceMean": lambda g, x, axes, kind: mean_of(g, x, axes),
    "ReduceMax": lambda g, x, axes, kind: largest_of(g, x, axes),
    "ReduceMin": lambda g, x, axes, kind: largest_of(g, x, axes, "smaller"),
    "ReduceProd": lambda g, x, axes, kind: reduced(
        g, x, axes, f"({kind})1", lambda a, b: f"({kind})({a} * {b})"
    ),
    "ReduceL1": lambda g, x, axes, kind: total_of(
        g, unary(g, x, "({0} < 0 ? ({kind})-{0} : {0})"), axes
    ),
    "ReduceL2": lambda g, x, axes, kind: unary(
        g, total_of(g, unary(g, x, "({kind})({0} * {0})"), axes), "({kind})__builtin_sqrt{f}({0})"
    ),
    "ReduceSumSquare": lambda g, x, axes, kind: total_of(
        g, unary(g, x, "({kind})({0} * {0})"), axes
    ),
    "ReduceLogSum": lambda g, x, axes, kind: unary(
        g, total_of(g, x, axes), "({kind})__builtin_log{f}({0})", 16
    ),
    "ReduceLogSumExp": _log_sum_exp,
}


def _softmax(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """Since opset 13 along one axis; before, along all from `axis` on."""
    data = x[0]
    axis = axis_of(node.attrs.get("axis", -1 if node.opset >= 13 else 1), data.rank)
    axes = [axis] if node.opset >= 13 else list(range(axis, data.rank))
    if node.op == "Softmax" and data.dtype == "float32" and axes and axes[-1] == data.rank - 1:
        target = g.buffer("float32", data.shape)

        def finish(code: Code, length: str, index: Index) -> None:
            code.line(f"softmax_row(row, {length});")

        g.calls.append(rows_call(g.node, data, len(axes), target, finish))
        return stored(target)
    data = g.store(data)
    top = g.store(largest_of(g, data, axes))
    shifted = binary(g, data, top, "{0} - {1}")
    power = unary(g, shifted, "atsc::graph::exp({0})", 8)
    if node.op == "Hardmax":
        raise RefusedError("Hardmax")
    if node.op == "LogSoftmax":
        total = unary(g, total_of(g, power, axes), "__builtin_log{f}({0})", 16)
        return binary(g, shifted, g.store(total), "{0} - {1}")
    total = unary(g, total_of(g, power, axes), "({kind})1 / {0}")
    return binary(g, power, g.store(total), "{0} * {1}")


def normalized(
    g: Lowering, x: Tensor, axes: Sequence[int], epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + epsilon), the mean, and the factor."""
    x = g.store(x)
    mean = g.store(mean_of(g, x, axes))
    centred = binary(g, x, mean, "{0} - {1}")
    variance = mean_of(g, unary(g, centred, "({0} * {0})"), axes)
    text = f"({{kind}})1 / __builtin_sqrt{{f}}({{0}} + ({{kind}}){float(epsilon).hex()})"
    factor = g.store(unary(g, variance, text, 8))
    return binary(g, centred, factor, "{0} * {1}"), mean, factor


def _scaled(g: Lowering, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    if scale is not None:
        x = binary(g, x, scale, "{0} * {1}")
    return x if bias is None else binary(g, x, bias, "{0} + {1}")


def _wide(g: Lowering, x: Tensor | None) -> Tensor | None:
    """Halves are normalised as floats."""
    return None if x is None else cast(g, x, "float32") if x.dtype in FLOATS[2:] else x


def _layer_norm_rows(
    g: Lowering,
    x: Tensor,
    axes: int,
    epsilon: float,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: ElementType,
) -> Tensor:
    """All of it in one pass over each row."""
    inner = x.shape[x.rank - axes :]
    factors = [None if v is None else g.cheap(expanded(g, v, inner)) for v in (scale, bias)]
    target = g.buffer("float32", x.shape)

    def finish(code: Code, length: str, index: Index) -> None:
        code.line(f"const float mean = row_sum(row, {length}) / static_cast<float>({length});")
        code.line(f"const float variance = row_variance(row, {length}, mean);")
        code.line(
            f"const float factor = 1.0f / __builtin_sqrtf(variance + {float(epsilon).hex()}f);"
        )
        with code.block(f"for (int64_t j = 0; j < {length}; ++j)"):
            value, place = "(row[j] - mean) * factor", code.split("j", inner)
            for tensor, operator in zip(factors, "*+", strict=True):
                if tensor is not None:
                    value = f"({value}) {operator} {tensor.at(code, place)}"
            code.line(f"row[j] = {value};")

    g.calls.append(rows_call(g.node, x, axes, target, finish))
    return cast(g, stored(target), dtype)


def _layer_norm(
    g: Lowering, node: OnnxNode, x: list[Any]
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    dtype = x[0].dtype
    data, scale, bias = (_wide(g, v) for v in [*x, None][:3])
    assert data is not None
    axis = axis_of(node.attrs.get("axis", -1), data.rank)
    axes = list(range(axis, data.rank))
    is_plain = all(v is None or v.rank <= len(axes) for v in (scale, bias))
    if data.dtype == "float32" and axes and is_plain and not any(node.outputs[1:]):
        return _layer_norm_rows(
            g, data, len(axes), node.attrs.get("epsilon", 1e-5), scale, bias, dtype
        )
    result, mean, factor = normalized(g, data, axes, node.attrs.get("epsilon", 1e-5))
    return cast(g, _scaled(g, result, scale, bias), dtype), mean, factor


def _per_channel(g: Lowering, x: Tensor, rank: int) -> Tensor:
    """[C] as [C, 1, 1, ...] for tensors [N, C, ...]."""
    return reshaped(g, x, (x.shape[0], *[Dim.of(1)] * (rank - 2)))


def _batch_norm(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    if node.attrs.get("training_mode", 0) or len(node.outputs) > 1:
        raise RefusedError("training mode")
    data, dtype = _wide(g, x[0]), x[0].dtype
    assert data is not None
    scale, bias, mean, variance = (
        _per_channel(g, cast(g, v, data.dtype), data.rank) for v in x[1:5]
    )
    epsilon = float(node.attrs.get("epsilon", 1e-5)).hex()
    text = f"({{kind}})1 / __builtin_sqrt{{f}}({{0}} + ({{kind}}){epsilon})"
    factor = g.store(binary(g, unary(g, variance, text, 8), scale, "{0} * {1}"))
    centred = binary(g, data, mean, "{0} - {1}")
    return cast(g, _scaled(g, centred, factor, bias), dtype)


def _instance_norm(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    data, dtype = _wide(g, x[0]), x[0].dtype
    assert data is not None
    epsilon = node.attrs.get("epsilon", 1e-5)
    result, _, _ = normalized(g, data, list(range(2, data.rank)), epsilon)
    scale, bias = (_per_channel(g, cast(g, v, data.dtype), data.rank) for v in x[1:3])
    return cast(g, _scaled(g, result, scale, bias), dtype)


def _arg(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    data = g.cheap(x[0])
    axis = axis_of(node.attrs.get("axis", 0), data.rank)
    sign = ">" if node.op == "ArgMax" else "<"
    sign += "=" if node.attrs.get("select_last_index", 0) else ""
    kind, size = c_type(data.dtype), data.shape[axis]
    g.at_least(size, 1, "the axis that it searches")

    def at(code: Code, index: Index) -> str:
        own, best, place, name = list(index), code.fresh(), code.fresh("i"), code.fresh("r")
        own[axis] = "0"
        code.line(f"{kind} {best} = {data.at(code, own)};")
        code.line(f"int64_t {place} = 0;")
        with code.block(f"for (int64_t {name} = 1; {name} < {code.dim(size)}; ++{name})"):
            own[axis] = c_index(size, name)
            value = code.let(kind, data.at(code, own))
            with code.block(f"if ({value} {sign} {best})"):
                code.line(f"{best} = {value};")
                code.line(f"{place} = {name};")
        return place

    shape = tuple(Dim.of(1) if a == axis else s for a, s in enumerate(data.shape))
    result = Tensor("int64", shape, at, cost=DEAR)
    if node.attrs.get("keepdims", 1):
        return result
    return reshaped(g, result, tuple(s for a, s in enumerate(shape) if a != axis))


def cumulative(start: str, operator: str) -> Rule:
    """Each element adds itself to, or multiplies, what is before it.

    It is quadratic in the axis, which is mostly short.
    """

    def rule(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
        data, kind = g.cheap(x[0]), c_type(x[0].dtype)
        axis = axis_of(g.ints(x[1], "axis")[0], data.rank)
        reverse, exclusive = node.attrs.get("reverse", 0), node.attrs.get("exclusive", 0)

        def at(code: Code, index: Index) -> str:
            own, total, name = list(index), code.fresh("total"), code.fresh("r")
            own[axis] = c_index(data.shape[axis], name)
            begin, end = "0", f"{index[axis]}{'' if exclusive else ' + 1'}"
            if reverse:
                begin = f"{index[axis]}{' + 1' if exclusive else ''}"
                end = code.dim(data.shape[axis])
            code.line(f"{kind} {total} = {start};")
            with code.block(f"for (int64_t {name} = {begin}; {name} < {end}; ++{name})"):
                code.line(f"{total} = ({kind})({total} {operator} {data.at(code, own)});")
            return total

        return Tensor(data.dtype, data.shape, at, cost=DEAR)

    return rule


RULES: dict[tuple[str, str], Rule] = {
    **{("", name): _reduce for name in _REDUCTIONS},
    ("", "Softmax"): _softmax,
    ("", "LogSoftmax"): _softmax,
    ("", "LayerNormalization"): _layer_norm,
    ("", "BatchNormalization"): _batch_norm,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "ArgMax"): _arg,
    ("", "ArgMin"): _arg,
    ("", "CumSum"): cumulative("0", "+"),
}
