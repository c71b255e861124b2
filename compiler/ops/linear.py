"""linear: a matrix product with its bias, gate and residual fused.

    y = x @ W.T + bias
    y = act(gate) * y      if there is a gate (SwiGLU, GeGLU: W is the up projection)
    y = act(y)             if there is an activation and no gate
    y = residual + y       if there is a residual

Shapes: x [M, K] float32 or Q8; W [N, K]; bias [N]; gate and residual [M, N]; y [M, N] float32.
With a Q8 input (accuracy level 4) products are exact integers, scaled per block; with a float input
(level 1 and float weights) the arithmetic is float. Source: com.microsoft MatMulNBits; ONNX MatMul.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import (
    ArraySource,
    BlockFormat,
    DType,
    FloatFormat,
    TensorType,
    Weight,
)
from atsc.compiler.ops import Attrs, Cost, OpDef, Operand, RoundState, Sample
from atsc.compiler.ops.activation import KINDS, apply_activation
from atsc.compiler.ops.quantize import Q8Array, quantize_rows, uneven_rows
from atsc.compiler.weights import dequantize


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    x, weight = inputs[0], inputs[1]
    assert isinstance(x, TensorType) and isinstance(weight, Weight)
    outputs, width = weight.shape
    if x.shape[-1] != width:
        raise ModelError(f"rows of {x.shape[-1]} for a weight with {width} inputs")
    for operand in inputs[2:]:
        if operand is not None and operand.shape[-1] != outputs:
            raise ModelError(f"a bias, gate or residual of {operand.shape[-1]}, not {outputs}")
    return (TensorType(DType.F32, (*x.shape[:-1], outputs)),)


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    x, weight, bias, gate, residual = [*inputs, None, None, None][:5]
    activation = str(attrs["activation"])
    floats = x.dequantize() if isinstance(x, Q8Array) else x
    y = (floats.astype(np.float64) @ dequantize(weight).astype(np.float64).T).astype(np.float32)
    if bias is not None:
        y = y + dequantize(bias)
    if gate is not None:
        y = apply_activation(activation, gate) * y
    elif activation != "none":
        y = apply_activation(activation, y)
    if residual is not None:
        y = residual + y
    return (y,)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    weight = inputs[1]
    assert isinstance(weight, Weight)
    outputs, width = weight.shape
    operands = sum(1 for operand in inputs[3:5] if operand is not None)
    return Cost(
        flops=2 * rows * outputs * width,
        bytes_read=weight.num_bytes + 4 * rows * (width + operands * outputs),
        bytes_written=4 * rows * outputs,
    )


def random_block_weight(
    rng: np.random.Generator,
    shape: tuple[int, int],
    fmt: BlockFormat,
    zero_points: DType = DType.U8,
    name: str = "w",
) -> Weight:
    """A random weight in a block format, with signed fp16-exact scales; for tests and samples."""
    outputs, width = shape
    blocks = -(-width // fmt.block_size)
    codes = rng.integers(0, 256, (outputs, blocks, fmt.block_size * fmt.bits // 8), np.uint8)
    sign = rng.choice(np.array([-1, 1], np.float32), (outputs, blocks))
    scales = (rng.uniform(0.5, 1.5, (outputs, blocks)) / (1 << fmt.bits)).astype(np.float16) * sign
    parts = {"codes": ArraySource.of(codes), "scales": ArraySource.of(scales.astype(np.float32))}
    if fmt.has_zero_points:
        points = rng.integers(0, 1 << fmt.bits, (outputs, blocks)).astype(np.uint8)
        parts["zero_points"] = ArraySource.of(
            points if zero_points is DType.U8 else (points + rng.random(points.shape)).astype("f4")
        )
    return Weight(name, shape, fmt, parts)


def random_float_weight(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, name: str = "w"
) -> Weight:
    """A random float weight; for tests and samples."""
    values = rng.standard_normal(shape, np.float32)
    array: NDArray[np.generic] = values
    if dtype is DType.F16:
        array = values.astype(np.float16)
    elif dtype is DType.BF16:
        array = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Weight(name, shape, FloatFormat(dtype), {"data": ArraySource.of(array, dtype)})


def _block_cases() -> Iterator[tuple[BlockFormat, DType, int]]:
    """Format, type of its zero points, and accuracy level."""
    for bits in (4, 8):
        for size in (16, 32, 64, 128, 256):
            for level in (1, 4) if size in (16, 32, 256) else (4,):
                yield BlockFormat(bits, size, False), DType.U8, level
                yield BlockFormat(bits, size, True), DType.U8, level
                if size in (16, 128):
                    yield BlockFormat(bits, size, True), DType.F32, level


def _samples() -> Iterator[Sample]:
    """Rows 1 to 512, odd N, K that ends inside a block; few distinct kernels to compile."""
    rng = np.random.default_rng(0)
    for fmt, zero_points, level in _block_cases():
        rows_and_shapes = [(rows, 45, 224) for rows in (1, 2, 3, 5)]
        rows_and_shapes += [(rows, 72, 328) for rows in (17, 64)]
        if fmt == BlockFormat(4, 32, False):
            rows_and_shapes.append((512, 72, 328))
        for rows, outputs, width in rows_and_shapes:
            x = uneven_rows(rng, rows, width)
            weight = random_block_weight(rng, (outputs, width), fmt, zero_points)
            operand = quantize_rows(x) if level == 4 else x
            yield Sample({"accuracy_level": level}, (operand, weight), tolerance=1e-5)
    for dtype in (DType.F32, DType.F16, DType.BF16):
        for rows in (1, 5, 64, 512) if dtype is DType.F16 else (1, 5, 64):
            x = rng.standard_normal((rows, 333), np.float32)
            weight = random_float_weight(rng, (45, 333), dtype)
            bias = random_float_weight(rng, (45,), DType.F32, "b")
            gate, residual = rng.standard_normal((2, rows, 45), np.float32)
            yield Sample({"activation": "silu"}, (x, weight, bias, gate, residual))
            yield Sample({"activation": "relu"}, (x, weight, bias, None, residual))
    weight = random_block_weight(rng, (72, 96), BlockFormat(4, 32, False))
    bias = random_float_weight(rng, (72,), DType.F32, "b")
    for activation, rows, gated in [
        *((kind, 7, True) for kind in KINDS),
        *((kind, 40, False) for kind in KINDS),
        ("silu", 1, False),
        ("silu", 40, True),
    ]:
        codes = quantize_rows(rng.standard_normal((rows, 96), np.float32))
        gate, residual = rng.standard_normal((2, rows, 72), np.float32)
        operands = (gate, residual) if gated else (None, None)
        yield Sample({"activation": activation}, (codes, weight, bias, *operands))


OPS = (
    OpDef(
        name="linear",
        inputs=("x", "weight", "bias?", "gate?", "residual?"),
        outputs=("y",),
        attrs={"accuracy_level": 0, "activation": "none"},
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("linear_gemv", "linear_gemm"),
        matrix_slot="weight",
        aligned_slots=("gate",),
    ),
)
