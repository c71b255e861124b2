"""Rewrites 8-bit MatMulNBits with float zero points into what onnxruntime's CPU has kernels for.

With u = round(zero point), which uint8 holds, per block b of K:

    sum_k (code - zero) scale x  =  sum_k (code - u) scale x  +  (u - zero) scale sum_k x

The first term is MatMulNBits with uint8 zero points, the second a small product of the block sums
of x. Conversions of Q5_1 and Q5_K files hold such nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_ZERO_POINTS = 3


def round_float_zero_points(graph: onnx.GraphProto, folder: Path) -> None:
    """Rewrite the nodes of a graph in place; external data is read from `folder`."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    rewritten: list[onnx.NodeProto] = []
    for node in graph.node:
        points = tensors.get(node.input[_ZERO_POINTS]) if len(node.input) > _ZERO_POINTS else None
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        is_such = node.op_type == "MatMulNBits" and attrs.get("bits") == 8
        if not is_such or points is None or points.data_type not in _FLOATS:
            rewritten.append(node)
            continue
        scales = numpy_helper.to_array(tensors[node.input[2]], str(folder)).astype(np.float64)
        zeros = numpy_helper.to_array(points, str(folder)).astype(np.float64)
        element = tensors[node.input[2]].data_type
        rewritten += _split(graph, node, attrs, scales, zeros, element)
    del graph.node[:]
    graph.node.extend(rewritten)


def _split(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    attrs: dict[str, int],
    scales: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    zeros: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    element: int,
) -> list[onnx.NodeProto]:
    """The nodes in place of one; what corrects its zero points is computed in 32 bits."""
    outputs, width, size = attrs["N"], attrs["K"], attrs["block_size"]
    blocks = -(-width // size)
    rounded = zeros.round().clip(0, 255)
    rest = ((rounded - zeros) * scales).reshape(outputs, blocks).T
    stem = f"{node.output[0]}/zero_points"
    constants: dict[str, np.ndarray[Any, Any]] = {
        "rounded": rounded.astype(np.uint8).reshape(outputs, blocks),
        "rest": np.ascontiguousarray(rest, np.float32),
        "pads": np.array([0, 0, 0, 0, 0, blocks * size - width], np.int64),
        "shape": np.array([0, 0, blocks, size], np.int64),
        "axis": np.array([3], np.int64),
    }
    for name, array in constants.items():
        graph.initializer.append(numpy_helper.from_array(array, f"{stem}/{name}"))
    product = onnx.NodeProto()
    product.CopyFrom(node)
    product.input[_ZERO_POINTS] = f"{stem}/rounded"
    product.output[0] = f"{stem}/product"

    def made(op: str, inputs: list[str], output: str, **options: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [output], name=f"{stem}/{op}", **options)

    is_narrow = element != onnx.TensorProto.FLOAT
    wide = f"{stem}/wide" if is_narrow else node.input[0]
    correction = f"{stem}/narrow" if is_narrow else f"{stem}/correction"

    def cast(source: str, output: str, to: int) -> onnx.NodeProto:
        return helper.make_node("Cast", [source], [output], name=output, to=to)

    return [
        product,
        *([cast(node.input[0], wide, onnx.TensorProto.FLOAT)] if is_narrow else []),
        made("Pad", [wide, f"{stem}/pads"], f"{stem}/padded"),
        made("Reshape", [f"{stem}/padded", f"{stem}/shape"], f"{stem}/blocks"),
        made("ReduceSum", [f"{stem}/blocks", f"{stem}/axis"], f"{stem}/sums", keepdims=0),
        made("MatMul", [f"{stem}/sums", f"{stem}/rest"], f"{stem}/correction"),
        *([cast(f"{stem}/correction", correction, element)] if is_narrow else []),
        made("Add", [product.output[0], correction], node.output[0]),
    ]
