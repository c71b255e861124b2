"""Operators that onnx's reference lacks or has in late opsets only.

Exporters quantise tables of positions like any other; what such a table holds has to be evaluated.
onnxruntime's optimiser fuses rope alone where it does not know the attention around it.
Sources: ONNX DequantizeLinear-23; com.microsoft GatherBlockQuantized, whose zero point is half the
range where data of bytes has none, and 0 where data of 4-bit elements has none; com.microsoft
RotaryEmbedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from atsc.compiler.importers.onnx.quantized import spread
from atsc.compiler.ops.rope import rotate

_Array = NDArray[Any]


def _number(node: onnx_ir.Node, name: str, default: int) -> int:
    return node.attributes[name].value if name in node.attributes else default


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


def _rotary_embedding(node: onnx_ir.Node, inputs: list[_Array | None]) -> _Array:
    """Rows [1, M, H * D] or heads [1, H, M, D]; one position is that of the first token."""
    x, positions, cos, sin = inputs
    assert x is not None and positions is not None and cos is not None and sin is not None
    if _number(node, "scale", 1) != 1 or _number(node, "is_packed_batching", 0):
        raise NotImplementedError("attributes scale and is_packed_batching")
    by_head = x.ndim == 4
    tokens = x.shape[2 if by_head else 1]
    offsets = np.arange(tokens if positions.ndim == 1 else 1)
    places = positions.reshape(-1).astype(np.int64) + offsets
    angles = np.stack([cos[places], sin[places]]).astype(np.float32)
    size = x.shape[-1] // (_number(node, "num_heads", 0) or x.shape[-1] // (2 * cos.shape[-1]))
    heads = x[0].swapaxes(0, 1) if by_head else x.reshape(tokens, -1, size)
    interleaved = bool(_number(node, "interleaved", 0))
    turned: _Array = rotate(heads.astype(np.float32), angles[0], angles[1], interleaved)
    return (turned.swapaxes(0, 1) if by_head else turned).reshape(x.shape)


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
    ("com.microsoft", "RotaryEmbedding"): _rotary_embedding,
}
"""(domain, operator) -> its output; what does not fit raises whatever numpy raises."""
