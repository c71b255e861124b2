"""CUDA C++ to binaries, by NVRTC or else by nvcc: no GPU is needed, and with NVRTC no toolkit.

The only module that imports `cuda.bindings.nvrtc`. Binaries are cached by content like the CPU
objects: source, every header that a kernel may include, options, compiler and its version. Kernels
include no header of CUDA's, since NVRTC's package carries none: common/numbers.cuh has conversions.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atsc.codegen.render import TEMPLATES
from atsc.codegen.toolchain import RUNTIME_SOURCES, cache_dir, check_unchanged, headers_digest
from atsc.compiler.errors import CodegenError

CUDA_COMMON = TEMPLATES / "cuda" / "common"
HEADERS = (RUNTIME_SOURCES / "device_kernel.h",)
BASE_OPTIONS = ("--std=c++20", f"-I{RUNTIME_SOURCES}", f"-I{CUDA_COMMON}")
ADVICE = "install the extra atsc[cuda] (no toolkit needed), or a CUDA toolkit whose nvcc is in PATH"


@dataclass(frozen=True, slots=True)
class CudaUnit:
    """One translation unit for one compute capability, 90 for sm_90."""

    name: str
    source: str
    sm: int
    ptx: bool = False
    """PTX, which the drivers of later GPUs compile, in place of a binary for this one."""


@dataclass(frozen=True, slots=True)
class CudaCompiler:
    """A compiler of CUDA C++; `compile` returns a binary or PTX, or raises CodegenError."""

    version: str
    compile: Callable[[CudaUnit], bytes]


def compile_cuda(units: Sequence[CudaUnit]) -> list[Path]:
    """Compile to .cubin or .ptx files, in parallel, through the cache; order is kept.

    Raises:
        CodegenError: there is no compiler, or it refuses a unit; carries its first error lines.
    """
    compiler = find_cuda_compiler()
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda unit: _compile_one(compiler, unit), units))


@functools.cache
def find_cuda_compiler() -> CudaCompiler:
    """NVRTC if its packages are installed, else nvcc.

    Raises:
        CodegenError: there is neither.
    """
    try:
        from cuda.bindings import nvrtc

        result, major, minor = nvrtc.nvrtcVersion()
        if int(result) == 0:
            version = f"nvrtc {major}.{minor}"
            return CudaCompiler(version, functools.partial(_compile_by_nvrtc, nvrtc))
    except (ImportError, RuntimeError):  # no bindings; no library behind them
        pass
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CodegenError(f"no compiler for CUDA kernels was found; {ADVICE}")
    shown = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    return CudaCompiler(shown.stdout, functools.partial(_compile_by_nvcc, nvcc))


def _compile_one(compiler: CudaCompiler, unit: CudaUnit) -> Path:
    digest = headers_digest(_headers())
    identity = "\0".join([compiler.version, *BASE_OPTIONS, digest, _architecture(unit)])
    key = hashlib.sha256(f"{identity}\0{unit.source}".encode()).hexdigest()
    target = cache_dir() / "cuda" / key[:2] / f"{key}.{'ptx' if unit.ptx else 'cubin'}"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    binary = compiler.compile(unit)
    check_unchanged(unit.name, _headers(), digest)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "built"
        built.write_bytes(binary)
        os.replace(built, target)
    return target


def _headers() -> list[Path]:
    return [*HEADERS, *sorted(CUDA_COMMON.glob("*.cuh"))]


def _architecture(unit: CudaUnit) -> str:
    return f"{'compute' if unit.ptx else 'sm'}_{unit.sm}"


def _compile_by_nvrtc(nvrtc: Any, unit: CudaUnit) -> bytes:
    def call(name: str, *arguments: Any) -> Any:
        result, *values = getattr(nvrtc, name)(*arguments)
        if int(result) != 0:
            raise CodegenError(f"compiling {unit.name}: {name} answers {result.name}")
        return values[0] if values else None

    program = call(
        "nvrtcCreateProgram", unit.source.encode(), f"{unit.name}.cu".encode(), 0, None, None
    )
    try:
        options = [f"--gpu-architecture={_architecture(unit)}", "-default-device", *BASE_OPTIONS]
        encoded = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(result) != 0:
            log = bytearray(call("nvrtcGetProgramLogSize", program))
            call("nvrtcGetProgramLog", program, log)
            raise CodegenError(_failure(unit, "NVRTC", log.decode(errors="replace")))
        kind = "PTX" if unit.ptx else "CUBIN"
        binary = bytearray(call(f"nvrtcGet{kind}Size", program))
        call(f"nvrtcGet{kind}", program, binary)
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile_by_nvcc(nvcc: str, unit: CudaUnit) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / f"{unit.name}.cu", Path(folder) / "built"
        source.write_text(unit.source)
        kind = "-ptx" if unit.ptx else "-cubin"
        target = f"-arch={_architecture(unit)}"
        command = [nvcc, target, kind, "--expt-relaxed-constexpr", *BASE_OPTIONS]
        result = subprocess.run(
            [*command, "-o", str(built), str(source)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise CodegenError(_failure(unit, "nvcc", result.stderr or result.stdout))
        return built.read_bytes()


def _failure(unit: CudaUnit, compiler: str, log: str) -> str:
    lines = [line.strip("\0 ") for line in log.splitlines()]
    errors = [line for line in lines if "error" in line.lower()] or [*filter(None, lines)]
    first = "; ".join(errors[:3])
    return f"compiling {unit.name} for {_architecture(unit)} with {compiler} failed: {first}"
