"""Operators on quantised constants, which onnx's reference lacks or has in late opsets only.

Exporters quantise tables of positions like any other; what such a table holds has to be evaluated.
Sources: ONNX DequantizeLinear-23; com.microsoft GatherBlockQuantized, whose zero point is half the
range where data of bytes has none, and 0 where data of 4-bit elements has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from atsc.compiler.importers.onnx.quantized import spread

_Array = NDArray[Any]


def _number(node: onnx_ir.Node, name: str, default: int) -> int:
    return int(node.attributes[name].value) if name in node.attributes else default


def _dequantized(
    codes: _Array, scales: _Array, points: _Array | None, axis: int, block_size: int
) -> _Array:
    axis += codes.ndim if axis < 0 else 0
    values: _Array = codes.astype(np.float32)
    if points is not None:
        values -= spread(points.astype(np.float32), codes.shape, axis, block_size)
    floats = scales.astype(np.float32)
    values *= spread(floats, codes.shape, axis, block_size)
    return values.astype(scales.dtype)


def _dequantize_linear(node: onnx_ir.Node, inputs: list[_Array | None]) -> _Array:
    codes, scales, points = (*inputs, None)[:3]
    assert codes is not None and scales is not None
    axis, block_size = _number(node, "axis", 1), _number(node, "block_size", 0)
    return _dequantized(codes, scales, points, axis, block_size)


def _gather_block_quantized(node: onnx_ir.Node, inputs: list[_Array | None]) -> _Array:
    codes, places, scales, points = (*inputs, None)[:4]
    assert codes is not None and places is not None and scales is not None
    bits = _number(node, "bits", 4)
    if codes.dtype == np.uint8:
        codes = _unpacked(codes, bits)
        points = np.full(1, 1 << (bits - 1)) if points is None else _unpacked(points, bits)
        points = points[..., : scales.shape[-1]]
        points = np.broadcast_to(points, scales.shape)
    axis, block_size = _number(node, "quantize_axis", 1), _number(node, "block_size", 128)
    table = _dequantized(codes, scales, points, axis, block_size)
    return np.take(table, places, axis=_number(node, "gather_axis", 0))


def _unpacked(packed: _Array, bits: int) -> _Array:
    """Bytes as codes along the last axis, low bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


EVALUATED: Mapping[
    tuple[str, str], Callable[[onnx_ir.Node, list[NDArray[Any] | None]], NDArray[Any]]
] = {
    ("", "DequantizeLinear"): _dequantize_linear,
    ("com.microsoft", "DequantizeLinear"): _dequantize_linear,
    ("com.microsoft", "GatherBlockQuantized"): _gather_block_quantized,
}
"""(domain, operator) -> its output; what does not fit raises whatever numpy raises."""
