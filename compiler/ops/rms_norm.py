"""rms_norm: root-mean-square normalisation, with an optional residual and an int8 output.

    y = x / sqrt(mean(x^2) + eps) * weight;   y = residual + y if there is a residual

The mean runs over groups of `group` columns (0: the whole row; a head size: QK-norm). Shapes: x and
residual [M, W]; weight [group]; `y` float32 [M, W]; `y_q8` the same quantised (ops/quantize.py);
either output may be absent. Source: ONNX RMSNormalization; com.microsoft
SkipSimplifiedLayerNormalization; Gemma's post-norms for the residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from atsc.compiler.ir import DType, TensorType
from atsc.compiler.ops import REQUIRED, Attrs, Cost, OpDef, Operand, RoundState, Sample
from atsc.compiler.ops.linear import random_float_weight
from atsc.compiler.ops.quantize import quantize_rows
from atsc.compiler.weights import dequantize


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    x = inputs[0]
    assert isinstance(x, TensorType)
    return TensorType(DType.F32, x.shape), TensorType(DType.Q8, x.shape)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    x, weight, residual = [*inputs, None][:3]
    group = int(attrs["group"]) or x.shape[-1]
    grouped = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    rms = np.sqrt((grouped**2).mean(axis=-1, keepdims=True) + float(attrs["eps"]))
    y = (grouped / rms * dequantize(weight)).reshape(x.shape).astype(np.float32)
    if residual is not None:
        y = residual + y
    return y, quantize_rows(y)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    x = inputs[0]
    assert isinstance(x, TensorType)
    elements = rows * int(x.shape[-1])
    return Cost(4 * elements, 4 * elements * (2 if len(inputs) > 2 else 1), 4 * elements)


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    for rows, width, group in ((1, 576, 0), (5, 100, 0), (17, 256, 64), (2, 5120, 0)):
        x, residual = rng.standard_normal((2, rows, width), np.float32)
        weight = random_float_weight(rng, (group or width,), DType.F32)
        yield Sample({"eps": 1e-5, "group": group}, (x, weight))
        yield Sample({"eps": 1e-6, "group": group}, (x * 1e4, weight, residual))


OPS = (
    OpDef(
        name="rms_norm",
        inputs=("x", "weight", "residual?"),
        outputs=("y", "y_q8"),
        attrs={"eps": REQUIRED, "group": 0},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("rms_norm",),
        replicable=True,
    ),
)
