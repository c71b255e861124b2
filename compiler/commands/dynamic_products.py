"""Rewrites products whose activations are rounded as they come into products of floats.

    s = MatMulInteger(DynamicQuantizeLinear(x), codes)    s * scale of x * scale of codes

A file of quantize_dynamic is a model whose weights are codes; how it rounds activations is one way
to calculate, no part of the model, and no reference: a plan rounds them in its own way. The
weights stay the file's. onnxruntime's optimiser writes the same as one or two fused nodes.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

_FUSED = {"DynamicQuantizeMatMul": (2, 3, 4), "MatMulIntegerToFloat": (3, 5, 6)}
"""Operator -> the slots of scales, zero points and bias."""


def use_exact_activations(graph: onnx.GraphProto) -> bool:
    """Rewrite the nodes of a graph in place; whether there were any."""
    makers = {name: node for node in graph.node for name in node.output}
    sizes = {tensor.name: tensor.dims for tensor in graph.initializer}
    made: list[onnx.NodeProto] = []
    found = False
    for node in graph.node:
        x = _rounded_input(node, makers)
        if x and node.op_type in _FUSED:
            made += _fused(node, x)
        elif x and node.op_type == "MatMulInteger":
            made += _integer(graph, node, x, makers[node.input[0]].output[1], sizes)
        else:
            made.append(node)
            continue
        found = True
    del graph.node[:]
    graph.node.extend(made)
    return found


def _rounded_input(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> str:
    """The floats that a product's first operand was rounded from; empty for other nodes."""
    if node.op_type == "DynamicQuantizeMatMul":
        return str(node.input[0])
    if node.op_type not in ("MatMulInteger", "MatMulIntegerToFloat"):
        return ""
    maker = makers.get(node.input[0])
    is_rounded = maker is not None and maker.op_type == "DynamicQuantizeLinear"
    return str(maker.input[0]) if maker is not None and is_rounded else ""


def _slot(node: onnx.NodeProto, index: int) -> str:
    return str(node.input[index]) if index < len(node.input) else ""


def _fused(node: onnx.NodeProto, x: str) -> list[onnx.NodeProto]:
    scales, points, bias = (_slot(node, index) for index in _FUSED[node.op_type])
    stem = f"{node.output[0]}/exact"
    product = f"{stem}/product" if bias else node.output[0]
    floats = [name for name in (node.input[1], scales, points) if name]
    nodes = [
        helper.make_node("DequantizeLinear", floats, [f"{stem}/weight"], name=stem, axis=1),
        helper.make_node("MatMul", [x, f"{stem}/weight"], [product], name=product),
    ]
    if bias:
        nodes.append(helper.make_node("Add", [product, bias], [node.output[0]], name=f"{stem}/sum"))
    return nodes


def _integer(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    x: str,
    scale: str,
    sizes: dict[str, list[int]],
) -> list[onnx.NodeProto]:
    """The sum as floats, less the scale of x that is multiplied with it later; its Cast stays."""
    stem = f"{node.output[0]}/exact"
    points = _slot(node, 3)
    one = np.ones(tuple(sizes.get(points, ())), np.float32)
    graph.initializer.append(numpy_helper.from_array(one, f"{stem}/one"))
    floats = [name for name in (node.input[1], f"{stem}/one", points) if name]
    return [
        helper.make_node("DequantizeLinear", floats, [f"{stem}/weight"], name=stem, axis=1),
        helper.make_node("MatMul", [x, f"{stem}/weight"], [f"{stem}/product"], name=f"{stem}/mul"),
        helper.make_node("Div", [f"{stem}/product", scale], [node.output[0]], name=f"{stem}/div"),
    ]
