"""Every CUDA kernel equals its operator's numpy reference on the operator's samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_runner import device, functions_of, gpu_missing, prepare_cuda, run_cuda
from kernel_runner import reference
from test_kernels import differences

from atsc.codegen.cuda import SM_LEVELS, level_of
from atsc.codegen.cuda_tiles import Gpu
from atsc.compiler.ops import OpDef, all_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing())]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with device() as found:
        yield found


def failures_of(op: OpDef, gpu: Gpu) -> list[str]:
    """What is wrong, a line a sample; kernels must not depend on what ran before them."""
    prepared = [p for sample in op.samples() if (p := prepare_cuda(op, sample, gpu))]
    functions = functions_of((p.kernel for p in prepared), gpu)
    failures = []
    for index, case in enumerate(prepared):
        expected = reference(case.cpu)
        expected = expected if expected[-1] else expected[:-1]
        for problem in differences(
            case.cpu, run_cuda(case, functions[case.kernel.symbol], gpu), expected
        ):
            where = f"sample {index} {dict(case.cpu.sample.attrs)} {case.kernel.symbol}"
            failures.append(f"{where}: {problem}")
    return failures


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_kernels_equal_the_reference(op: OpDef, gpu: Gpu) -> None:
    if not any(level_of(stem, SM_LEVELS[-1]) for stem in op.templates):
        pytest.skip(f"{op.name} has no CUDA template")
    failures = failures_of(op, gpu)
    assert not failures, "\n".join(failures)
