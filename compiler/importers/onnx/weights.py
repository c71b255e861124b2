"""Constants as Weights in their canonical parts; everything is read when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.operands import Constant, reshape
from atsc.compiler.ir import ArraySource, BlockFormat, DType, FloatFormat, Weight
from atsc.compiler.weights import to_f32


class LastRead:
    """Keeps the one array that was converted last.

    Weights are written in chunks of rows, each of which reads its source anew; what is converted
    rather than mapped would be converted once a chunk.
    """

    def __init__(self) -> None:
        self._owner: object = None
        self._array: NDArray[Any] = np.empty(0)

    def source(
        self, dtype: DType, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]
    ) -> ArraySource:
        """A source whose array is made when it is read, unless it was the last one."""
        owner = object()

        def read() -> NDArray[Any]:
            if self._owner is not owner:
                self._owner, self._array = None, np.empty(0)
                self._array = make()
                self._owner = owner
            return self._array

        return ArraySource(dtype, shape, read)


def float_weight(name: str, constant: Constant) -> Weight:
    """A float constant as it is."""
    source = constant.source
    return Weight(name, constant.shape, FloatFormat(source.dtype), {"data": source})


def as_vector(constant: Constant, width: int | None) -> Constant:
    """A constant [1, ..., width] as [width].

    Raises:
        ModelError: it has another shape.
    """
    size = int(np.prod(constant.shape, dtype=np.int64))
    if any(d != 1 for d in constant.shape[:-1]) or (width is not None and size != width):
        wanted = "one row" if width is None else f"[{width}]"
        raise ModelError(f"{constant.root} has shape {list(constant.shape)}, expected {wanted}")
    return reshape(constant, (size,))


def nibble_codes(constant: Constant, shape: tuple[int, ...]) -> ArraySource:
    """int4 or uint4 elements as unsigned codes of `shape`; int4 is shifted by 8."""
    flip = 0x88 if constant.elements is onnx_ir.DataType.INT4 else 0
    source = constant.source

    def read() -> NDArray[np.generic]:
        packed = np.asarray(source.read(), np.uint8)
        return (packed ^ np.uint8(flip) if flip else packed).reshape(shape)

    return ArraySource(DType.U8, shape, read)


def unpacked_nibbles(source: ArraySource, shape: tuple[int, int], flip: int = 0) -> ArraySource:
    """4-bit integers [N, ceil(columns / 2)] packed low nibble first, as uint8 [N, columns]."""
    rows, columns = shape

    def read() -> NDArray[np.generic]:
        packed = np.asarray(source.read(), np.uint8).reshape(rows, -1) ^ np.uint8(flip)
        pairs = np.stack([packed & 15, packed >> 4], axis=-1)
        return pairs.reshape(rows, -1)[:, :columns]

    return ArraySource(DType.U8, shape, read)


def unpacked_pairs(source: ArraySource, shape: tuple[int, int]) -> ArraySource:
    """2-bit integers [N, ceil(columns / 4)] packed low bits first, as uint8 [N, columns]."""
    rows, columns = shape

    def read() -> NDArray[np.generic]:
        packed = np.asarray(source.read(), np.uint8)
        quarters = packed[..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        return quarters.reshape(rows, -1)[:, :columns]

    return ArraySource(DType.U8, shape, read)


def widened_pairs(source: ArraySource, add: int, last_read: LastRead) -> ArraySource:
    """2-bit codes [N, blocks, bytes] as 4-bit codes [N, blocks, 2 * bytes], each plus `add`."""
    shape = (*source.shape[:-1], 2 * source.shape[-1])

    def make() -> NDArray[np.generic]:
        packed = np.asarray(source.read(), np.uint8)
        wide = np.empty((*packed.shape, 2), np.uint8)
        wide[..., 0] = (packed & 3) | (packed & 12) << 2
        wide[..., 1] = (packed >> 4 & 3) | (packed >> 2 & 48)
        wide += np.uint8(add * 17)
        return wide.reshape(shape)

    return last_read.source(DType.U8, shape, make)


def padded_rows(constant: Constant, shape: tuple[int, int], last_read: LastRead) -> Constant:
    """Rows of bytes made longer, so that they end with a whole block; the rest is not read."""
    source = constant.source

    def make() -> NDArray[np.generic]:
        rows = np.zeros(shape, np.uint8)
        rows[:, : constant.shape[1]] = source.read()
        return rows

    padded = last_read.source(DType.U8, shape, make)
    return Constant(constant.root, shape, constant.elements, padded)


def all_equal(value: int, shape: tuple[int, ...]) -> ArraySource:
    """A constant uint8 array that takes no memory."""
    return ArraySource(DType.U8, shape, lambda: np.broadcast_to(np.uint8(value), shape))


def float_part(constant: Constant, shape: tuple[int, ...]) -> ArraySource:
    """Scales or float zero points as fp32 or fp16 of `shape`; bf16 is widened.

    Raises:
        ModelError: the constant has another number of elements, or is no float.
    """
    if not constant.is_float:
        raise ModelError(f"{constant.root} has elements of type {constant.elements.name}")
    source = _shaped(constant, shape).source
    if source.dtype is not DType.BF16:
        return source
    return ArraySource(DType.F32, shape, lambda: to_f32(source.read(), DType.BF16))


def block_weight(
    name: str,
    shape: tuple[int, int],
    bits: int,
    block_size: int,
    codes: ArraySource,
    scales: ArraySource,
    zero_points: ArraySource | None,
) -> Weight:
    """A weight in blocks from parts that already have their canonical shapes."""
    fmt = BlockFormat(bits, block_size, zero_points is not None)
    parts = {"codes": codes, "scales": scales}
    if zero_points is not None:
        parts["zero_points"] = zero_points
    return Weight(name, shape, fmt, parts)


def byte_codes(constant: Constant, shape: tuple[int, ...]) -> ArraySource:
    """uint8 bytes of `shape`.

    Raises:
        ModelError: the constant has other elements or another number of them.
    """
    if constant.elements is not onnx_ir.DataType.UINT8:
        raise ModelError(f"{constant.root} has elements of type {constant.elements.name}")
    return _shaped(constant, shape).source


def _shaped(constant: Constant, shape: tuple[int, ...]) -> Constant:
    if constant.transposed or np.prod(constant.shape) != np.prod(shape):
        raise ModelError(
            f"{constant.root} has shape {list(constant.shape)}, expected {list(shape)}"
        )
    return constant if constant.shape == shape else reshape(constant, shape)
