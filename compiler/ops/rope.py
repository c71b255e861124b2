"""rope: rotary position embedding of every head.

Half-split (`interleaved` false): element i turns with i + rotary_dim / 2; interleaved: 2i with
2i + 1. With angle row `position + m` of the caches:

    y1 = x1 * cos - x2 * sin;   y2 = x1 * sin + x2 * cos;   elements past rotary_dim stay

Shapes: x [M, H * head_size]; cos and sin [max position, rotary_dim / 2]; y like x. Most graphs have
it fused into `attention`. Source: com.microsoft RotaryEmbedding; ONNX RotaryEmbedding-23.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import LOGIT_ROWS, DType, TensorType
from atsc.compiler.ops import REQUIRED, Attrs, Cost, OpDef, Operand, RoundState, Sample
from atsc.compiler.ops.linear import random_float_weight
from atsc.compiler.weights import dequantize

F32Array = NDArray[np.float32]


def rotate(x: F32Array, cos: F32Array, sin: F32Array, interleaved: bool) -> F32Array:
    """Rotate float32 [M, H, D] by angles [M, rotary_dim / 2]."""
    half = cos.shape[-1]
    y = x.copy()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x1, x2 = x[..., first], x[..., second]
    cos, sin = cos[:, None], sin[:, None]
    y[..., first] = x1 * cos - x2 * sin
    y[..., second] = x1 * sin + x2 * cos
    return y


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    x = inputs[0]
    assert isinstance(x, TensorType)
    if x.shape[0] == LOGIT_ROWS:
        raise ModelError("the rows whose logits are wanted are no contiguous sequence")
    return (TensorType(DType.F32, x.shape),)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    x, cos, sin = inputs
    angles = slice(state.position, state.position + len(x))
    heads = x.reshape(len(x), -1, int(attrs["head_size"]))
    turned = rotate(
        heads, dequantize(cos)[angles], dequantize(sin)[angles], bool(attrs["interleaved"])
    )
    return (turned.reshape(x.shape),)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    x = inputs[0]
    assert isinstance(x, TensorType)
    elements = rows * int(x.shape[-1])
    return Cost(3 * elements, 8 * elements, 4 * elements)


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    for head_size, rotary_dim in ((64, 64), (80, 32), (128, 128)):
        for interleaved in (False, True):
            x = rng.standard_normal((5, 3 * head_size), np.float32)
            cos = random_float_weight(rng, (40, rotary_dim // 2), DType.F32, "cos")
            sin = random_float_weight(rng, (40, rotary_dim // 2), DType.F32, "sin")
            attrs = {"head_size": head_size, "interleaved": interleaved}
            yield Sample(attrs, (x, cos, sin), position=7)


OPS = (
    OpDef(
        name="rope",
        inputs=("x", "cos", "sin"),
        outputs=("y",),
        attrs={"head_size": REQUIRED, "interleaved": False},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("rope",),
    ),
)
