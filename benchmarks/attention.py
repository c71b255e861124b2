"""Attention kernels against this machine's limits: `python benchmarks/attention.py [--json]`.

Decode: time of a plain read of the layers' K and V over time of the kernel (1 is the limit of
memory). Prefill: multiply-adds that the causal mask leaves a second, over what independent
multiply-adds reach (1 is the limit of arithmetic). One thread, SmolLM2-135M's shape unless told
otherwise; both sides alternate, and the medians of their CPU times are compared.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from atsc.codegen.cpu import ISA_LEVELS, Kernel, kernels_of, translation_units
from atsc.codegen.layout import StoredWeight, store
from atsc.codegen.toolchain import Unit, compile_units, link_library
from atsc.compiler.ir import ArraySource, DType, FloatFormat, TensorType, Weight
from atsc.compiler.ops import all_ops

DECODE = ((1, 128), (1, 2048), (1, 16384), (4, 2048))
PREFILL = ((512, 0), (2048, 0), (512, 3584), (64, 448))


class Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("rows", "position", "heads", "kv_heads", "size", "layers")
    )


def attention_kernel(
    heads: int, kv_heads: int, size: int, few_rows: bool, isa: str = "avx2"
) -> Kernel:
    """The kernel for packed q, k, v with rotary embedding."""
    op = all_ops()["attention"]
    packed = TensorType(DType.F32, ("M", (heads + 2 * kv_heads) * size))
    source = ArraySource(DType.F32, (1, size // 2), lambda: np.zeros((1, size // 2), np.float32))
    angles: StoredWeight = store(
        Weight("angles", (1, size // 2), FloatFormat(DType.F32), {"data": source}), False
    )
    attrs: dict[str, Any] = {
        "layer": 0,
        "num_heads": heads,
        "kv_heads": kv_heads,
        "head_size": size,
        "scale": size**-0.5,
    }
    operands = [packed, None, None, angles, angles]
    return kernels_of(op, attrs, operands, [True], few_rows)[isa]


def build(kernels: list[Kernel], folder: Path) -> ctypes.CDLL:
    timing = (Path(__file__).parent / "attention_timing.cc").read_text()
    units = [*translation_units(kernels), Unit("timing", timing, ISA_LEVELS[0].flags)]
    visible = [Unit(u.name, u.source, (*u.flags, "-fvisibility=default")) for u in units]
    link_library(compile_units(visible), folder / "attention.so")
    library = ctypes.CDLL(str(folder / "attention.so"))
    library.new_timer.restype = ctypes.c_void_p
    for name in ("time_kernel", "time_read", "time_multiply_adds"):
        getattr(library, name).restype = ctypes.c_double
    return library


def measure(library: ctypes.CDLL, kernel: Kernel, shape: Shape, repeats: int) -> dict[str, Any]:
    """Medians of alternating runs."""
    address = ctypes.addressof(ctypes.c_char.in_dll(library, kernel.symbol))
    timer = ctypes.c_void_p(library.new_timer(ctypes.c_void_p(address), ctypes.byref(shape)))
    rows, past = shape.rows, shape.position
    products = 2 * shape.heads * shape.size * (rows * past + rows * (rows + 1) // 2)
    few_rows = rows <= 8
    count = 24_000_000
    times, limits = [], []
    for _ in range(repeats + 1):
        times.append(library.time_kernel(timer) / shape.layers)
        if few_rows:
            limits.append(library.time_read(timer) / shape.layers)
        else:
            limits.append(
                library.time_multiply_adds(ctypes.c_int64(count)) * products / (8 * count)
            )
    library.delete_timer(timer)
    seconds, limit = statistics.median(times[1:]), statistics.median(limits[1:])
    return {
        "rows": rows,
        "past": past,
        "limit": "read" if few_rows else "multiply-adds",
        "us": seconds * 1e6,
        "gflops": 2 * products / seconds / 1e9,
        "of_limit": limit / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--heads", type=int, nargs=3, default=(9, 3, 64), metavar=("H", "G", "D"))
    parser.add_argument("--isa", default="avx2", choices=("avx2", "avx512"))
    parser.add_argument("--layers", type=int, default=30, help="caches to rotate over in decode")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    heads, kv_heads, size = options.heads
    decode, prefill = (
        attention_kernel(heads, kv_heads, size, few, options.isa) for few in (True, False)
    )
    with tempfile.TemporaryDirectory() as folder:
        library = build([decode, prefill], Path(folder))
        results = []
        for rows, past in (*DECODE, *PREFILL):
            few = rows <= 8
            shape = Shape(rows, past, heads, kv_heads, size, options.layers if few else 1)
            results.append(measure(library, decode if few else prefill, shape, options.repeats))
            if not options.json:
                row = results[-1]
                print(
                    f"rows {rows:5} past {past:6}  {row['us']:10.1f} us a layer"
                    f"  {row['gflops']:6.1f} GFLOP/s  {row['of_limit']:5.2f} of {row['limit']}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": results}))


if __name__ == "__main__":
    main()
