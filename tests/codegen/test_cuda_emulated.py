"""The CUDA kernels of linear layers equal the reference, run on the CPU as the GPU runs them.

Small shapes with many steps of every ring, so that stages are filled again; tests/gpu has the whole
grid of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cuda_emulation
import numpy as np
import pytest
from kernel_runner import Prepared, num_rows, reference, type_of
from test_kernels import differences

from atsc.codegen.cuda import kernel_of
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.layout import is_tiled_by, store
from atsc.compiler.ir import BlockFormat, DType, Weight
from atsc.compiler.ops import Sample, all_ops
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.ops.quantize import quantize_rows

pytestmark = pytest.mark.toolchain


def linear_samples() -> Iterator[Sample]:
    """45 outputs of 1,056 or 1,050 inputs: 33 slabs of 32."""
    rng = np.random.default_rng(0)
    bias = random_float_weight(rng, (45,), DType.F32, "b")
    for rows in (1, 5, 20):
        gate, residual = rng.standard_normal((2, rows, 45), np.float32)
        x = rng.standard_normal((rows, 1056), np.float32)
        for fmt, zeros in (
            (BlockFormat(4, 32, False), DType.U8),
            (BlockFormat(4, 128, True), DType.U8),
            (BlockFormat(8, 16, True), DType.F32),
        ):
            weight = random_block_weight(rng, (45, 1056), fmt, zeros)
            attrs = {"activation": "silu"}
            yield Sample(attrs, (quantize_rows(x), weight, bias, gate, residual), tolerance=1e-5)
            yield Sample(attrs, (x, weight, None, gate, None), tolerance=1e-5)
        for dtype in (DType.F16, DType.BF16, DType.F32):
            weight = random_float_weight(rng, (45, 1050), dtype)
            yield Sample({}, (x[:, :1050].copy(), weight, bias, None, residual))


def quantize_samples() -> Iterator[Sample]:
    x = np.random.default_rng(0).standard_normal((3, 1050), np.float32)
    yield Sample({}, (x,), tolerance=1e-6)


SAMPLES = {"linear": linear_samples, "quantize": quantize_samples}


@pytest.mark.parametrize("name", SAMPLES)
def test_kernels_equal_the_reference(name: str, tmp_path: Path) -> None:
    op, gpu, cases = all_ops()[name], Gpu(90, 8), []
    for sample in SAMPLES[name]():
        stored = tuple(
            store(x, slot.rstrip("?") == op.matrix_slot and is_tiled_by(x, name == "linear"))
            if isinstance(x, Weight)
            else None
            for slot, x in zip(op.inputs, sample.inputs, strict=False)
        )
        operands = [s or type_of(x) for s, x in zip(stored, sample.inputs, strict=True)]
        few = num_rows(sample) <= 8
        kernel = kernel_of(op, sample.attrs, operands, [True] * len(op.outputs), few, gpu)
        assert kernel is not None
        cases.append((Prepared(op, sample, kernel, stored), kernel))  # type: ignore[arg-type]
    library = cuda_emulation.build((kernel for _, kernel in cases), tmp_path)
    failures = []
    for case, kernel in cases:
        actual = cuda_emulation.run(op, case.sample, case.stored, kernel, library)
        for problem in differences(case, actual, reference(case)[:-1]):
            failures.append(f"{num_rows(case.sample)} rows, {kernel.symbol}: {problem}")
    assert not failures, "\n".join(failures)
