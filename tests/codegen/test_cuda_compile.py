"""Every CUDA template compiles for every level, with the launch that it asks for: needs no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from kernel_runner import num_rows, type_of

from atsc.codegen.cuda import SM_LEVELS, CudaKernel, evaluate, kernel_of, translation_units
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.layout import is_tiled_by, store
from atsc.codegen.nvrtc import CudaUnit, compile_cuda, find_cuda_compiler
from atsc.compiler.errors import CodegenError
from atsc.compiler.ir import Weight
from atsc.compiler.ops import OpDef, Sample, all_ops


def _has_compiler() -> bool:
    try:
        return bool(find_cuda_compiler().version)
    except CodegenError:
        return False


pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(not _has_compiler(), reason="needs NVRTC (atsc[cuda]) or nvcc"),
]


def kernel_of_sample(op: OpDef, sample: Sample, gpu: Gpu) -> CudaKernel | None:
    operands = [
        store(x, slot.rstrip("?") == op.matrix_slot and is_tiled_by(x, op.name == "linear"))
        if isinstance(x, Weight)
        else type_of(x)
        for slot, x in zip(op.inputs, sample.inputs, strict=False)
    ]
    few = num_rows(sample) <= 8
    return kernel_of(op, sample.attrs, operands, [True] * len(op.outputs), few, gpu)


def kernels(gpu: Gpu) -> Iterator[CudaKernel]:
    """Of each template the kernels of a few samples, spread over all of them."""
    found: dict[str, dict[str, CudaKernel]] = {}
    for op in all_ops().values():
        for sample in op.samples():
            if kernel := kernel_of_sample(op, sample, gpu):
                found.setdefault(kernel.template, {})[kernel.symbol] = kernel
    for of_template in found.values():
        distinct = list(of_template.values())
        yield from distinct[:: max(1, len(distinct) // 3)]


@pytest.mark.parametrize("sm", SM_LEVELS)
def test_templates_compile(sm: int) -> None:
    units = translation_units(kernels(Gpu(sm, 30)), sm)
    assert {unit.name for unit in units} >= {"quantize"}
    for unit, path in zip(units, compile_cuda(units), strict=True):
        assert path.read_bytes()[:4] == b"\x7fELF", unit.name


def test_ptx_serves_later_gpus() -> None:
    unit = next(unit for unit in translation_units(kernels(Gpu(120, 30)), 120, ptx=True))
    (path,) = compile_cuda([unit])
    assert path.suffix == ".ptx"
    assert b".target sm_120" in path.read_bytes()


def test_launches_are_whole_for_all_rows() -> None:
    for kernel, rows in itertools.product(kernels(Gpu(90, 132)), (1, 8, 9, 512)):
        launch = kernel.launch()
        sizes = {"rows": rows, "kv_capacity": 64, "num_sms": 132}
        assert launch.block % 32 == 0 and 32 <= launch.block <= 1024, kernel.symbol
        assert all(count > 0 for count in launch.grid_of(**sizes)), kernel.symbol
        assert launch.scratch_of(**sizes) >= 0


def test_an_error_names_template_and_line() -> None:
    with pytest.raises(CodegenError, match=r"compiling wrong for sm_75 .*undefined"):
        compile_cuda([CudaUnit("wrong", "__global__ void f() { undefined(); }", 75)])


def test_launch_expressions() -> None:
    assert evaluate("(rows + 63) / 64 * 3", {"rows": 65}) == 6
    with pytest.raises(CodegenError, match="holds 'open'"):
        evaluate("open(rows)", {"rows": 1})
