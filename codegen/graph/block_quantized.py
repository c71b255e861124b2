"""com.microsoft's operators on constants in blocks: GatherBlockQuantized and MatMulNBits.

A block of `block_size` codes along one axis has a scale, and a zero point or else half the range
of the codes (4-bit elements: 0). Codes of 2 and 4 bits lie in bytes along the last axis, low bits
first. Products are of floats, whatever accuracy_level allows. Source: onnxruntime's schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atsc.codegen.graph.elementwise import FLOATS
from atsc.codegen.graph.linear import matrix_product
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import axis_of, reshaped, sliced, transposed, unsqueezed
from atsc.codegen.graph.reduce import binary
from atsc.codegen.graph.tensor import Code, Index, Tensor, c_index
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import NIBBLES, OnnxNode


def _in_bytes(x: Tensor, bits: int) -> Tensor:
    """Codes of 2, 4 or 8 bits in bytes along the last axis, as int32."""
    each = 8 // bits

    def at(code: Code, index: Index) -> str:
        last = index[-1]
        if each == 1 or last == "0":
            byte, shift = x.at(code, index), "0"
        else:
            place = code.index(last)
            byte = x.at(code, [*index[:-1], code.index(f"{place} / {each}")])
            shift = f"(int)({place} % {each}) * {bits}"
        return f"(({byte} >> {shift}) & {(1 << bits) - 1})"

    shape = (*x.shape[:-1], x.shape[-1] * Dim.of(each))
    return Tensor("int32", shape, at, cost=x.cost + 3)


def _groups(size: Dim, count: int) -> Dim:
    """How many groups of so many there are, the last one perhaps not whole."""
    if size.constant is None:
        raise RefusedError(f"a constant of {size} elements along an axis")
    return Dim.of(-(-size.constant // count))


def _dequantized(
    codes: Tensor, scales: Tensor, zero: Tensor | int, axis: int, block: int
) -> Tensor:
    """`(code - zero) * scale` with a scale for each block of an axis."""

    def at(code: Code, index: Index) -> str:
        own = list(index)
        own[axis] = c_index(scales.shape[axis], code.index(f"{index[axis]} / {block}"))
        offset = zero.at(code, own) if isinstance(zero, Tensor) else str(zero)
        return f"((float)({codes.at(code, index)} - {offset}) * {scales.at(code, own)})"

    return Tensor(scales.dtype, codes.shape, at, cost=codes.cost + scales.cost + 4)


def _expect(tensor: Tensor, wanted: Sequence[Dim], what: str) -> None:
    if tensor.shape != tuple(wanted):
        shapes = (", ".join(map(str, shape)) for shape in (tensor.shape, wanted))
        raise RefusedError("{} have shape [{}], expected [{}]".format(what, *shapes))


def _check_block_size(block: int) -> None:
    if block < 16 or block & (block - 1):
        raise RefusedError(f"attribute block_size is {block}, supported: 16, 32, 64, ...")


def _gather_block_quantized(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data, indices, scales = x[0], g.cheap(x[1]), g.cheap(x[2])
    points: Tensor | None = x[3] if len(x) > 3 else None
    elements = g.constant_type(node.inputs[0])
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    axis = axis_of(int(node.attrs.get("gather_axis", 0)), data.rank)
    along = axis_of(int(node.attrs.get("quantize_axis", 1)), data.rank)
    _check_block_size(block)
    if scales.dtype not in FLOATS or (points is not None and points.dtype != data.dtype):
        raise RefusedError("scales that are no floats, or zero points of another type than data")
    per_byte, default = 1, 0
    if elements in NIBBLES:
        if bits != 4:
            raise RefusedError(f"attribute bits is {bits}, elements of {elements} have 4")
    elif elements != "uint8" or bits not in (2, 4, 8):
        raise RefusedError(f"attribute bits is {bits} for elements of {elements}")
    elif axis != 0 or along != data.rank - 1:
        names = f"attributes gather_axis {axis} and quantize_axis {along}"
        raise RefusedError(f"{names}, supported for uint8: 0 and {data.rank - 1}, the last one")
    else:
        per_byte, default = 8 // bits, 1 << (bits - 1)
        data = _in_bytes(data, bits)
    parts = (*data.shape[:along], _groups(data.shape[along], block), *data.shape[along + 1 :])
    _expect(scales, parts, "scales")
    zero: Tensor | int = default
    if points is not None:
        _expect(points, (*parts[:-1], _groups(parts[-1], per_byte)), "zero points")
        zero = points if per_byte == 1 else _in_bytes(points, bits)
    table = _dequantized(data, scales, zero, along, block)
    end = axis + indices.rank

    def at(code: Code, index: Index) -> str:
        """Unlike Gather, the operator makes zeros of an index that is out of range."""
        size = code.dim(table.shape[axis])
        given = code.let("int64_t", f"(int64_t){indices.at(code, index[axis:end])}", "i")
        place = code.let("int64_t", f"{given} < 0 ? {given} + {size} : {given}", "i")
        inside = code.let("bool", f"{place} >= 0 && {place} < {size}")
        safe = code.let("int64_t", f"{inside} ? {place} : 0", "i")
        value = table.at(code, [*index[:axis], safe, *index[end:]])
        return f"({inside} ? {value} : 0.0f)"

    shape = table.shape[:axis] + indices.shape + table.shape[axis + 1 :]
    return Tensor(table.dtype, shape, at, cost=table.cost + 3)


def _matmul_nbits(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    """x [.., K] times the transpose of a matrix [N, K] with blocks along K."""
    left, codes, scales, points, order, bias = [*x, *[None] * 6][:6]
    outputs, width = int(node.attrs["N"]), int(node.attrs["K"])
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    _check_block_size(block)
    if order is not None or node.attrs.get("weight_prepacked", 0):
        raise RefusedError("its input g_idx, or attribute weight_prepacked, is not supported")
    if bits not in (2, 4, 8) or left.dtype not in FLOATS:
        raise RefusedError(f"attribute bits is {bits} for activations of {left.dtype}")
    blocks = -(-width // block)
    parts = (Dim.of(outputs), Dim.of(blocks))
    codes = reshaped(g, codes, (parts[0], Dim.of(blocks * block * bits // 8)))
    zero: Tensor | int = 1 << (bits - 1)
    if points is not None and points.dtype in FLOATS:
        zero = reshaped(g, points, parts)
    elif points is not None:
        zero = _in_bytes(reshaped(g, points, (parts[0], _groups(parts[1], 8 // bits))), bits)
    matrix = _dequantized(_in_bytes(codes, bits), reshaped(g, scales, parts), zero, 1, block)
    right = transposed(sliced(matrix, 1, Dim.of(0), Dim.of(width)), [1, 0])
    rows = unsqueezed(g, left, [0]) if left.rank == 1 else left
    result = matrix_product(g, rows, right)
    if left.rank == 1:
        result = reshaped(g, result, (parts[0],))
    return result if bias is None else binary(g, result, bias, "{0} + {1}")


RULES: dict[tuple[str, str], Rule] = {
    ("com.microsoft", "GatherBlockQuantized"): _gather_block_quantized,
    ("com.microsoft", "MatMulNBits"): _matmul_nbits,
}
