"""The system's C++ compiler, and the cache of what it compiled.

Objects are cached by content: source, every header that a kernel may include, flags, compiler
version. `$ATSC_CACHE_DIR` or `~/.cache/atsc` holds them; entries appear whole or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from atsc.compiler.errors import CodegenError

RUNTIME_SOURCES = Path(__file__).parent.parent / "runtime" / "src"
RUNTIME_INCLUDE = Path(__file__).parent.parent / "runtime" / "include"
COMMON = Path(__file__).parent / "templates" / "common"
INCLUDE_DIRS = (RUNTIME_SOURCES, RUNTIME_INCLUDE, COMMON)
BASE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler and what its `--version` says first."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit: a name for messages, its source, and flags beyond BASE_FLAGS."""

    name: str
    source: str
    flags: tuple[str, ...] = ()


def cache_dir() -> Path:
    """Where compiled objects are kept; not created here."""
    if explicit := os.environ.get("ATSC_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "atsc"


@functools.cache
def find_compiler() -> Compiler:
    """The compiler to use: $CXX, else the C++ driver beside $CC, else g++, clang++ or c++.

    Raises:
        CodegenError: there is none; says how to get one.
    """
    candidates: list[str] = []
    if cxx := os.environ.get("CXX"):
        candidates.append(cxx)
    if cc := os.environ.get("CC"):
        candidates.append(cc.replace("clang", "clang++").replace("gcc", "g++"))
    for candidate in [*candidates, "g++", "clang++", "c++"]:
        command = tuple(candidate.split())
        if not command or shutil.which(command[0]) is None:
            continue
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        if shown.returncode == 0:
            return Compiler(command, shown.stdout.splitlines()[0])
    raise CodegenError(
        "no C++ compiler was found; install one (Debian, Ubuntu: apt install g++; Fedora: dnf "
        "install gcc-c++) or set CXX to yours"
    )


def compile_units(
    units: Sequence[Unit], on_progress: Callable[[int, int], None] | None = None
) -> list[Path]:
    """Compile to object files, in parallel, through the cache; order is kept.

    Raises:
        CodegenError: the compiler refuses one; carries its first error lines.
    """
    done = 0
    results: dict[int, Path] = {}
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        futures = {pool.submit(_compile_one, unit): index for index, unit in enumerate(units)}
        try:
            for future, index in futures.items():
                results[index] = future.result()
                done += 1
                if on_progress:
                    on_progress(done, len(units))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [results[index] for index in range(len(units))]


def link_library(objects: Iterable[Path], output: Path, flags: Sequence[str] = ()) -> None:
    """Link a shared library that needs nothing but libc, libm and the thread library.

    Raises:
        CodegenError: the linker fails.
    """
    compiler = find_compiler()
    command = [
        *compiler.command,
        "-shared",
        "-o",
        str(output),
        *map(str, objects),
        "-static-libstdc++",
        "-static-libgcc",
        "-Wl,-Bsymbolic",
        "-Wl,--no-undefined",
        "-Wl,--gc-sections",
        "-pthread",
        "-lm",
        "-ldl",
        *flags,
    ]
    _run(command, f"linking {output.name}")


@functools.cache
def _headers_digest() -> str:
    digest = hashlib.sha256()
    for folder in INCLUDE_DIRS:
        for header in sorted(folder.glob("*.h")):
            digest.update(header.name.encode() + header.read_bytes())
    return digest.hexdigest()


def _compile_one(unit: Unit) -> Path:
    compiler = find_compiler()
    flags = (*BASE_FLAGS, *unit.flags)
    identity = "\0".join([*compiler.command, compiler.version, *flags, _headers_digest()])
    key = hashlib.sha256(f"{identity}\0{unit.source}".encode()).hexdigest()
    target = cache_dir() / "objects" / key[:2] / f"{key}.o"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source = Path(folder) / f"{unit.name}.cc"
        source.write_text(unit.source)
        built = Path(folder) / "built.o"
        includes = [f"-I{directory}" for directory in INCLUDE_DIRS]
        command = [*compiler.command, *flags, *includes, "-c", str(source), "-o", str(built)]
        _run(command, f"compiling {unit.name}")
        os.replace(built, target)
    return target


def _run(command: Sequence[str], doing: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        first = "; ".join(errors[:3]) or result.stderr.strip()[-400:]
        raise CodegenError(f"{doing} with {command[0]} failed: {first}")
