"""Builds the C++ programs that test rounds of host and device on plans made at run time."""

from __future__ import annotations

import subprocess
from pathlib import Path

from atsc.codegen import toolchain

SOURCES = Path(__file__).parent / "runtime" / "hybrid"


def build_program(name: str, output: Path, flags: tuple[str, ...] = ()) -> Path:
    """An executable of `hybrid/NAME.cc` and the runtime without the C interface."""
    flags = ("-fexceptions", "-O1", f"-I{SOURCES}", *flags)
    runtime = [
        path
        for path in sorted(toolchain.RUNTIME_SOURCES.glob("*.cc"))
        if not path.stem.startswith("api")
    ]
    headers = "".join(path.read_text() for path in sorted(SOURCES.glob("*.h")))
    # Part of what the cache compares.
    main = f"{(SOURCES / f'{name}.cc').read_text()}\n#if 0\n{headers}\n#endif\n"
    units = [toolchain.Unit(f"hybrid_{path.stem}", path.read_text(), flags) for path in runtime]
    objects = toolchain.compile_units([*units, toolchain.Unit(name, main, flags)])
    compiler = toolchain.find_compiler()
    arguments = [*flags, *map(str, objects), "-pthread", "-ldl", "-o", str(output)]
    subprocess.run([*compiler.command, *arguments], check=True, capture_output=True, text=True)
    return output
