"""Every CUDA kernel equals its operator's numpy reference on the operator's samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_runner import device, failures_of, gpu_missing

from atsc.codegen.cuda import has_cuda_template
from atsc.codegen.cuda_tiles import Gpu
from atsc.compiler.ops import OpDef, all_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing())]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with device() as found:
        yield found


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_kernels_equal_the_reference(op: OpDef, gpu: Gpu) -> None:
    if not has_cuda_template(op):
        pytest.skip(f"{op.name} has no CUDA template")
    failures = failures_of(op, gpu)
    assert not failures, "\n".join(failures)
