"""GGUF tensors as `Matrix` parts, losslessly and in chunks of rows.

    Q4_0   w = d (q - 8)          int4 blocks of 32, no zero points
    Q4_1   w = d q + m            int4 blocks of 32, float zero points -m / d
    Q5_0   w = d (q - 16)         int8 blocks of 32, codes q + 112
    Q5_1   w = d q + m            int8 blocks of 32, float zero points -m / d
    Q8_0   w = d q                int8 blocks of 32, codes q + 128
    Q4_K   w = d s q - e t        int4 blocks of 32, float zero points e t / (d s)
    Q5_K   w = d s q - e t        int8 blocks of 32, float zero points e t / (d s)
    Q6_K   w = d s (q - 32)       int8 blocks of 16, codes q + 96
    F32, F16, BF16                as they are

d, m and e are fp16. s and t are small integers, one each a block, so that the scale d s and the
offset e t are exact in fp32. Codes of blocks with a zero point are shifted to begin at 0. Then
`(code - zero_point) * scale` in float32 is within one ulp (of the block's largest magnitude) of
what gguf-py's `dequantize` says; where the nearest zero point misses that, a neighbour is taken. A
block of scale 0 holds its offset alone: it becomes that as the scale, codes 1, zero point 0.
Source: block_q4_0 to block_q6_K of ggml; gguf-py's `dequantize` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.decoder import Array, Chunks, F32Array, Matrix
from atsc.compiler.ir import BlockFormat, DType, FloatFormat

_CHUNK_BYTES = 4 << 20
_ULPS = (1, -1, 2, -2, 3, -3)

Bytes = NDArray[np.uint8]
Blocks = Bytes
"""uint8 [rows, GGUF blocks a row, bytes a GGUF block]."""


@dataclass(frozen=True, slots=True)
class _BlockType:
    """How one quantised GGUF type maps to a BlockFormat: `w = scale * (q - center) - offset`.

    `codes` returns q as uint8 [rows, GGUF blocks, elements a GGUF block]; `scales` and `offsets`
    return float32 [rows, GGUF blocks, block sizes a GGUF block]. Types with a center have no
    offsets, and types with offsets have zero points.
    """

    format: BlockFormat
    codes: Callable[[Blocks], Bytes]
    scales: Callable[[Blocks], F32Array]
    offsets: Callable[[Blocks], F32Array] | None = None
    center: int = 0


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
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    rows = tensor.data.reshape(outputs, width // elements, num_bytes)
    parts = {
        name: _chunks(rows, order, read)
        for name, read in _parts(tensor.name, block_type, width).items()
    }
    return Matrix((outputs, width), block_type.format, parts)


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


def _parts(tensor: str, block_type: _BlockType, width: int) -> dict[str, Callable[[Blocks], Array]]:
    """The readers of a BlockFormat's parts; `width` is K."""
    fmt = block_type.format
    blocks = width // fmt.block_size

    def codes(data: Blocks) -> Bytes:
        return block_type.codes(data).reshape(-1, blocks, fmt.block_size)

    def finite(read: Callable[[Blocks], F32Array], data: Blocks) -> F32Array:
        with np.errstate(invalid="ignore"):
            numbers = read(data)
        if not np.isfinite(numbers).all():
            raise ModelError(
                f"tensor {tensor}: a scale is infinite or no number; download it again"
            )
        return numbers.reshape(-1, blocks)

    def scales(data: Blocks) -> F32Array:
        return finite(block_type.scales, data)

    if block_type.offsets is None:
        shift = np.uint8(fmt.implicit_zero_point - block_type.center)
        return {"codes": lambda data: _packed(codes(data) + shift, fmt.bits), "scales": scales}

    def offsets(data: Blocks) -> F32Array:
        assert block_type.offsets is not None
        return finite(block_type.offsets, data)

    def shifted_codes(data: Blocks) -> Bytes:
        stored = codes(data)
        is_constant = (scales(data) == 0)[..., None]
        shifted = stored - stored.min(axis=-1, keepdims=True)
        return _packed(np.where(is_constant, np.uint8(1), shifted), fmt.bits)

    def scales_or_offsets(data: Blocks) -> F32Array:
        found = scales(data)
        return np.where(found == 0, -offsets(data), found)

    return {
        "codes": shifted_codes,
        "scales": scales_or_offsets,
        "zero_points": lambda data: _zero_points(codes(data), scales(data), offsets(data)),
    }


def _zero_points(codes: Bytes, scales: F32Array, offsets: F32Array) -> F32Array:
    """Zero points of the shifted codes; see the module.

    `scale * code - offset` is what gguf-py computes, in float32. The zero point nearest to
    `offset / scale` may miss it by up to two ulps, since the difference and the product are rounded
    as well; the few blocks where it does are tried again with the numbers next to it.
    """
    least = codes.min(axis=-1)
    is_constant = scales == 0
    divisor = np.where(is_constant, np.float32(1), scales)
    exact = offsets / divisor.astype(np.float64) - least
    points: F32Array = np.where(is_constant, 0.0, exact).astype(np.float32)
    wanted = codes * scales[..., None]
    wanted -= offsets[..., None]
    shifted = (codes - least[..., None]).astype(np.float32)
    allowed = np.spacing(np.maximum(wanted.max(axis=-1), -wanted.min(axis=-1)))
    is_missed = (_errors(shifted, points, divisor, wanted) > allowed) & ~is_constant
    if is_missed.any():
        points[is_missed] = _nearby(
            shifted[is_missed], points[is_missed], divisor[is_missed], wanted[is_missed]
        )
    return points


def _nearby(codes: F32Array, points: F32Array, scales: F32Array, wanted: F32Array) -> F32Array:
    """The zero points next to `points` that come closest to what is wanted, a row each."""
    best, least_error = points, _errors(codes, points, scales, wanted)
    for ulps in _ULPS:
        steps: F32Array = np.spacing(np.abs(points))
        candidates: F32Array = points + np.float32(ulps) * steps
        error = _errors(codes, candidates, scales, wanted)
        best = np.where(error < least_error, candidates, best)
        least_error = np.minimum(error, least_error)
    return best


def _errors(codes: F32Array, points: F32Array, scales: F32Array, wanted: F32Array) -> F32Array:
    """The largest error of each block; points and scales have one number a block."""
    made = codes - points[..., None]
    made *= scales[..., None]
    made -= wanted
    largest: F32Array = np.maximum(made.max(axis=-1), -made.min(axis=-1))
    return largest


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Codes of 8 bits as they are; of 4 bits two a byte, the even one in the low nibble."""
    if bits == 8:
        return codes
    packed: Bytes = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def _halves(data: Blocks, at: int) -> F32Array:
    """The fp16 at byte `at` of each GGUF block, as float32 [rows, GGUF blocks, 1]."""
    halves = np.ascontiguousarray(data[..., at : at + 2]).view(np.float16)
    return halves.astype(np.float32)


def _nibbles(data: Blocks, at: int, count: int, group: int) -> Bytes:
    """4-bit codes in `count` bytes from byte `at`: of each `group` bytes all low nibbles, then all
    high ones.
    """
    grouped = data[..., at : at + count].reshape(*data.shape[:2], -1, 1, group)
    shifts = np.array([0, 4], np.uint8)[:, None]
    codes: Bytes = (grouped >> shifts) & np.uint8(15)
    return codes.reshape(*data.shape[:2], 2 * count)


def _fifth_bits(data: Blocks, at: int) -> Bytes:
    """The highest bits of 32 codes, one after the other in 4 bytes, as 0 or 16."""
    bits: Bytes = np.unpackbits(data[..., at : at + 4], axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _k_fifth_bits(data: Blocks, at: int) -> Bytes:
    """The highest bits of 256 codes as 0 or 16: bit b of byte j is that of code 32 b + j."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    bits: Bytes = (data[..., None, at : at + 32] >> shifts) & np.uint8(1)
    return (bits << np.uint8(4)).reshape(*data.shape[:2], 256)


def _q6_k_codes(data: Blocks) -> Bytes:
    """128 bytes of low nibbles in groups of 64, then 64 bytes of bit pairs in groups of 32."""
    pairs = data[..., 128:192].reshape(*data.shape[:2], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high: Bytes = ((pairs >> shifts) & np.uint8(3)) << np.uint8(4)
    return _nibbles(data, 0, 128, 64) | high.reshape(*data.shape[:2], 256)


def _k_scales_and_offsets(data: Blocks) -> tuple[Bytes, Bytes]:
    """s and t of the 8 blocks, 6 bits each, in 12 bytes from byte 4.

    Bytes 0 to 3: the first four s, bytes 4 to 7: the first four t, with the two highest bits of the
    last four in theirs; bytes 8 to 11: the other four bits of the last four s (low nibble) and t.
    """
    first, second, rest = (data[..., start : start + 4] for start in (4, 8, 12))
    s = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=-1)
    t = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=-1)
    return s, t


def _k_scales(data: Blocks) -> F32Array:
    return _halves(data, 0) * _k_scales_and_offsets(data)[0]


def _k_offsets(data: Blocks) -> F32Array:
    return _halves(data, 2) * _k_scales_and_offsets(data)[1]


def _q6_k_scales(data: Blocks) -> F32Array:
    return _halves(data, 208) * data[..., 192:208].view(np.int8)


_FLOAT_TYPES: Mapping[GGMLQuantizationType, tuple[DType, type[np.generic]]] = {
    GGMLQuantizationType.F32: (DType.F32, np.float32),
    GGMLQuantizationType.F16: (DType.F16, np.float16),
    GGMLQuantizationType.BF16: (DType.BF16, np.uint16),
}
_INT4 = BlockFormat(4, 32, has_zero_points=False)
_INT4_POINTS = BlockFormat(4, 32, has_zero_points=True)
_INT8 = BlockFormat(8, 32, has_zero_points=False)
_INT8_POINTS = BlockFormat(8, 32, has_zero_points=True)
_BLOCK_TYPES = {
    GGMLQuantizationType.Q4_0: _BlockType(
        _INT4, lambda b: _nibbles(b, 2, 16, 16), lambda b: _halves(b, 0), center=8
    ),
    GGMLQuantizationType.Q4_1: _BlockType(
        _INT4_POINTS,
        lambda b: _nibbles(b, 4, 16, 16),
        lambda b: _halves(b, 0),
        lambda b: -_halves(b, 2),
    ),
    GGMLQuantizationType.Q5_0: _BlockType(
        _INT8,
        lambda b: _nibbles(b, 6, 16, 16) | _fifth_bits(b, 2),
        lambda b: _halves(b, 0),
        center=16,
    ),
    GGMLQuantizationType.Q5_1: _BlockType(
        _INT8_POINTS,
        lambda b: _nibbles(b, 8, 16, 16) | _fifth_bits(b, 4),
        lambda b: _halves(b, 0),
        lambda b: -_halves(b, 2),
    ),
    GGMLQuantizationType.Q8_0: _BlockType(_INT8, lambda b: b[..., 2:], lambda b: _halves(b, 0)),
    GGMLQuantizationType.Q4_K: _BlockType(
        _INT4_POINTS, lambda b: _nibbles(b, 16, 128, 32), _k_scales, _k_offsets
    ),
    GGMLQuantizationType.Q5_K: _BlockType(
        _INT8_POINTS,
        lambda b: _nibbles(b, 48, 128, 32) | _k_fifth_bits(b, 16),
        _k_scales,
        _k_offsets,
    ),
    GGMLQuantizationType.Q6_K: _BlockType(
        BlockFormat(8, 16, has_zero_points=False), _q6_k_codes, _q6_k_scales, center=32
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
