"""Random int4 matrices that cost nothing to make: windows of one pool of random blocks.

A matrix is a place in the pool and a power of two for its scales, so that a model of any size is
described in kilobytes and written at the speed of the disk. Codes are 1 to 15, triangular around 8,
so that sums have no bias; scales are exact in fp16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.importers.onnx.decoder import Array, Matrix
from atsc.compiler.ir import BlockFormat

_POOL_BYTES = 16777183  # A prime: no two matrices of a model start at the same place.
_POOL_SCALES = 1048573
_CHUNK_BYTES = 4 << 20
_CODE_DEVIATION = 3.24 * 1.04  # Of code - 8, and of the scales' spread.


class RandomWeights:
    """Hands out matrices and small float vectors, all decided by the seed."""

    def __init__(self, seed: int, block_size: int) -> None:
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._format = BlockFormat(4, block_size, has_zero_points=False)
        low, high = (self._codes() for _ in range(2))
        pool = low | (high << 4)
        scales = self._rng.uniform(0.5, 1.5, _POOL_SCALES).astype(np.float16).astype(np.float32)
        # Twice, so that every window is contiguous.
        self._pool = np.concatenate([pool, pool])
        self._scales = np.concatenate([scales, scales])
        self._next_byte = 0
        self._next_scale = 0

    def matrix(self, *shape: int, gain: float = 1.0) -> Matrix:
        """A matrix [..., N, K] that maps inputs of variance 1 to outputs of variance gain ** 2."""
        *outer, width = shape
        rows = math.prod(outer)
        blocks, remainder = divmod(width, self._format.block_size)
        assert not remainder, f"{width} inputs are no whole blocks"
        exponent = round(math.log2(gain / (_CODE_DEVIATION * math.sqrt(width))))
        block_bytes = self._format.block_size // 2
        first_byte, first_scale = self._next_byte, self._next_scale
        self._next_byte = (first_byte + rows * width // 2) % _POOL_BYTES
        self._next_scale = (first_scale + rows * blocks * 7 + 1) % _POOL_SCALES

        def codes() -> Iterator[Array]:
            for start, count in _chunks(rows, width // 2):
                at = (first_byte + start * width // 2) % _POOL_BYTES
                window = self._pool[at : at + count * width // 2]
                yield window.reshape(count, blocks, block_bytes)

        def scales() -> Iterator[Array]:
            for start, count in _chunks(rows, width // 2):
                at = (first_scale + start * blocks) % _POOL_SCALES
                window = self._scales[at : at + count * blocks]
                yield (window * np.float32(2.0**exponent)).reshape(count, blocks)

        return Matrix(shape, self._format, {"codes": codes, "scales": scales})

    def normal(self, *shape: int, mean: float = 0.0, deviation: float) -> NDArray[np.float32]:
        """Normally distributed floats."""
        return (mean + deviation * self._rng.standard_normal(shape)).astype(np.float32)

    def _codes(self) -> NDArray[np.uint8]:
        draws = self._rng.integers(0, 256, _POOL_BYTES, np.uint8)
        return 1 + (draws & 7) + ((draws >> 3) & 7)


def _chunks(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of pieces of a few megabytes; an even number of rows, but for the last."""
    step = max(2, _CHUNK_BYTES // row_bytes // 2 * 2)
    for start in range(0, rows, step):
        yield start, min(step, rows - start)
