"""Zig's C++ compiler, for libraries that need nothing but an old glibc.

The package `ziglang` (extra `atsc[zig]`) carries clang, a linker, libc++ and the symbols of every
glibc. What it builds does not depend on the machine that builds it. Zig reads some flags in its own
way, which `arguments` translates; it builds its C++ library on the first link, for about a minute.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from collections.abc import Iterable
from pathlib import Path

GLIBC = "2.28"
"""Debian 10, Ubuntu 18.10, RHEL 8 and later."""
TARGET = f"x86_64-linux-gnu.{GLIBC}"
COMPILE_FLAGS = ("-g0",)
"""Zig adds debug information unless told not to."""
LINK_FLAGS = ("-s",)
"""Zig's own libraries carry debug information with paths of the machine."""

_MARCH = "-march="
_DROPPED = ("-mtune=generic", "-static-libstdc++", "-static-libgcc")
"""Unknown to zig's clang, or what zig does anyway."""


@functools.cache
def find_zig() -> tuple[Path, str] | None:
    """The program of the package `ziglang` and its version; None where it is not installed."""
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "zig"
        try:
            shown = subprocess.run(
                [program, "version"], capture_output=True, text=True, check=False
            )
        except OSError:
            continue
        if shown.returncode == 0:
            return program, shown.stdout.strip()
    return None


def arguments(flags: Iterable[str]) -> list[str]:
    """Flags of gcc and clang as zig wants them: its CPU names have underscores."""
    return [
        _MARCH + flag.removeprefix(_MARCH).replace("-", "_") if flag.startswith(_MARCH) else flag
        for flag in flags
        if flag not in _DROPPED
    ]
