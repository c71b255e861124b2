"""CUDA attention over contexts long enough that tokens are split between blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from cuda_runner import device, failures_of, functions_of, gpu_missing, prepare_cuda, run_cuda
from test_kernels import same_bits

from atsc.codegen.cuda_tiles import Gpu
from atsc.compiler.ops import Sample, all_ops
from atsc.compiler.ops.attention import random_sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing())]

OP = all_ops()["attention"]
LONG = (
    # heads, kv heads, size, rows, past, window
    (40, 8, 128, 1, 2047, 0),
    (40, 8, 128, 7, 3001, 0),
    (20, 4, 128, 2, 5000, 1500),
    (32, 32, 96, 1, 700, 0),
    (8, 1, 256, 3, 4000, 0),
    (6, 2, 80, 5, 1999, 0),
    (40, 8, 128, 64, 2000, 0),
    (16, 4, 128, 30, 5000, 1600),
    (4, 1, 64, 130, 1500, 0),
    (4, 2, 256, 20, 1800, 0),
    (6, 2, 80, 100, 1111, 0),
    (5, 1, 120, 9, 3000, 0),
)


def long_samples() -> Iterator[Sample]:
    rng = np.random.default_rng(3)
    for index, (heads, kv_heads, size, rows, past, window) in enumerate(LONG):
        yield random_sample(
            rng,
            heads,
            kv_heads,
            size,
            rows,
            past,
            window,
            softcap=20.0 if index % 4 == 2 else 0.0,
            norm=index % 2 == 0,
            sinks=index % 3 == 1,
            packed=index % 3 != 2,
        )


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with device() as found:
        yield found


def test_long_contexts(gpu: Gpu) -> None:
    failures = failures_of(dataclasses.replace(OP, samples=long_samples), gpu)
    assert not failures, "\n".join(failures)


def test_results_are_the_same_every_time(gpu: Gpu) -> None:
    """However blocks are scheduled, splits are joined in order."""
    prepared = [p for sample in long_samples() if (p := prepare_cuda(OP, sample, gpu))]
    functions = functions_of((p.kernel for p in prepared), gpu)
    assert len(prepared) == len(LONG)
    for case in prepared:
        function = functions[case.kernel.symbol]
        first = run_cuda(case, function, gpu)
        assert all(same_bits(first, run_cuda(case, function, gpu)) for _ in range(5))
