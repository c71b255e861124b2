"""add_positions: learned (or sinusoidal) position embeddings, added to activations.

    y[m] = x[m] + table[position + m]

Shapes: x and y [M, W] float32; table [max position, W] float32. Source: ONNX Gather (axis 0) by
position and Add, as GPT-2 and OPT have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import LOGIT_ROWS, DType, TensorType, Weight
from atsc.compiler.ops import Attrs, Cost, OpDef, Operand, RoundState, Sample
from atsc.compiler.ops.linear import random_float_weight
from atsc.compiler.weights import dequantize


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    x, table = inputs
    assert isinstance(x, TensorType) and isinstance(table, Weight)
    if x.shape[0] == LOGIT_ROWS:
        raise ModelError("the rows whose logits are wanted are no contiguous sequence")
    if len(table.shape) != 2 or table.shape[1] != x.shape[-1]:
        raise ModelError(f"rows of {x.shape[-1]} and position rows {list(table.shape)}")
    return (TensorType(DType.F32, x.shape),)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    x, table = inputs
    return (x + dequantize(table)[state.position : state.position + len(x)],)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    x = inputs[0]
    assert isinstance(x, TensorType)
    elements = rows * int(x.shape[-1])
    return Cost(elements, 8 * elements, 4 * elements)


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    for rows, width, position in ((1, 45, 0), (17, 256, 7), (5, 300, 35)):
        x = rng.standard_normal((rows, width), np.float32)
        table = random_float_weight(rng, (40, width), DType.F32, "table")
        yield Sample({}, (x, table), position=position)


OPS = (
    OpDef(
        name="add_positions",
        inputs=("x", "table"),
        outputs=("y",),
        attrs={},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("add_positions",),
    ),
)
