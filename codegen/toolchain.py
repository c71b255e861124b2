"""C++ compilers, the system's or zig's, and the cache of what they compiled.

Objects are cached by content: source, every header that a kernel may include, flags, compiler
version. `$ATSC_CACHE_DIR` or `~/.cache/atsc` holds them; entries appear whole or not at all.

Nothing of the machine gets into an object or a library: sources are compiled under a relative name,
paths of headers are mapped, and the order of everything is fixed. Zig, whose version fixes the C++
library too, makes the same library bit for bit on any machine.
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
from typing import Literal

from atsc.codegen import zig
from atsc.compiler.errors import CodegenError, UsageError

ROOT = Path(__file__).parent.parent
RUNTIME_SOURCES = ROOT / "runtime" / "src"
RUNTIME_INCLUDE = ROOT / "runtime" / "include"
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
TOOLCHAINS = ("system", "zig")
ADVICE = (
    "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), set CXX to yours, "
    "or pip install 'atsc[zig]'"
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler."""

    kind: Literal["system", "zig"]
    command: tuple[str, ...]
    version: str
    """What `--version` says first."""

    @property
    def identity(self) -> str:
        """What its objects depend on; zig's does not depend on where it is installed."""
        return self.version if self.kind == "zig" else "\0".join([*self.command, self.version])

    def arguments(self, flags: Iterable[str]) -> list[str]:
        """Flags as this compiler wants them."""
        return zig.arguments(flags) if self.kind == "zig" else list(flags)


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


def find_compiler(toolchain: str | None = None) -> Compiler:
    """The compiler of a toolchain: by default the system's, or zig where the system has none.

    Raises:
        CodegenError: there is none; says how to get one.
        UsageError: no such toolchain.
    """
    if toolchain not in (None, *TOOLCHAINS):
        raise UsageError(f"--toolchain {toolchain}: toolchains are {', '.join(TOOLCHAINS)}")
    found = None
    if toolchain != "zig":
        found = _find_system()
    if toolchain != "system" and found is None:
        found = _find_zig()
    if found is None and toolchain == "zig":
        raise CodegenError("--toolchain zig: it is not installed; pip install 'atsc[zig]'")
    if found is None:
        raise CodegenError(f"no C++ compiler was found; {ADVICE}")
    return found


@functools.cache
def _find_system() -> Compiler | None:
    """$CXX, else the C++ driver beside $CC, else g++, clang++ or c++."""
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
            return Compiler("system", command, shown.stdout.splitlines()[0])
    return None


def _find_zig() -> Compiler | None:
    found = zig.find_zig()
    if found is None:
        return None
    program, version = found
    command = (str(program), "c++", "-target", zig.TARGET)
    return Compiler("zig", command, f"zig {version} for glibc {zig.GLIBC}")


def compile_units(
    units: Sequence[Unit],
    on_progress: Callable[[int, int], None] | None = None,
    compiler: Compiler | None = None,
) -> list[Path]:
    """Compile to object files, in parallel, through the cache; order is kept.

    Args:
        units: what to compile.
        on_progress: told how many of all are done.
        compiler: by default `find_compiler()`.

    Raises:
        CodegenError: the compiler refuses one; carries its first error lines.
    """
    compiler = compiler or find_compiler()
    done = 0
    results: dict[int, Path] = {}
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        futures = {
            pool.submit(_compile_one, compiler, unit): index for index, unit in enumerate(units)
        }
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


def link_library(
    objects: Iterable[Path],
    output: Path,
    flags: Sequence[str] = (),
    compiler: Compiler | None = None,
) -> None:
    """Link a shared library that needs nothing but libc, libm and the thread library.

    Objects of one compiler only: zig's C++ library is not the system's.

    Raises:
        CodegenError: the linker fails.
    """
    compiler = compiler or find_compiler()
    options = (
        "-static-libstdc++",
        "-static-libgcc",
        "-Wl,-Bsymbolic",
        "-Wl,--no-undefined",
        "-Wl,--gc-sections",
        "-pthread",
        "-lm",
        "-ldl",
        *(zig.LINK_FLAGS if compiler.kind == "zig" else ()),
        *flags,
    )
    shared = ["-shared", "-o", str(output.absolute()), *(str(path.absolute()) for path in objects)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler.command, *shared, *compiler.arguments(options)]
        _run(compiler, command, Path(folder), f"linking {output.name}")


def headers_digest(headers: Iterable[Path]) -> str:
    """Of their content now: a process may outlive it."""
    digest = hashlib.sha256()
    for header in headers:
        digest.update(header.name.encode() + header.read_bytes())
    return digest.hexdigest()


def check_unchanged(unit: str, headers: Iterable[Path], digest: str) -> None:
    """After a compiler has read the headers: what it compiled is known.

    Else it must not be found under a key of that digest for ever.

    Raises:
        CodegenError: their content is another one than it was.
    """
    if headers_digest(headers) != digest:
        raise CodegenError(
            f"compiling {unit}: atsc's own headers were changed meanwhile; compile again"
        )


def _headers() -> list[Path]:
    return [header for folder in INCLUDE_DIRS for header in sorted(folder.glob("*.h"))]


def _compile_one(compiler: Compiler, unit: Unit) -> Path:
    flags = (*BASE_FLAGS, *unit.flags, *(zig.COMPILE_FLAGS if compiler.kind == "zig" else ()))
    digest = headers_digest(_headers())
    identity = "\0".join([compiler.identity, *flags, unit.name, digest])
    key = hashlib.sha256(f"{identity}\0{unit.source}".encode()).hexdigest()
    target = cache_dir() / "objects" / key[:2] / f"{key}.o"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name).resolve()
        (folder / f"{unit.name}.cc").write_text(unit.source)
        paths = [f"-I{directory}" for directory in INCLUDE_DIRS]
        # The last one that matches holds.
        paths += [f"-ffile-prefix-map={ROOT}=atsc", f"-ffile-prefix-map={folder}=."]
        command = [*compiler.command, *compiler.arguments(flags), *paths]
        command += ["-c", f"{unit.name}.cc", "-o", "built.o"]
        _run(compiler, command, folder, f"compiling {unit.name}")
        check_unchanged(unit.name, _headers(), digest)
        os.replace(folder / "built.o", target)
    return target


def _run(compiler: Compiler, command: Sequence[str], folder: Path, doing: str) -> None:
    """Run a command of a compiler in a folder of its own, where it may leave things."""
    environment = dict(os.environ)
    if compiler.kind == "zig":
        environment["ZIG_GLOBAL_CACHE_DIR"] = str(cache_dir().absolute() / "zig")
        environment["ZIG_LOCAL_CACHE_DIR"] = str(folder / "zig")
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        first = "; ".join(errors[:3]) or result.stderr.strip()[-400:]
        raise CodegenError(f"{doing} with {compiler.version} failed: {first}")
