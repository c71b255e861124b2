"""The runtime's scheduler of promotions as a library of its own, called through ctypes.

It depends on no model, so it is compiled once for a machine and kept in the cache.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from atsc.codegen.build import RUNTIME_FLAGS
from atsc.codegen.toolchain import (
    COMMON,
    RUNTIME_SOURCES,
    Unit,
    cache_dir,
    compile_units,
    find_compiler,
    link_library,
)
from atsc.compiler.errors import CodegenError
from atsc.passes.transfer import Promotion, Scheduler, Slots, Transferable, TransferSchedule

SOURCES = (
    RUNTIME_SOURCES / "transfer_schedule.cc",
    RUNTIME_SOURCES / "transfer_turns.cc",
    COMMON / "transfer_library.cc",
)


class _Unit(ctypes.Structure):
    """`TransferUnit` of runtime/src/transfer_schedule.h."""

    _fields_ = (
        ("cpu_ns", ctypes.c_int64),
        ("gpu_ns", ctypes.c_int64),
        ("transfer_ns", ctypes.c_int64),
        ("to_gpu_ns", ctypes.c_int64),
        ("to_cpu_ns", ctypes.c_int64),
        ("num_bytes", ctypes.c_uint64),
        ("on_gpu", ctypes.c_bool),
        ("can_be_promoted", ctypes.c_bool),
    )


class _Machine(ctypes.Structure):
    """`TransferMachine`."""

    _fields_ = (
        ("num_slots", ctypes.c_int),
        ("slot_bytes", ctypes.c_uint64),
        ("link_factor", ctypes.c_double),
        ("cpu_share", ctypes.c_double),
        ("late_ns", ctypes.c_int64),
    )


class _Promotion(ctypes.Structure):
    """`Promotion` of runtime/src/round_builder.h."""

    _fields_ = (("unit", ctypes.c_int), ("slot", ctypes.c_int), ("not_before", ctypes.c_int))


class _Result(ctypes.Structure):
    """`Result` of templates/common/transfer_library.cc."""

    _fields_ = (
        ("round_ns", ctypes.c_int64),
        ("static_ns", ctypes.c_int64),
        ("num_promotions", ctypes.c_int32),
        ("message", ctypes.c_char * 120),
    )


def load_scheduler(exact: bool = False, toolchain: str | None = None) -> Scheduler:
    """The scheduler, compiled if the cache has it not.

    Args:
        exact: instead of within 1 % and a millisecond; in exponential time.
        toolchain: as `find_compiler` takes it.

    Raises:
        CodegenError: there is no compiler, or it fails.
    """
    library = _open(toolchain)

    def schedule(units: Sequence[Transferable], slots: Slots) -> TransferSchedule:
        promotions, result = (_Promotion * len(units))(), _Result()
        library.atsc_schedule_transfers(
            _packed(units),
            len(units),
            ctypes.byref(_machine(slots)),
            exact,
            promotions,
            ctypes.byref(result),
        )
        if result.message:
            raise CodegenError(f"scheduling promotions of {len(units)} units: {result.message!r}")
        return TransferSchedule(
            tuple(
                Promotion(each.unit, each.slot, each.not_before)
                for each in promotions[: result.num_promotions]
            ),
            result.round_ns,
            result.static_ns,
        )

    return schedule


def predict_in_turns(
    units: Sequence[Transferable],
    slots: Slots,
    promoted: Collection[int],
    slice_ns: int,
    spins: bool = False,
    toolchain: str | None = None,
) -> int:
    """Nanoseconds of a round beside another program that has the GPU in turn.

    Args:
        units: their times without the other program.
        promoted: units that are copied to a slot.
        slice_ns: how long each program has the GPU while both have work for it.
        spins: whether the GPU keeps its turn while it waits for the CPU.

    Raises:
        CodegenError: there is no compiler, or it fails.
    """
    flags = bytes(index in promoted for index in range(len(units)))
    found: int = _open(toolchain).atsc_predict_in_turns(
        _packed(units), len(units), ctypes.byref(_machine(slots)), flags, slice_ns, spins
    )
    return found


def _packed(units: Sequence[Transferable]) -> ctypes.Array[_Unit]:
    return (_Unit * len(units))(
        *(
            _Unit(
                unit.cpu_ns,
                unit.gpu_ns,
                unit.transfer_ns,
                unit.to_gpu_ns,
                unit.to_cpu_ns,
                unit.num_bytes,
                unit.on_gpu,
                unit.can_be_promoted,
            )
            for unit in units
        )
    )


def _machine(slots: Slots) -> _Machine:
    return _Machine(
        slots.num_slots, slots.slot_bytes, slots.link_factor, slots.cpu_share, slots.late_ns
    )


@functools.cache
def _open(toolchain: str | None) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_library(toolchain)))
    library.atsc_schedule_transfers.restype = None
    library.atsc_schedule_transfers.argtypes = (
        ctypes.POINTER(_Unit),
        ctypes.c_int32,
        ctypes.POINTER(_Machine),
        ctypes.c_bool,
        ctypes.POINTER(_Promotion),
        ctypes.POINTER(_Result),
    )
    library.atsc_predict_in_turns.restype = ctypes.c_int64
    library.atsc_predict_in_turns.argtypes = (
        ctypes.POINTER(_Unit),
        ctypes.c_int32,
        ctypes.POINTER(_Machine),
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_bool,
    )
    return library


def build_library(toolchain: str | None = None) -> Path:
    """The library's file in the cache; there it appears whole or not at all.

    Raises:
        CodegenError: there is no compiler, or it fails.
    """
    compiler = find_compiler(toolchain)
    units = [Unit(path.stem, path.read_text("utf-8"), RUNTIME_FLAGS) for path in SOURCES]
    objects = compile_units(units, compiler=compiler)
    key = hashlib.sha256("\0".join(path.name for path in objects).encode()).hexdigest()
    target = cache_dir() / "libraries" / f"transfer-{key}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "built.so"
        link_library(objects, built, compiler=compiler)
        os.replace(built, target)
    return target
