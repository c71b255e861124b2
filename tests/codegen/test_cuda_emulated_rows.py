"""The CUDA kernels of attention and the row-wise operators, run on the CPU as the GPU runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import cuda_emulation
import numpy as np
import pytest
from cuda_tolerance import with_tolerance
from kernel_runner import Prepared, num_rows, reference, type_of
from long_samples import LONG_SAMPLES
from test_kernels import differences

from atsc.codegen.cuda import kernel_of
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.layout import store
from atsc.compiler.ir import Weight
from atsc.compiler.ops import Sample, all_ops
from atsc.compiler.ops.attention import random_sample

pytestmark = pytest.mark.toolchain


def failures_of(name: str, samples: Iterable[Sample], gpu: Gpu, folder: Path) -> list[str]:
    op, cases = all_ops()[name], []
    for sample in samples:
        stored = tuple(store(x, False) if isinstance(x, Weight) else None for x in sample.inputs)
        operands = [s or type_of(x) for s, x in zip(stored, sample.inputs, strict=True)]
        few = num_rows(sample) <= 8
        kernel = kernel_of(op, sample.attrs, operands, [True] * len(op.outputs), few, gpu)
        assert kernel is not None
        case = Prepared(op, with_tolerance(sample, kernel), kernel, stored)  # type: ignore[arg-type]
        cases.append((case, kernel))
    library = cuda_emulation.build((kernel for _, kernel in cases), folder)
    failures = []
    for index, (case, kernel) in enumerate(cases):
        run = (op, case.sample, case.stored, kernel, library, gpu.num_sms)
        expected = reference(case)
        expected = expected if expected[-1] else expected[:-1]
        for problem in differences(case, cuda_emulation.run(*run), expected):
            failures.append(f"sample {index}, {kernel.symbol}: {problem}")
    return failures


ROW_WISE = (
    *("quantize", "rms_norm", "layer_norm", "rope", "add_positions"),
    *("div", "gated_activation", "select_rows"),
)


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise_operators(name: str, tmp_path: Path) -> None:
    samples = [s for s in all_ops()[name].samples() if num_rows(s) < 64]
    some = [*samples[:: max(1, len(samples) // 5)], *LONG_SAMPLES.get(name, tuple)()]
    assert not failures_of(name, some, Gpu(90, 4), tmp_path)


def attention_samples() -> Iterator[Sample]:
    """With and without splits, windows whose ring wraps, head sizes that fill no whole product."""
    rng = np.random.default_rng(5)
    yield random_sample(rng, 6, 2, 64, 3, 301, 0, 0.0, norm=True)
    yield random_sample(rng, 6, 2, 64, 1, 20, 0, 0.0, norm=True)
    yield random_sample(rng, 5, 1, 72, 7, 400, 330, 5.0, sinks=True, packed=False)
    yield random_sample(rng, 2, 1, 136, 2, 60, 0, 0.0)
    yield random_sample(rng, 5, 1, 64, 20, 530, 0, 0.0, norm=True)
    yield random_sample(rng, 3, 1, 72, 11, 700, 600, 5.0, sinks=True, packed=False)
    yield random_sample(rng, 4, 2, 72, 40, 0, 16, 5.0, sinks=True, packed=False)
    yield random_sample(rng, 2, 1, 136, 9, 40, 0, 0.0)


@pytest.mark.parametrize("gpu", [Gpu(90, 4), Gpu(75, 9)], ids=lambda gpu: f"sm{gpu.sm}")
def test_attention(gpu: Gpu, tmp_path: Path) -> None:
    """Two stages of shared memory on sm_90, one on sm_75."""
    assert not failures_of("attention", attention_samples(), gpu, tmp_path)
