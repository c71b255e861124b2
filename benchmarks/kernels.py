"""Speed of the linear CPU kernels: GEMV against a plain read of the same bytes, GEMM in MAC/s.

    python benchmarks/kernels.py [--isa avx2] [--threads 1 2] [--shapes 1536x576 ...] [--rows 1 512]
                                 [--formats int4b32 ...] [--level 4] [--refined 0.1]
                                 [--copies-mib 600] [--json]

Each shape has as many copies of its weights as `--copies-mib` holds, used in turn, so that they
come from beyond the caches as far as the machine allows. `read` is the time of an AVX2 read of the
same bytes divided by the kernel's: 1 is the memory's limit. Kernel and read alternate in
one run; each is the best of several medians, since other programs may run beside it. `--refined` is
the share of activation blocks that have a second digit (compiler/ops/quantize.py). `--isa amx` has
kernels of level 4 for more than 8 rows alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from atsc.codegen.cpu import ISA_LEVELS, Kernel, kernels_of, translation_units
from atsc.codegen.layout import StoredWeight, part_chunks, store
from atsc.codegen.toolchain import Unit, compile_units, link_library
from atsc.compiler.ir import BlockFormat, DType, TensorType
from atsc.compiler.ops import all_ops
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.ops.quantize import quantize_rows

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "codegen"))
from kernel_runner import (
    AMX_CPU_FLAGS,
    CpuKernel,
    KernelArgs,
    aligned,
    can_run,
    may_use_amx,
    q8_bytes,
)

SHAPES = ["576x576", "1536x576", "576x1536", "49152x576", "3072x1024", "1024x3072", "151936x1024"]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; seconds are of one call on all threads."""

    shape: str
    format: str
    level: int
    rows: int
    threads: int
    seconds: float
    weight_bytes: int
    gmac_per_s_a_core: float
    read_ratio: float


def weight_of(shape: str, fmt: str) -> StoredWeight:
    rng = np.random.default_rng(0)
    outputs, width = (int(part) for part in shape.split("x"))
    if not fmt.startswith("int"):
        return store(random_float_weight(rng, (outputs, width), DType(fmt)), tiled=True)
    bits, block = fmt[3:].rstrip("z").split("b")
    form = BlockFormat(int(bits), int(block), fmt.endswith("z"))
    return store(random_block_weight(rng, (outputs, width), form), tiled=True)


def kernel_of(stored: StoredWeight, level: int, rows: int, isa: str) -> Kernel:
    op = all_ops()["linear"]
    width = stored.weight.shape[1]
    kind = DType.Q8 if level == 4 else DType.F32
    operands = [TensorType(kind, (rows, width)), stored]
    kernels = kernels_of(op, {"accuracy_level": level}, operands, [True], rows <= 8)
    if isa not in kernels:
        raise SystemExit(
            f"kernels.py: {isa} has no linear of level {level} for rounds of --rows {rows}; "
            "give other --rows, --level or --isa"
        )
    return kernels[isa]


def library_of(kernels: list[Kernel], folder: Path) -> ctypes.CDLL:
    timer = Path(__file__).with_name("kernel_timer.cc").read_text()
    units = [*translation_units(kernels), Unit("kernel_timer", timer, ("-march=x86-64-v3",))]
    visible = [Unit(u.name, u.source, (*u.flags, "-fvisibility=default")) for u in units]
    target = folder / f"{kernels[0].symbol}.so"
    link_library(compile_units(visible), target)
    library = ctypes.CDLL(str(target))
    library.time_kernel.restype = library.time_read.restype = ctypes.c_double
    return library


def activations(rows: int, width: int, refined: float) -> np.ndarray:
    """Random floats, of which a share of the blocks of 32 is larger than the others."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, width), np.float32)
    large = rng.random((rows, -(-width // 32))) < refined
    return x * np.where(np.repeat(large, 32, axis=1)[:, :width], np.float32(10), np.float32(1))


class Operands:
    """Copies of one weight, with the activations and the output of one call."""

    def __init__(
        self, stored: StoredWeight, level: int, refined: float, rows: int, copies: int
    ) -> None:
        outputs, width = stored.weight.shape
        x = activations(rows, width, refined)
        data = q8_bytes(quantize_rows(x)) if level == 4 else x.view(np.uint8).ravel()
        self.x, self.y = aligned(data.nbytes), aligned(outputs * rows * 4)
        self.x[:] = data
        self.num_bytes = stored.num_bytes
        self.memory = aligned(copies * stored.num_bytes)
        self.args = (KernelArgs * copies)()
        for index, args in enumerate(self.args):
            offset = index * stored.num_bytes
            args.inputs[0] = self.x.ctypes.data
            for slot, part in enumerate(stored.parts):
                args.inputs[1 + slot] = self.memory.ctypes.data + offset
                at = offset
                for chunk in part_chunks(stored, part):
                    flat = chunk.view(np.uint8).ravel()
                    self.memory[at : at + flat.nbytes] = flat
                    at += flat.nbytes
                offset += -(-part.num_bytes // 64) * 64
            args.outputs[0] = self.y.ctypes.data
            args.rows = rows
        self.scratch = aligned(0)
        self.places = (ctypes.c_void_p * copies)(
            *(self.memory.ctypes.data + i * stored.num_bytes for i in range(copies))
        )

    def use(self, kernel: CpuKernel, threads: int) -> None:
        """Give the calls what the kernel wants for so many threads."""
        if kernel.scratch_bytes:
            self.scratch = aligned(kernel.scratch_bytes(self.args[0].rows, 0, threads))
        for args in self.args:
            args.num_threads = threads
            args.scratch = self.scratch.ctypes.data


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for shape in options.shapes:
        for fmt in options.formats:
            stored = weight_of(shape, fmt)
            copies = max(1, min(options.copies_mib * 2**20 // stored.num_bytes, 2000))
            kernels = [kernel_of(stored, options.level, r, options.isa) for r in options.rows]
            library = library_of(kernels, folder)
            for rows, kernel in zip(options.rows, kernels, strict=True):
                operands = Operands(stored, options.level, options.refined, rows, copies)
                for threads in options.threads:
                    yield _measure_one(library, kernel, operands, shape, fmt, threads, options)


def _measure_one(
    library: ctypes.CDLL,
    kernel: Kernel,
    operands: Operands,
    shape: str,
    fmt: str,
    threads: int,
    options: argparse.Namespace,
) -> Row:
    copies, rows = len(operands.args), operands.args[0].rows
    entry = CpuKernel.in_dll(library, kernel.symbol)
    operands.use(entry, threads)
    outputs, width = (int(part) for part in shape.split("x"))
    calls = max(3, min(copies * 2, int(2e10 / (rows * outputs * width) / 4)))
    times, reads = [], []
    for _ in range(options.repeats):
        times.append(
            library.time_kernel(ctypes.byref(entry), operands.args, copies, threads, calls)
        )
        size = ctypes.c_size_t(operands.num_bytes)
        reads.append(library.time_read(operands.places, size, copies, threads, calls))
    seconds = min(times)
    rate = rows * outputs * width / seconds / threads / 1e9
    ratio = min(reads) / seconds
    return Row(shape, fmt, options.level, rows, threads, seconds, operands.num_bytes, rate, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="avx2", choices=[isa.name for isa in ISA_LEVELS])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--formats", nargs="+", default=["int4b32"])
    parser.add_argument("--level", type=int, default=4, choices=(1, 4))
    parser.add_argument("--refined", type=float, default=0.1)
    parser.add_argument("--copies-mib", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    isa = next(level for level in ISA_LEVELS if level.name == options.isa)
    if not (can_run(isa) and (may_use_amx() or not isa.cpu_flags >= AMX_CPU_FLAGS)):
        raise SystemExit(f"kernels.py: this machine has no {options.isa}; choose another --isa")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for index, row in enumerate(measure(options, Path(folder))):
            found.append(row)
            if not options.json:
                if index == 0:
                    print(
                        "      shape   format  level  rows  threads  GB/s  of read  GMAC/s a core"
                    )
                speed = row.weight_bytes / row.seconds / 1e9
                print(
                    f"{row.shape:>11} {row.format:>8} {row.level:6} {row.rows:5} {row.threads:8}"
                    f" {speed:5.1f} {row.read_ratio:8.2f} {row.gmac_per_s_a_core:14.1f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"isa": options.isa, "rows": [asdict(row) for row in found]}))


if __name__ == "__main__":
    main()
