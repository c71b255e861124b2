"""DequantizeLinear of constants, and linear layers whose inputs are quantised while they run.

Sources: ONNX DequantizeLinear-23; com.microsoft DequantizeLinear and DynamicQuantizeMatMul. The
file rounds activations to uint8 with one scale a tensor; we use accuracy level 4 instead, int8 in
blocks of 32 (docs/decisions.md): the weights are the file's, and the error is of the same size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.canonical.editor import OWN_DOMAIN
from atsc.compiler.importers.onnx.dynamic_quantization import DYNAMIC_MATMUL
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.matrix_rules import emit_linear
from atsc.compiler.importers.onnx.operands import Constant, Ints, transpose
from atsc.compiler.importers.onnx.quantized import dequantized, quantized_operands
from atsc.compiler.ir import ArraySource

_DYNAMIC_LEVEL = 4


def _integers(node: OnnxNode, index: int) -> Constant:
    """A constant of integers; small ones of 32 bits were taken for sizes before."""
    operand = node.input(index)
    if isinstance(operand, Ints) and (known := operand.known()) is not None:
        array = np.array(known, np.int32).reshape(operand.values.shape)
        return Constant(node.output(), array.shape, onnx_ir.DataType.INT32, ArraySource.of(array))
    return node.constant(index, floats=False)


def _dequantize(lowering: Lowering, node: OnnxNode) -> None:
    points = None if node.input(2) is None else _integers(node, 2)
    quantized = quantized_operands(
        _integers(node, 0), node.constant(1), points, node.attrs["axis"], node.attrs["block_size"]
    )
    lowering.bind(node.output(), dequantized(quantized, lowering.last_read))


def _dynamic_matmul(lowering: Lowering, node: OnnxNode) -> None:
    codes, scales = node.constant(1, floats=False), node.constant(2)
    if len(codes.shape) != 2:
        raise ModelError(f"{codes.root} has shape {list(codes.shape)}, expected a matrix")
    points = None if node.input(3) is None else node.constant(3, floats=False)
    quantized = quantized_operands(codes, scales, points, 1, 0)
    weight = lowering.matrix(transpose(dequantized(quantized, lowering.last_read)))
    level = lowering.accuracy_level
    emit_linear(
        lowering,
        node,
        node.rows(0),
        weight,
        node.optional_constant(4),
        _DYNAMIC_LEVEL if level is None else level,
    )


_DEQUANTIZE = {
    "axis": Attr(1),
    "block_size": Attr(0),
    "output_dtype": Attr(0, (0, 1, 10, 16)),
}
_SLOTS = ("x", "weight", "scales", "zero_points?", "bias?")
RULES = (
    Rule("", "DequantizeLinear", _dequantize, ("x", "scales", "zero_points?"), _DEQUANTIZE),
    Rule(
        "com.microsoft",
        "DequantizeLinear",
        _dequantize,
        ("x", "scales", "zero_points?"),
        {"axis": Attr(1), "block_size": Attr(0)},
    ),
    Rule("com.microsoft", "DynamicQuantizeMatMul", _dynamic_matmul, _SLOTS),
    Rule(OWN_DOMAIN, DYNAMIC_MATMUL, _dynamic_matmul, _SLOTS),
)
