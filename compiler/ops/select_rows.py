"""select_rows: keep the rows for which logits are wanted (all, the last, or a list).

    y[r] = x[logit_rows[r]]

Shapes: x [M, W] -> y [R, W]; which rows is the caller's choice, a round at a time. Inserted before
the final norm on import, so that the head runs for the wanted rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from atsc.compiler.ir import LOGIT_ROWS, TensorType
from atsc.compiler.ops import Attrs, Cost, OpDef, Operand, RoundState, Sample


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    (x,) = inputs
    assert isinstance(x, TensorType)
    return (TensorType(x.dtype, (LOGIT_ROWS, *x.shape[1:])),)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    rows = state.logit_rows
    return (inputs[0] if rows is None else inputs[0][rows],)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    (x,) = inputs
    assert isinstance(x, TensorType)
    moved = 4 * rows * int(x.shape[-1])
    return Cost(0, moved, moved)


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    yield Sample({}, (rng.standard_normal((5, 100), np.float32),), tolerance=0)


OPS = (
    OpDef(
        name="select_rows",
        inputs=("x",),
        outputs=("y",),
        attrs={},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("select_rows",),
    ),
)
