"""What holds for every canonical operator; a new one is picked up by itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import DType, Node, TensorType, Weight
from atsc.compiler.ops import OpDef, Operand, RoundState, all_ops, op_of
from atsc.compiler.ops.quantize import Q8Array, quantize_rows

OPS = [pytest.param(op, id=op.name) for op in all_ops().values()]
MAX_SAMPLES = 12


def operand(value: Any) -> Operand:
    if value is None or isinstance(value, Weight):
        return value
    if isinstance(value, Q8Array):
        return TensorType(DType.Q8, (len(value.codes), value.width))
    return TensorType(DType.I32 if value.dtype == np.int32 else DType.F32, value.shape)


def spread(op: OpDef) -> list[Any]:
    """Some samples of an operator, from first to last."""
    samples = list(op.samples())
    step = -(-len(samples) // MAX_SAMPLES)
    return list(itertools.islice(samples, 0, None, step))


@pytest.mark.parametrize("op", OPS)
def test_infer_says_what_the_reference_computes(op: OpDef) -> None:
    samples = spread(op)
    assert samples
    for sample in samples:
        attrs = op.complete(sample.attrs)
        rows = len(
            sample.inputs[0].codes if isinstance(sample.inputs[0], Q8Array) else sample.inputs[0]
        )
        results = op.reference(attrs, sample.inputs, RoundState())
        types = op.infer(attrs, [operand(value) for value in sample.inputs])
        assert len(types) == len(op.outputs)
        for result, kind in zip(results, types, strict=False):
            assert operand(result) == TensorType(
                kind.dtype, tuple(rows if dim == "R" else dim for dim in kind.shape)
            )


@pytest.mark.parametrize("op", OPS)
def test_cost_grows_with_rows(op: OpDef) -> None:
    (sample, *_) = op.samples()
    attrs, operands = op.complete(sample.attrs), [operand(value) for value in sample.inputs]
    one, many = (op.cost(attrs, operands, rows, 64) for rows in (1, 16))
    assert min(one.flops, one.bytes_read, one.bytes_written) >= 0
    assert many.flops == 16 * one.flops or op.name == "attention"
    assert many.bytes_written == 16 * one.bytes_written


@pytest.mark.parametrize("op", OPS)
def test_attributes_are_checked(op: OpDef) -> None:
    with pytest.raises(ModelError, match=f"operator {op.name} has no attribute nonsense"):
        op.complete({"nonsense": 1})


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(ModelError, match="node n: conv is no canonical operator"):
        op_of(Node("conv", "n", (), ()))


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_quantised_rows_are_within_half_a_step(width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((3, width), np.float32)
    q8 = quantize_rows(x)
    step = np.repeat(q8.scales, 32, axis=1)[:, :width]
    assert (np.abs(q8.dequantize() - x) <= 0.5001 * step).all()
    assert (q8.codes.reshape(3, -1)[:, width:] == 0).all()


def test_a_second_digit_makes_large_blocks_as_exact_as_the_others() -> None:
    x = np.random.default_rng(7).uniform(-1, 1, (2, 320)).astype(np.float32)
    x[:, 64:96] *= 100
    x[1] = x[1, ::-1] * 1e-3
    q8 = quantize_rows(x)
    assert q8.fine is not None
    assert np.argwhere(q8.fine.scales).tolist() == [[0, 2], [1, 7]]
    step = np.repeat(np.where(q8.fine.scales, q8.fine.scales, q8.scales), 32, axis=1)
    assert (np.abs(q8.dequantize() - x) <= 0.51 * step).all()


def test_rows_of_even_blocks_have_no_second_digit() -> None:
    q8 = quantize_rows(np.ones((3, 96), np.float32))
    assert q8.fine is not None and not q8.fine.scales.any()


def test_integers_up_to_127_are_exact() -> None:
    integers = np.zeros((1, 32), np.float32)
    integers[0, :3] = [127, -5, 64]
    assert quantize_rows(integers).codes[0, 0, :3].tolist() == [127, -5, 64]


def test_a_row_of_zeros_has_scale_zero() -> None:
    q8 = quantize_rows(np.zeros((2, 40), np.float32))
    assert not q8.scales.any() and not q8.codes.any()
    assert not q8.dequantize().any()
