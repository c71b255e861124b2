"""Tests and times the CUDA kernels on the first GPU: python benchmarks/gpu_kernels.py

Linear layers have the shapes of Qwen3-14B. Weights are random and rotate through more memory than
the L2 cache holds; launches are replayed from a CUDA graph, so that no launch cost is in the times;
a figure is the median of the replays. GB/s counts the weight's bytes alone, Top/s two operations a
product. `--refined` is the share of int8 blocks of activations with a second digit, whose products
are not counted (compiler/ops/quantize.py); they are mostly those of the same columns in all rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests" / "codegen"), str(ROOT / "tests" / "gpu")]
if importlib.util.find_spec("atsc") is None:  # a bare machine; a checkout would hide atsc.load
    sys.path.append(str(ROOT / ".links"))

from cuda_runner import (  # noqa: E402
    Buffer,
    DeviceArgs,
    call,
    device,
    failures_of,
    functions_of,
    gpu_missing,
    launch,
)

from atsc.codegen.cuda import CudaKernel, has_cuda_template, kernel_of  # noqa: E402
from atsc.codegen.cuda_tiles import Gpu, gemm_blocks_tile, gemv_blocks_tile  # noqa: E402
from atsc.codegen.layout import StoredWeight, store, value_bytes  # noqa: E402
from atsc.compiler.ir import (  # noqa: E402
    ArraySource,
    BlockFormat,
    DType,
    FloatFormat,
    Format,
    TensorType,
    Weight,
)
from atsc.compiler.ops import all_ops  # noqa: E402

SHAPES = {
    "qkv": (7168, 5120),
    "kv": (1024, 5120),
    "o": (5120, 5120),
    "up": (17408, 5120),
    "down": (5120, 17408),
    "head": (151936, 5120),
}
INT4, INT4Z, INT8 = BlockFormat(4, 32, False), BlockFormat(4, 32, True), BlockFormat(8, 32, False)
SHOWN = ("warps", "unroll", "rows", "columns", "slabs", "stages")
ROTATED_BYTES = 400 << 20
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer at one number of rows."""

    shape: str
    format: Format
    x: DType
    rows: int

    @property
    def name(self) -> str:
        return f"{self.shape} {self.format} x {self.x.value} rows {self.rows}"


CASES = (
    *(Case(shape, INT4, DType.Q8, 1) for shape in SHAPES),
    *(Case("up", INT4, DType.Q8, rows) for rows in (2, 8)),
    *(Case("up", fmt, DType.Q8, 1) for fmt in (INT4Z, INT8, BlockFormat(4, 128, False))),
    Case("up", INT4, DType.F32, 1),
    Case("up", FloatFormat(DType.F16), DType.F32, 1),
    Case("kv", FloatFormat(DType.F32), DType.F32, 1),
    *(Case(shape, INT4, DType.Q8, 512) for shape in ("kv", "o", "up", "down")),
    *(Case("up", fmt, DType.Q8, 512) for fmt in (INT4Z, INT8, BlockFormat(4, 128, False))),
    Case("up", INT4, DType.Q8, 64),
    Case("up", INT4, DType.F32, 512),
    Case("up", FloatFormat(DType.F16), DType.F32, 512),
)


def weight_of(case: Case) -> StoredWeight:
    """The layer's weight as the compiler sees it; its codes are never read."""
    (n, k), fmt = SHAPES[case.shape], case.format
    if isinstance(fmt, FloatFormat):
        zeros = np.broadcast_to(np.zeros(1, np.float32), (n, k))
        return store(Weight("w", (n, k), fmt, {"data": ArraySource.of(zeros, fmt.dtype)}), True)
    blocks = -(-k // fmt.block_size)
    arrays = {
        "codes": np.broadcast_to(np.uint8(0), (n, blocks, fmt.block_size * fmt.bits // 8)),
        "scales": np.broadcast_to(np.float32(0.0625), (n, blocks)),
        "zero_points": np.broadcast_to(np.uint8(7), (n, blocks)),
    }
    if not fmt.has_zero_points:
        del arrays["zero_points"]
    parts = {name: ArraySource.of(array) for name, array in arrays.items()}
    return store(Weight("w", (n, k), fmt, parts), True)


def kernel_of_case(case: Case, gpu: Gpu, sizes: Sizes) -> CudaKernel:
    """The layer's kernel with its own tile sizes, or with others."""
    k = SHAPES[case.shape][1]
    operands = [TensorType(case.x, ("M", k)), weight_of(case), None, None, None]
    few = case.rows <= 8
    kernel = kernel_of(all_ops()["linear"], {}, operands, [True], few, gpu)
    assert kernel is not None
    if not sizes:
        return kernel
    choose = gemv_blocks_tile if few else gemm_blocks_tile
    params = {**kernel.params, "tile": choose(kernel.params, *sizes)}
    digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:8]
    return dataclasses.replace(kernel, params=params, symbol=f"swept_{digest}")


def random_part(name: str, num_bytes: int, fmt: Format, rng: np.random.Generator) -> np.ndarray:
    if name in {"scales", "data"} and not (isinstance(fmt, FloatFormat) and fmt.dtype is DType.F32):
        return rng.uniform(0.01, 0.06, num_bytes // 2).astype(np.float16)
    if name == "data":
        return rng.standard_normal(num_bytes // 4, np.float32)
    return rng.integers(0, 256 if name == "codes" else 16, num_bytes, np.uint8)


def q8_values(rows: int, width: int, refined: float, rng: np.random.Generator) -> np.ndarray:
    """Random rows, in bytes. One block in ten of `refined` is unlike its column."""
    shape = (-(-width // 32), rows)
    unlike = rng.random(shape) < refined / 10
    has_fine = (rng.random(shape[0]) < refined)[:, None] ^ unlike
    scales = np.where(has_fine, np.float32(0.05), np.float32(0.01))
    fine_scales = np.where(has_fine, scales / np.float32(254), np.float32(0))
    parts = []
    for of_digit in (scales, fine_scales):
        codes = rng.integers(-127, 128, (*shape, 32), np.int8)
        sums = codes.sum(axis=-1, dtype=np.int32)
        parts += [codes, of_digit, of_digit * sums.astype(np.float32), sums]
    return np.concatenate([part.view(np.uint8).ravel() for part in parts])


def seconds_of(replayed: Callable[[int], None], num_launches: int) -> float:
    """Median time of one launch, of those that `replayed` puts on a stream, as a graph."""
    stream = call("cuStreamCreate", 1)
    call("cuStreamBeginCapture", stream, RELAXED)
    replayed(int(stream))
    graph = call("cuStreamEndCapture", stream)
    executable = call("cuGraphInstantiate", graph, 0)
    begin, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
    times = []
    for repeat in range(9):
        call("cuEventRecord", begin, stream)
        call("cuGraphLaunch", executable, stream)
        call("cuEventRecord", end, stream)
        call("cuStreamSynchronize", stream)
        if repeat:
            times.append(float(call("cuEventElapsedTime", begin, end)) * 1e-3)
    return statistics.median(times) / num_launches


@dataclasses.dataclass
class Operands:
    """A layer's operands on the device: several weights, one x, one y."""

    args: list[DeviceArgs]
    alive: list[Buffer]
    weight_bytes: int


def upload(case: Case, refined: float) -> Operands:
    rng = np.random.default_rng(0)
    (n, k), stored = SHAPES[case.shape], weight_of(case)
    alive = []
    if case.x is DType.Q8:
        x = Buffer.of(q8_values(case.rows, k, refined, rng))
    else:
        x = Buffer.of(rng.standard_normal((case.rows, k), np.float32))
    y = Buffer(value_bytes(DType.F32, case.rows, n))
    params = np.zeros(1, np.dtype([("position", "i8"), ("rows", "i4", 2)]))
    params["rows"] = case.rows
    round_params = Buffer.of(params)
    num_bytes = sum(part.num_bytes for part in stored.parts)
    parts = [random_part(part.name, part.num_bytes, case.format, rng) for part in stored.parts]
    args = []
    for _ in range(max(2, -(-ROTATED_BYTES // num_bytes))):
        one = DeviceArgs()
        one.inputs[0], one.outputs[0], one.round = x.pointer, y.pointer, round_params.pointer
        for place, part in enumerate(parts):
            alive.append(Buffer.of(part))
            one.inputs[1 + place] = alive[-1].pointer
        args.append(one)
    return Operands(args, [*alive, x, y, round_params], num_bytes)


def measure(
    case: Case, kernel: CudaKernel, function: Any, operands: Operands, gpu: Gpu
) -> dict[str, Any]:
    n, k = SHAPES[case.shape]
    repeats = max(2, 40 // len(operands.args)) if case.rows <= 8 else 1
    launches = [args for _ in range(repeats) for args in operands.args][:120]

    plan = kernel.launch()

    def replayed(stream: int) -> None:
        for args in launches:
            launch(plan, function, args, stream, rows=case.rows, num_sms=gpu.num_sms)

    seconds = seconds_of(replayed, len(launches))
    return {
        "case": case.name,
        "tile": kernel.params["tile"],
        "us": seconds * 1e6,
        "gb_per_s": operands.weight_bytes / seconds * 1e-9,
        "tera_ops": 2 * case.rows * n * k / seconds * 1e-12,
    }


def test_all(gpu: Gpu, every: int, wanted: str) -> list[str]:
    failures = []
    for op in all_ops().values():
        if not has_cuda_template(op) or (wanted and op.name not in wanted.split(",")):
            continue
        began = time.perf_counter()
        found = failures_of(op, gpu, every)
        print(f"test {op.name}: {len(found)} failures, {time.perf_counter() - began:.1f} s")
        failures += [f"{op.name}: {line}" for line in found]
    return failures


def sizes_of(case: Case, sweep: bool) -> Iterator[Sizes]:
    """The chosen tile sizes, and for a sweep the others worth a try."""
    yield ()
    if not sweep or case.format != INT4 or case.x is not DType.Q8:
        return
    if case.rows <= 8:
        for unroll, stages in ((2, 3), (4, 2), (4, 3), (4, 4)):
            yield from ((warps, unroll, stages) for warps in (4, 8, 16))
    else:
        for rows, columns in ((64, 64), (128, 64), (128, 128)):
            yield from ((rows, columns, slabs, stages) for slabs, stages in ((2, 3), (2, 4)))


def time_all(gpu: Gpu, sweep: bool, wanted: str, refined: float) -> list[dict[str, Any]]:
    cases = [case for case in CASES if wanted in case.name]
    kernels = {
        (case, sizes): kernel_of_case(case, gpu, sizes)
        for case in cases
        for sizes in sizes_of(case, sweep)
    }
    began = time.perf_counter()
    functions = functions_of(kernels.values(), gpu)
    print(f"compiled {len(functions)} kernels in {time.perf_counter() - began:.1f} s")
    rows = []
    for case in cases:
        operands = upload(case, refined)
        for (of_case, _), kernel in kernels.items():
            if of_case == case:
                row = measure(case, kernel, functions[kernel.symbol], operands, gpu)
                rows.append(row)
                shown = {k: v for k, v in row["tile"].items() if k in SHOWN}
                print(
                    f"{row['case']:34} {row['us']:9.1f} us {row['gb_per_s']:7.0f} GB/s "
                    f"{row['tera_ops']:6.1f} Top/s  {shown}",
                    flush=True,
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--sweep", action="store_true", help="try other tile sizes too")
    parser.add_argument("--only", choices=("test", "time"), help="do one of the two")
    parser.add_argument("--case", default="", help="time the cases whose name holds this alone")
    parser.add_argument("--every", type=int, default=1, help="test every so many samples alone")
    parser.add_argument("--ops", default="", help="test these operators alone: linear,quantize")
    parser.add_argument("--refined", type=float, default=0.1, help="blocks with second digits")
    options = parser.parse_args()
    if missing := gpu_missing():
        print(f"gpu_kernels: {missing}", file=sys.stderr)
        return 1
    with device() as gpu:
        print(f"sm_{gpu.sm}, {gpu.num_sms} multiprocessors", flush=True)
        failures = test_all(gpu, options.every, options.ops) if options.only != "time" else []
        rows = []
        if options.only != "test":
            rows = time_all(gpu, options.sweep, options.case, options.refined)
    if options.json:
        options.json.write_text(json.dumps({"sm": gpu.sm, "rows": rows}, indent=1))
    print("\n".join([f"{len(failures)} failures", *failures[:40]]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
