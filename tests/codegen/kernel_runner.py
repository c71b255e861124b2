"""Compiles the kernels of an operator's samples into one library and runs them by ctypes.

A run checks what kernel.h promises besides the result: nothing is written around the outputs or to
other tokens of the cache, scratch beyond the counters may hold anything, and counters end at zero.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atsc.codegen.cpu import (
    AMX_FLAGS,
    MATRIX_POINTERS,
    IsaLevel,
    Kernel,
    kernels_of,
    translation_units,
)
from atsc.codegen.layout import StoredWeight, is_tiled_by, part_chunks, store, value_bytes
from atsc.codegen.toolchain import Unit, compile_units, link_library
from atsc.compiler.ir import DType, TensorType, Weight
from atsc.compiler.isa import cpu_flags
from atsc.compiler.ops import OpDef, RoundState, Sample
from atsc.compiler.ops.quantize import BLOCK, Q8Array

MAX_INPUTS, MAX_OUTPUTS = 20, 2
COUNTER_BYTES = 4096
"""templates/common/scratch.h kCounterBytes."""
GUARD_BYTES = 256
"""Poison on either side of what a kernel writes."""
POISON = 0xCD
AMX_CPU_FLAGS = frozenset({"amx_tile", "amx_int8"})


class KernelArgs(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_void_p * MAX_INPUTS),
        ("outputs", ctypes.c_void_p * MAX_OUTPUTS),
        ("rows", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("logit_rows", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("kv_capacity", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
    )


RUN = ctypes.CFUNCTYPE(None, ctypes.POINTER(KernelArgs), ctypes.c_int64, ctypes.c_int64)
DOMAIN = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(KernelArgs))
SCRATCH = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)


class CpuKernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("run", RUN),
        ("domain", DOMAIN),
        ("scratch_bytes", SCRATCH),
    )


def aligned(num_bytes: int) -> np.ndarray:
    """Zeroed bytes at a 64-byte boundary."""
    raw = np.zeros(num_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


class Guarded:
    """Poisoned bytes at a 64-byte boundary, between two guards that must stay as they are."""

    def __init__(self, num_bytes: int) -> None:
        self.whole = aligned(num_bytes + 2 * GUARD_BYTES)
        self.whole[:] = POISON
        self.bytes = self.whole[GUARD_BYTES : GUARD_BYTES + num_bytes]

    @property
    def pointer(self) -> int:
        return self.bytes.ctypes.data

    def check(self, what: str) -> None:
        for guard in (self.whole[:GUARD_BYTES], self.whole[GUARD_BYTES + len(self.bytes) :]):
            assert (guard == POISON).all(), f"{what}: written outside"


def q8_bytes(value: Q8Array) -> np.ndarray:
    """A Q8 value as runtime/src/kernel.h lays it out; what nobody has set is poisoned."""
    fine = value.fine or Q8Array(
        np.zeros_like(value.codes), np.zeros_like(value.scales), value.width
    )
    return np.concatenate([digit_bytes(value), fine_bytes(fine)])


def fine_bytes(fine: Q8Array) -> np.ndarray:
    """The second digit: of blocks without one, the scale alone is set."""
    missing = fine.scales == 0
    fine = dataclasses.replace(fine, codes=np.where(missing[..., None], np.int8(-127), fine.codes))
    memory = digit_bytes(fine)
    scaled_sums = memory[fine.scales.size * (BLOCK + 4) :].view(np.float32)[: fine.scales.size]
    scaled_sums[missing.T.ravel()] = np.nan
    return memory


def digit_bytes(value: Q8Array) -> np.ndarray:
    """One digit of it."""
    sums = value.codes.astype(np.int32).sum(axis=-1)
    parts = [
        value.codes.transpose(1, 0, 2),
        value.scales.T.astype(np.float32),
        (value.scales * sums).T.astype(np.float32),
        sums.T.astype(np.int32),
    ]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts])


def q8_value(memory: np.ndarray, rows: int, width: int) -> tuple[Q8Array, np.ndarray, np.ndarray]:
    """The inverse: the value, its scaled sums and its sums, each [rows, blocks]."""
    half = len(memory) // 2
    value, scaled, sums = digit_value(memory[:half], rows, width)
    fine, fine_scaled, fine_sums = digit_value(memory[half:].copy(), rows, width)
    refined = fine.scales != 0
    fine.codes[~refined] = 0  # of blocks without a second digit only the scale is set
    assert np.array_equal(fine_sums[refined], fine.codes.astype(np.int32).sum(-1)[refined])
    np.testing.assert_allclose(fine_scaled[refined], (fine.scales * fine_sums)[refined], rtol=1e-6)
    return dataclasses.replace(value, fine=fine), scaled, sums


def digit_value(
    memory: np.ndarray, rows: int, width: int
) -> tuple[Q8Array, np.ndarray, np.ndarray]:
    """One digit: its codes and scales, scaled sums and sums."""
    blocks = -(-width // BLOCK)
    count = blocks * rows
    codes = memory[: count * BLOCK].view(np.int8).reshape(blocks, rows, BLOCK).transpose(1, 0, 2)
    rest = memory[count * BLOCK : count * (BLOCK + 12)]
    scales, scaled, sums = (
        rest[i * count * 4 : (i + 1) * count * 4].view(kind).reshape(blocks, rows).T
        for i, kind in enumerate((np.float32, np.float32, np.int32))
    )
    return Q8Array(codes, scales, width), scaled, sums


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sample with its kernel and stored weights; `outputs` says which outputs it writes."""

    op: OpDef
    sample: Sample
    kernel: Kernel
    stored: tuple[StoredWeight | None, ...]
    outputs: tuple[bool, ...] = (True, True)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a domain is cut into pieces and who runs them."""

    pieces: int = 3
    threads: int = 2
    """What KernelArgs::num_threads says."""
    seed: int = 0
    """Of the order of the pieces."""
    concurrent: bool = False
    """Whether so many threads run the pieces at the same time."""


def type_of(operand: Any) -> TensorType | Weight | None:
    if operand is None or isinstance(operand, Weight):
        return operand
    if isinstance(operand, Q8Array):
        return TensorType(DType.Q8, (len(operand.codes), operand.width))
    dtype = DType.I32 if operand.dtype == np.int32 else DType.F32
    return TensorType(dtype, operand.shape)


def prepare(
    op: OpDef, sample: Sample, isa: IsaLevel, outputs: Sequence[bool] | None = None
) -> Prepared | None:
    """The kernel that serves a sample on one ISA level; None if the level has no template."""
    stored = tuple(
        store(operand, is_tiled_by(operand, op.name == "linear"))
        if isinstance(operand, Weight) and slot.rstrip("?") == op.matrix_slot
        else store(operand, False)
        if isinstance(operand, Weight)
        else None
        for slot, operand in zip(op.inputs, sample.inputs, strict=False)
    )
    operands = [s or type_of(operand) for s, operand in zip(stored, sample.inputs, strict=True)]
    rows = num_rows(sample)
    few = rows <= 8
    wanted = tuple(outputs or [True] * len(op.outputs))
    kernels = kernels_of(op, sample.attrs, operands, wanted, few)
    kernel = kernels.get(isa.name)
    return Prepared(op, sample, kernel, stored, wanted) if kernel else None


def num_rows(sample: Sample) -> int:
    first = sample.inputs[0]
    return len(first.codes) if isinstance(first, Q8Array) else len(first)


def can_run(isa: IsaLevel) -> bool:
    """Whether this CPU has a level, AMX aside: `build` emulates it where it is missing."""
    return isa.cpu_flags - AMX_CPU_FLAGS <= cpu_flags()


def build(prepared: Iterable[Prepared], folder: Path) -> ctypes.CDLL:
    """One library with all kernels."""
    objects = compile_units(
        [
            Unit(unit.name, unit.source, (*flags_here(unit), "-fvisibility=default", "-Werror"))
            for unit in translation_units(p.kernel for p in prepared)
        ]
    )
    _check_no_weak_symbols(objects)
    library = folder / "kernels.so"
    link_library(objects, library)
    return ctypes.CDLL(str(library))


def may_use_amx() -> bool:
    """Asks for AMX, whose tiles Linux gives to none but a process that asks; runtime/src/isa.h."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if not cpu_flags() >= AMX_CPU_FLAGS:
        return False
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def flags_here(unit: Unit) -> tuple[str, ...]:
    """A unit's flags, with AMX emulated where this process may not use it."""
    if not set(AMX_FLAGS) <= set(unit.flags) or may_use_amx():
        return unit.flags
    return (*(flag for flag in unit.flags if flag not in AMX_FLAGS), "-DATSC_EMULATED_AMX")


def _check_no_weak_symbols(objects: Iterable[Path]) -> None:
    """A function that several objects may define would serve CPUs that lack one object's ISA."""
    command = ["nm", "--defined-only", *map(str, objects)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    weak = [row[2] for row in rows if len(row) == 3 and row[1] in "WVu"]
    assert not weak, f"not internal to its kernel: {', '.join(weak[:5])}"


def reference(prepared: Prepared, logit_rows: np.ndarray | None = None) -> tuple[Any, ...]:
    """What the operator's reference says, and the cache that it leaves."""
    op, sample = prepared.op, prepared.sample
    state = RoundState(sample.position, logit_rows, past_caches(op, sample))
    outputs = op.reference(op.complete(sample.attrs), sample.inputs, state)
    return (*outputs, state.caches)


def past_caches(op: OpDef, sample: Sample) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Random K and V of `position` tokens for an attention sample; nothing otherwise."""
    if op.name != "attention":
        return {}
    attrs = op.complete(sample.attrs)
    shape = (sample.position, int(attrs["kv_heads"]), int(attrs["head_size"]))
    keys, values = np.random.default_rng(1).standard_normal((2, *shape), np.float32)
    rounded = [a.astype(np.float16).astype(np.float32) for a in (keys, values)]
    return {int(attrs["layer"]): (rounded[0], rounded[1])}


@dataclass(slots=True)
class Call:
    """A kernel's arguments and the memory that they point to."""

    args: KernelArgs
    inputs: list[np.ndarray] = field(default_factory=list)
    outputs: list[tuple[TensorType, Guarded | None]] = field(default_factory=list)
    caches: list[np.ndarray] = field(default_factory=list)
    scratch: Guarded | None = None

    def pointer(self, data: np.ndarray) -> int:
        """The address of an aligned copy."""
        memory = aligned(max(data.nbytes, 1))
        memory[: data.nbytes] = np.ascontiguousarray(data).view(np.uint8).ravel()
        self.inputs.append(memory)
        return memory.ctypes.data


def run(
    prepared: Prepared,
    library: ctypes.CDLL,
    schedule: Schedule | None = None,
    logit_rows: np.ndarray | None = None,
) -> tuple[Any, ...]:
    """Run the kernel over its domain as the schedule says; outputs like `reference`.

    An output that is not wanted comes as None.
    """
    schedule = schedule or Schedule()
    kernel = CpuKernel.in_dll(library, prepared.kernel.symbol)
    call = _call_of(prepared, kernel, schedule, logit_rows)
    before = [cache.copy() for cache in call.caches]
    _run_pieces(kernel, call.args, schedule)
    for cache, old in zip(call.caches, before, strict=True):
        _check_other_tokens(prepared.sample, cache, old)
    if call.scratch:
        call.scratch.check("scratch")
        assert not call.scratch.bytes[:COUNTER_BYTES].any(), "counters are left above zero"
    rows = int(call.args.rows)
    results = [_result(kind, memory, rows) for kind, memory in call.outputs]
    if call.caches:
        results.append(read_caches(prepared.op, prepared.sample, rows, call.caches))
    return tuple(results)


def _call_of(
    prepared: Prepared, kernel: CpuKernel, schedule: Schedule, logit_rows: np.ndarray | None
) -> Call:
    op, sample, rows = prepared.op, prepared.sample, num_rows(prepared.sample)
    if op.name == "select_rows":
        logit_rows = np.arange(rows) if logit_rows is None else logit_rows
        rows = len(logit_rows)
    call = Call(KernelArgs(rows=rows, position=sample.position, num_threads=schedule.threads))
    args, index = call.args, 0
    for slot, operand, stored in zip(op.inputs, sample.inputs, prepared.stored, strict=False):
        if stored is not None:
            for offset, part in enumerate(stored.parts):
                chunks = [chunk.view(np.uint8).ravel() for chunk in part_chunks(stored, part)]
                args.inputs[index + offset] = call.pointer(np.concatenate(chunks))
        elif isinstance(operand, Q8Array):
            args.inputs[index] = call.pointer(q8_bytes(operand))
        elif operand is not None:
            args.inputs[index] = call.pointer(operand)
        index += MATRIX_POINTERS if slot.rstrip("?") == op.matrix_slot else 1

    types = op.infer(op.complete(sample.attrs), [type_of(operand) for operand in sample.inputs])
    for place, (kind, wanted) in enumerate(zip(types, prepared.outputs, strict=False)):
        memory = Guarded(value_bytes(kind.dtype, rows, int(kind.shape[-1]))) if wanted else None
        call.outputs.append((kind, memory))
        args.outputs[place] = memory.pointer if memory else None
    if op.name == "attention":
        args.kv_capacity, call.caches = fill_caches(op, sample, rows)
        args.k_cache, args.v_cache = (cache.ctypes.data for cache in call.caches)
    if logit_rows is not None:
        args.logit_rows = call.pointer(logit_rows.astype(np.int32))
    if kernel.scratch_bytes:
        num_bytes = kernel.scratch_bytes(rows, args.kv_capacity, schedule.threads)
        call.scratch = Guarded(num_bytes)
        call.scratch.bytes[:COUNTER_BYTES] = 0
        args.scratch = call.scratch.pointer
    return call


def _run_pieces(kernel: CpuKernel, args: KernelArgs, schedule: Schedule) -> None:
    domain = kernel.domain(args)
    cuts = sorted({round(i * domain / schedule.pieces) for i in range(schedule.pieces + 1)})
    pieces = list(itertools.pairwise(cuts))
    random.Random(schedule.seed).shuffle(pieces)
    if not schedule.concurrent:
        for begin, end in pieces:
            kernel.run(args, begin, end)
        return
    with ThreadPoolExecutor(schedule.threads) as pool:
        for done in [pool.submit(kernel.run, args, *piece) for piece in pieces]:
            done.result()


def _result(kind: TensorType, memory: Guarded | None, rows: int) -> Any:
    if memory is None:
        return None
    memory.check("an output")
    width = int(kind.shape[-1])
    if kind.dtype is DType.Q8:
        return q8_value(memory.bytes, rows, width)
    return memory.bytes.view(np.float32).reshape(rows, width)


def _capacity(op: OpDef, sample: Sample, rows: int) -> int:
    window = int(op.complete(sample.attrs)["window"])
    total = sample.position + rows
    return min(total, window + rows) if window else total + 5


def fill_caches(op: OpDef, sample: Sample, rows: int) -> tuple[int, list[np.ndarray]]:
    """The capacity, and K and V as rings of fp16 [kv_heads, capacity, head_size]; the rest NaN."""
    attrs = op.complete(sample.attrs)
    capacity = _capacity(op, sample, rows)
    caches = []
    for past in past_caches(op, sample)[int(attrs["layer"])]:
        shape = (int(attrs["kv_heads"]), capacity, int(attrs["head_size"]))
        cache = aligned(int(np.prod(shape)) * 2).view(np.float16).reshape(shape)
        cache[...] = np.nan
        tokens = np.arange(max(0, len(past) - capacity), len(past))
        cache[:, tokens % capacity] = past[tokens].transpose(1, 0, 2)
        caches.append(cache)
    return capacity, caches


def _check_other_tokens(sample: Sample, cache: np.ndarray, before: np.ndarray) -> None:
    new = np.arange(sample.position, sample.position + num_rows(sample)) % cache.shape[1]
    others = np.setdiff1d(np.arange(cache.shape[1]), new)
    same = cache[:, others].view(np.uint16) == before[:, others].view(np.uint16)
    assert same.all(), "old tokens of the cache are overwritten"


def read_caches(op: OpDef, sample: Sample, rows: int, caches: list[np.ndarray]) -> Any:
    """The new tokens' K and V, [rows, kv_heads, head_size] each."""
    places = [(sample.position + row) % caches[0].shape[1] for row in range(rows)]
    return tuple(cache[:, places].transpose(1, 0, 2).astype(np.float32) for cache in caches)
