"""Operators that read or write where an input says: gathers, scatters, one-hot."""

from __future__ import annotations

import numpy as np

from atsc.codegen.graph.kernels import finished_call
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import axis_of, reshaped
from atsc.codegen.graph.tensor import (
    Code,
    Index,
    Tensor,
    c_index,
    c_type,
    known_tensor,
    linear,
    stored,
)
from atsc.compiler.dims import Dim, smallest
from atsc.compiler.tensor_graph import OnnxNode


def _gather(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    data, indices = x
    axis = axis_of(node.attrs.get("axis", 0), data.rank)
    if data.known is not None and indices.literal is not None:
        return known_tensor(np.take(data.known, indices.literal, axis), data.dtype)
    # Each index is read for each element of a row.
    indices = g.cheap(indices)
    shape = data.shape[:axis] + indices.shape + data.shape[axis + 1 :]
    end = axis + indices.rank
    size = data.shape[axis].constant
    given = indices.literal
    if given is not None and given.size:
        reach = max(int(given.max()) + 1, -int(given.min()))
        if size is not None and reach > size:
            raise RefusedError(f"an index beyond the {size} of axis {axis}")
        g.at_least(data.shape[axis], reach, "the axis that it takes elements of")
    _check_not_empty(g, data.shape[axis], indices)
    if indices.literal is not None and indices.literal.size == 1:
        number = int(indices.literal.item())
        fixed = f"{number}" if number >= 0 else f"({{}} - {-number})"

        def at_fixed(code: Code, index: Index) -> str:
            place = fixed.format(code.dim(data.shape[axis]))
            place = c_index(data.shape[axis], place)
            return data.at(code, [*index[:axis], place, *index[end:]])

        return Tensor(data.dtype, shape, at_fixed, cost=data.cost)

    def at(code: Code, index: Index) -> str:
        place = code.checked(indices.at(code, index[axis:end]), data.shape[axis])
        return data.at(code, [*index[:axis], place, *index[end:]])

    return Tensor(data.dtype, shape, at, cost=data.cost + 2)


def _check_not_empty(g: Lowering, size: Dim, indices: Tensor) -> None:
    """Kernels that find an index out of range read the first element: there must be one."""
    least = smallest(1, indices.size)
    g.at_least(size, least, "the axis that it takes elements of")


def _gather_elements(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    data, indices = x
    axis = axis_of(node.attrs.get("axis", 0), data.rank)
    _check_within(g, indices, data, axis)
    _check_not_empty(g, data.shape[axis], indices)

    def at(code: Code, index: Index) -> str:
        own = [c_index(size, at) for size, at in zip(data.shape, index, strict=True)]
        own[axis] = code.checked(indices.at(code, index), data.shape[axis])
        return data.at(code, own)

    return Tensor(data.dtype, indices.shape, at, cost=data.cost + indices.cost + 2)


def _check_within(g: Lowering, indices: Tensor, data: Tensor, axis: int) -> None:
    """Beside the axis that they index, indices may name fewer places than there are, not more."""
    if indices.rank != data.rank:
        raise RefusedError(f"indices of {indices.rank} dimensions for data of {data.rank}")
    for place, (size, most) in enumerate(zip(indices.shape, data.shape, strict=True)):
        if place != axis:
            g.at_least(most, size, f"the data along axis {place}")


def _gather_nd(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    data, indices = x[0], g.cheap(x[1])
    batch, depth = node.attrs.get("batch_dims", 0), indices.shape[-1].constant
    if depth is None:
        raise RefusedError("an index of unknown length")
    end = indices.rank - 1
    for axis in range(batch):
        g.agree(indices.shape[axis], data.shape[axis], "the batches of indices and data")
    for size in data.shape[batch : batch + depth]:
        _check_not_empty(g, size, indices)

    def at(code: Code, index: Index) -> str:
        places = [
            code.checked(indices.at(code, [*index[:end], str(k)]), data.shape[batch + k])
            for k in range(depth)
        ]
        return data.at(code, [*index[:batch], *places, *index[end:]])

    shape = indices.shape[:-1] + data.shape[batch + depth :]
    return Tensor(data.dtype, shape, at, cost=data.cost + 2 * depth)


def _one_hot(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    indices, depth, values = g.cheap(x[0]), g.dims(x[1], "depth")[0], x[2]
    axis = node.attrs.get("axis", -1)
    axis = axis + indices.rank + 1 if axis < 0 else axis

    def at(code: Code, index: Index) -> str:
        raw = indices.at(code, [*index[:axis], *index[axis + 1 :]])
        given = code.let("int64_t", f"(int64_t){raw}", "i")
        place = code.let("int64_t", f"{given} < 0 ? {given} + {code.dim(depth)} : {given}", "i")
        off, on = values.at(code, ["0"]), values.at(code, ["1"])
        return f"({place} == {index[axis]} ? {on} : {off})"

    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])
    return Tensor(values.dtype, shape, at, cost=2)


def _compress_known(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """Compress by a constant condition is a Gather."""
    condition = g.content(x[1], "the condition").reshape(-1)
    places = g.array(np.flatnonzero(condition).astype(np.int64))
    data = x[0]
    if "axis" not in node.attrs:
        data = reshaped(g, data, (data.size,))
    axis = node.attrs.get("axis", 0)
    return _gather(g, OnnxNode(node.name, "Gather", "", 13, (), (), {"axis": axis}), [data, places])


def _check_updates(
    g: Lowering, node: OnnxNode, data: Tensor, indices: Tensor, updates: Tensor
) -> None:
    """There are as many updates as indices, and each lies in the data but for what indices say."""
    if node.op != "ScatterND":
        _check_within(g, updates, data, axis_of(node.attrs.get("axis", 0), data.rank))
        wanted = indices.shape
    else:
        if (depth := indices.shape[-1].constant) is None:
            raise RefusedError("an index of unknown length")
        wanted = (*indices.shape[:-1], *data.shape[depth:])
    if len(wanted) != updates.rank:
        raise RefusedError(f"updates of {updates.rank} dimensions, and {len(wanted)} are indexed")
    for size, expected in zip(updates.shape, wanted, strict=True):
        g.agree(size, expected, "updates and what is indexed")


def _scatter(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """ScatterElements and ScatterND: one pass over the updates after one over the data.

    Updates may name an element twice, so they run in order, as one item.
    """
    data, indices, updates = x[0], g.store(x[1]), g.store(x[2])
    reduction = node.attrs.get("reduction", "none")
    kind, expressions = c_type(data.dtype), {
        "none": "{1}",
        "add": "({kind})({0} + {1})",
        "mul": "({kind})({0} * {1})",
        "min": "smaller<{kind}>({0}, {1})",
        "max": "larger<{kind}>({0}, {1})",
    }  # fmt: skip
    if data.dtype in ("float16", "bfloat16") and reduction != "none":
        raise RefusedError(f"reduction {reduction} of {data.dtype}")
    _check_updates(g, node, data, indices, updates)
    copied, target = g.store(data), g.buffer(data.dtype, data.shape)
    code = Code()
    all_data = Tensor(data.dtype, (data.size,), stored(copied.buffer, (data.size,)).at)
    with code.block(f"for (int64_t e = 0; e < {code.dim(data.size)}; ++e)"):
        code.line(f"out[e] = {code.as_stored(data.dtype, all_data.at(code, ['e']))};")
    with code.block(f"for (int64_t u = 0; u < {code.dim(updates.size)}; ++u)"):
        code.line("int64_t rest = u;")
        index = [f"u{axis}" for axis in range(updates.rank)]
        for axis in reversed(range(updates.rank)):
            code.line(f"const int64_t {index[axis]} = rest % {code.dim(updates.shape[axis])};")
            code.line(f"rest /= {code.dim(updates.shape[axis])};")
        own = [c_index(size, at) for size, at in zip(updates.shape, index, strict=True)]
        if node.op == "ScatterND":
            depth, end = indices.shape[-1].constant, indices.rank - 1
            if depth is None:
                raise RefusedError("an index of unknown length")
            places = [
                code.checked(indices.at(code, [*own[:end], str(k)]), data.shape[k])
                for k in range(depth)
            ]
            place = [*places, *own[end:]]
        else:
            axis = axis_of(node.attrs.get("axis", 0), data.rank)
            place = list(own)
            place[axis] = code.checked(indices.at(code, own), data.shape[axis])
        code.line("if (failed) continue;")
        where = code.index(linear(code, data.shape, place))
        value = updates.at(code, own)
        text = expressions[reduction].format(f"out[{where}]", value, kind=kind)
        code.line(f"out[{where}] = {code.as_stored(data.dtype, text)};")
    code.lines.insert(0, "  if (lo >= hi) return 0;")
    total = data.size + updates.size
    g.calls.append(finished_call(g.node, code, target, Dim.of(1), total))
    return stored(target)


RULES: dict[tuple[str, str], Rule] = {
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather_elements,
    ("", "GatherND"): _gather_nd,
    ("", "OneHot"): _one_hot,
    ("", "Compress"): _compress_known,
    ("", "Scatter"): _scatter,
    ("", "ScatterElements"): _scatter,
    ("", "ScatterND"): _scatter,
}
