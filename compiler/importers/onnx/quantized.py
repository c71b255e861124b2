"""Constants behind DequantizeLinear, as weights in blocks where that loses nothing, else as floats.

A linear layer reads a weight [N, K] in blocks along K. Exporters store it either way round, with a
scale for each block of K, for each output, or for all; every one of these is a block format with
repeated scales. Scales that differ along K in another way are multiplied out.

Source: ONNX DequantizeLinear-23, `(x - zero_point) * scale`, zero_point 0 where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.operands import NIBBLES, Constant, Quantized, transpose
from atsc.compiler.importers.onnx.weights import LastRead, all_equal, block_weight
from atsc.compiler.ir import ArraySource, DType, Weight
from atsc.compiler.weights import to_f32

_BLOCK_SIZES = (256, 128, 64, 32, 16)
_SIGNED = (onnx_ir.DataType.INT4, onnx_ir.DataType.INT8)
_CODES = (
    onnx_ir.DataType.INT4,
    onnx_ir.DataType.UINT4,
    onnx_ir.DataType.INT8,
    onnx_ir.DataType.UINT8,
    onnx_ir.DataType.INT32,
)
_CHUNK_BYTES = 1 << 24
_Bytes = NDArray[np.uint8]


def quantized_operands(
    codes: Constant, scales: Constant, points: Constant | None, axis: int, block_size: int
) -> Quantized:
    """The operands of a DequantizeLinear, checked; zero points and codes are of one type.

    Raises:
        ModelError: a type or a shape does not fit.
    """
    if codes.elements not in _CODES:
        raise ModelError(f"{codes.root} has elements of type {codes.elements.name}")
    shape, rank = list(codes.shape), len(codes.shape)
    wanted: list[list[int]] = [shape]
    axis += rank if axis < 0 else 0
    if block_size < 0 or (block_size and not 0 <= axis < rank):
        raise ModelError(f"attributes axis {axis} and block_size {block_size} do not fit {shape}")
    if block_size:
        wanted = [[*shape[:axis], -(-shape[axis] // block_size), *shape[axis + 1 :]]]
    else:
        wanted = [[], [1], *([[shape[axis]]] if 0 <= axis < rank else [])]
    if list(scales.shape) not in wanted:
        raise ModelError(
            f"scales {scales.root} have shape {list(scales.shape)}, expected {wanted[-1]}"
        )
    one_for_all = not block_size and scales.size == 1
    axis = 0 if one_for_all else axis
    if points is not None and (
        points.elements != codes.elements
        or (points.shape != scales.shape and not (one_for_all and points.size == 1))
    ):
        raise ModelError(
            f"zero points {points.root} are {points.elements.name} {list(points.shape)}, "
            f"expected {codes.elements.name} {list(scales.shape)}"
        )
    return Quantized(codes, scales, points, axis, block_size)


def dequantized(quantized: Quantized, last_read: LastRead) -> Constant:
    """The floats of a DequantizeLinear as a constant, computed when they are read."""
    codes = quantized.codes
    if codes.transposed:
        return transpose(dequantized(_turned(quantized), last_read))
    axis, block_size = quantized.axis, quantized.block_size

    def make() -> NDArray[np.float32]:
        values = _integers(codes).astype(np.float32)
        if quantized.zero_points is not None:
            points = _integers(quantized.zero_points).astype(np.float32)
            values -= spread(points, codes.shape, axis, block_size)
        values *= spread(_float_values(quantized.scales), codes.shape, axis, block_size)
        return values

    source = last_read.source(DType.F32, codes.shape, make)
    return Constant(codes.root, codes.shape, onnx_ir.DataType.FLOAT, source, quantized=quantized)


def _turned(quantized: Quantized) -> Quantized:
    """The operands whose floats are the transposed ones: a matrix is stored once either way."""

    def turn(constant: Constant) -> Constant:
        return transpose(constant) if quantized.block_size else constant

    points = quantized.zero_points
    return Quantized(
        transpose(quantized.codes),
        turn(quantized.scales),
        None if points is None else turn(points),
        quantized.axis if _is_scalar(quantized) else 1 - quantized.axis,
        quantized.block_size,
    )


def spread(
    values: NDArray[Any], shape: tuple[int, ...], axis: int, block_size: int
) -> NDArray[Any]:
    """Scales or zero points so that they broadcast against codes of `shape`.

    They are one number, or one for each index of `axis`, or for each `block_size` of these.
    """
    if not block_size:
        return values.reshape(
            () if values.size == 1 else [-1 if i == axis else 1 for i in range(len(shape))]
        )
    repeated = np.repeat(values, block_size, axis=axis)
    return repeated[(slice(None),) * axis + (slice(shape[axis]),)]


def has_blocks(constant: Constant) -> bool:
    """Whether a matrix [N, K] from a DequantizeLinear has a block format with the same values."""
    return _block_size(constant) is not None


def quantized_weight(name: str, constant: Constant, last_read: LastRead) -> Weight:
    """A matrix [N, K] from a DequantizeLinear as a weight in blocks; see `has_blocks`."""
    quantized, block = constant.quantized, _block_size(constant)
    assert quantized is not None and block is not None
    outputs, width = constant.shape
    codes = quantized.codes
    bits = 4 if codes.elements in NIBBLES else 8
    blocks = -(-width // block)
    turned = constant.transposed

    def part(values: Callable[[], NDArray[Any]]) -> Callable[[], NDArray[Any]]:
        return lambda: _per_block(quantized, values(), (outputs, blocks), block, turned)

    scales = quantized.scales
    scale_type = DType.F16 if scales.source.dtype is DType.F16 else DType.F32
    zero: ArraySource | None = None
    if quantized.zero_points is not None:
        points = quantized.zero_points
        zero = ArraySource(DType.U8, (outputs, blocks), part(lambda: _unsigned(points)))
    elif codes.elements not in _SIGNED:
        zero = all_equal(0, (outputs, blocks))
    shape = (outputs, blocks, block * bits // 8)
    return block_weight(
        name,
        (outputs, width),
        bits,
        block,
        last_read.source(
            DType.U8, shape, lambda: _block_codes(codes, (outputs, width), turned, shape, bits)
        ),
        ArraySource(
            scale_type,
            (outputs, blocks),
            part(
                lambda: scales.source.read() if scale_type is DType.F16 else _float_values(scales)
            ),
        ),
        zero,
    )


def _block_size(constant: Constant) -> int | None:
    """The size of blocks along K, or None if no block format has these values."""
    quantized = constant.quantized
    if quantized is None or len(constant.shape) != 2 or quantized.codes.transposed:
        return None
    if quantized.codes.elements not in (*NIBBLES, onnx_ir.DataType.INT8, onnx_ir.DataType.UINT8):
        return None
    width_axis, width = (0 if constant.transposed else 1), constant.shape[1]
    along_width = quantized.axis == width_axis
    if _is_scalar(quantized) or (not along_width and not quantized.block_size):
        return _BLOCK_SIZES[0]
    if not along_width or not quantized.block_size:
        return None
    if quantized.block_size >= width and quantized.block_size not in _BLOCK_SIZES:
        return _BLOCK_SIZES[0]
    return next((size for size in _BLOCK_SIZES if quantized.block_size % size == 0), None)


def _is_scalar(quantized: Quantized) -> bool:
    return not quantized.block_size and quantized.scales.size == 1


def _per_block(
    quantized: Quantized, values: NDArray[Any], shape: tuple[int, int], block: int, turned: bool
) -> NDArray[Any]:
    """Scales or zero points as [N, blocks]."""
    if not quantized.block_size:
        return np.broadcast_to(values.reshape(-1, 1), shape)
    by_output = values.T if turned else values
    if quantized.block_size == block:
        return by_output
    taken = np.arange(shape[1]) * block // quantized.block_size
    return by_output[:, taken]


def _block_codes(
    codes: Constant, size: tuple[int, int], turned: bool, shape: tuple[int, ...], bits: int
) -> _Bytes:
    """Unsigned codes in blocks, converted some outputs at a time."""
    outputs, width = size
    stored = np.asarray(codes.source.read()).view(np.uint8)
    row = outputs if turned else width
    if bits == 4 and row % 2:
        stored, in_bytes = _nibbles(stored)[: outputs * width], False
    else:
        in_bytes = bits == 4
    matrix = stored.reshape(codes.shape[0], -1)
    flip = np.uint8((1 << (bits - 1)) if codes.elements in _SIGNED else 0)
    result = np.zeros(shape, np.uint8)
    step = max(2, _CHUNK_BYTES // width // 2 * 2)
    padded = shape[1] * shape[2] * 8 // bits
    for first in range(0, outputs, step):
        end = min(first + step, outputs)
        if turned:
            part = matrix[:, first // 2 : (end + 1) // 2] if in_bytes else matrix[:, first:end]
            part = (_nibbles(part).reshape(width, -1) if in_bytes else part).T
        else:
            part = matrix[first:end]
            part = _nibbles(part).reshape(len(part), -1) if in_bytes else part
        values: _Bytes = np.zeros((end - first, padded), np.uint8)
        values[:, :width] = part ^ flip
        if bits == 4:
            values = values[:, ::2] | values[:, 1::2] << np.uint8(4)
        result[first:end] = values.reshape(-1, *shape[1:])
    return result


def _nibbles(packed: _Bytes) -> _Bytes:
    """Bytes of any shape as flat 4-bit elements, low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)


def _unsigned(constant: Constant) -> _Bytes:
    """4- or 8-bit elements as uint8 of the constant's shape; signed ones are shifted by half."""
    raw = np.ascontiguousarray(constant.source.read()).view(np.uint8)
    signed = constant.elements in _SIGNED
    if constant.elements in NIBBLES:
        count = int(np.prod(constant.shape, dtype=np.int64))
        raw = _nibbles(raw)[:count] ^ np.uint8(8 if signed else 0)
    elif signed:
        raw = raw ^ np.uint8(0x80)
    return raw.reshape(constant.shape)


def _integers(constant: Constant) -> NDArray[Any]:
    """The elements as numbers, in a type that holds them."""
    if constant.elements not in NIBBLES:
        return constant.source.read()
    shift = 8 if constant.elements in _SIGNED else 0
    return _unsigned(constant).astype(np.int8) - np.int8(shift)


def _float_values(constant: Constant) -> NDArray[np.float32]:
    return to_f32(constant.source.read(), constant.source.dtype)
