"""The CUDA argmax, which serves greedy sampling and is no operator of the graph."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cuda_runner import Buffer, DeviceArgs, device, functions_of, gpu_missing, launch, scratch_of

from atsc.codegen.cuda import CudaKernel
from atsc.codegen.cuda_tiles import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing())]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with device() as found:
        yield found


def argmax(x: np.ndarray, gpu: Gpu) -> np.ndarray:
    rows, width = x.shape
    kernel = CudaKernel("argmax", 75, f"argmax_{width}", {"width": width})
    function = functions_of([kernel], gpu)[kernel.symbol]
    params = np.zeros(1, np.dtype([("position", "i8"), ("rows", "i4", 2)]))
    params["rows"] = rows
    scratch = scratch_of(kernel.launch(), rows=rows)
    logits, chosen, round_params = Buffer.of(x), Buffer(4 * rows).fill(0xCD), Buffer.of(params)
    args = DeviceArgs(round=round_params.pointer, scratch=scratch.pointer)
    args.inputs[0], args.outputs[0] = logits.pointer, chosen.pointer
    for _ in range(2):  # counters are left at zero
        launch(kernel.launch(), function, args, rows=rows)
    return chosen.read().view(np.int32)


@pytest.mark.parametrize(("rows", "width"), [(1, 151936), (3, 49152), (8, 45), (2, 8192)])
def test_argmax(rows: int, width: int, gpu: Gpu) -> None:
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    assert np.array_equal(argmax(x, gpu), x.argmax(axis=1))


def test_the_first_of_equal_ones_wins(gpu: Gpu) -> None:
    x = np.full((3, 40000), -np.inf, np.float32)
    x[0, [31000, 777, 9000]] = 5
    x[1, [39999, 8192, 8191]] = -1e30
    assert argmax(x, gpu).tolist() == [777, 8191, 0]
