"""Every CUDA template compiles for every level, with the launch that it asks for: needs no GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_runner import num_rows, type_of

from atsc.codegen import nvrtc
from atsc.codegen.cuda import (
    SM_LEVELS,
    CudaKernel,
    evaluate,
    kernel_of,
    launch_in,
    translation_units,
)
from atsc.codegen.cuda_tiles import SHARED_BYTES, Gpu
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


@functools.cache
def all_kernels(sm: int) -> list[CudaKernel]:
    """The kernels of all samples, each once."""
    gpu = Gpu(sm, 30)
    found = (kernel_of_sample(op, x, gpu) for op in all_ops().values() for x in op.samples())
    return list({kernel.symbol: kernel for kernel in found if kernel}.values())


def some_kernels(sm: int) -> Iterator[CudaKernel]:
    """One kernel of each template; another one for every compute capability."""
    of_template: dict[str, list[CudaKernel]] = {}
    for kernel in all_kernels(sm):
        of_template.setdefault(kernel.template, []).append(kernel)
    for found in of_template.values():
        yield found[SM_LEVELS.index(sm) * len(found) // len(SM_LEVELS)]


@pytest.mark.parametrize("sm", SM_LEVELS)
def test_templates_compile(sm: int) -> None:
    units = translation_units(some_kernels(sm), sm)
    assert {unit.name for unit in units} >= {"quantize", "linear_gemv_blocks", "linear_gemm_blocks"}
    for unit, path in zip(units, compile_cuda(units), strict=True):
        assert path.read_bytes()[:4] == b"\x7fELF", unit.name


def test_ptx_serves_later_gpus() -> None:
    units = translation_units(some_kernels(120), 120, ptx=True)
    (path,) = compile_cuda([unit for unit in units if unit.name == "quantize"])
    assert path.suffix == ".ptx"
    assert b".target sm_120" in path.read_bytes()


@pytest.mark.parametrize("sm", SM_LEVELS)
def test_launches_suit_the_gpu(sm: int) -> None:
    for kernel in all_kernels(sm):
        launch = kernel.launch()
        assert launch.block % 32 == 0 and 32 <= launch.block <= 1024, kernel.symbol
        assert launch.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES[89]), kernel.symbol
        for rows in (1, 8, 9, 512):
            sizes = {"rows": rows, "kv_capacity": 64, "num_sms": 30}
            assert all(count > 0 for count in launch.grid_of(**sizes)), kernel.symbol
            assert launch.scratch_of(**sizes) >= 0


def test_a_launch_line_cannot_be_missing() -> None:
    kernel = all_kernels(90)[0]
    source = re.sub(r"//@ scratch.*", "", kernel.source())
    with pytest.raises(CodegenError, match="no launch line //@ scratch"):
        launch_in(source, "cuda/some.cu.j2")


def test_an_error_names_template_and_line() -> None:
    with pytest.raises(CodegenError, match=r"compiling wrong for sm_75 .*undefined"):
        compile_cuda([CudaUnit("wrong", "__global__ void f() { undefined(); }", 75)])


def test_headers_that_change_while_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The binary of a mixture is not kept, and the next one is of what is there then."""
    monkeypatch.setenv("ATSC_CACHE_DIR", str(tmp_path / "cache"))
    header, unit = tmp_path / "number.h", CudaUnit("number", "", 90)
    monkeypatch.setattr(nvrtc, "HEADERS", (header,))

    def compile_and_change(_: CudaUnit) -> bytes:
        binary = header.read_bytes()
        header.write_text("2")
        return binary

    compiler = nvrtc.CudaCompiler("fake", compile_and_change)
    monkeypatch.setattr(nvrtc, "find_cuda_compiler", lambda: compiler)
    header.write_text("1")
    with pytest.raises(CodegenError, match="headers were changed meanwhile; compile again"):
        compile_cuda([unit])
    (path,) = compile_cuda([unit])
    assert path.read_text() == "2"


def test_launch_expressions() -> None:
    assert evaluate("(rows + 63) / 64 * 3", {"rows": 65}) == 6
    with pytest.raises(CodegenError, match="holds 'open'"):
        evaluate("open(rows)", {"rows": 1})
