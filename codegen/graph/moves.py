"""Operators that move elements: shapes, slices, gathers; most are an index and no kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from atsc.codegen.graph.elementwise import both_known, cast, elementwise, onnx_type
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule, aligned
from atsc.codegen.graph.tensor import (
    Code,
    Index,
    Quantised,
    Stored,
    Tensor,
    View,
    c_index,
    c_type,
    known_tensor,
    stored,
)
from atsc.compiler.dims import Dim, exact_quotient, largest, product, smallest
from atsc.compiler.tensor_graph import OnnxNode


def axis_of(number: int, rank: int) -> int:
    """An axis counted from the start."""
    if not -rank <= number < max(rank, 1):
        raise RefusedError(f"axis {number} of a tensor of {rank} dimensions")
    return number + rank if number < 0 else number


def axes_of(g: Lowering, node: OnnxNode, x: list[Any], place: int = 1) -> list[int] | None:
    """The attribute `axes`, or the input that took its place; None if neither is there."""
    if "axes" in node.attrs:
        return [int(axis) for axis in node.attrs["axes"]]
    if len(x) > place and x[place] is not None:
        return g.ints(x[place], "axes")
    return None


def reshaped(g: Lowering, x: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    """The same elements in another shape of the same size."""
    if x.shape == shape:
        return x
    if x.product is not None and (exposed := x.product.reshaped(x, shape)) is not None:
        return exposed
    numbers = [size.constant for size in shape if size.constant is not None]
    if x.known is not None and len(numbers) == len(shape):
        return known_tensor(np.reshape(x.known, numbers), x.dtype)
    kept = [s for s in x.shape if s.constant != 1] == [s for s in shape if s.constant != 1]
    if kept and not isinstance(x, Stored) and x.product is None:
        # Dimensions of 1 come and go: still a function of the index.
        places = [axis for axis, size in enumerate(shape) if size.constant != 1]

        def at(code: Code, index: Index) -> str:
            rest = iter([index[place] for place in places])
            return x.at(code, ["0" if s.constant == 1 else next(rest) for s in x.shape])

        view = None
        if x.view is not None:
            steps = zip(x.shape, x.view.strides, strict=True)
            open_strides = iter([stride for size, stride in steps if size.constant != 1])
            strides = [Dim.of(0) if s.constant == 1 else next(open_strides) for s in shape]
            view = View(x.view.buffer, tuple(strides))
        return Tensor(x.dtype, shape, at, cost=x.cost, view=view)
    source = g.store(x)
    return stored(source.buffer, shape)


def _reshape(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    wanted = g.dims(x[1], "the shape") if len(x) > 1 else list(map(Dim.of, node.attrs["shape"]))
    keeps_zero = node.attrs.get("allowzero", 0)
    shape: list[Dim] = []
    for axis, size in enumerate(wanted):
        if size.constant == 0 and not keeps_zero:
            if axis >= x[0].rank:
                raise RefusedError(f"shape {axis} is 0 beyond the input's dimensions")
            size = x[0].shape[axis]
        shape.append(size)
    unknown = [axis for axis, size in enumerate(shape) if size.constant == -1]
    if len(unknown) > 1:
        raise RefusedError("a shape with more than one -1")
    for axis in unknown:
        rest = product(size for place, size in enumerate(shape) if place != axis)
        shape[axis] = x[0].size // rest if rest.constant != 0 else Dim.of(0)
        if exact_quotient(x[0].size, rest) is None:
            g.agree(shape[axis] * rest, x[0].size, "elements before and after Reshape")
    if not unknown:
        g.agree(product(shape), x[0].size, "elements before and after Reshape")
    return reshaped(g, x[0], tuple(shape))


def _flatten(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    axis = node.attrs.get("axis", 1)
    axis = axis + x[0].rank if axis < 0 else axis
    return reshaped(g, x[0], (product(x[0].shape[:axis]), product(x[0].shape[axis:])))


def _squeeze(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    axes = axes_of(g, node, x)
    if axes is None:
        axes = [axis for axis, size in enumerate(x[0].shape) if size.constant == 1]
        for size in (size for size in x[0].shape if size.constant is None):
            g.at_least(size, 2, "an open size that Squeeze without axes keeps")
    gone = {axis_of(axis, x[0].rank) for axis in axes}
    for axis in gone:
        g.agree(x[0].shape[axis], Dim.of(1), "a size that is squeezed")
    kept = tuple(size for axis, size in enumerate(x[0].shape) if axis not in gone)
    return reshaped(g, x[0], kept)


def unsqueezed(g: Lowering, x: Tensor, axes: list[int]) -> Tensor:
    """With dimensions of 1 at `axes` of the result."""
    rank = x.rank + len(axes)
    new = {axis_of(axis, rank) for axis in axes}
    rest = iter(x.shape)
    return reshaped(g, x, tuple(Dim.of(1) if a in new else next(rest) for a in range(rank)))


def _unsqueeze(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    axes = axes_of(g, node, x)
    if axes is None:
        raise RefusedError("no axes")
    return unsqueezed(g, x[0], axes)


def transposed(x: Tensor, order: list[int]) -> Tensor:
    """Dimension i of the result is dimension `order[i]` of x."""
    if x.known is not None:
        return known_tensor(np.transpose(x.known, order), x.dtype)

    def at(code: Code, index: Index) -> str:
        own = [""] * x.rank
        for place, axis in enumerate(order):
            own[axis] = index[place]
        return x.at(code, own)

    view = x.view and View(x.view.buffer, tuple(x.view.strides[axis] for axis in order))
    shape = tuple(x.shape[axis] for axis in order)
    quantised = x.quantised and _transposed_codes(x.quantised, order)
    return Tensor(x.dtype, shape, at, cost=x.cost, view=view, quantised=quantised)


def _transposed_codes(x: Quantised, order: list[int]) -> Quantised:
    back = [order.index(axis) for axis in range(len(order))]
    axis = None if x.axis is None else back[x.axis]

    def dequantised(codes: Tensor) -> Tensor:
        return transposed(x.dequantised(transposed(codes, back)), order)

    return Quantised(transposed(x.codes, order), x.scale, x.zero, axis, dequantised)


def _transpose(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    order = node.attrs.get("perm") or reversed(range(x[0].rank))
    return transposed(x[0], [axis_of(axis, x[0].rank) for axis in order])


def expanded(g: Lowering, x: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    """Broadcast to a shape."""
    whole = g.broadcast([x.shape, shape])
    numbers = [size.constant for size in whole if size.constant is not None]
    if x.known is not None and len(numbers) == len(whole):
        return known_tensor(np.broadcast_to(x.known, numbers), x.dtype)
    x = g.cheap(x)
    return Tensor(x.dtype, whole, lambda code, index: x.at(code, aligned(x, index)), cost=x.cost)


def _expand(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    return expanded(g, x[0], tuple(g.dims(x[1], "the shape")))


def _shape(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    begin, end = node.attrs.get("start", 0), node.attrs.get("end", x[0].rank)
    return known_tensor(np.array([*x[0].shape, None], object)[:-1][begin:end])


def _size(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    return known_tensor(np.array(x[0].size, object))


def _constant_of_shape(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    value = node.attrs.get("value", np.zeros(1, np.float32))
    shape = tuple(g.dims(x[0], "the shape"))
    scalar = g.array(np.asarray(value).reshape(()))
    return expanded(g, scalar, shape)


def _range(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    dtype, kind = x[0].dtype, c_type(x[0].dtype)
    if all(v.literal is not None for v in x):
        begin, end, step = (v.literal.item() for v in x)  # type: ignore[union-attr]
        return g.array(np.arange(begin, end, step, dtype=dtype))
    begin_dim, end_dim, step_dim = (g.dims(v, "a limit of Range")[0] for v in x)
    if step_dim.constant is None or step_dim.constant <= 0:
        raise RefusedError(f"a step of {step_dim}")
    count = largest((end_dim - begin_dim + (step_dim - 1)) // step_dim, 0)
    if begin_dim.constant == 0 and step_dim.constant == 1:
        count = end_dim  # a size
    if count.constant is not None and count.constant <= 64:
        steps = [begin_dim + step_dim * i for i in range(count.constant)]
        return known_tensor(np.array([*steps, None], object)[:-1], dtype)

    def at(code: Code, index: Index) -> str:
        return f"({kind})({code.dim(begin_dim)} + {index[0]} * {code.dim(step_dim)})"

    return Tensor(dtype, (count,), at, cost=1)


def _concat(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    axis = axis_of(node.attrs["axis"], x[0].rank)
    if all(part.known is not None for part in x):
        return known_tensor(np.concatenate([part.known for part in x], axis), x[0].dtype)
    shape = list(x[0].shape)
    for part in x[1:]:
        for place, size in enumerate(part.shape):
            if place == axis:
                shape[axis] = shape[axis] + size
            else:
                shape[place] = g.agree(shape[place], size, "sizes of concatenated tensors")

    def at(code: Code, index: Index) -> str:
        return pick(code, index, 0, Dim.of(0))

    def pick(code: Code, index: Index, number: int, before: Dim) -> str:
        part = x[number]

        def own() -> str:
            place = index[axis]
            if before.constant != 0:
                place = code.let("int64_t", f"{index[axis]} - {code.dim(before)}", "i")
            at = [*index[:axis], place, *index[axis + 1 :]]
            return part.at(code, [c_index(size, i) for size, i in zip(part.shape, at, strict=True)])

        if number == len(x) - 1:
            return own()
        after = before + part.shape[axis]
        condition = f"{index[axis]} < {code.dim(after)}"
        return code.choose(
            c_type(part.dtype), condition, own, lambda: pick(code, index, number + 1, after)
        )

    # Reading one element tests for each part: not worth doing for each reader.
    return Tensor(x[0].dtype, tuple(shape), at, cost=max(part.cost for part in x) + 2 * len(x))


def sliced(x: Tensor, axis: int, begin: Dim, size: Dim, step: int = 1) -> Tensor:
    """`size` elements of an axis from `begin`, `step` apart."""

    def at(code: Code, index: Index) -> str:
        place = index[axis] if step == 1 else f"{index[axis]} * {step}L"
        if begin.constant != 0:
            place = f"{code.dim(begin)} + {place}"
        place = code.index(place) if step != 1 or begin.constant != 0 else place
        return x.at(code, [*index[:axis], c_index(x.shape[axis], place), *index[axis + 1 :]])

    return Tensor(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :]), at, cost=x.cost)


def _bound(value: Dim, size: Dim, low: Dim, high: Dim) -> Dim:
    """One end of a slice as ONNX clamps it, in as few operations as the sizes allow."""
    number = value.constant
    if number is not None and number < 0:
        value = value + size
        if number < -(2**31):
            return low
    if number is not None and number >= 2**31 - 1:
        return high
    if value.constant is not None and size.constant is not None:
        low_number, high_number = low.constant, high.constant
        assert low_number is not None
        assert high_number is not None
        return Dim.of(min(max(value.constant, low_number), high_number))
    if value in (low, high, size):
        return value
    if value.constant is None or number is None or number < 0:
        value = largest(value, low) if any(f < 0 for _, f in value.terms) else value
    return smallest(value, high)


def _slice(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data = x[0]
    if "starts" in node.attrs:
        begins, ends = ([Dim.of(v) for v in node.attrs[key]] for key in ("starts", "ends"))
        axes, steps = list(node.attrs.get("axes", range(len(begins)))), [1] * len(begins)
    else:
        begins, ends = g.dims(x[1], "starts"), g.dims(x[2], "ends")
        axes, steps = list(range(len(begins))), [1] * len(begins)
        if len(x) > 3 and x[3] is not None:
            axes = g.ints(x[3], "axes")
        if len(x) > 4 and x[4] is not None:
            steps = g.ints(x[4], "steps")
    result: Tensor = data
    zero = Dim.of(0)
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        axis = axis_of(axis, data.rank)
        size = data.shape[axis]
        if result.known is not None and size.constant is not None and step != 0:
            numbers = [begin.constant, end.constant]
            if None not in numbers:
                cut = [slice(None)] * axis + [slice(begin.constant, end.constant, step)]
                if step < 0 and numbers[1] is not None and numbers[1] < -size.constant:
                    cut[-1] = slice(begin.constant, None, step)
                result = known_tensor(result.known[tuple(cut)], data.dtype)
                continue
        if step > 0:
            first, last = _bound(begin, size, zero, size), _bound(end, size, zero, size)
            count = (last - first + (step - 1)) // step
        else:
            top = size - 1
            first, last = _bound(begin, size, zero, top), _bound(end, size, Dim.of(-1), top)
            count = (first - last + (-step - 1)) // -step
        if not all(f >= 0 for _, f in count.terms):
            count = largest(count, 0)
        if (first.constant, count, step) != (0, size, 1):
            result = sliced(result, axis, first, count, step)
    return result


def _split(g: Lowering, node: OnnxNode, x: list[Any]) -> tuple[Tensor, ...]:
    axis = axis_of(node.attrs.get("axis", 0), x[0].rank)
    size, parts = x[0].shape[axis], len(node.outputs)
    if len(x) > 1 and x[1] is not None:
        sizes = g.dims(x[1], "the sizes of Split")
    elif "split" in node.attrs:
        sizes = [Dim.of(v) for v in node.attrs["split"]]
    else:
        part = (size + (parts - 1)) // parts
        sizes = [part] * (parts - 1) + [size - part * (parts - 1)]
    g.agree(sum(sizes, Dim.of(0)), size, "the sizes of Split and the axis")
    source, begin, results = g.cheap(x[0]), Dim.of(0), []
    for part in sizes:
        results.append(sliced(source, axis, begin, part))
        begin = begin + part
    return tuple(results)


def _tile(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    repeats = g.dims(x[1], "repeats")
    data = g.cheap(x[0])

    def at(code: Code, index: Index) -> str:
        own = []
        for size, times, place in zip(data.shape, repeats, index, strict=True):
            wrapped = place if times.constant == 1 else code.index(f"{place} % {code.dim(size)}")
            own.append(c_index(size, wrapped))
        return data.at(code, own)

    shape = tuple(size * times for size, times in zip(data.shape, repeats, strict=True))
    return Tensor(data.dtype, shape, at, cost=data.cost + 1)


def padded(
    g: Lowering,
    x: Tensor,
    before: list[Dim],
    after: list[Dim],
    fill: Tensor | None,
    mode: str = "constant",
) -> Tensor:
    """With elements added (or cut off) at both ends of each axis."""
    shape = tuple(b + s + a for b, s, a in zip(before, x.shape, after, strict=True))
    kind = c_type(x.dtype)

    def at(code: Code, index: Index) -> str:
        places, inside = [], []
        for size, front, back, place in zip(x.shape, before, after, index, strict=True):
            if front.constant == 0 and back.constant == 0:
                places.append(c_index(size, place))
                continue
            own = place if front.constant == 0 else code.index(f"{place} - {code.dim(front)}")
            limit = code.dim(size)
            if mode == "reflect":
                own = code.index(f"{own} < 0 ? -{own} : {own}")
                own = code.index(f"{own} >= {limit} ? 2 * {limit} - 2 - {own} : {own}")
            elif mode == "edge":
                own = code.index(f"{own} < 0 ? 0 : {own} >= {limit} ? {limit} - 1 : {own}")
            elif mode == "wrap":
                own = code.index(f"({own} % {limit} + {limit}) % {limit}")
            else:
                inside.append(f"{own} >= 0 && {own} < {limit}")
            places.append(own)
        if not inside:
            return x.at(code, places)
        other = (lambda: fill.at(code, ["0"] * fill.rank)) if fill else (lambda: f"({kind})0")
        return code.choose(kind, " && ".join(inside), lambda: x.at(code, places), other)

    return Tensor(x.dtype, shape, at, cost=x.cost + 2)


def _pad(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data, mode = x[0], node.attrs.get("mode", "constant")
    fill = x[2] if len(x) > 2 else None
    if "pads" in node.attrs:
        pads = [Dim.of(v) for v in node.attrs["pads"]]
        fill = cast(g, g.array(np.array(node.attrs.get("value", 0.0), np.float32)), data.dtype)
    else:
        pads = g.dims(x[1], "pads")
    axes = list(range(data.rank))
    if len(x) > 3 and x[3] is not None:
        axes = [axis_of(axis, data.rank) for axis in g.ints(x[3], "axes")]
    before, after = [Dim.of(0)] * data.rank, [Dim.of(0)] * data.rank
    for place, axis in enumerate(axes):
        before[axis], after[axis] = pads[place], pads[place + len(axes)]
    for size, *ends in zip(data.shape, before, after, strict=True):
        for end in ends:
            if mode != "constant" and end.constant != 0:
                least = end + 1 if mode == "reflect" else 1
                g.at_least(size, least, f"an axis with {mode} pads")
    return padded(g, data, before, after, fill, mode)


def _trilu(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data, offset = x[0], Dim.of(0)
    if len(x) > 1 and x[1] is not None:
        offset = g.dims(x[1], "k")[0]
    sign = ">=" if node.attrs.get("upper", 1) else "<="

    def at(code: Code, index: Index) -> str:
        value = data.at(code, index)
        return f"({index[-1]} - {index[-2]} {sign} {code.dim(offset)} ? {value} : 0)"

    return Tensor(data.dtype, data.shape, at, cost=data.cost + 1)


def _eye_like(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    dtype = onnx_type(node.attrs["dtype"]) if "dtype" in node.attrs else x[0].dtype
    offset, kind = node.attrs.get("k", 0), c_type(dtype)

    def at(code: Code, index: Index) -> str:
        return f"({kind})({index[1]} - {index[0]} == {offset})"

    return Tensor(dtype, x[0].shape, at, cost=1)


def _depth_to_space(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    block = node.attrs["blocksize"]
    n, c, h, w = x[0].shape
    size = c // (block * block)
    g.agree(c, size * block * block, "channels and whole blocks")
    if node.attrs.get("mode", "DCR") == "DCR":
        split, order = (n, Dim.of(block), Dim.of(block), size, h, w), [0, 3, 4, 1, 5, 2]
    else:
        split, order = (n, size, Dim.of(block), Dim.of(block), h, w), [0, 1, 4, 2, 5, 3]
    return reshaped(g, transposed(reshaped(g, x[0], split), order), (n, size, h * block, w * block))


def _space_to_depth(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    block = node.attrs["blocksize"]
    if node.attrs.get("mode", "DCR") != "DCR":
        raise RefusedError(f"mode {node.attrs['mode']}")
    n, c, h, w = x[0].shape
    for size in (h, w):
        g.agree(size, size // block * block, "the image and whole blocks")
    step = Dim.of(block)
    split = (n, c, h // block, step, w // block, step)
    moved = transposed(reshaped(g, x[0], split), [0, 3, 5, 1, 2, 4])
    return reshaped(g, moved, (n, c * block * block, h // block, w // block))


RULES: dict[tuple[str, str], Rule] = {
    ("", "Reshape"): _reshape,
    ("", "Flatten"): _flatten,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Transpose"): _transpose,
    ("", "Expand"): _expand,
    ("", "Shape"): _shape,
    ("", "Size"): _size,
    ("", "ConstantOfShape"): _constant_of_shape,
    ("", "Range"): _range,
    ("", "Concat"): _concat,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Tile"): _tile,
    ("", "Pad"): _pad,
    ("", "Trilu"): _trilu,
    ("", "EyeLike"): _eye_like,
    ("", "DepthToSpace"): _depth_to_space,
    ("", "SpaceToDepth"): _space_to_depth,
}
__all__ = ["RULES", "both_known", "elementwise"]
