"""Casts between float types on activations, which are 32 bits wide here whatever the file says.

Converters to half floats put them around operators that are to stay in 32 bits, and behind inputs
and before outputs of the model; onnxruntime puts them around what it has no half kernel for.
Without them all other rewrites see the model that was converted. Casts of masks and positions stay:
how those are rounded is measured.
"""

from __future__ import annotations

import onnx_ir

from atsc.compiler.importers.onnx.canonical.editor import Editor
from atsc.compiler.importers.onnx.canonical.rounds import MOVEMENTS, Node, Value
from atsc.compiler.importers.onnx.operands import FLOATS

_OF_FLOATS = {
    *("MatMul", "Gemm", "Softmax", "Exp", "Sqrt", "Reciprocal", "Sigmoid", "Tanh", "Erf", "Gelu"),
    *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "Attention"),
    *("RotaryEmbedding", "ReduceMean", "Swish", "DynamicQuantizeMatMul", "DynamicMatMul"),
}
"""Operators of the default domain whose results are floats, whatever they are made of."""
_AS_FIRST = {
    *("Add", "Sub", "Mul", "Div", "Pow", "Neg", "Abs", "Min", "Max", "Clip", "Relu", "Sum"),
    *("ReduceSum", "ReduceMax", "ScatterND", "ScatterElements", "TensorScatter"),
    *set(MOVEMENTS).difference({"Cast"}),
}
"""Operators of the default domain whose results have the type of their first input."""


def rewrite_casts(editor: Editor) -> None:
    """Remove every cast of activations from one float type to another."""
    is_float: dict[Value, bool] = {}
    for node in editor.graph:
        for value in (v for v in node.inputs if v is not None and v not in is_float):
            is_float[value] = value.dtype in FLOATS
        for output in node.outputs:
            is_float[output] = _is_float(node, output, is_float)
    for node in list(editor.graph):
        if node.op_type != "Cast" or node.domain or not editor.rounds.is_data(node.outputs[0]):
            continue
        source = node.inputs[0]
        if source is not None and is_float[source] and node.attributes["to"].value in FLOATS:
            editor.supersede(node, source)


def _is_float(node: Node, output: Value, known: dict[Value, bool]) -> bool:
    """Whether an output is of a float type; what the file says of it, if anything, counts."""
    if output.dtype is not None:
        return output.dtype in FLOATS
    if node.op_type == "Cast":
        return onnx_ir.DataType(node.attributes["to"].value) in FLOATS
    inputs = [value for value in node.inputs if value is not None]
    if node.op_type in ("Where", "DequantizeLinear") and len(inputs) > 1:
        return known[inputs[1]]
    if node.domain == "com.microsoft" or node.op_type in _OF_FLOATS:
        return output is node.outputs[0] and node.op_type not in ("DynamicQuantizeLinear",)
    return bool(inputs) and node.op_type in _AS_FIRST and known[inputs[0]]
