"""Compiles the kernels of an operator's samples into one library and runs them by ctypes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atsc.codegen.cpu import MATRIX_POINTERS, IsaLevel, Kernel, kernels_of, translation_units
from atsc.codegen.layout import StoredWeight, is_tiled_by, part_chunks, store
from atsc.codegen.toolchain import compile_units, link_library
from atsc.compiler.ir import DType, TensorType, Weight
from atsc.compiler.ops import OpDef, RoundState, Sample
from atsc.compiler.ops.quantize import BLOCK, Q8Array

MAX_INPUTS, MAX_OUTPUTS = 20, 2


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
    """Zeroed bytes at a 64-byte boundary, with a guard of 64 bytes behind."""
    raw = np.zeros(num_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


def q8_bytes(value: Q8Array) -> np.ndarray:
    """A Q8 value as runtime/src/kernel.h lays it out."""
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
    """A sample with its kernel and stored weights."""

    op: OpDef
    sample: Sample
    kernel: Kernel
    stored: tuple[StoredWeight | None, ...]


def type_of(operand: Any) -> TensorType | Weight | None:
    if operand is None or isinstance(operand, Weight):
        return operand
    if isinstance(operand, Q8Array):
        return TensorType(DType.Q8, (len(operand.codes), operand.width))
    dtype = DType.I32 if operand.dtype == np.int32 else DType.F32
    return TensorType(dtype, operand.shape)


def prepare(op: OpDef, sample: Sample, isa: IsaLevel) -> Prepared | None:
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
    outputs = [True] * len(op.outputs)
    kernels = kernels_of(op, sample.attrs, operands, outputs, few)
    kernel = kernels.get(isa.name)
    return Prepared(op, sample, kernel, stored) if kernel else None


def num_rows(sample: Sample) -> int:
    first = sample.inputs[0]
    return len(first.codes) if isinstance(first, Q8Array) else len(first)


def build(prepared: Iterable[Prepared], folder: Path) -> ctypes.CDLL:
    """One library with all kernels."""
    objects = compile_units(
        [
            type(unit)(unit.name, unit.source, (*unit.flags, "-fvisibility=default", "-Werror"))
            for unit in translation_units(p.kernel for p in prepared)
        ]
    )
    library = folder / "kernels.so"
    link_library(objects, library)
    return ctypes.CDLL(str(library))


def reference(prepared: Prepared) -> tuple[Any, ...]:
    """What the operator's reference says, and the cache that it leaves."""
    op, sample = prepared.op, prepared.sample
    state = RoundState(position=sample.position, caches=past_caches(op, sample))
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


def run(
    prepared: Prepared, library: ctypes.CDLL, pieces: int = 3, threads: int = 2
) -> tuple[Any, ...]:
    """Run the kernel over its domain in several pieces, out of order; outputs like `reference`."""
    op, sample, rows = prepared.op, prepared.sample, num_rows(prepared.sample)
    kernel = CpuKernel.in_dll(library, prepared.kernel.symbol)
    args, alive = KernelArgs(rows=rows, position=sample.position, num_threads=threads), []

    def pointer(data: np.ndarray) -> int:
        memory = aligned(max(data.nbytes, 1))
        memory[: data.nbytes] = np.ascontiguousarray(data).view(np.uint8).ravel()
        alive.append(memory)
        return memory.ctypes.data

    index = 0
    for slot, operand, stored in zip(op.inputs, sample.inputs, prepared.stored, strict=False):
        if stored is not None:
            for offset, part in enumerate(stored.parts):
                chunks = [chunk.view(np.uint8).ravel() for chunk in part_chunks(stored, part)]
                args.inputs[index + offset] = pointer(np.concatenate(chunks))
        elif isinstance(operand, Q8Array):
            args.inputs[index] = pointer(q8_bytes(operand))
        elif operand is not None:
            args.inputs[index] = pointer(operand)
        index += MATRIX_POINTERS if slot.rstrip("?") == op.matrix_slot else 1

    types = op.infer(op.complete(sample.attrs), [type_of(operand) for operand in sample.inputs])
    memories = []
    for place, kind in enumerate(types):
        width = int(kind.shape[-1])
        size = (-(-width // BLOCK) * 44 if kind.dtype is DType.Q8 else width * 4) * rows
        memory = aligned(size)
        memory[:] = 0xCD
        memories.append(memory)
        args.outputs[place] = memory.ctypes.data

    capacity = 0
    if op.name == "attention":
        capacity, caches = fill_caches(op, sample, rows)
        args.k_cache, args.v_cache = (cache.ctypes.data for cache in caches)
        args.kv_capacity = capacity
    if op.name == "select_rows":
        wanted = np.arange(rows, dtype=np.int32)
        args.logit_rows = wanted.ctypes.data
    if kernel.scratch_bytes:
        scratch = aligned(kernel.scratch_bytes(rows, capacity, threads))
        args.scratch = scratch.ctypes.data

    domain = kernel.domain(args)
    cuts = sorted({round(i * domain / pieces) for i in range(pieces + 1)})
    for begin, end in reversed(list(itertools.pairwise(cuts))):
        kernel.run(args, begin, end)

    results: list[Any] = []
    for kind, memory in zip(types, memories, strict=True):
        width = int(kind.shape[-1])
        if kind.dtype is DType.Q8:
            results.append(q8_value(memory, rows, width))
        else:
            results.append(memory.view(np.float32).reshape(rows, width))
    if op.name == "attention":
        results.append(read_caches(op, sample, rows, caches))
    return tuple(results)


def _capacity(op: OpDef, sample: Sample, rows: int) -> int:
    window = int(op.complete(sample.attrs)["window"])
    total = sample.position + rows
    return min(total, window + rows) if window else total + 5


def fill_caches(op: OpDef, sample: Sample, rows: int) -> tuple[int, list[np.ndarray]]:
    attrs = op.complete(sample.attrs)
    capacity = _capacity(op, sample, rows)
    caches = []
    for past in past_caches(op, sample)[int(attrs["layer"])]:
        size = int(attrs["kv_heads"]) * capacity * int(attrs["head_size"])
        memory = aligned(size * 2)
        cache = memory.view(np.float16).reshape(int(attrs["kv_heads"]), capacity, -1)
        cache[...] = np.nan
        for token in range(len(past)):
            cache[:, token % capacity] = past[token]
        caches.append(cache)
    return capacity, caches


def read_caches(op: OpDef, sample: Sample, rows: int, caches: list[np.ndarray]) -> Any:
    """The new tokens' K and V, [rows, kv_heads, head_size] each."""
    places = [(sample.position + row) % caches[0].shape[1] for row in range(rows)]
    return tuple(cache[:, places].transpose(1, 0, 2).astype(np.float32) for cache in caches)
