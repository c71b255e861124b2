"""The CUDA kernels of linear layers equal the reference, run on the CPU as the GPU runs them.

Small shapes with many steps of every ring, so that stages are filled again; tests/gpu has the whole
grid of samples.
"""

from __future__ import annotations

from pathlib import Path

import cuda_emulation
import pytest
from cuda_tolerance import with_tolerance
from kernel_runner import Prepared, num_rows, reference, type_of
from long_samples import linear_samples
from test_kernels import differences

from atsc.codegen.cuda import kernel_of
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.layout import is_tiled_by, store
from atsc.compiler.ir import Weight
from atsc.compiler.ops import all_ops

pytestmark = pytest.mark.toolchain


@pytest.mark.parametrize(("num_sms", "every"), [(1, 1), (8, 3)])
def test_kernels_equal_the_reference(num_sms: int, every: int, tmp_path: Path) -> None:
    """On one multiprocessor blocks are large; on eight, those that would be few are smaller."""
    op, gpu, cases = all_ops()["linear"], Gpu(90, num_sms), []
    for sample in list(linear_samples())[::every]:
        stored = tuple(
            store(x, slot.rstrip("?") == op.matrix_slot and is_tiled_by(x, True))
            if isinstance(x, Weight)
            else None
            for slot, x in zip(op.inputs, sample.inputs, strict=False)
        )
        operands = [s or type_of(x) for s, x in zip(stored, sample.inputs, strict=True)]
        few = num_rows(sample) <= 8
        kernel = kernel_of(op, sample.attrs, operands, [True] * len(op.outputs), few, gpu)
        assert kernel is not None
        sample = with_tolerance(sample, kernel)
        cases.append((Prepared(op, sample, kernel, stored), kernel))  # type: ignore[arg-type]
    library = cuda_emulation.build((kernel for _, kernel in cases), tmp_path)
    failures = []
    for case, kernel in cases:
        actual = cuda_emulation.run(op, case.sample, case.stored, kernel, library)
        expected = reference(case)[:-1]
        for problem in differences(case, actual, expected):
            failures.append(f"{num_rows(case.sample)} rows, {kernel.symbol}: {problem}")
    assert not failures, "\n".join(failures)
