"""Operators that are neither elementwise nor reductions, most of them along one axis."""

from __future__ import annotations

from typing import Any

from atsc.codegen.graph.elementwise import FLOATS, elementwise, onnx_type
from atsc.codegen.graph.kernels import finished_call
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import axis_of, reshaped
from atsc.codegen.graph.reduce import binary, cumulative, largest_of, total_of, unary
from atsc.codegen.graph.tensor import DEAR, Code, Index, Tensor, c_index, c_type, linear, stored
from atsc.codegen.tail import ELEMENT_BYTES
from atsc.compiler.dims import Dim, product
from atsc.compiler.tensor_graph import OnnxNode


def _top_k(g: Lowering, node: OnnxNode, x: list[Any]) -> tuple[Tensor, Tensor]:
    """Values and indices of the k largest (or smallest), in order; the lower index first of equals.

    The place of each element is the number of those before it, which is quadratic in the axis and
    needs no memory. NaN counts as the largest.
    """
    data = g.store(x[0])
    axis = axis_of(node.attrs.get("axis", -1), data.rank)
    k = Dim.of(node.attrs["k"]) if "k" in node.attrs else g.dims(x[1], "k")[0]
    size, sign = data.shape[axis], ">" if node.attrs.get("largest", 1) else "<"
    g.at_least(size, k, "the axis that it takes k of")
    shape = tuple(k if a == axis else s for a, s in enumerate(data.shape))
    lines = [s for a, s in enumerate(data.shape) if a != axis]
    target = g.buffer("int64", shape)
    code = Code()
    with code.block("for (int64_t item = lo; item < hi; ++item)"):
        code.line("int64_t rest = item;")
        code.line(f"const int64_t own = rest % {code.dim(size)};")
        code.line(f"rest /= {code.dim(size)};")
        index = [c_index(size, "own") if a == axis else "" for a in range(data.rank)]
        for a in reversed([a for a in range(data.rank) if a != axis]):
            index[a] = c_index(data.shape[a], f"x{a}")
            code.line(f"[[maybe_unused]] const int64_t x{a} = rest % {code.dim(data.shape[a])};")
            code.line(f"rest /= {code.dim(data.shape[a])};")
        value = data.at(code, index)
        code.line("int64_t place = 0;")
        with code.block(f"for (int64_t r = 0; r < {code.dim(size)}; ++r)"):
            index[axis] = c_index(size, "r")
            other = data.at(code, index)
            before = f"{other} {sign} {value}"
            if data.dtype in FLOATS:
                nan_first = f"({other} != {other} && {value} == {value})"
                nan_last = f"({value} != {value} && {other} == {other})"
                before = f"({before} || {nan_first if sign == '>' else nan_last})"
                same = f"({other} == {value} || ({other} != {other} && {value} != {value}))"
            else:
                same = f"{other} == {value}"
            code.line(f"place += {before} || ({same} && r < own);")
        index[axis] = c_index(k, "place")
        code.line(f"if (place < {code.dim(k)}) out[{linear(code, shape, index)}] = own;")
    grid = product(lines) * size
    g.calls.append(finished_call(g.node, code, target, grid, size))
    indices = stored(target)

    def at(code: Code, index: Index) -> str:
        own = list(index)
        own[axis] = c_index(size, code.let("int64_t", indices.at(code, index), "i"))
        return data.at(code, own)

    return Tensor(data.dtype, shape, at, cost=1), indices


def _reverse_sequence(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    data, lengths = g.cheap(x[0]), g.cheap(x[1])
    time = axis_of(node.attrs.get("time_axis", 0), data.rank)
    batch = axis_of(node.attrs.get("batch_axis", 1), data.rank)

    def at(code: Code, index: Index) -> str:
        own = list(index)
        # A length beyond the axis would read outside of it.
        given = code.let("int64_t", lengths.at(code, [index[batch]]), "i")
        code.require(f"{given} >= 0 && {given} <= {code.dim(data.shape[time])}")
        length = code.let("int64_t", f"least({given}, {code.dim(data.shape[time])})", "i")
        place = f"{index[time]} < {length} ? {length} - 1 - {index[time]} : {index[time]}"
        own[time] = c_index(data.shape[time], code.let("int64_t", place, "i"))
        return data.at(code, own)

    return Tensor(data.dtype, data.shape, at, cost=data.cost + 2)


def _hardmax(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """1 at the first of the largest, else 0. Before version 13 the axis begins a flattened rest."""
    data, kind = g.cheap(x[0]), c_type(x[0].dtype)
    whole = data.shape
    axis = axis_of(node.attrs.get("axis", -1 if node.opset >= 13 else 1), data.rank)
    if node.opset < 13:
        data = reshaped(g, data, (product(whole[:axis]), product(whole[axis:])))
        axis = 1
    top = g.store(largest_of(g, data, [axis]))

    def at(code: Code, index: Index) -> str:
        own, first, name = list(index), code.fresh("i"), code.fresh("r")
        line = ["0" if a == axis else at for a, at in enumerate(index)]
        most = top.at(code, line)
        code.line(f"int64_t {first} = -1;")
        limit = f"{name} < {code.dim(data.shape[axis])} && {first} < 0"
        with code.block(f"for (int64_t {name} = 0; {limit}; ++{name})"):
            own[axis] = c_index(data.shape[axis], name)
            code.line(f"if ({data.at(code, own)} == {most}) {first} = {name};")
        return code.let(kind, f"({kind})({index[axis]} == {first})")

    return reshaped(g, Tensor(data.dtype, data.shape, at, cost=DEAR), whole)


def _lp_normalization(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """x / |x|_p along an axis; 0 where the norm is."""
    data = g.cheap(x[0])
    axis, power = axis_of(node.attrs.get("axis", -1), data.rank), node.attrs.get("p", 2)
    if power not in (1, 2) or data.dtype not in ("float32", "float64"):
        raise RefusedError(f"norm {power} of {data.dtype}")
    terms = unary(g, data, "__builtin_fabs{f}({0})" if power == 1 else "{0} * {0}")
    norm = total_of(g, terms, [axis])
    norm = g.store(norm if power == 1 else unary(g, norm, "__builtin_sqrt{f}({0})"))
    return binary(g, data, norm, "{1} == 0 ? 0 : {0} / {1}")


def _lrn(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """x / (bias + alpha / size * sum of squares of neighbouring channels) ^ beta."""
    data = g.cheap(x[0])
    if data.dtype not in ("float32", "float64"):
        raise RefusedError(f"elements of type {data.dtype}")
    kind, channels, size = c_type(data.dtype), data.shape[1], int(node.attrs["size"])
    alpha, beta, bias = (
        f"({kind}){float(node.attrs.get(name, default)).hex()}"
        for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )

    def at(code: Code, index: Index) -> str:
        own, total, name = list(index), code.fresh("sum"), code.fresh("r")
        begin = code.let("int64_t", f"{index[1]} - {(size - 1) // 2}", "i")
        end = code.let("int64_t", f"{index[1]} + {size // 2 + 1}", "i")
        own[1] = c_index(channels, name)
        code.line(f"{kind} {total} = 0;")
        limit = f"{name} < least({end}, {code.dim(channels)})"
        with code.block(f"for (int64_t {name} = {begin} < 0 ? 0 : {begin}; {limit}; ++{name})"):
            value = data.at(code, own)
            code.line(f"{total} += {value} * {value};")
        function = "__builtin_powf" if kind == "float" else "__builtin_pow"
        divisor = f"{function}({bias} + {alpha} / {size} * {total}, {beta})"
        return code.let(kind, f"{data.at(code, list(index))} / {divisor}")

    return Tensor(data.dtype, data.shape, at, cost=DEAR)


def _tensor_scatter(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    """A cache with an update written along its sequence axis, at a place of each batch row."""
    cache, update = g.cheap(x[0]), g.cheap(x[1])
    starts = g.cheap(x[2]) if len(x) > 2 and x[2] is not None else None
    axis = axis_of(node.attrs.get("axis", -2), cache.rank)
    kind, size, length = c_type(cache.dtype), cache.shape[axis], update.shape[axis]
    circular = node.attrs.get("mode", "linear") == "circular"
    g.at_least(size, length, "the cache that it updates")

    def at(code: Code, index: Index) -> str:
        start = "0" if starts is None else starts.at(code, [index[0]])
        if starts is not None:
            last = code.dim(size) if circular else f"{code.dim(size)} - {code.dim(length)}"
            code.require(f"{start} >= 0 && {start} <= {last}")
        place = code.let("int64_t", f"{index[axis]} - {start}", "i")
        if circular:
            place = code.let("int64_t", f"floor_mod<int64_t>({place}, {code.dim(size)})", "i")
        own = list(index)
        own[axis] = c_index(length, place)
        return code.choose(
            kind,
            f"{place} >= 0 && {place} < {code.dim(length)}",
            lambda: update.at(code, own),
            lambda: cache.at(code, index),
        )

    return Tensor(cache.dtype, cache.shape, at, cost=3)


def _bit_cast(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """The same bits as another type of the same width."""
    data, dtype = x[0], onnx_type(node.attrs["to"])
    widened = {"float16", "bfloat16", "bool"} & {data.dtype, dtype}
    if widened or ELEMENT_BYTES[data.dtype] != ELEMENT_BYTES[dtype]:
        raise RefusedError(f"bits of {data.dtype} as {dtype}")
    return elementwise(g, [data], dtype, lambda v: f"bits<{c_type(dtype)}>({v})")


RULES: dict[tuple[str, str], Rule] = {
    ("", "TensorScatter"): _tensor_scatter,
    ("", "BitCast"): _bit_cast,
    ("", "TopK"): _top_k,
    ("", "CumProd"): cumulative("1", "*"),
    ("", "ReverseSequence"): _reverse_sequence,
    ("", "Hardmax"): _hardmax,
    ("", "LpNormalization"): _lp_normalization,
    ("", "LRN"): _lrn,
}
