"""quantize: float activations to int8 in blocks of 32, as accuracy level 4 wants them.

    scale = max|x| / 127 over each block of 32 along the last axis;  code = round(x / scale)

A block whose scale is more than twice the mean of its row's gets a second digit, so that
x = scale * (code + fine / 254): of trained models these are about a tenth of the blocks, and make
most of the rounding error.

Shapes: x [M, K] -> Q8 [M, K], the last block padded with zeros. Rounding is to nearest, ties to
even. A block of zeros has scale 0. Source: DESIGN "Numbers"; com.microsoft MatMulNBits leaves the
quantisation of accuracy_level 4 to the implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.ir import DType, TensorType
from atsc.compiler.ops import Attrs, Cost, OpDef, Operand, RoundState, Sample

BLOCK = 32
REFINED_ABOVE = 2.0
"""Times the mean scale of a row: blocks above it get a second digit."""
LEAST_REFINED = 1e-34
"""Below this scale 254 / scale comes near to the largest float."""


@dataclass(frozen=True, slots=True)
class Q8Array:
    """A Q8 value: `codes` int8 [M, blocks, 32], `scales` float32 [M, blocks], `width` K.

    `fine` holds the second digits, alike; None, or scales of 0, where there are none.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    width: int
    fine: Q8Array | None = None

    def dequantize(self) -> NDArray[np.float32]:
        """The floats that the codes stand for, [M, K]."""
        values = self.codes.astype(np.float32) * self.scales[..., None]
        flat: NDArray[np.float32] = values.reshape(len(self.codes), -1)[:, : self.width]
        return flat if self.fine is None else flat + self.fine.dequantize()


def quantize_rows(x: NDArray[np.float32]) -> Q8Array:
    """Quantise float32 [M, K]."""
    rows, width = x.shape
    blocks = -(-width // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :width] = x
    grouped = padded.reshape(rows, blocks, BLOCK)
    largest = np.abs(grouped).max(axis=-1)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0)
    codes = np.rint(grouped * inverse[..., None].astype(np.float32)).astype(np.int8)
    scales = (largest / np.float32(127)).astype(np.float32)
    return Q8Array(codes, scales, width, _second_digits(grouped, codes, scales, width))


def _second_digits(
    grouped: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32], width: int
) -> Q8Array:
    mean = scales.mean(axis=-1, keepdims=True, dtype=np.float64)
    refined = (scales > REFINED_ABOVE * mean) & (scales > LEAST_REFINED)
    # What is left is exact in float64, and rounded once, as a fused multiply-add does.
    rest = (grouped - scales.astype(np.float64)[..., None] * codes).astype(np.float32)
    factor = np.where(refined, np.float32(254) / np.where(refined, scales, 1), 0)
    fine = np.rint(rest * factor[..., None].astype(np.float32)).astype(np.int8)
    fine_scales = np.where(refined, scales / np.float32(254), 0).astype(np.float32)
    return Q8Array(fine, fine_scales, width)


def uneven_rows(rng: np.random.Generator, rows: int, width: int) -> NDArray[np.float32]:
    """Random float32 [rows, width], some blocks of which are large; for tests and samples."""
    x = rng.standard_normal((rows, width), np.float32)
    large = rng.random((rows, -(-width // BLOCK))) < 0.2
    factors = np.repeat(np.where(large, np.float32(20), np.float32(1)), BLOCK, axis=1)
    uneven: NDArray[np.float32] = x * factors[:, :width]
    return uneven


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    (x,) = inputs
    assert isinstance(x, TensorType)
    return (TensorType(DType.Q8, x.shape),)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    return (quantize_rows(inputs[0]),)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    (x,) = inputs
    assert isinstance(x, TensorType)
    elements = rows * int(x.shape[-1])
    return Cost(3 * elements, 4 * elements, elements * 44 // 32)


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    for rows, width in ((1, 576), (3, 100), (64, 1536)):
        yield Sample({}, (rng.standard_normal((rows, width), np.float32),), tolerance=1e-6)
        yield Sample({}, (uneven_rows(rng, rows, width),), tolerance=1e-6)
    yield Sample({}, (np.zeros((2, 64), np.float32),), tolerance=0)
    yield Sample({}, (1e-36 * uneven_rows(rng, 3, 576),), tolerance=1e-6)


OPS = (
    OpDef(
        name="quantize",
        inputs=("x",),
        outputs=("y",),
        attrs={},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("quantize",),
        replicable=True,
    ),
)
