"""What layout.py writes, read back by the formulas of its docstring, is the weight."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atsc.codegen import layout
from atsc.codegen.layout import StoredWeight, part_chunks, store, value_bytes
from atsc.compiler.ir import ArraySource, BlockFormat, DType, FloatFormat, Weight
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.weights import dequantize, to_f32


def stored_bytes(stored: StoredWeight) -> dict[str, np.ndarray]:
    """Part name -> its bytes; chunks follow each other without a gap."""
    found = {}
    for part in stored.parts:
        chunks = [chunk.view(np.uint8).ravel() for chunk in part_chunks(stored, part)]
        found[part.name] = np.concatenate(chunks)
        assert found[part.name].nbytes == part.num_bytes, part.name
    return found


def code_index(bits: int, n: int, k: int, width: int) -> tuple[int, int]:
    """Byte of a code, and its shift."""
    slab = n // 8 * -(-width // 32) + k // 32
    low = k % 32
    if bits == 8:
        return (slab * 8 + low // 4) * 32 + n % 8 * 4 + low % 4, 0
    return (slab * 4 + low % 16 // 4) * 32 + n % 8 * 4 + low % 4, 4 * (low // 16)


def read_back(stored: StoredWeight) -> np.ndarray:
    """Each weight by itself, slowly."""
    weight, parts = stored.weight, stored_bytes(stored)
    fmt, (outputs, width) = weight.format, weight.shape
    assert isinstance(fmt, BlockFormat)
    blocks = layout.num_blocks(fmt, width)
    floats = {"f16": np.float16, "f32": np.float32, "u8": np.uint8}
    assert stored.scale_dtype is not None
    scales = parts["scales"].view(floats[stored.scale_dtype.value])
    zeros = None if stored.zero_kind == "none" else parts["zeros"].view(floats[stored.zero_kind])
    found = np.empty((outputs, width), np.float32)
    for n, k in np.ndindex(outputs, width):
        byte, shift = code_index(fmt.bits, n, k, width)
        raw = int(parts["codes"][byte])
        code = raw >> shift & 15 if fmt.bits == 4 else raw ^ 128
        at = (n // 8 * blocks + k // fmt.block_size) * 8 + n % 8
        scale = np.float32(scales[at])
        if zeros is None:
            found[n, k] = scale * np.float32(code - fmt.implicit_zero_point)
        elif stored.zero_kind == "u8":
            found[n, k] = scale * np.float32(code - int(zeros[at]))
        else:
            centre = 128 if fmt.bits == 8 else 0
            found[n, k] = scale * np.float32(code - centre) + np.float32(zeros[at])
    return found


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([16, 32, 64, 256]),
    zeros=st.sampled_from([None, DType.U8, DType.F32]),
    outputs=st.integers(1, 19),
    width=st.integers(1, 150),
    chunk=st.sampled_from([1, 1000, 1 << 24]),
)
def test_block_formats_read_back(
    bits: int, block: int, zeros: DType | None, outputs: int, width: int, chunk: int
) -> None:
    rng = np.random.default_rng(width * 20 + outputs)
    fmt = BlockFormat(bits, block, zeros is not None)
    weight = random_block_weight(rng, (outputs, width), fmt, zeros or DType.U8)
    stored = store(weight, tiled=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "CHUNK_ELEMENTS", chunk)
        actual = read_back(stored)
    expected = dequantize(weight)
    atol = 1e-6 * float(np.abs(expected).max()) if zeros is DType.F32 else 0.0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize(
    ("outputs", "width", "chunk"), [(21, 37, 100), (8, 2, 1), (5, 64, 1 << 24)]
)
def test_floats_read_back(
    dtype: DType, outputs: int, width: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "CHUNK_ELEMENTS", chunk)
    weight = random_float_weight(np.random.default_rng(3), (outputs, width), dtype)
    kind = np.float32 if dtype is DType.F32 else np.float16 if dtype is DType.F16 else np.uint16
    for tiled in (True, False):
        data = to_f32(stored_bytes(store(weight, tiled))["data"].view(kind), dtype)
        group = 1 if dtype is DType.F32 else 2
        groups = -(-width // group)
        found = np.empty((outputs, width), np.float32)
        for n, k in np.ndindex(outputs, width):
            at = ((n // 8 * groups + k // group) * 8 + n % 8) * group + k % group
            found[n, k] = data[at if tiled else n * width + k]
        np.testing.assert_array_equal(found, dequantize(weight))


def test_padding_is_zero() -> None:
    rng = np.random.default_rng(0)
    stored = store(random_block_weight(rng, (3, 40), BlockFormat(4, 32, False)), tiled=True)
    parts = stored_bytes(stored)
    used = {code_index(4, n, k, 40) for n in range(3) for k in range(40)}
    for n, k in itertools.product(range(8), range(64)):
        byte, shift = code_index(4, n, k, 40)
        if (byte, shift) not in used:
            assert parts["codes"][byte] >> shift & 15 == 0
    scales = parts["scales"].view(np.float16).reshape(2, 8)
    assert np.all(scales[:, 3:] == 0) and np.all(scales[:, :3] != 0)


def test_scales_that_fp16_cannot_hold_stay_f32() -> None:
    weight = random_block_weight(np.random.default_rng(0), (8, 64), BlockFormat(4, 32, False))
    scales = weight.parts["scales"].read().astype(np.float32)
    assert store(weight, True).scale_dtype is DType.F16
    for unfit in (1e-12, 1e6, 1 / 3):
        changed = scales.copy()
        changed[7, 1] = unfit
        parts = {**weight.parts, "scales": ArraySource.of(changed)}
        stored = store(Weight("w", weight.shape, weight.format, parts), True)
        assert stored.scale_dtype is DType.F32
        assert stored_bytes(stored)["scales"].view(np.float32)[15] == np.float32(unfit)


def test_minima_of_q4_1_become_f16_offsets() -> None:
    """The zero point of a Q4_1 block is -minimum / scale, its minimum fp16."""
    rng = np.random.default_rng(5)
    weight = random_block_weight(rng, (16, 64), BlockFormat(4, 32, True), DType.F32)
    scales = weight.parts["scales"].read().astype(np.float32)
    minima = rng.standard_normal(scales.shape).astype(np.float16).astype(np.float32)
    parts = {**weight.parts, "zero_points": ArraySource.of(-minima / scales)}
    stored = store(Weight("w", weight.shape, weight.format, parts), True)
    assert stored.zero_kind == "f16"
    offsets = stored_bytes(stored)["zeros"].view(np.float16).reshape(2, 2, 8)
    np.testing.assert_array_equal(offsets.transpose(0, 2, 1).reshape(16, 2), minima)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [None, DType.U8, DType.F32])
def test_scales_beside_int8_activations_are_rounded(bits: int, zeros: DType | None) -> None:
    """As K-quants and exports for CPUs have them: of more digits than fp16 has."""
    rng = np.random.default_rng(3)
    fmt = BlockFormat(bits, 32, zeros is not None)
    weight = random_block_weight(rng, (16, 96), fmt, zeros or DType.U8)
    scales = (weight.parts["scales"].read() * rng.uniform(0.9, 1.1, (16, 3))).astype(np.float32)
    weight = Weight("w", weight.shape, fmt, {**weight.parts, "scales": ArraySource.of(scales)})
    exact, rounded = store(weight, True), store(weight, True, may_round=True)
    assert (exact.scale_dtype, rounded.scale_dtype) == (DType.F32, DType.F16)
    expected = {None: "none", DType.U8: "u8", DType.F32: "f16" if bits == 4 else "f32"}[zeros]
    assert rounded.zero_kind == expected
    error = np.abs(read_back(rounded) - dequantize(weight))
    steps = np.repeat(np.abs(scales), 32, axis=1)
    # Of int4 with offsets, the product's and the offset's roundings, of up to 15 steps each.
    most = np.abs(dequantize(weight)) * 2.0**-11 + (steps / 128 if expected == "f16" else 0)
    assert error.max() > 0 and np.all(error <= most)


def test_scales_out_of_the_range_of_fp16_are_never_rounded() -> None:
    weight = random_block_weight(np.random.default_rng(0), (8, 64), BlockFormat(4, 32, False))
    scales = weight.parts["scales"].read().astype(np.float32) / 3
    for factor, expected in ((1, DType.F16), (1e-8, DType.F32), (1e8, DType.F32)):
        parts = {**weight.parts, "scales": ArraySource.of(scales * np.float32(factor))}
        stored = store(Weight("w", weight.shape, weight.format, parts), True, may_round=True)
        assert stored.scale_dtype is expected
    tiny = scales.copy()
    tiny[7, 1] = scales.max() * 1e-6
    parts = {**weight.parts, "scales": ArraySource.of(tiny)}
    assert (
        store(Weight("w", weight.shape, weight.format, parts), True, True).scale_dtype is DType.F16
    )


def test_vectors_are_stored_as_float32() -> None:
    values = np.arange(5, dtype=np.float16)
    weight = Weight("b", (5,), FloatFormat(DType.F16), {"data": ArraySource.of(values)})
    np.testing.assert_array_equal(
        stored_bytes(store(weight, False))["data"].view(np.float32), values
    )


def test_q8_values_hold_whole_blocks() -> None:
    assert value_bytes(DType.Q8, rows=3, width=33) == 2 * 3 * 88
    assert value_bytes(DType.F32, rows=3, width=33) == 396
