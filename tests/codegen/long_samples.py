"""Samples with a long K, on which a kernel fills every stage of its rings many times, and with rows
that have large blocks of int8."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atsc.compiler.ir import BlockFormat, DType
from atsc.compiler.ops import Sample
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.ops.quantize import quantize_rows, uneven_rows


def linear_samples() -> Iterator[Sample]:
    """45 outputs of 65 slabs of 32 inputs for few rows, of 17 and 18 for many."""
    rng = np.random.default_rng(0)
    bias = random_float_weight(rng, (45,), DType.F32, "b")
    for rows, width in ((1, 2080), (5, 2080), (20, 544), (20, 576)):
        gate, residual = rng.standard_normal((2, rows, 45), np.float32)
        x = uneven_rows(rng, rows, width)
        for fmt, zeros in (
            (BlockFormat(4, 32, False), DType.U8),
            (BlockFormat(4, 128, True), DType.U8),
            (BlockFormat(8, 16, True), DType.F32),
        ):
            weight = random_block_weight(rng, (45, width), fmt, zeros)
            attrs = {"activation": "silu"}
            yield Sample(attrs, (quantize_rows(x), weight, bias, gate, residual), tolerance=1e-5)
            if width != 576:
                yield Sample(attrs, (x, weight, None, gate, None), tolerance=1e-5)
        for dtype in (DType.F16, DType.BF16, DType.F32) if width != 576 else ():
            weight = random_float_weight(rng, (45, width - 30), dtype)
            yield Sample({}, (x[:, :-30].copy(), weight, bias, None, residual))


def quantize_samples() -> Iterator[Sample]:
    """Threads with one share of a row, and with two."""
    rng = np.random.default_rng(0)
    for width in (2050, 4100):
        yield Sample({}, (uneven_rows(rng, 3, width),), tolerance=1e-6)


def norm_samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    weight = random_float_weight(rng, (2080,), DType.F32, "w")
    for rows in (1, 9):
        yield Sample({"eps": 1e-6}, (uneven_rows(rng, rows, 2080), weight), tolerance=1e-5)


LONG_SAMPLES = {
    "linear": linear_samples,
    "quantize": quantize_samples,
    "rms_norm": norm_samples,
    "layer_norm": norm_samples,
}
