"""GGUF tensors as `Matrix` parts, losslessly and in chunks of rows.

    Q4_0   w = d (q - 8)        int4 blocks of 32, no zero points
    Q4_1   w = d q + m          int4 blocks of 32, float zero points -m / d
    Q8_0   w = d q              int8 blocks of 32, codes q + 128
    F32, F16, BF16              as they are

d and m are fp16. Q4_1 zero points are float32, so that `float16(-d * zero_point)` is m again, bit
for bit. A block with d = 0 holds m alone: it becomes scale m, codes 1, zero point 0. Where a block
spans its codes, as quantisers leave it, `(code - zero_point) * d` in float32 is within one ulp (of
the block's largest magnitude) of `d q + m`; a block of middle codes alone may be up to five off.
Source: block_q4_0, block_q4_1 and block_q8_0 of ggml; gguf-py's `dequantize` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor
from gguf import quants as gguf_quants
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.decoder import Array, Chunks, F32Array, Matrix
from atsc.compiler.ir import BlockFormat, DType, FloatFormat

_CHUNK_BYTES = 4 << 20
_BLOCK_SIZE = 32

Bytes = NDArray[np.uint8]
Blocks = Bytes
"""uint8 [rows, blocks a row, bytes a block]."""


@dataclass(frozen=True, slots=True)
class _BlockType:
    """How one quantised GGUF type maps to the parts of a BlockFormat."""

    num_bytes: int
    format: BlockFormat
    parts: Mapping[str, Callable[[Blocks], Array]]


def matrix_of(tensor: ReaderTensor, *, num_heads: int = 0) -> Matrix:
    """A GGUF matrix of K inputs and N outputs, [N, K].

    Args:
        tensor: of a type in the table above.
        num_heads: of q and k in architecture llama: their rows are put back into the order of
            half-rotated RoPE, which GGUF files permute to the interleaved one. 0: as they are.

    Raises:
        ModelError: the type is not supported, or the tensor is no matrix.
    """
    kind = tensor.tensor_type
    if len(tensor.shape) != 2:
        raise ModelError(f"tensor {tensor.name}: expected a matrix, found shape {_shape(tensor)}")
    width, outputs = (int(size) for size in tensor.shape)
    order = _row_order(tensor.name, outputs, num_heads)
    if kind in _FLOAT_TYPES:
        dtype, storage = _FLOAT_TYPES[kind]
        rows = tensor.data.view(storage).reshape(outputs, width)
        return Matrix((outputs, width), FloatFormat(dtype), {"data": _chunks(rows, order, _same)})
    block_type = _block_type(tensor)
    rows = tensor.data.reshape(outputs, width // _BLOCK_SIZE, block_type.num_bytes)
    parts = {name: _chunks(rows, order, read) for name, read in block_type.parts.items()}
    return Matrix((outputs, width), block_type.format, parts)


def dequantized(tensor: ReaderTensor) -> Matrix:
    """A GGUF matrix as float32, as gguf-py dequantises it: for rows that must be gathered."""
    _block_type(tensor)
    width, outputs = (int(size) for size in tensor.shape)

    def read(rows: Array) -> Array:
        floats: Array = gguf_quants.dequantize(rows, tensor.tensor_type)
        return floats

    rows = tensor.data.reshape(outputs, -1)
    return Matrix(
        (outputs, width), FloatFormat(DType.F32), {"data": _chunks(rows, _in_order, read)}
    )


def vector_of(tensor: ReaderTensor, *, num_heads: int = 0) -> F32Array:
    """A GGUF float vector (norm, bias, RoPE factors) as float32; `num_heads` as in `matrix_of`."""
    if len(tensor.shape) != 1:
        raise ModelError(f"tensor {tensor.name}: expected a vector, found shape {_shape(tensor)}")
    if tensor.tensor_type not in _FLOAT_TYPES:
        raise _unsupported(tensor)
    dtype, storage = _FLOAT_TYPES[tensor.tensor_type]
    stored = tensor.data.view(storage).reshape(-1)
    if dtype is DType.BF16:
        values = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        values = stored.astype(np.float32)
    order = _row_order(tensor.name, len(values), num_heads)
    restored: F32Array = values[order(0, len(values))]
    return restored


def _q4_codes(nibbles: Bytes) -> Bytes:
    """ggml's order (byte j: elements j and j + 16) to MatMulNBits' (byte j: 2 j and 2 j + 1)."""
    elements = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    packed: Bytes = elements[..., 0::2] | (elements[..., 1::2] << 4)
    return packed


def _half(blocks: Blocks, at: int) -> F32Array:
    """The fp16 at byte `at` of each block, as float32."""
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
    return halves[..., 0].astype(np.float32)


def _q4_1_codes(blocks: Blocks) -> Array:
    is_constant = _half(blocks, 0) == 0
    return np.where(is_constant[..., None], np.uint8(0x11), _q4_codes(blocks[..., 4:]))


def _q4_1_scales(blocks: Blocks) -> Array:
    scale = _half(blocks, 0)
    return np.where(scale == 0, _half(blocks, 2), scale)


def _q4_1_zero_points(blocks: Blocks) -> Array:
    scale = _half(blocks, 0)
    return np.where(scale == 0, np.float32(0), -_half(blocks, 2) / np.where(scale == 0, 1, scale))


def _q8_codes(blocks: Blocks) -> Array:
    return blocks[..., 2:] ^ np.uint8(0x80)


_FLOAT_TYPES: Mapping[GGMLQuantizationType, tuple[DType, type[np.generic]]] = {
    GGMLQuantizationType.F32: (DType.F32, np.float32),
    GGMLQuantizationType.F16: (DType.F16, np.float16),
    GGMLQuantizationType.BF16: (DType.BF16, np.uint16),
}
_BLOCK_TYPES = {
    GGMLQuantizationType.Q4_0: _BlockType(
        18,
        BlockFormat(4, _BLOCK_SIZE, has_zero_points=False),
        {"codes": lambda b: _q4_codes(b[..., 2:]), "scales": lambda b: _half(b, 0)},
    ),
    GGMLQuantizationType.Q4_1: _BlockType(
        20,
        BlockFormat(4, _BLOCK_SIZE, has_zero_points=True),
        {"codes": _q4_1_codes, "scales": _q4_1_scales, "zero_points": _q4_1_zero_points},
    ),
    GGMLQuantizationType.Q8_0: _BlockType(
        34,
        BlockFormat(8, _BLOCK_SIZE, has_zero_points=False),
        {"codes": _q8_codes, "scales": lambda b: _half(b, 0)},
    ),
}


def _block_type(tensor: ReaderTensor) -> _BlockType:
    if tensor.tensor_type not in _BLOCK_TYPES:
        raise _unsupported(tensor)
    return _BLOCK_TYPES[tensor.tensor_type]


def _unsupported(tensor: ReaderTensor) -> ModelError:
    known = ", ".join(kind.name for kind in (*_FLOAT_TYPES, *_BLOCK_TYPES))
    return ModelError(
        f"tensor {tensor.name} is of type {tensor.tensor_type.name}, which atsc cannot convert yet"
        f" (supported: {known}); requantise the file to one of these"
    )


def _shape(tensor: ReaderTensor) -> list[int]:
    return [int(size) for size in tensor.shape]


RowOrder = Callable[[int, int], NDArray[np.int64] | slice]
"""Rows start to stop of the result as rows of the file."""


def _row_order(name: str, rows: int, num_heads: int) -> RowOrder:
    """Undo the permutation of q and k: row (h, i, half) of the file is row (h, half, i)."""
    if not num_heads:
        return _in_order
    if rows % (2 * num_heads):
        raise ModelError(f"tensor {name}: {rows} rows are no whole pairs for {num_heads} heads")
    order = np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2)
    restored = order.swapaxes(1, 2).reshape(-1)
    return lambda start, stop: restored[start:stop]


def _in_order(start: int, stop: int) -> slice:
    return slice(start, stop)


def _same(rows: Array) -> Array:
    return rows


def _chunks(rows: Array, order: RowOrder, read: Callable[..., Array]) -> Chunks:
    """Iterate over `read` of a few megabytes of rows at a time."""
    step = max(1, _CHUNK_BYTES // max(1, rows[:1].nbytes))

    def iterate() -> Iterator[Array]:
        for start in range(0, len(rows), step):
            yield read(rows[order(start, min(start + step, len(rows)))])

    return iterate
