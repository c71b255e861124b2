"""Kernels of linear and embed where integer lanes could saturate, and on tied tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kernel_runner import (
    CpuKernel,
    Prepared,
    Schedule,
    build,
    can_run,
    prepare,
    reference,
    run,
)

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


def extreme_weight(
    bits: int, pattern: str, zero_points: int | None, outputs: int = 12, width: int = WIDTH
) -> Weight:
    """Codes at the ends of their range."""
    blocks = width // 32
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
    return Weight("w", (outputs, width), BlockFormat(bits, 32, zero_points is not None), parts)


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
    library = build(prepared, tmp_path)
    for case in prepared:
        (expected, _), (actual, *_) = reference(case), run(case, library)
        # All terms are multiples of 1/16 below 2^20: float sums of them are exact.
        np.testing.assert_array_equal(actual, expected, err_msg=case.kernel.symbol)


def activations_with_fine_rows(counts: Sequence[int], rows: int) -> Q8Array:
    """Random rows, of which `counts[i]` anywhere have a second digit in block i."""
    rng, blocks = np.random.default_rng(rows), len(counts)
    codes, fine_codes = rng.integers(-127, 128, (2, rows, blocks, 32), np.int8)
    fine_scales = np.zeros((rows, blocks), np.float32)
    for block, count in enumerate(counts):
        fine_scales[rng.permutation(rows)[:count], block] = 0.125
    scales = np.full((rows, blocks), 0.25, np.float32)
    width = 32 * blocks
    return Q8Array(codes, scales, width, Q8Array(fine_codes, fine_scales, width))


@pytest.mark.parametrize("isa", LEVELS)
def test_any_number_of_rows_has_second_digits(isa: IsaLevel, tmp_path: Path) -> None:
    """AMX gathers them in groups of 16 rows."""
    op = all_ops()["linear"]
    most = 24
    weights = [
        extreme_weight(bits, "alternating", zero_points, outputs, 32 * 7)
        for bits in (4, 8)
        for zero_points in (None, 3)
        for outputs in (8, 28)
    ]
    prepared = [
        case
        for weight in weights
        for rows in (24, 40, 64, 100)
        for x in [activations_with_fine_rows([0, 1, 15, 16, 17, most, 0], rows)]
        if (case := prepare(op, Sample({"accuracy_level": 4}, (x, weight)), isa))
    ]
    library = build(prepared, tmp_path)
    for case in prepared:
        (expected, _), (actual, *_) = reference(case), run(case, library)
        np.testing.assert_array_equal(actual, expected, err_msg=case.kernel.symbol)


@pytest.mark.parametrize("isa", LEVELS)
def test_packed_rows_give_the_same_bits(isa: IsaLevel, tmp_path: Path) -> None:
    """Large pieces pack a block of rows into the scratch; small ones, or no scratch, do not."""
    op = all_ops()["linear"]
    weight = extreme_weight(4, "alternating", None, 8 * 17, 32 * 3)
    x = activations_with_fine_rows([0, 40, 64], 130)
    case = prepare(op, Sample({"accuracy_level": 4}, (x, weight)), isa)
    assert case is not None
    library, expected = build([case], tmp_path), reference(case)[0]
    counters = 4096
    kernel = CpuKernel.in_dll(library, case.kernel.symbol)
    assert kernel.scratch_bytes(130, 0, 3) >= counters + 3 * 3 * 64 * 44
    assert kernel.scratch_bytes(64, 0, 3) == counters
    for schedule in (
        Schedule(pieces=1),
        Schedule(pieces=2, threads=1, concurrent=True),
        Schedule(pieces=3, threads=4, concurrent=True),
        Schedule(pieces=27),
    ):
        actual, *_ = run(case, library, schedule)
        np.testing.assert_array_equal(actual, expected, err_msg=str(schedule))


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
