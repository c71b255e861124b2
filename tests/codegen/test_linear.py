"""Kernels of linear and embed where integer lanes could saturate, and on tied tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernel_runner import Prepared, build, can_run, prepare, reference, run

from atsc.codegen.cpu import ISA_LEVELS, IsaLevel, kernels_of
from atsc.codegen.layout import store
from atsc.compiler.ir import ArraySource, BlockFormat, DType, TensorType, Weight
from atsc.compiler.ops import Sample, all_ops
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.ops.quantize import Q8Array

pytestmark = pytest.mark.toolchain

LEVELS = [
    pytest.param(
        isa,
        id=isa.name,
        marks=pytest.mark.skipif(not can_run(isa), reason=f"this CPU has no {isa.name}"),
    )
    for isa in ISA_LEVELS
]
WIDTH = 96


def extreme_weight(bits: int, pattern: str, zero_points: int | None) -> Weight:
    """Eight rows and a half of codes at the ends of their range."""
    outputs, blocks = 12, WIDTH // 32
    top = (1 << bits) - 1
    codes = np.zeros((outputs, blocks, 32), np.uint8)
    if pattern == "high":
        codes[:] = top
    elif pattern == "alternating":
        codes[..., ::2] = top
    elif pattern == "half":
        codes[..., 16:] = top
    packed = codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
    scales = np.full((outputs, blocks), 0.5, np.float32)
    parts = {"codes": ArraySource.of(packed), "scales": ArraySource.of(scales)}
    if zero_points is not None:
        parts["zero_points"] = ArraySource.of(np.full((outputs, blocks), zero_points, np.uint8))
    return Weight("w", (outputs, WIDTH), BlockFormat(bits, 32, zero_points is not None), parts)


def extreme_activations(rows: int) -> Q8Array:
    """Rows of 127, of -127, and of both in turn, of both digits of every other block."""
    codes = np.full((rows, WIDTH // 32, 32), 127, np.int8)
    codes[1::3] = -127
    codes[2::3, :, ::2] = -127
    scales = np.full((rows, WIDTH // 32), 0.25, np.float32)
    fine_scales = np.where(np.arange(scales.size).reshape(scales.shape) % 2, np.float32(0.125), 0)
    return Q8Array(codes, scales, WIDTH, Q8Array(codes, fine_scales.astype(np.float32), WIDTH))


@pytest.mark.parametrize("isa", LEVELS)
def test_products_never_saturate(isa: IsaLevel, tmp_path: Path) -> None:
    samples = [
        Sample({"accuracy_level": 4}, (extreme_activations(rows), weight))
        for bits in (4, 8)
        for pattern in ("low", "high", "alternating", "half")
        for zero_points in (None, 0, (1 << bits) - 1)
        for rows in (1, 3, 9, 40)
        if (weight := extreme_weight(bits, pattern, zero_points))
    ]
    op = all_ops()["linear"]
    prepared = [p for sample in samples if (p := prepare(op, sample, isa)) is not None]
    if not prepared:
        pytest.skip(f"linear has no template of its own for {isa.name}")
    library = build(prepared, tmp_path)
    for case in prepared:
        (expected, _), (actual, *_) = reference(case), run(case, library)
        # All terms are multiples of 1/16 below 2^20: float sums of them are exact.
        np.testing.assert_array_equal(actual, expected, err_msg=case.kernel.symbol)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_a_tied_float_table_is_read_from_tiles(dtype: DType, tmp_path: Path) -> None:
    op, ids = all_ops()["embed"], np.array([0, 7, 8, 20], np.int32)
    table = random_float_weight(np.random.default_rng(0), (21, 37), dtype)
    stored = store(table, tiled=True)
    operands = [TensorType(DType.I32, ids.shape), stored]
    kernel = kernels_of(op, {}, operands, [True], True)["avx2"]
    prepared = Prepared(op, Sample({}, (ids, table)), kernel, (None, stored), (True,))
    library = build([prepared], tmp_path)
    np.testing.assert_array_equal(run(prepared, library)[0], reference(prepared)[0])


def test_float_rows_pass_infinities_and_wide_ranges(tmp_path: Path) -> None:
    """Accuracy level 1 of int4: activations are never silently made finite or lost."""
    op, rng = all_ops()["linear"], np.random.default_rng(2)
    weight = random_block_weight(rng, (16, 96), BlockFormat(4, 32, False))
    rows = [rng.standard_normal((1, 96), np.float32) for _ in range(3)]
    rows[0][0, 5] = np.inf
    rows[1][0, 40] = np.nan
    rows[2] *= np.repeat(np.array([1e-20, 1e4, 1e15], np.float32), 32)
    cases = [prepare(op, Sample({"accuracy_level": 1}, (x, weight)), ISA_LEVELS[0]) for x in rows]
    prepared = [case for case in cases if case is not None]
    library = build(prepared, tmp_path)
    results = [run(case, library)[0] for case in prepared]
    assert not np.isfinite(results[0]).any() and not np.isfinite(results[1]).any()
    expected = reference(prepared[2])[0]
    assert np.linalg.norm(results[2] - expected) <= 1e-6 * np.linalg.norm(expected)
