"""Quantised tensors: QuantizeLinear and DequantizeLinear.

A scale is of the whole tensor, of each element of an axis, or of blocks along that axis (ONNX
QuantizeLinear 21). Rounding is to even, then the zero point is added, then the result saturates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from atsc.codegen.graph.elementwise import FLOATS, cast, elementwise, onnx_type
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import axis_of
from atsc.codegen.graph.tensor import Code, Index, Quantised, Tensor, c_type
from atsc.codegen.tail import ElementType
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import OnnxNode

_QUANTISED = ("int8", "uint8", "int16", "uint16")


def _along(g: Lowering, node: OnnxNode, data: Tensor, given: Tensor | None) -> Tensor | None:
    """A scale or zero point as a tensor of the data's shape."""
    if given is None:
        return None
    given = g.cheap(given)
    if given.size == Dim.of(1):
        return Tensor(given.dtype, (), lambda code, index: given.at(code, ["0"] * given.rank))
    axis = axis_of(node.attrs.get("axis", 1), data.rank)
    block = int(node.attrs.get("block_size", 0))
    if given.rank == 1 and not block:
        g.agree(given.shape[0], data.shape[axis], "scales along the axis")
    elif given.rank != data.rank or not block:
        raise RefusedError("scales of another rank without a block_size")

    def at(code: Code, index: Index) -> str:
        if not block:
            return given.at(code, [index[axis]])
        own = list(index)
        if given.shape[axis].constant == 1:
            own[axis] = "0"
        else:
            own[axis] = code.let("int64_t", f"{index[axis]} / {block}", "i")
        return given.at(code, own)

    return Tensor(given.dtype, data.shape, at, cost=given.cost + 1)


def saturated(dtype: ElementType, value: str) -> str:
    """A float as the nearest of a small integer type."""
    limits = np.iinfo(dtype)
    low, high = f"{limits.min}.0f", f"{limits.max}.0f"
    return f"({c_type(dtype)})(int32_t)within({value}, {low}, {high})"


def _quantize(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data: Tensor = x[0]
    given_zero: Tensor | None = x[2] if len(x) > 2 else None
    if given_zero is not None:
        dtype = given_zero.dtype
    else:
        number = int(node.attrs.get("output_dtype", 0))
        dtype = onnx_type(number) if number else "uint8"
    if dtype not in _QUANTISED or data.dtype not in ("float32", "float16", "bfloat16", "int32"):
        raise RefusedError(f"{data.dtype} to {dtype}")
    if node.attrs.get("precision", 0) not in (0, 1) and data.dtype != "float32":
        raise RefusedError(f"precision {node.attrs['precision']}")
    scale, zero = (_along(g, node, data, v) for v in (g.held(x[1]), given_zero))
    assert scale is not None
    real = cast(g, data, "float32") if data.dtype == "int32" else data
    quotient = elementwise(
        g, [real, cast(g, scale, real.dtype)], real.dtype, lambda a, b: f"{a} / {b}"
    )
    offset = zero if zero is not None else g.array(np.zeros((), np.int32))
    return elementwise(
        g,
        [quotient, cast(g, offset, "int32")],
        dtype,
        lambda a, b: saturated(dtype, f"__builtin_nearbyintf({a}) + {b}"),
        4,
    )


def _dequantize(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data = g.held(x[0])
    given_scale, given_zero = g.held(x[1]), x[2] if len(x) > 2 else None
    scale, zero = (_along(g, node, data, v) for v in (given_scale, given_zero))
    assert scale is not None
    number = int(node.attrs.get("output_dtype", 0))
    dtype = onnx_type(number) if number else scale.dtype
    if data.dtype not in (*_QUANTISED, "int32") or scale.dtype not in FLOATS:
        raise RefusedError(f"{data.dtype} by {scale.dtype}")

    def floats(codes: Tensor) -> Tensor:
        whole = cast(g, codes, "int32")
        if zero is not None:
            offset = cast(g, zero, "int32")
            whole = elementwise(g, [whole, offset], "int32", lambda a, b: f"{a} - {b}")
        return elementwise(g, [whole, scale], dtype, lambda a, b: f"(float){a} * {b}", 2)

    if data.dtype not in ("int8", "uint8") or dtype != "float32" or node.attrs.get("block_size"):
        return floats(data)

    def dequantised(codes: Tensor) -> Tensor:
        return replace(
            floats(codes), quantised=Quantised(codes, given_scale, given_zero, axis, dequantised)
        )

    is_whole = given_scale.size == Dim.of(1)
    axis = None if is_whole else axis_of(node.attrs.get("axis", 1), data.rank)
    return dequantised(data)


RULES: dict[tuple[str, str], Rule] = {
    ("", "QuantizeLinear"): _quantize,
    ("", "DequantizeLinear"): _dequantize,
}
