"""TableRows: tables of rows by token id in any layout, as the embedding wants them.

Sources: ONNX Gather-13; com.microsoft GatherBlockQuantized, whose codes may have any rank, blocks
along any axis, and rows along any other. onnxruntime takes codes in bytes with rows along the first
axis and blocks along the last one only. A table stays in blocks where that loses nothing, and is
multiplied out otherwise.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.canonical.editor import OWN_DOMAIN
from atsc.compiler.importers.onnx.canonical.tables import TABLE_ROWS
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.matrix_rules import BLOCK_SIZES, emit_embed, token_ids
from atsc.compiler.importers.onnx.operands import Constant, Quantized, reshape, transpose
from atsc.compiler.importers.onnx.quantized import dequantized, quantized_operands
from atsc.compiler.importers.onnx.weights import all_equal
from atsc.compiler.ir import ArraySource, DType


def _table_rows(lowering: Lowering, node: OnnxNode) -> None:
    axis, ids = node.attrs["axis"], token_ids(node, 1)
    if node.input(2) is None:
        table = node.constant(0)
    else:
        quantized, axis = _in_blocks(node, axis)
        table = dequantized(quantized, lowering.last_read)
    emit_embed(lowering, node, lowering.matrix(_rows_along(table, axis, lowering)), ids)


def _in_blocks(node: OnnxNode, axis: int) -> tuple[Quantized, int]:
    """The operands of a GatherBlockQuantized as those of a DequantizeLinear, and their axis of
    rows.

    Raises:
        ModelError: they are none that onnxruntime takes.
    """
    codes, scales = node.constant(0, floats=False), node.constant(2)
    points = None if node.input(3) is None else node.constant(3, floats=False)
    bits, block = node.attrs["bits"], node.attrs["block_size"]
    rank = len(codes.shape)
    along = node.attrs["quantize_axis"]
    along += rank if along < 0 else 0
    if not 0 <= along < rank:
        raise ModelError(f"attribute quantize_axis is {along} for codes of {rank} axes")
    if codes.elements is onnx_ir.DataType.UINT8:
        if axis != 0 or along != rank - 1:
            raise ModelError(
                f"gather_axis {axis} and quantize_axis {along}, supported for codes in bytes: "
                f"0 and {rank - 1}, the last one"
            )
        codes = _unpacked(codes, bits, codes.shape[-1] * 8 // bits)
        parts = (*codes.shape[:-1], -(-codes.shape[-1] // block))
        if points is None:
            source = all_equal(1 << (bits - 1), parts)
            points = Constant(f"{codes.root}/middle", parts, codes.elements, source)
        else:
            points = _unpacked(points, bits, parts[-1])
    elif bits != 4:
        raise ModelError(f"attribute bits is {bits}, elements of {codes.elements.name} have 4")
    return _flat_blocks(quantized_operands(codes, scales, points, along, block), axis)


def _unpacked(constant: Constant, bits: int, size: int) -> Constant:
    """Codes in bytes along the last axis, low bits first, as one byte each; `size` of them."""
    if constant.elements is not onnx_ir.DataType.UINT8:
        raise ModelError(f"{constant.root} has elements of type {constant.elements.name}")
    if bits == 8:
        return constant
    shape = (*constant.shape[:-1], size)
    if constant.shape[-1] != -(-size * bits // 8):
        raise ModelError(f"{constant.root} has shape {list(constant.shape)}, expected {shape}")
    source = constant.source

    def read() -> NDArray[np.generic]:
        packed = np.asarray(source.read(), np.uint8)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return codes.reshape(*packed.shape[:-1], -1)[..., :size]

    unpacked = ArraySource(DType.U8, shape, read)
    return Constant(constant.root, shape, constant.elements, unpacked)


def _flat_blocks(quantized: Quantized, axis: int) -> tuple[Quantized, int]:
    """The same as a matrix of rows, if every block stays whole within a row."""
    shape, block = quantized.codes.shape, quantized.block_size
    last = len(shape) - 1
    first = math.prod(shape[:axis]) == 1 and axis < last
    if len(shape) == 2 or not first or quantized.axis != last or shape[last] % block:
        return quantized, axis
    rows, points = shape[axis], quantized.zero_points
    parts = (rows, math.prod(shape[axis + 1 :]) // block)
    flat = Quantized(
        reshape(quantized.codes, (rows, parts[1] * block)),
        reshape(quantized.scales, parts),
        None if points is None else reshape(points, parts),
        1,
        block,
    )
    return flat, 0


def _rows_along(table: Constant, axis: int, lowering: Lowering) -> Constant:
    """A table as the matrix of what it has along an axis, all other axes in order."""
    shape = table.shape
    if len(shape) == 2:
        return transpose(table) if axis == 1 else table
    rows = (shape[axis], math.prod(shape) // shape[axis])
    source = table.source

    def make() -> NDArray[np.generic]:
        return np.ascontiguousarray(np.moveaxis(source.read(), axis, 0)).reshape(rows)

    turned = lowering.last_read.source(source.dtype, rows, make)
    return Constant(f"{table.root}/rows", rows, table.elements, turned)


RULES = (
    Rule(
        OWN_DOMAIN,
        TABLE_ROWS,
        _table_rows,
        ("table", "ids", "scales?", "zero_points?"),
        {
            "axis": Attr(required=True),
            "width": Attr(required=True),
            "bits": Attr(4, (2, 4, 8)),
            "block_size": Attr(128, BLOCK_SIZES),
            "quantize_axis": Attr(1),
        },
    ),
)
