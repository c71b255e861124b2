"""Operators without a rule here: a kernel that TVM generates and the reference confirms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from atsc.codegen.graph.kernels import Call
from atsc.codegen.graph.lower import Lowering, RefusedError, element_type
from atsc.codegen.graph.tensor import Buffer, Stored, Tensor, stored
from atsc.codegen.tail import TensorType
from atsc.codegen.tvm_kernels import tvm_kernel
from atsc.codegen.tvm_request import request_of
from atsc.compiler.dims import Dim
from atsc.compiler.errors import CodegenError
from atsc.compiler.tensor_graph import OnnxNode

_MOST_BAKED_ELEMENTS = 64
_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")


def generated(g: Lowering, node: OnnxNode, inputs: list[Any]) -> tuple[Tensor | None, ...]:
    """A rule for any operator of ai.onnx: one kernel, from buffers to buffers.

    Raises:
        RefusedError: no generator makes it, or not rightly; it says why.
    """
    if node.domain:
        raise RefusedError("no such operator here")
    if node.op in _CONTROL_FLOW:
        raise RefusedError("control flow is not compiled; export the model without it")
    constants = {
        place: content for place, x in enumerate(inputs) if (content := _baked(x)) is not None
    }
    given: list[Tensor | None] = list(inputs)
    types = [None if x is None else TensorType(x.dtype, x.shape) for x in given]
    try:
        proto = helper.make_node(
            node.op,
            [name and f"x{place}" for place, name in enumerate(node.inputs)],
            [name and f"y{place}" for place, name in enumerate(node.outputs)],
            **node.attrs,
        )
        outputs = _output_types(proto, node.opset, types, constants)
        kernel = tvm_kernel(proto, node.opset, types, outputs, constants)
    except (CodegenError, TypeError, ValueError) as error:
        raise RefusedError(str(error).split("): ", 1)[-1]) from error
    sources = [
        g.store(x).buffer
        for place, x in enumerate(given)
        if x is not None and place not in constants
    ]
    made = tuple(
        Buffer(f"{node.name}:{len(g.calls)}.{place}", kind.dtype, kind.shape)
        for place, kind in enumerate(outputs)
    )
    values = tuple(Dim.of(symbol) for symbol in kernel.symbols)
    g.calls.append(Call(node.name, kernel, tuple(sources), made, values))
    return tuple(stored(buffer) for buffer in made)


def _baked(x: Tensor | None) -> np.ndarray | None:
    """The content of a small constant, which becomes part of the kernel."""
    if x is None:
        return None
    if x.literal is not None:
        return x.literal if x.literal.size <= _MOST_BAKED_ELEMENTS else None
    if x.known is not None and all(dim.constant is not None for dim in x.known.flat):
        values = [dim.constant for dim in x.known.flat]
        return np.array(values, np.dtype(x.dtype)).reshape(x.known.shape)
    return None


def _output_types(
    node: onnx.NodeProto,
    opset: int,
    inputs: Sequence[TensorType | None],
    constants: dict[int, np.ndarray],
) -> list[TensorType]:
    """What onnx's shape inference says of a node's outputs.

    Raises:
        CodegenError: it leaves a size open.
    """
    request = request_of(node, opset, inputs, [], constants)
    model = onnx.load_from_string(request.model)
    model.graph.node[0].output.extend(node.output)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    names = {f"d{place}": dim for place, dim in enumerate(request.sizes)}
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise CodegenError(f"its types do not fit: {str(error).splitlines()[0][:160]}") from error
    types = []
    for value in inferred.graph.output:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            raise CodegenError("the shape of its result depends on data")
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        dims = []
        for size in tensor.shape.dim:
            if size.dim_param in names:
                dims.append(names[size.dim_param])
            elif size.HasField("dim_value"):
                dims.append(Dim.of(size.dim_value))
            else:
                raise CodegenError("the shape of its result depends on data")
        types.append(TensorType(element_type(dtype), tuple(dims)))
    return types


__all__ = ["Stored", "generated"]
