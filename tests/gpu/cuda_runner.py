"""Compiles the CUDA kernels of an operator's samples and runs them through the driver API."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda_tolerance import with_tolerance
from kernel_runner import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    Prepared,
    fill_caches,
    num_rows,
    q8_bytes,
    q8_value,
    read_caches,
    reference,
    type_of,
)
from long_samples import LONG_SAMPLES
from test_kernels import differences

from atsc.codegen.cpu import MATRIX_POINTERS
from atsc.codegen.cuda import CudaKernel, Launch, kernel_of, translation_units
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.layout import is_tiled_by, part_chunks, store, value_bytes
from atsc.codegen.nvrtc import CudaUnit, compile_cuda
from atsc.compiler.ir import DType, Weight
from atsc.compiler.ops import OpDef, Sample
from atsc.compiler.ops.quantize import Q8Array

GUARD = 256
"""Bytes of poison behind every buffer that a kernel writes."""
COUNTER_BYTES = 4096
"""templates/cuda/common/scratch.cuh kCounterBytes."""


class DeviceArgs(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_uint64 * MAX_INPUTS),
        ("outputs", ctypes.c_uint64 * MAX_OUTPUTS),
        ("round", ctypes.c_uint64),
        ("logit_rows", ctypes.c_uint64),
        ("k_cache", ctypes.c_uint64),
        ("v_cache", ctypes.c_uint64),
        ("kv_capacity", ctypes.c_int64),
        ("scratch", ctypes.c_uint64),
        ("rows_of", ctypes.c_int32),
    )


class DriverError(RuntimeError):
    pass


def call(name: str, *arguments: Any) -> Any:
    """A driver function's value; its error as an exception."""
    result, *values = getattr(driver, name)(*arguments)
    if int(result) != 0:
        raise DriverError(f"{name}: {result.name}")
    return values[0] if len(values) == 1 else tuple(values)


def gpu_missing() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    try:
        call("cuInit", 0)
        return "" if call("cuDeviceGetCount") else "there is no NVIDIA GPU"
    except (DriverError, RuntimeError) as error:
        return f"there is no NVIDIA GPU: {error}"


@contextmanager
def device() -> Iterator[Gpu]:
    """The first GPU, with its primary context current."""
    call("cuInit", 0)
    handle = call("cuDeviceGet", 0)
    context = call("cuDevicePrimaryCtxRetain", handle)
    call("cuCtxSetCurrent", context)

    def attribute(name: str) -> int:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", kind, handle))

    major, minor = (attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    try:
        yield Gpu(10 * major + minor, attribute("MULTIPROCESSOR_COUNT"))
    finally:
        call("cuDevicePrimaryCtxRelease", handle)


class Buffer:
    """Device memory, freed with the object."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.pointer = int(call("cuMemAlloc", max(num_bytes, 16)))

    @staticmethod
    def of(data: np.ndarray) -> Buffer:
        flat = np.ascontiguousarray(data).view(np.uint8).ravel()
        buffer = Buffer(flat.nbytes)
        call("cuMemcpyHtoD", buffer.pointer, flat.ctypes.data, flat.nbytes)
        return buffer

    def fill(self, byte: int) -> Buffer:
        call("cuMemsetD8", self.pointer, byte, self.num_bytes)
        return self

    def read(self) -> np.ndarray:
        data = np.empty(self.num_bytes, np.uint8)
        call("cuMemcpyDtoH", data.ctypes.data, self.pointer, self.num_bytes)
        return data

    def __del__(self) -> None:
        driver.cuMemFree(self.pointer)


def load_module(path: Path) -> Any:
    image = np.fromfile(path, np.uint8)
    return call("cuModuleLoadData", image.ctypes.data)


def compile_in_parallel(units: Sequence[CudaUnit]) -> list[Path]:
    """By processes, each with an NVRTC of its own: one compiles one unit at a time."""
    workers = min(len(units), len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return [path for (path,) in pool.map(compile_cuda, [[unit] for unit in units])]


def functions_of(kernels: Iterable[CudaKernel], gpu: Gpu) -> dict[str, Any]:
    """Symbol -> loaded function, allowed the shared memory that its launch asks for."""
    distinct = {kernel.symbol: kernel for kernel in kernels}
    units = [unit for kernel in distinct.values() for unit in translation_units([kernel], gpu.sm)]
    modules = [load_module(path) for path in compile_in_parallel(units)]
    functions = {}
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for (symbol, kernel), module in zip(distinct.items(), modules, strict=True):
        function = call("cuModuleGetFunction", module, symbol.encode())
        if shared := kernel.launch().shared_bytes:
            call("cuFuncSetAttribute", function, limit, shared)
        functions[symbol] = function
    return functions


@dataclass(frozen=True, slots=True)
class PreparedCuda:
    """A sample, its stored weights and its kernel; `cpu` is what the CPU harness calls prepared."""

    cpu: Prepared
    kernel: CudaKernel


def prepare_cuda(op: OpDef, sample: Sample, gpu: Gpu) -> PreparedCuda | None:
    """The kernel that serves a sample on a GPU; None if the operator has no CUDA template."""
    linear = op.name == "linear"
    stored = tuple(
        store(operand, slot.rstrip("?") == op.matrix_slot and is_tiled_by(operand, linear))
        if isinstance(operand, Weight)
        else None
        for slot, operand in zip(op.inputs, sample.inputs, strict=False)
    )
    operands = [s or type_of(operand) for s, operand in zip(stored, sample.inputs, strict=True)]
    few = num_rows(sample) <= 8
    kernel = kernel_of(op, sample.attrs, operands, [True] * len(op.outputs), few, gpu)
    if kernel is None:
        return None
    return PreparedCuda(Prepared(op, with_tolerance(sample, kernel), kernel, stored), kernel)  # type: ignore[arg-type]


def launch(plan: Launch, function: Any, args: DeviceArgs, stream: int = 0, **sizes: int) -> None:
    """Launch a kernel for `rows`, `kv_capacity` and `num_sms` in `sizes`."""
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    block, shared = (plan.block, 1, 1), plan.shared_bytes
    grid = plan.grid_of(**sizes)
    call("cuLaunchKernel", function, *grid, *block, shared, stream, ctypes.addressof(pointers), 0)


def scratch_of(plan: Launch, **sizes: int) -> Buffer:
    """Scratch of a launch, and a guard: counters of zero, poison behind them."""
    num_bytes = max(plan.scratch_of(**sizes), COUNTER_BYTES)
    scratch = Buffer(num_bytes + GUARD).fill(0xCD)
    call("cuMemsetD8", scratch.pointer, 0, COUNTER_BYTES)
    return scratch


def run_cuda(prepared: PreparedCuda, function: Any, gpu: Gpu) -> tuple[Any, ...]:
    """Run the kernel once; outputs like `kernel_runner.run`. Checks the guards behind outputs."""
    op, sample, stored = prepared.cpu.op, prepared.cpu.sample, prepared.cpu.stored
    rows = num_rows(sample)
    args, alive = DeviceArgs(), []

    def pointer(data: np.ndarray) -> int:
        alive.append(Buffer.of(data))
        return alive[-1].pointer

    index = 0
    for slot, operand, weight in zip(op.inputs, sample.inputs, stored, strict=False):
        if weight is not None:
            for offset, part in enumerate(weight.parts):
                chunks = [chunk.view(np.uint8).ravel() for chunk in part_chunks(weight, part)]
                args.inputs[index + offset] = pointer(np.concatenate(chunks))
        elif isinstance(operand, Q8Array):
            args.inputs[index] = pointer(q8_bytes(operand))
        elif operand is not None:
            args.inputs[index] = pointer(operand)
        index += MATRIX_POINTERS if slot.rstrip("?") == op.matrix_slot else 1

    types = op.infer(op.complete(sample.attrs), [type_of(operand) for operand in sample.inputs])
    outputs = []
    for place, kind in enumerate(types):
        size = value_bytes(kind.dtype, rows, int(kind.shape[-1]))
        outputs.append((Buffer(size + GUARD).fill(0xCD), size))
        args.outputs[place] = outputs[-1][0].pointer
    params = np.zeros(1, np.dtype([("position", "i8"), ("rows", "i4", 2)]))
    params["position"], params["rows"] = sample.position, rows
    args.round, args.logit_rows = pointer(params), pointer(np.arange(rows, dtype=np.int32))

    host_caches: list[np.ndarray] = []
    caches: list[Buffer] = []
    if op.name == "attention":
        args.kv_capacity, host_caches = fill_caches(op, sample, rows)
        caches = [Buffer.of(cache) for cache in host_caches]
        args.k_cache, args.v_cache = (cache.pointer for cache in caches)
    sizes = {"rows": rows, "kv_capacity": int(args.kv_capacity), "num_sms": gpu.num_sms}
    plan = prepared.kernel.launch()
    scratch = scratch_of(plan, **sizes)
    args.scratch = scratch.pointer
    launch(plan, function, args, **sizes)
    call("cuCtxSynchronize")
    left = scratch.read()
    assert not left[:COUNTER_BYTES].any(), f"{prepared.kernel.symbol} leaves counters above zero"
    assert (left[-GUARD:] == 0xCD).all(), f"{prepared.kernel.symbol} writes behind its scratch"

    results: list[Any] = []
    for kind, (buffer, size) in zip(types, outputs, strict=True):
        data, width = buffer.read(), int(kind.shape[-1])
        assert (data[size:] == 0xCD).all(), f"{prepared.kernel.symbol} writes behind its output"
        if kind.dtype is DType.Q8:
            results.append(q8_value(data[:size], rows, width))
        else:
            results.append(data[:size].view(np.float32).reshape(rows, width))
    for host, cache in zip(host_caches, caches, strict=True):
        host[...] = cache.read().view(np.float16).reshape(host.shape)
    if host_caches:
        results.append(read_caches(op, sample, rows, host_caches))
    return tuple(results)


def failures_of(op: OpDef, gpu: Gpu, every: int = 1) -> list[str]:
    """What is wrong, a line a sample, of every so many samples of an operator."""
    samples = [*op.samples(), *LONG_SAMPLES.get(op.name, tuple)()]
    prepared = [p for sample in samples[::every] if (p := prepare_cuda(op, sample, gpu))]
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
