"""Runs CUDA kernels on the CPU, block after block (emulation/emulation.h), without a GPU.

Kernels may use CUDA C++ and what common/ptx.cuh and common/tensor_cores.cuh declare; of these two
there are versions in C++. Their source is compiled as it is but for the declaration of dynamic
shared memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from kernel_runner import (
    COUNTER_BYTES,
    MAX_INPUTS,
    MAX_OUTPUTS,
    aligned,
    fill_caches,
    num_rows,
    q8_bytes,
    q8_value,
    read_caches,
    type_of,
)

from atsc.codegen.cpu import MATRIX_POINTERS
from atsc.codegen.cuda import CudaKernel
from atsc.codegen.layout import StoredWeight, part_chunks, value_bytes
from atsc.codegen.nvrtc import CUDA_COMMON
from atsc.codegen.toolchain import Unit, cache_dir, compile_units, link_library
from atsc.compiler.ir import DType
from atsc.compiler.ops import OpDef, Sample
from atsc.compiler.ops.quantize import Q8Array

EMULATION = Path(__file__).parent / "emulation"
GUARD = 256
RUN = """
extern "C" void run_{symbol}(const atsc::DeviceArgs* args, int blocks) {{
  atsc::block.args = args;
  atsc::grid = {{blocks, 1, 1}};
  atsc::block.body = [](const void* p) {{ {symbol}(*static_cast<const atsc::DeviceArgs*>(p)); }};
  for (int i = 0; i < blocks; ++i) atsc::run_block({{i, 0, 0}}, {threads});
}}
"""


class DeviceArgs(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_void_p * MAX_INPUTS),
        ("outputs", ctypes.c_void_p * MAX_OUTPUTS),
        ("round", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("kv_capacity", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("rows_of", ctypes.c_int32),
    )


def _headers() -> Path:
    """The kernels' headers, two of them replaced; a folder of the cache that its content names."""
    files = {path.name: path for path in [*CUDA_COMMON.glob("*.cuh"), *EMULATION.iterdir()]}
    digest = hashlib.sha256(b"".join(files[name].read_bytes() for name in sorted(files)))
    folder = cache_dir() / "emulation" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
    return folder


def build(kernels: Iterable[CudaKernel], folder: Path) -> ctypes.CDLL:
    """One library with all kernels, for the CPU."""
    headers = _headers()
    flags = (
        f"-I{headers}",
        "-fvisibility=default",
        "-fexceptions",
        "-w",
        "-O1",
        "-march=x86-64-v3",
    )
    units = []
    for kernel in {kernel.symbol: kernel for kernel in kernels}.values():
        source, count = re.subn(
            r"extern __shared__ __align__\(\d+\) u8 shared\[\];",
            "u8* const shared = dynamic_shared;",
            kernel.source(),
        )
        launch = kernel.launch()
        assert count == (1 if launch.shared_bytes else 0)
        run = RUN.format(symbol=kernel.symbol, threads=launch.block)
        text = f'#include "emulation.h"\n{source}\n{run}'
        units.append(Unit(kernel.template, text, flags))
    library = folder / "kernels.so"
    link_library(compile_units(units), library)
    return ctypes.CDLL(str(library))


def run(
    op: OpDef,
    sample: Sample,
    stored: Iterable[StoredWeight | None],
    kernel: CudaKernel,
    library: ctypes.CDLL,
    num_sms: int = 1,
) -> tuple[Any, ...]:
    """Run a kernel on a sample; outputs like `kernel_runner.run`."""
    rows, args, alive = num_rows(sample), DeviceArgs(), []

    def pointer(data: np.ndarray) -> int:
        memory = aligned(max(data.nbytes, 1))
        memory[: data.nbytes] = np.ascontiguousarray(data).view(np.uint8).ravel()
        alive.append(memory)
        return int(memory.ctypes.data)

    index = 0
    for slot, operand, weight in zip(op.inputs, sample.inputs, stored, strict=False):
        if weight is not None:
            for offset, part in enumerate(weight.parts):
                chunks = [chunk.view(np.uint8).ravel() for chunk in part_chunks(weight, part)]
                args.inputs[index + offset] = pointer(np.concatenate(chunks))
        elif operand is not None:
            args.inputs[index] = pointer(
                q8_bytes(operand) if isinstance(operand, Q8Array) else operand
            )
        index += MATRIX_POINTERS if slot.rstrip("?") == op.matrix_slot else 1
    params = np.zeros(1, np.dtype([("position", "i8"), ("rows", "i4", 2)]))
    params["position"], params["rows"] = sample.position, rows
    args.round, args.logit_rows = pointer(params), pointer(np.arange(rows, dtype=np.int32))

    types = op.infer(op.complete(sample.attrs), [type_of(operand) for operand in sample.inputs])
    outputs = []
    for place, kind in enumerate(types):
        size = value_bytes(kind.dtype, rows, int(kind.shape[-1]))
        outputs.append(aligned(size + GUARD))
        outputs[-1][:] = 0xCD
        args.outputs[place] = outputs[-1].ctypes.data
    caches: list[np.ndarray] = []
    if op.name == "attention":
        args.kv_capacity, caches = fill_caches(op, sample, rows)
        args.k_cache, args.v_cache = (cache.ctypes.data for cache in caches)
    sizes = {"rows": rows, "kv_capacity": int(args.kv_capacity), "num_sms": num_sms}
    scratch = aligned(max(COUNTER_BYTES, kernel.launch().scratch_of(**sizes)) + GUARD)
    scratch[COUNTER_BYTES:] = 0xCD
    args.scratch = scratch.ctypes.data
    x, y, z = kernel.launch().grid_of(**sizes)
    assert (y, z) == (1, 1)
    getattr(library, f"run_{kernel.symbol}")(ctypes.byref(args), x)
    assert not scratch[:COUNTER_BYTES].any(), f"{kernel.symbol} leaves counters above zero"
    assert (scratch[-GUARD:] == 0xCD).all(), f"{kernel.symbol} writes behind its scratch"

    results: list[Any] = []
    for kind, memory in zip(types, outputs, strict=True):
        width = int(kind.shape[-1])
        assert (memory[-GUARD:] == 0xCD).all(), f"{kernel.symbol} writes behind its output"
        if kind.dtype is DType.Q8:
            results.append(q8_value(memory[:-GUARD], rows, width))
        else:
            results.append(memory[:-GUARD].view(np.float32).reshape(rows, width))
    if caches:
        results.append(read_caches(op, sample, rows, caches))
    return tuple(results)
