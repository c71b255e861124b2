"""Tests and times the CUDA kernels of attention and the row-wise operators on the first GPU.

    python benchmarks/gpu_operators.py [--json FILE] [--only test|time] [--sweep]

Shapes are those of Qwen3-14B (40 heads on 8 kv heads of 128), and of models with other head sizes.
Caches rotate through more memory than the L2 cache holds; launches are replayed from a graph; a
figure is the median of the replays. `gb_per_s` counts the operator's own cost in bytes, `tera_ops`
in operations (compiler/ops).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path += [
    str(ROOT / "benchmarks"),
    str(ROOT / "tests" / "codegen"),
    str(ROOT / "tests" / "gpu"),
]
if importlib.util.find_spec("atsc") is None:  # a bare machine; a checkout would hide atsc.load
    sys.path.append(str(ROOT / ".links"))

from cuda_runner import (  # noqa: E402
    Buffer,
    DeviceArgs,
    PreparedCuda,
    call,
    device,
    failures_of,
    functions_of,
    gpu_missing,
    launch,
    prepare_cuda,
    scratch_of,
)
from gpu_kernels import ROTATED_BYTES, seconds_of  # noqa: E402
from kernel_runner import num_rows, type_of  # noqa: E402

from atsc.codegen.cuda import has_cuda_template  # noqa: E402
from atsc.codegen.cuda_tiles import Gpu, attention_prefill_tile  # noqa: E402
from atsc.codegen.layout import part_chunks, value_bytes  # noqa: E402
from atsc.compiler.ir import DType, Weight  # noqa: E402
from atsc.compiler.ops import Sample, all_ops  # noqa: E402
from atsc.compiler.ops.attention import random_sample  # noqa: E402
from atsc.compiler.ops.linear import random_float_weight  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator's sample; `past` tokens are in the cache."""

    name: str
    op: str
    sample: Sample


def attention(heads: int, kv_heads: int, size: int, rows: int, total: int, window: int = 0) -> Case:
    rng = np.random.default_rng(0)
    sample = random_sample(
        rng, heads, kv_heads, size, rows, total - rows, window, 0.0, norm=size == 128
    )
    name = f"attention {heads}/{kv_heads} x {size} rows {rows} T {total} window {window}"
    return Case(name, "attention", sample)


def cases() -> Iterator[Case]:
    for total in (128, 512, 2048, 2064, 4096, 16384):
        yield attention(40, 8, 128, 1, total)
    yield attention(40, 8, 128, 8, 2048)
    yield attention(32, 32, 128, 1, 2048)
    yield attention(9, 3, 64, 1, 2048)
    yield attention(8, 4, 256, 1, 4096)
    yield attention(64, 8, 64, 1, 4096, window=128)
    for rows, total in ((512, 512), (512, 2048), (512, 4096), (2048, 4096), (64, 4096)):
        yield attention(40, 8, 128, rows, total)
    yield attention(32, 8, 64, 512, 4096)
    yield attention(8, 4, 256, 512, 4096)
    yield attention(64, 8, 64, 512, 4096, window=128)
    rng = np.random.default_rng(0)
    weight = random_float_weight(rng, (5120,), DType.F32)
    for rows in (1, 8, 512):
        x, residual = rng.standard_normal((2, rows, 5120), np.float32)
        wide = rng.standard_normal((rows, 17408), np.float32)
        yield Case(f"rms_norm rows {rows}", "rms_norm", Sample({"eps": 1e-6}, (x, weight)))
        inputs = (x, weight, residual)
        yield Case(f"rms_norm + residual rows {rows}", "rms_norm", Sample({"eps": 1e-6}, inputs))
        inputs = (x, weight, weight)
        yield Case(f"layer_norm rows {rows}", "layer_norm", Sample({"eps": 1e-6}, inputs))
        yield Case(f"quantize 5120 rows {rows}", "quantize", Sample({}, (x,)))
        yield Case(f"quantize 17408 rows {rows}", "quantize", Sample({}, (wide,)))
        yield Case(f"add rows {rows}", "add", Sample({}, (x, residual)))


def arguments(prepared: PreparedCuda, gpu: Gpu) -> tuple[list[DeviceArgs], list[Buffer]]:
    """Launch arguments, with several caches if it reads one; and what keeps their memory."""
    op, sample = prepared.cpu.op, prepared.cpu.sample
    rows, alive, copies = num_rows(sample), [], 1
    attrs, args = op.complete(sample.attrs), DeviceArgs()

    def pointer(data: np.ndarray) -> int:
        alive.append(Buffer.of(data))
        return alive[-1].pointer

    for place, (operand, stored) in enumerate(zip(sample.inputs, prepared.cpu.stored, strict=True)):
        if isinstance(operand, Weight):
            assert stored is not None
            chunks = [c.view(np.uint8).ravel() for c in part_chunks(stored, stored.parts[0])]
            args.inputs[place] = pointer(np.concatenate(chunks))
        elif operand is not None:
            args.inputs[place] = pointer(operand)
    for place, kind in enumerate(op.infer(attrs, [type_of(x) for x in sample.inputs])):
        alive.append(Buffer(value_bytes(kind.dtype, rows, int(kind.shape[-1]))))
        args.outputs[place] = alive[-1].pointer
    params = np.zeros(1, np.dtype([("position", "i8"), ("rows", "i4", 2)]))
    params["position"], params["rows"] = sample.position, rows
    args.round = pointer(params)
    cache = np.zeros(0, np.float16)
    if op.name == "attention":
        window, total = int(attrs["window"]), sample.position + rows
        args.kv_capacity = min(total, window + rows) if window else total
        shape = (int(attrs["kv_heads"]), args.kv_capacity, int(attrs["head_size"]))
        cache = np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)
        copies = max(2, min(64, ROTATED_BYTES // (2 * cache.nbytes)))
    sizes = {"rows": rows, "kv_capacity": int(args.kv_capacity), "num_sms": gpu.num_sms}
    alive.append(scratch_of(prepared.kernel.launch(), **sizes))
    args.scratch = alive[-1].pointer
    found = []
    for _ in range(copies):
        one = DeviceArgs.from_buffer_copy(args)
        if cache.size:
            one.k_cache, one.v_cache = pointer(cache), pointer(cache)
        found.append(one)
    return found, alive


def variants(prepared: PreparedCuda, sweep: bool) -> Iterator[PreparedCuda]:
    """The kernel with the chosen tile, and for a sweep with others worth a try."""
    yield prepared
    kernel, attrs = prepared.kernel, prepared.cpu.sample.attrs
    tiles: list[dict[str, int]] = []
    if kernel.template == "attention_decode" and attrs["head_size"] <= 128:
        chosen = kernel.params["tile"]
        tiles = [{"warps": w, "blocks": b * chosen["blocks"]} for w in (4, 8) for b in (1, 2)]
    elif kernel.template == "attention_prefill" and attrs["head_size"] <= 128:
        sizes = ((4, 2, 64, 2, 2), (4, 2, 64, 1, 2), (8, 2, 64, 2, 1), (4, 1, 64, 2, 2))
        tiles = [attention_prefill_tile(int(attrs["head_size"]), *size) for size in sizes]
        tiles.append({**tiles[0], "splits": 1})
    for tile in tiles if sweep else ():
        if tile == kernel.params["tile"]:
            continue
        params = {**kernel.params, "tile": tile}
        digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:8]
        swept = dataclasses.replace(kernel, params=params, symbol=f"swept_{digest}")
        yield dataclasses.replace(prepared, kernel=swept)


def measure(case: Case, prepared: PreparedCuda, function: Any, gpu: Gpu) -> dict[str, Any]:
    op, sample = prepared.cpu.op, prepared.cpu.sample
    rows, attrs = num_rows(sample), op.complete(sample.attrs)
    all_args, alive = arguments(prepared, gpu)
    launches = (all_args * 64)[:64] if rows <= 8 else (all_args * 16)[:16]
    plan = prepared.kernel.launch()
    sizes = {"rows": rows, "kv_capacity": int(all_args[0].kv_capacity), "num_sms": gpu.num_sms}

    def replayed(stream: int) -> None:
        for args in launches:
            launch(plan, function, args, stream, **sizes)

    seconds = seconds_of(replayed, len(launches))
    del alive
    cost = op.cost(attrs, [type_of(x) for x in sample.inputs], rows, sample.position + rows)
    num_bytes = cost.bytes_read + cost.bytes_written
    operations = cost.flops
    if op.name == "attention" and not attrs["window"]:
        # What causality leaves: the cost counts every token for every row.
        total = sample.position + rows
        operations = cost.flops * (total - (rows - 1) / 2) / total
    return {
        "case": case.name,
        "tile": prepared.kernel.params["tile"],
        "us": seconds * 1e6,
        "gb_per_s": num_bytes / seconds * 1e-9,
        "tera_ops": operations / seconds * 1e-12,
    }


def copy_rate() -> float:
    """Bytes a second that a copy within the device reads and writes together."""
    size = 1 << 30
    source, target = Buffer(size).fill(1), Buffer(size)

    def copy(stream: int) -> None:
        call("cuMemcpyDtoDAsync", target.pointer, source.pointer, size, stream)

    return 2 * size / seconds_of(copy, 1)


def test_all(gpu: Gpu) -> list[str]:
    failures = []
    for op in all_ops().values():
        if op.name == "linear" or not has_cuda_template(op):
            continue
        began = time.perf_counter()
        found = failures_of(op, gpu)
        print(f"test {op.name}: {len(found)} failures, {time.perf_counter() - began:.1f} s")
        failures += [f"{op.name}: {line}" for line in found]
    return failures


def time_all(gpu: Gpu, sweep: bool) -> list[dict[str, Any]]:
    prepared = [
        (case, variant)
        for case in cases()
        if (chosen := prepare_cuda(all_ops()[case.op], case.sample, gpu))
        for variant in variants(chosen, sweep)
    ]
    functions = functions_of((p.kernel for _, p in prepared), gpu)
    rows = []
    for case, one in prepared:
        row = measure(case, one, functions[one.kernel.symbol], gpu)
        rows.append(row)
        tile = {k: v for k, v in row["tile"].items() if k != "shared"} if sweep else ""
        print(
            f"{row['case']:46} {row['us']:8.2f} us {row['gb_per_s']:5.0f} GB/s "
            f"{row['tera_ops']:6.1f} Top/s {tile}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--only", choices=("test", "time"), help="do one of the two")
    parser.add_argument("--sweep", action="store_true", help="try other tile sizes too")
    options = parser.parse_args()
    if missing := gpu_missing():
        print(f"gpu_operators: {missing}", file=sys.stderr)
        return 1
    with device() as gpu:
        rate = copy_rate()
        print(
            f"sm_{gpu.sm}, {gpu.num_sms} multiprocessors, copy {rate * 1e-9:.0f} GB/s", flush=True
        )
        failures = test_all(gpu) if options.only != "time" else []
        rows = time_all(gpu, options.sweep) if options.only != "test" else []
    if options.json:
        options.json.write_text(json.dumps({"copy_bytes_per_s": rate, "rows": rows}, indent=1))
    print("\n".join([f"{len(failures)} failures", *failures[:40]]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
