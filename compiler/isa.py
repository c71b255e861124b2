"""CPU levels: what a plan may demand of a processor, and what this processor offers."""

from __future__ import annotations

import platform
import sys
from collections.abc import Set
from pathlib import Path

ISA_FLAGS = {
    "x86-64": frozenset({"sse2"}),
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
}
"""Level -> the flags of /proc/cpuinfo that it adds to the level before; lowest first.

Source: x86-64 psABI, micro-architecture levels.
"""

CPUINFO = Path("/proc/cpuinfo")


def platform_name() -> str:
    """Operating system and architecture, as plans name them: `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine().lower()}"


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The feature flags that the kernel reports for the first CPU; empty where it reports none."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def missing_flags(level: str, flags: Set[str]) -> list[str]:
    """The flags that a CPU lacks for a level, sorted.

    Raises:
        KeyError: no such level.
    """
    needed: set[str] = set()
    for name, added in ISA_FLAGS.items():
        needed |= added
        if name == level:
            return sorted(needed - flags)
    raise KeyError(level)


def highest_level(flags: Set[str]) -> str | None:
    """The highest level whose flags are all there; None below `x86-64`."""
    found = None
    for level in ISA_FLAGS:
        if missing_flags(level, flags):
            break
        found = level
    return found
