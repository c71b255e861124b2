"""What the stored parts of a Weight mean, in numpy: the definition of correct for every layout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.ir import ArraySource, BlockFormat, DType, Weight

F32Array = NDArray[np.float32]


def to_f32(array: NDArray[np.generic], dtype: DType) -> F32Array:
    """Floats as float32; bf16 comes as uint16 bit patterns."""
    if dtype is DType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def read_f32(source: ArraySource) -> F32Array:
    """A whole float part as float32."""
    return to_f32(source.read(), source.dtype)


def unpack_codes(codes: NDArray[np.generic], bits: int) -> NDArray[np.uint8]:
    """uint8 [N, blocks, block_size * bits / 8] -> uint8 [N, blocks, block_size], 0..2**bits - 1."""
    packed: NDArray[np.uint8] = np.asarray(codes, np.uint8)
    if bits == 8:
        return packed
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*codes.shape[:-1], codes.shape[-1] * 2)


def dequantize(weight: Weight, rows: slice = slice(None)) -> F32Array:
    """Some rows of a weight as float32 [rows, ...].

    Source: com.microsoft MatMulNBits, `(code - zero_point) * scale`.
    """
    if not isinstance(weight.format, BlockFormat):
        data = weight.parts["data"]
        return to_f32(data.read()[rows], data.dtype)
    codes = unpack_codes(weight.parts["codes"].read()[rows], weight.format.bits)
    scales = weight.parts["scales"]
    scale = to_f32(scales.read()[rows], scales.dtype)[..., None]
    zero: F32Array | np.float32 = np.float32(weight.format.implicit_zero_point)
    if weight.format.has_zero_points:
        points = weight.parts["zero_points"]
        zero = to_f32(points.read()[rows], points.dtype)[..., None]
    values = (codes.astype(np.float32) - zero) * scale
    flat: F32Array = values.reshape(values.shape[0], -1)[:, : weight.shape[1]]
    return flat
