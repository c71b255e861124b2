"""Times of units measured on this machine, with the very kernels that the plan will contain.

A plan without placements is written beside the one to come and opened by the loader; its runtime
times one unit at a time, weights cold, on either side. Of units with equal kernels and sizes (the
layers of a model) one is timed, or some where times jitter. What was found is kept in the cache
folder under a hash of the machine, the kernels, how they are timed and the question; that plan is
written only when an answer is missing. Source: DESIGN section 3, annotate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.codegen.device_plan import profiling_tables
from atsc.codegen.toolchain import RUNTIME_SOURCES, cache_dir
from atsc.compiler.compilation import Compilation
from atsc.compiler.write_plan import write_compiled
from atsc.passes.annotate import Progress
from atsc.passes.placement import Link, Side

if TYPE_CHECKING:
    from atsc.runtime.loader import Plan

MOST_TIMED = 5
"""Of equal units, on the CPU in decode: what else uses its memory comes and goes within seconds."""


@dataclass(slots=True)
class MeasuredTimer:
    """The Timer of `annotate` that asks the hardware; remembers its answers."""

    open_plan: Callable[[], Plan]
    """The plan that is timed, opened once."""
    signatures: tuple[str, ...]
    """Of each unit: equal where kernels and sizes are."""
    answers: dict[str, Any] = field(default_factory=dict)

    def unit_ns(self, unit: int, side: Side, rows: int, position: int) -> int:
        """See Timer. The median of equal units that were asked about until now."""
        key = f"{self.signatures[unit]} {side.value} {rows} {position}"
        times: dict[str, int] = self.answers.setdefault(key, {})
        on_device = side is Side.GPU
        most = MOST_TIMED if rows == 1 and not on_device else 1
        if str(unit) not in times and len(times) < most:
            times[str(unit)] = self.open_plan().profile_unit(unit, on_device, rows, position)
        return int(statistics.median(times.values()))

    def transfer_ns(self, num_bytes: int) -> int:
        """See Timer."""
        return round(num_bytes / self.link_profile()["to_device_beside_cpu_bytes_per_s"] * 1e9)

    def link(self, to: Side) -> Link:
        """See Timer."""
        direction = "device" if to is Side.GPU else "host"
        found = self.link_profile()
        rate = found[f"to_{direction}_bytes_per_s"]
        return Link(found[f"hand_off_to_{direction}_ns"], 1e9 / rate)

    def cpu_share(self) -> float:
        """See Timer."""
        return min(1 / self.link_profile()["cpu_slowdown"], 1.0)

    def fixed_device_bytes(self) -> int:
        """What the process holds of the GPU whatever lives there."""
        return int(self.link_profile()["fixed_device_bytes"])

    def link_profile(self) -> dict[str, float]:
        """Rates and latencies between the two sides, as Plan.profile_link gives them."""
        if "link" not in self.answers:
            self.answers["link"] = self.open_plan().profile_link()
        found: dict[str, float] = self.answers["link"]
        return found


@contextlib.contextmanager
def measuring(b: Compilation, profile: Path, progress: Progress | None) -> Iterator[MeasuredTimer]:
    """A timer for a compilation whose target is this machine; keeps what it found.

    Args:
        b: what is to be timed.
        profile: where the plan that is timed is written, on a disk with room for the weights.
        progress: told how far the weights are written.

    Raises:
        DeviceError: the GPU cannot be used.
    """
    from atsc.runtime import loader

    kept = cache_dir() / "profiles" / f"{_identity(b)}.json"
    with contextlib.ExitStack() as opened:

        @functools.cache
        def open_plan() -> Plan:
            tables = None
            if b.target.gpu:
                tables = profiling_tables(
                    b.target.gpu, b.target.vram_bytes, b.code.device, len(b.parts.units)
                )
            write_compiled(b, None, tables, profile, progress)
            return opened.enter_context(
                loader.load(profile, threads=b.options.threads, strict=True)
            )

        timer = MeasuredTimer(open_plan, _signatures(b), _read(kept))
        yield timer
        _write(kept, timer.answers)


def _signatures(b: Compilation) -> tuple[str, ...]:
    """Kernels of a unit's nodes and its size: what its time depends on."""
    found = []
    for unit, stored in zip(b.parts.units, b.parts.storage.units, strict=True):
        symbols = [
            kernel.symbol
            for index in unit.nodes
            for level in (b.code.cpu.of_nodes[index].few_rows, b.code.cpu.of_nodes[index].many_rows)
            for kernel in level.values()
        ]
        text = json.dumps([unit.kind.value, stored.bytes, symbols])
        found.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return tuple(found)


def _identity(b: Compilation) -> str:
    """A hash of the machine, of the code that is timed, and of the code that times it."""
    modules = [path.name for _, path in b.code.device.modules] if b.code.device else []
    profiler = [path.read_text("utf-8") for path in sorted(RUNTIME_SOURCES.glob("profiler*"))]
    assert profiler, "the runtime's sources are part of the package"
    code = [b.code.cpu.identity(), modules, profiler]
    facts = [dataclasses.asdict(b.target), code, b.options.threads, MOST_TIMED]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _write(path: Path, answers: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(answers, indent=1), "utf-8")
    os.replace(fresh, path)
