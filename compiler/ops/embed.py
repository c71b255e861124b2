"""embed: rows of a table, gathered by token id.

    y[m] = table[ids[m]]

Shapes: ids int32 [M]; table [V, W] in any weight format; y float32 [M, W]. The table may be the
tied head's own weight. Source: ONNX Gather (axis 0); com.microsoft GatherBlockQuantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from atsc.compiler.ir import BlockFormat, DType, TensorType, Weight
from atsc.compiler.ops import Attrs, Cost, OpDef, Operand, RoundState, Sample
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.weights import dequantize


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    ids, table = inputs
    assert isinstance(ids, TensorType) and isinstance(table, Weight)
    return (TensorType(DType.F32, (*ids.shape, table.shape[1])),)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    ids, table = inputs
    return (dequantize(table)[np.asarray(ids)],)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    table = inputs[1]
    assert isinstance(table, Weight)
    row_bytes = table.num_bytes // table.shape[0]
    return Cost(rows * table.shape[1], rows * row_bytes, 4 * rows * table.shape[1])


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    ids = np.array([3, 0, 44, 17], np.int32)
    for dtype in (DType.F32, DType.F16, DType.BF16):
        yield Sample({}, (ids, random_float_weight(rng, (45, 100), dtype)))
    for bits in (4, 8):
        for size in (16, 32, 64, 128, 256):
            for zero in (False, True):
                fmt = BlockFormat(bits, size, zero)
                yield Sample({}, (ids, random_block_weight(rng, (45, 224), fmt)))
        fmt = BlockFormat(bits, 32, has_zero_points=True)
        yield Sample({}, (ids, random_block_weight(rng, (45, 224), fmt, DType.F32)))


OPS = (
    OpDef(
        name="embed",
        inputs=("ids", "table"),
        outputs=("y",),
        attrs={},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("embed",),
        matrix_slot="table",
    ),
)
