"""layer_norm: layer normalisation, with an optional int8 output.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

Mean and variance run over groups of `group` columns (0: the whole row; a head size: QK-norm).
Shapes: x [M, W]; weight and bias [group]; `y` float32 [M, W]; `y_q8` the same quantised
(ops/quantize.py); either output may be absent. Source: ONNX LayerNormalization (axis=-1);
com.microsoft SkipLayerNormalization.
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
    x, weight, bias = [*inputs, None][:3]
    group = int(attrs["group"]) or x.shape[-1]
    wide = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + float(attrs["eps"]))
    y = y * dequantize(weight)
    if bias is not None:
        y = y + dequantize(bias)
    y = y.reshape(x.shape).astype(np.float32)
    return y, quantize_rows(y)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    x = inputs[0]
    assert isinstance(x, TensorType)
    elements = rows * int(x.shape[-1])
    return Cost(7 * elements, 4 * elements, 4 * elements)


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    for rows, width, group in ((1, 576, 0), (5, 100, 0), (17, 256, 0), (3, 160, 40), (2, 512, 64)):
        x = rng.standard_normal((rows, width), np.float32) + 3
        weight = random_float_weight(rng, (group or width,), DType.F32, "w")
        bias = random_float_weight(rng, (group or width,), DType.F32, "b")
        yield Sample({"eps": 1e-5, "group": group}, (x, weight, bias))
        yield Sample({"eps": 1e-6, "group": group}, (x, weight))


OPS = (
    OpDef(
        name="layer_norm",
        inputs=("x", "weight", "bias?"),
        outputs=("y", "y_q8"),
        attrs={"eps": REQUIRED, "group": 0},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("layer_norm",),
        replicable=True,
    ),
)
