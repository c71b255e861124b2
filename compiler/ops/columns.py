"""columns: a range of columns of every row, as importers write a Split.

    y = x[:, start:stop]

Shapes: x [M, W] -> y [M, stop - start]. It has no kernel: the passes absorb it into a packed
attention or split the weight that made x by rows, and refuse the model where neither works.
Source: ONNX Split on the last axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import TensorType
from atsc.compiler.ops import REQUIRED, Attrs, Cost, OpDef, Operand, RoundState, Sample


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    (x,) = inputs
    assert isinstance(x, TensorType)
    start, stop, width = int(attrs["start"]), int(attrs["stop"]), int(x.shape[-1])
    if not 0 <= start < stop <= width:
        raise ModelError(f"columns {start} to {stop} of rows of {width}")
    return (TensorType(x.dtype, (*x.shape[:-1], stop - start)),)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    return (inputs[0][:, int(attrs["start"]) : int(attrs["stop"])],)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    return Cost(0, 0, 0)


def _samples() -> Iterator[Sample]:
    x = np.random.default_rng(0).standard_normal((5, 100), np.float32)
    yield Sample({"start": 32, "stop": 64}, (x,), tolerance=0)


OPS = (
    OpDef(
        name="columns",
        inputs=("x",),
        outputs=("y",),
        attrs={"start": REQUIRED, "stop": REQUIRED},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=(),
    ),
)
