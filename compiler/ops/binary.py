"""add, sub, mul, div: pointwise arithmetic of two operands.

Shapes: a [M, W] float32; b [M, W], or a weight [W], or a weight of one element; y [M, W].
Source: ONNX Add, Sub, Mul, Div with the broadcasting that decoders use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import DType, TensorType, Weight
from atsc.compiler.ops import Attrs, Cost, OpDef, Operand, Reference, RoundState, Sample
from atsc.compiler.ops.linear import random_float_weight
from atsc.compiler.weights import dequantize

KINDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    a, b = inputs
    assert isinstance(a, TensorType) and b is not None
    if b.shape != a.shape and not (isinstance(b, Weight) and b.shape in ((1,), a.shape[-1:])):
        raise ModelError(f"operands {list(a.shape)} and {list(b.shape)}")
    return (TensorType(DType.F32, a.shape),)


def _reference_of(kind: str) -> Reference:
    def reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
        a, b = inputs
        return (KINDS[kind](a, dequantize(b) if isinstance(b, Weight) else b),)

    return reference


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    a = inputs[0]
    assert isinstance(a, TensorType)
    elements = rows * int(a.shape[-1])
    return Cost(elements, 8 * elements, 4 * elements)


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    for rows, width in ((1, 45), (17, 256)):
        a, b = rng.standard_normal((2, rows, width), np.float32) + 5
        yield Sample({}, (a, b))
        yield Sample({}, (a, random_float_weight(rng, (width,), DType.F32)))
        yield Sample({}, (a, random_float_weight(rng, (1,), DType.F32)))


OPS = tuple(
    OpDef(
        name=kind,
        inputs=("a", "b"),
        outputs=("y",),
        attrs={},
        infer=_infer,
        reference=_reference_of(kind),
        cost=_cost,
        samples=_samples,
        templates=("binary",),
    )
    for kind in KINDS
)
