"""The one layout of weights, which CPU and GPU kernels both read, and the layout of values.

A matrix [N, K] that a linear layer reads is cut into tiles of 8 outputs, padded with zeros:

    int4   codes [N/8][K/32][4 g][8 row][4 b]   low nibble: k = 4g + b; high nibble: k = 16 + 4g + b
    int8   codes [N/8][K/32][8 g][8 row][4 b]   signed code - 128; k = 4g + b
    f32    data  [N/8][K][8 row]
    f16, bf16    [N/8][K/2][8 row][2]           k = 2 * index + last axis

One 32-bit word of int4 holds what lane (row, g) of an m16n8k32 int8 tensor-core fragment needs
(`w & 0x0f0f0f0f` is b0, `w >> 4 & 0x0f0f0f0f` is b1), and one AVX2 register holds 8 rows x 4 k,
against which 4 activations are broadcast. A word of f16 is the same for m16n8k16.

Block formats carry, each [N/8][blocks][8 row]:

    scales   f16 if every scale is exactly representable, else f32
    zeros    absent without zero points; else u8 (zero points as they are) or, where they are
             float, f16/f32 offsets: -scale * zero_point for int4, scale * (128 - zero_point) for
             int8, so that w = scale * code + offset (f16 if that loses nothing)

Matrices that meet int8 activations alone have f16 scales, and int4 ones f16 offsets, also where
this rounds them: by up to 2^-12 of a scale, a twentieth of what rounding the activations does.

`blocks` is ceil(K / block_size), and at least enough to cover K padded to 32. All other weights
(tables that only `embed` reads in float, norm weights, biases, cos and sin) are row-major.
A unit is one contiguous range; parts start at multiples of 64 bytes, units at 4096.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.ir import BlockFormat, DType, FloatFormat, Weight
from atsc.compiler.weights import read_f32, to_f32, unpack_codes

TILE_ROWS = 8
Q8_BLOCK = 32
Q8_BYTES_PER_BLOCK = 2 * 44
"""Two digits, of which the second belongs to few blocks (runtime/src/kernel.h)."""
PART_ALIGNMENT = 64
UNIT_ALIGNMENT = 4096
CHUNK_ELEMENTS = 1 << 20

ZeroKind = Literal["none", "u8", "f16", "f32"]


@dataclass(frozen=True, slots=True)
class Part:
    """One contiguous array of a stored weight."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How a weight is stored in weights.bin: everything that a kernel template must know."""

    weight: Weight
    tiled: bool
    scale_dtype: DType | None
    zero_kind: ZeroKind
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts, each rounded up to the alignment of parts."""
        return sum(align(part.num_bytes, PART_ALIGNMENT) for part in self.parts)


def align(num_bytes: int, alignment: int) -> int:
    """Round up to a multiple."""
    return -(-num_bytes // alignment) * alignment


def value_bytes(dtype: DType, rows: int, width: int) -> int:
    """Bytes of a value of `rows` x `width` in the activation arena (runtime/src/kernel.h)."""
    if dtype is DType.Q8:
        return -(-width // Q8_BLOCK) * rows * Q8_BYTES_PER_BLOCK
    return rows * width * {DType.F32: 4, DType.I32: 4}[dtype]


def num_blocks(fmt: BlockFormat, width: int) -> int:
    """Stored scale blocks of a row: K padded to 32 is always covered."""
    return align(width, max(Q8_BLOCK, fmt.block_size)) // fmt.block_size


def store(weight: Weight, tiled: bool, may_round: bool = False) -> StoredWeight:
    """Decide how a weight is stored; reads its scales and zero points, not its codes.

    Args:
        weight: any weight.
        tiled: a linear layer reads it; weights in a block format are tiled in any case.
        may_round: scales and offsets may be rounded to f16.
    """
    if not isinstance(weight.format, BlockFormat):
        elements = int(np.prod(weight.shape, dtype=np.int64))
        if not tiled:
            dtype = weight.format.dtype if len(weight.shape) == 2 else DType.F32
            size = elements * (4 if dtype is DType.F32 else 2)
            return StoredWeight(weight, False, None, "none", (Part("data", size),))
        outputs, width = weight.shape
        size = 4 if weight.format.dtype is DType.F32 else 2
        padded = align(outputs, TILE_ROWS) * align(width, 4 // size) * size
        return StoredWeight(weight, True, None, "none", (Part("data", padded),))
    fmt, (outputs, width) = weight.format, weight.shape
    rows = align(outputs, TILE_ROWS)
    blocks = num_blocks(fmt, width)
    scales = read_f32(weight.parts["scales"])
    is_short = _fits_f16(scales) or (may_round and _is_near_f16(scales))
    scale_dtype = DType.F16 if is_short else DType.F32
    zero_kind = _zero_kind(weight, scales, may_round and is_short)
    parts = [
        Part("codes", rows * align(width, Q8_BLOCK) * fmt.bits // 8),
        Part("scales", rows * blocks * (2 if scale_dtype is DType.F16 else 4)),
    ]
    if zero_kind != "none":
        parts.append(Part("zeros", rows * blocks * {"u8": 1, "f16": 2, "f32": 4}[zero_kind]))
    return StoredWeight(weight, True, scale_dtype, zero_kind, tuple(parts))


def part_chunks(stored: StoredWeight, part: Part) -> Iterator[NDArray[np.generic]]:
    """The bytes of one part in order, in pieces of about CHUNK_ELEMENTS elements."""
    weight = stored.weight
    if not stored.tiled:
        yield from _row_major(stored)
        return
    tiles_a_chunk = CHUNK_ELEMENTS // max(1, weight.shape[1]) // TILE_ROWS
    rows_a_chunk = max(1, tiles_a_chunk) * TILE_ROWS
    for start in range(0, weight.shape[0], rows_a_chunk):
        rows = slice(start, start + rows_a_chunk)
        yield _TILERS[part.name](stored, rows)


def _row_major(stored: StoredWeight) -> Iterator[NDArray[np.generic]]:
    data = stored.weight.parts["data"]
    array = data.read()
    if len(data.shape) != 2:
        yield np.ascontiguousarray(to_f32(array, data.dtype))
        return
    step = max(1, CHUNK_ELEMENTS // max(1, data.shape[1]))
    for start in range(0, data.shape[0], step):
        yield np.ascontiguousarray(array[start : start + step])


def _tile_rows(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """[n, ...] -> [tiles, 8, ...], the last tile padded with zeros."""
    rows = align(len(array), TILE_ROWS)
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded.reshape(rows // TILE_ROWS, TILE_ROWS, *array.shape[1:])


def _tile_data(stored: StoredWeight, rows: slice) -> NDArray[np.generic]:
    data = stored.weight.parts["data"]
    tiles = _tile_rows(np.asarray(data.read()[rows]))
    if data.dtype is DType.F32:
        return np.ascontiguousarray(tiles.transpose(0, 2, 1))
    count, _, width = tiles.shape
    padded = np.zeros((count, TILE_ROWS, align(width, 2)), tiles.dtype)
    padded[:, :, :width] = tiles
    pairs = padded.reshape(count, TILE_ROWS, -1, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3))


def _tile_codes(stored: StoredWeight, rows: slice) -> NDArray[np.generic]:
    weight = stored.weight
    assert isinstance(weight.format, BlockFormat)
    codes = unpack_codes(weight.parts["codes"].read()[rows], weight.format.bits)
    flat = codes.reshape(len(codes), -1)
    width = align(weight.shape[1], Q8_BLOCK)
    padded = np.zeros((len(flat), width), np.uint8)
    kept = min(width, weight.shape[1])
    padded[:, :kept] = flat[:, :kept]
    tiles: NDArray[Any] = _tile_rows(padded.reshape(len(flat), width // Q8_BLOCK, Q8_BLOCK))
    if weight.format.bits == 8:
        signed = (tiles ^ np.uint8(128)).view(np.int8)
        groups = signed.reshape(*signed.shape[:3], 8, 4)
        return np.ascontiguousarray(groups.transpose(0, 2, 3, 1, 4))
    nibbles = tiles[..., :16] | (tiles[..., 16:] << 4)
    groups = nibbles.reshape(*nibbles.shape[:3], 4, 4)
    return np.ascontiguousarray(groups.transpose(0, 2, 3, 1, 4))


def _tile_blocks(values: NDArray[np.generic], fmt: BlockFormat, width: int) -> NDArray[np.generic]:
    padded = np.zeros((len(values), num_blocks(fmt, width)), values.dtype)
    padded[:, : values.shape[1]] = values
    return np.ascontiguousarray(_tile_rows(padded).transpose(0, 2, 1))


def _tile_scales(stored: StoredWeight, rows: slice) -> NDArray[np.generic]:
    weight, scales = stored.weight, stored.weight.parts["scales"]
    assert isinstance(weight.format, BlockFormat)
    values = to_f32(scales.read()[rows], scales.dtype)
    if stored.scale_dtype is DType.F16:
        values = values.astype(np.float16)
    return _tile_blocks(values, weight.format, weight.shape[1])


def _tile_zeros(stored: StoredWeight, rows: slice) -> NDArray[np.generic]:
    weight, points = stored.weight, stored.weight.parts["zero_points"]
    assert isinstance(weight.format, BlockFormat)
    if stored.zero_kind == "u8":
        return _tile_blocks(points.read()[rows], weight.format, weight.shape[1])
    offsets = _offsets(stored, rows)
    if stored.zero_kind == "f16":
        offsets = offsets.astype(np.float16)
    return _tile_blocks(offsets, weight.format, weight.shape[1])


_TILERS = {
    "data": _tile_data,
    "codes": _tile_codes,
    "scales": _tile_scales,
    "zeros": _tile_zeros,
}


def _fits_f16(values: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(_through_f16(values), values))


def _is_near_f16(scales: NDArray[np.float32]) -> bool:
    """Whether rounding keeps 11 bits, at least of scales above a 256th of the largest one."""
    with np.errstate(invalid="ignore"):
        lost = np.abs(_through_f16(scales) - scales)
        largest = np.abs(scales).max(initial=0)
        return bool((lost <= np.maximum(np.abs(scales), largest / 256) * 2.0**-11).all())


def _offsets(stored: StoredWeight, rows: slice) -> NDArray[np.float32]:
    """What float zero points add to scale * code, with the scales as they are stored."""
    weight = stored.weight
    assert isinstance(weight.format, BlockFormat)
    scales, points = weight.parts["scales"], weight.parts["zero_points"]
    scale = to_f32(scales.read()[rows], scales.dtype)
    if stored.scale_dtype is DType.F16:
        scale = _through_f16(scale)
    centre = np.float32(128 if weight.format.bits == 8 else 0)
    offsets: NDArray[np.float32] = scale * (centre - to_f32(points.read()[rows], points.dtype))
    return offsets


def _through_f16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _zero_kind(weight: Weight, scale: NDArray[np.float32], may_round: bool) -> ZeroKind:
    """Float zero points become f16 offsets where dividing by the scale gives them back exactly.

    A Q4_1 block stores its minimum m as fp16, and conversion writes the zero point as -m / scale.
    With `may_round` (scales are f16 then), also where they move weights by less than a 128th of a
    step.
    """
    assert isinstance(weight.format, BlockFormat)
    if not weight.format.has_zero_points:
        return "none"
    points = weight.parts["zero_points"]
    if points.dtype is DType.U8:
        return "u8"
    if weight.format.bits == 8:
        return "f32"
    zero = read_f32(points)
    with np.errstate(all="ignore"):
        offsets = _through_f16(-scale * zero)
        exact = np.where(scale != 0, -offsets / scale == zero, zero == 0)
        if may_round:
            wanted = -_through_f16(scale) * zero
            exact |= np.abs(_through_f16(wanted) - wanted) <= np.abs(scale) / 128
    return "f16" if bool(exact.all()) else "f32"


def is_tiled_by(weight: Weight, read_by_linear: bool) -> bool:
    """Whether a weight is stored in tiles."""
    return read_by_linear or not isinstance(weight.format, FloatFormat)
