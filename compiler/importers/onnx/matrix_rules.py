"""MatMul, Gemm, MatMulNBits, Gather and GatherBlockQuantized: the operators that read big weights.

Sources: ONNX MatMul, Gemm, Gather; com.microsoft MatMulNBits and GatherBlockQuantized. What the
latter two leave open was found by running onnxruntime 1.32: uint8 data without zero points means 8
(4 bits) or 128 (8 bits) in both, int4 and uint4 data without zero points means 0.
"""

from __future__ import annotations

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.operands import (
    BlockOffsets,
    Constant,
    Rows,
    Symbol,
    reshape,
    transpose,
)
from atsc.compiler.importers.onnx.quantized import dequantized, quantized_operands
from atsc.compiler.importers.onnx.weights import (
    all_equal,
    block_weight,
    byte_codes,
    float_part,
    nibble_codes,
    padded_rows,
    unpacked_nibbles,
    unpacked_pairs,
    widened_pairs,
)
from atsc.compiler.ir import ArraySource, BlockFormat, DType, Weight
from atsc.compiler.weights import read_f32

BLOCK_SIZES = (16, 32, 64, 128, 256)


def emit_linear(
    lowering: Lowering,
    node: OnnxNode,
    x: Rows,
    weight: str,
    bias: Constant | None,
    accuracy_level: int | None = None,
) -> None:
    """A linear layer of a weight that is there, and its bias.

    Raises:
        ModelError: the widths do not fit.
    """
    outputs, width = lowering.weights[weight].shape
    if x.width != width:
        raise ModelError(f"{weight} has {width} inputs, the activations have {x.width}")
    bias_name = "" if bias is None else lowering.vector(bias, outputs)
    level = {} if accuracy_level is None else {"accuracy_level": accuracy_level}
    lowering.emit("linear", node.name, (x.name, weight, bias_name), node.output(), **level)
    lowering.bind(node.output(), Rows(node.output(), outputs))


def _matmul(lowering: Lowering, node: OnnxNode) -> None:
    x, weight = node.rows(0), node.constant(1)
    if len(weight.shape) == 3 and weight.shape[0] == 1 and not weight.transposed:
        weight = reshape(weight, weight.shape[1:])
    if len(weight.shape) != 2:
        raise ModelError(f"{weight.root} has shape {list(weight.shape)}, expected a matrix")
    matrix = transpose(weight)
    emit_linear(lowering, node, x, lowering.matrix(matrix), None, _level(lowering, matrix))


def _gemm(lowering: Lowering, node: OnnxNode) -> None:
    x, weight, bias = node.rows(0), node.constant(1), node.optional_constant(2)
    weight = weight if node.attrs["transB"] else transpose(weight)
    emit_linear(lowering, node, x, lowering.matrix(weight), bias, _level(lowering, weight))


def _level(lowering: Lowering, weight: Constant) -> int | None:
    """DequantizeLinear says nothing of how its readers calculate, so they do it in floats unless
    our caller wants something else.
    """
    return None if weight.quantized is None else lowering.accuracy_level


def _zero_points(
    constant: Constant | None, bits: int, shape: tuple[int, int]
) -> ArraySource | None:
    """Zero points of uint8 data as the canonical part: unpacked, or float."""
    if constant is None:
        return None
    if constant.is_float:
        return float_part(constant, shape)
    rows, blocks = shape
    if bits == 2:
        return unpacked_pairs(byte_codes(constant, (rows, -(-blocks // 4))), shape)
    packed = (rows, (blocks + 1) // 2)
    if bits == 8 or (constant.shape == shape and shape != packed):
        return byte_codes(constant, shape)
    return unpacked_nibbles(byte_codes(constant, packed), shape)


def _uint8_weight(
    lowering: Lowering,
    shape: tuple[int, int],
    bits: int,
    block_size: int,
    parts: tuple[Constant, Constant, Constant | None],
) -> str:
    """The weight of uint8 codes, scales and zero points, one for all nodes that read them.

    Codes of 2 bits are stored in 4, as kernels read them.
    """
    codes, scales, points = parts
    rows, width = shape
    blocks = -(-width // block_size)

    def make(name: str) -> Weight:
        stored = byte_codes(codes, (rows, blocks, block_size * bits // 8))
        if bits == 2:
            stored = widened_pairs(stored, 0 if points else 6, lowering.last_read)
        return block_weight(
            name,
            shape,
            max(bits, 4),
            block_size,
            stored,
            float_part(scales, (rows, blocks)),
            _zero_points(points, bits, (rows, blocks)),
        )

    roots = (codes.root, scales.root, None if points is None else points.root)
    return lowering.weight(("blocks", *roots, bits, block_size, shape), codes.root, make)


def _matmul_nbits(lowering: Lowering, node: OnnxNode) -> None:
    shape = node.attrs["N"], node.attrs["K"]
    if min(shape) <= 0:
        raise ModelError("attributes N and K must be positive")
    points = None if node.input(3) is None else node.constant(3, floats=False)
    parts = node.constant(1, floats=False), node.constant(2), points
    level = node.attrs["accuracy_level"]
    if lowering.accuracy_level is not None:
        level = lowering.accuracy_level
    weight = _uint8_weight(lowering, shape, node.attrs["bits"], node.attrs["block_size"], parts)
    emit_linear(lowering, node, node.rows(0), weight, node.optional_constant(5), level)


def token_ids(node: OnnxNode, index: int) -> str:
    """The name of the model's input_ids, which an input must be.

    Raises:
        ModelError: it is something else.
    """
    operand = node.input(index)
    if not isinstance(operand, Symbol) or operand.kind != "ids":
        raise ModelError(f"input {index} is not the model's input_ids")
    return operand.name


def gather_rows(lowering: Lowering, node: OnnxNode) -> None:
    """Gather on a float table by token id; shape_rules hands the other uses of Gather apart."""
    if node.attrs["axis"] != 0:
        raise ModelError(f"attribute axis is {node.attrs['axis']}, supported for tables: 0")
    constant, ids = node.constant(0), token_ids(node, 1)
    if len(constant.shape) == 3 and constant.shape[2] == 1:
        lowering.bind(node.output(), BlockOffsets(constant))
        return
    emit_embed(lowering, node, lowering.matrix(constant), ids)


def add_block_offsets(lowering: Lowering, node: OnnxNode, x: Rows, offsets: BlockOffsets) -> None:
    """What our own conversions write for a table with float zero points, which no operator gathers:
    rows without zero points, seen as blocks, plus an offset a block. It is one table again here.
    """
    maker = next((made for made in lowering.nodes if x.name in made.outputs), None)
    constant = offsets.constant
    table = lowering.weights[maker.inputs[1]] if maker and maker.op == "embed" else None
    fmt = table.format if table else None
    if (
        not (maker and table and isinstance(fmt, BlockFormat))
        or fmt.has_zero_points
        or fmt.block_size != x.group
        or constant.shape[:2] != table.parts["scales"].shape
    ):
        raise ModelError(f"{constant.root} holds no offsets for the blocks of a table")
    parts = {**table.parts, "zero_points": _points_of_offsets(constant, table.parts["scales"], fmt)}
    with_points = BlockFormat(fmt.bits, fmt.block_size, has_zero_points=True)
    name = lowering.weight(
        ("offsets", table.name, constant.root),
        table.name,
        lambda free: Weight(free, table.shape, with_points, parts),
    )
    lowering.emit("embed", node.name, (maker.inputs[0], name), node.output())
    lowering.bind(node.output(), Rows(node.output(), x.width, x.group))


def _points_of_offsets(offsets: Constant, scales: ArraySource, fmt: BlockFormat) -> ArraySource:
    """Zero points z such that `offset = (implicit zero point - z) * scale`."""
    shape = offsets.shape[:2]
    source = float_part(offsets, shape)

    def read() -> NDArray[np.generic]:
        scale, offset = read_f32(scales), read_f32(source).astype(np.float64)
        is_lost = (scale == 0) & (offset != 0)
        if is_lost.any():
            raise ModelError(f"{offsets.root} has offsets for blocks whose scale is 0")
        points = fmt.implicit_zero_point - offset / np.where(scale == 0, np.float32(1), scale)
        return points.astype(np.float32)

    return ArraySource(DType.F32, shape, read)


def emit_embed(lowering: Lowering, node: OnnxNode, table: str, ids: str) -> None:
    """Rows of a weight [V, W] by token id."""
    lowering.emit("embed", node.name, (ids, table), node.output())
    lowering.bind(node.output(), Rows(node.output(), lowering.weights[table].shape[1]))


def _gather_blocks(lowering: Lowering, node: OnnxNode) -> None:
    data, ids = node.constant(0, floats=False), token_ids(node, 1)
    scales = node.constant(2)
    points = None if node.input(3) is None else node.constant(3, floats=False)
    bits, block_size = node.attrs["bits"], node.attrs["block_size"]
    along_rows = node.attrs["quantize_axis"] in (1, -1)
    if len(data.shape) != 2:
        raise ModelError(f"{data.root} has shape {list(data.shape)}, expected a matrix")
    if data.elements is onnx_ir.DataType.UINT8:
        if not along_rows:
            raise ModelError("attribute quantize_axis is 0, supported for data of bytes: 1 or -1")
        rows, shape = data.shape[0], (data.shape[0], data.shape[1] * 8 // bits)
        row_bytes = -(-shape[1] // block_size) * block_size * bits // 8
        if row_bytes != data.shape[1]:
            data = padded_rows(data, (rows, row_bytes), lowering.last_read)
        table = _uint8_weight(lowering, shape, bits, block_size, (data, scales, points))
    else:
        if bits != 4:
            raise ModelError(f"attribute bits is {bits}, elements of {data.elements.name} have 4")
        quantized = quantized_operands(data, scales, points, int(along_rows), block_size)
        if along_rows and data.shape[1] % block_size == 0:
            table = _nibble_weight(lowering, data, scales, points, block_size)
        else:
            table = lowering.matrix(dequantized(quantized, lowering.last_read))
    emit_embed(lowering, node, table, ids)


def _nibble_weight(
    lowering: Lowering, data: Constant, scales: Constant, points: Constant | None, block_size: int
) -> str:
    """A weight of int4 or uint4 elements, whose zero point is 0 where none is given."""
    signed = data.elements is onnx_ir.DataType.INT4
    rows, width = data.shape
    blocks = width // block_size

    def make(name: str) -> Weight:
        zero: ArraySource | None = None
        if points is not None:
            zero = _nibble_points(points, (rows, blocks), 0x88 if signed else 0)
        elif not signed:
            zero = all_equal(0, (rows, blocks))
        codes = nibble_codes(data, (rows, blocks, block_size // 2))
        return block_weight(
            name, (rows, width), 4, block_size, codes, float_part(scales, (rows, blocks)), zero
        )

    roots = (data.root, scales.root, None if points is None else points.root)
    return lowering.weight(("nibbles", *roots, block_size), data.root, make)


def _nibble_points(points: Constant, shape: tuple[int, int], flip: int) -> ArraySource:
    """4-bit tensors are packed over their flat elements, not row by row."""
    count = shape[0] * shape[1]
    flat = unpacked_nibbles(points.source, (1, count), flip)
    return ArraySource(flat.dtype, shape, lambda: flat.read().reshape(shape))


_ACCURACY = Attr(0, (0, 1, 2, 3, 4))
RULES = (
    Rule("", "MatMul", _matmul, ("x", "weight")),
    Rule(
        "",
        "Gemm",
        _gemm,
        ("x", "weight", "bias?"),
        {
            "alpha": Attr(1.0, (1.0,)),
            "beta": Attr(1.0, (1.0,)),
            "transA": Attr(0, (0,)),
            "transB": Attr(0, (0, 1)),
        },
    ),
    Rule(
        "com.microsoft",
        "MatMulNBits",
        _matmul_nbits,
        ("x", "weight", "scales", "zero_points?", "!g_idx", "bias?"),
        {
            "K": Attr(required=True),
            "N": Attr(required=True),
            "bits": Attr(4, (2, 4, 8)),
            "block_size": Attr(None, BLOCK_SIZES, required=True),
            "accuracy_level": _ACCURACY,
            "weight_prepacked": Attr(0, (0,)),
        },
    ),
    Rule(
        "com.microsoft",
        "GatherBlockQuantized",
        _gather_blocks,
        ("data", "ids", "scales", "zero_points?"),
        {
            "bits": Attr(4, (2, 4, 8)),
            "block_size": Attr(128, BLOCK_SIZES),
            "gather_axis": Attr(0, (0, -2)),
            "quantize_axis": Attr(1, (0, 1, -1, -2)),
        },
    ),
)
