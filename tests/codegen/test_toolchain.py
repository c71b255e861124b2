"""Compilers: which one is taken, what it is told, and that its output knows no machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_kernels

from atsc.codegen import toolchain, zig
from atsc.codegen.cpu import IsaLevel
from atsc.compiler import cli
from atsc.compiler.errors import CodegenError, UsageError
from atsc.compiler.ops import OpDef

SOURCE = """
#include <stdexcept>
#include <string>
#include "kernel.h"
#include "where.h"
extern "C" __attribute__((visibility("default"))) int length(int n) {
  try {
    if (n > 3) throw std::runtime_error(std::string(__FILE__) + where());
    return static_cast<int>(std::string(n, 'x').size());
  } catch (const std::exception& error) {
    return -static_cast<int>(std::string(error.what()).size());
  }
}
"""
BY_ZIG = {"embed", "quantize", "rms_norm", "linear", "attention"}
HEADER = "inline const char* where() { return __FILE__; }\n"
UNIT = toolchain.Unit("length", SOURCE, ("-march=x86-64", "-mtune=generic", "-fexceptions"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretends that compilers are there, or not."""

    def pretend(*, system: bool, ziglang: bool) -> None:
        gcc = toolchain.Compiler("system", ("g++",), "g++ 1")
        found = (Path("/opt/zig"), "0.14.0") if ziglang else None
        monkeypatch.setattr(toolchain, "_find_system", lambda: gcc if system else None)
        monkeypatch.setattr(zig, "find_zig", lambda: found)

    yield pretend


@pytest.mark.toolchain
def test_headers_that_change_while_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The object of a mixture is not kept, and the next one is of what is there then."""
    monkeypatch.setenv("ATSC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "INCLUDE_DIRS", (tmp_path,))
    header, compile_really = tmp_path / "number.h", toolchain._run
    unit = toolchain.Unit("number", '#include "number.h"\nint number() { return NUMBER; }\n')

    def compile_and_change(*arguments: Any) -> None:
        compile_really(*arguments)
        header.write_text("#define NUMBER 2\n")

    header.write_text("#define NUMBER 1\n")
    monkeypatch.setattr(toolchain, "_run", compile_and_change)
    with pytest.raises(CodegenError, match="headers were changed meanwhile; compile again"):
        toolchain.compile_units([unit])
    assert not list((tmp_path / "cache").rglob("*.o"))
    (second,) = toolchain.compile_units([unit])
    header.write_text("#define NUMBER 1\n")
    monkeypatch.setattr(toolchain, "_run", compile_really)
    (first,) = toolchain.compile_units([unit])
    assert first != second and first.read_bytes() != second.read_bytes()


def test_the_system_comes_first_and_zig_where_there_is_none(
    installed: Callable[..., None],
) -> None:
    installed(system=True, ziglang=True)
    assert toolchain.find_compiler().kind == "system"
    assert toolchain.find_compiler("zig").version == "zig 0.14.0 for glibc 2.28"
    installed(system=False, ziglang=True)
    found = toolchain.find_compiler()
    assert found.command == ("/opt/zig", "c++", "-target", "x86_64-linux-gnu.2.28")
    with pytest.raises(CodegenError, match=r"no C\+\+ compiler was found; install one .*atsc\[zig"):
        toolchain.find_compiler("system")


def test_what_is_not_there_is_said(installed: Callable[..., None]) -> None:
    installed(system=False, ziglang=False)
    with pytest.raises(CodegenError, match=r"no C\+\+ compiler was found; install one"):
        toolchain.find_compiler()
    with pytest.raises(CodegenError, match=r"--toolchain zig: it is not installed; pip install"):
        toolchain.find_compiler("zig")
    with pytest.raises(UsageError, match="--toolchain gcc: toolchains are system, zig"):
        toolchain.find_compiler("gcc")


def test_compile_says_when_zig_takes_over(
    installed: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    installed(system=False, ziglang=True)
    assert cli.main(["compile", str(tmp_path / "model.onnx")]) == 1
    said = "no compiler on this system: building with zig 0.14.0 for glibc 2.28"
    assert capsys.readouterr().err.startswith(said)
    installed(system=True, ziglang=True)
    assert cli.main(["compile", str(tmp_path / "model.onnx")]) == 1
    assert "building with" not in capsys.readouterr().err
    installed(system=False, ziglang=False)
    assert cli.main(["compile", str(tmp_path / "model.onnx")]) == 1
    assert capsys.readouterr().err.startswith("atsc: no C++ compiler was found; ")


def test_flags_as_zig_wants_them() -> None:
    flags = ["-O3", "-march=x86-64-v4", "-mavx512vnni", "-mtune=generic", "-static-libgcc"]
    assert zig.arguments(flags) == ["-O3", "-march=x86_64_v4", "-mavx512vnni"]
    assert zig.arguments(["-march=x86-64"]) == ["-march=x86_64"]


def test_objects_of_zig_do_not_depend_on_where_it_is() -> None:
    here, there = (
        toolchain.Compiler("zig", (f"/{place}/zig", "c++"), "zig 1") for place in ("a", "b")
    )
    assert here.identity == there.identity
    assert toolchain.Compiler("zig", ("/a/zig", "c++"), "zig 2").identity != here.identity
    gcc, clang = (toolchain.Compiler("system", (name,), "1") for name in ("g++", "clang++"))
    assert gcc.identity != clang.identity


def build(
    compiler: toolchain.Compiler, place: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, bytes]:
    """Object and library, built from a copy of the headers at `place`, with objects kept there."""
    for folder in (toolchain.RUNTIME_SOURCES, toolchain.RUNTIME_INCLUDE, toolchain.COMMON):
        shutil.copytree(folder, place / folder.relative_to(toolchain.ROOT))
    (place / "runtime" / "src" / "where.h").write_text(HEADER)
    copies = [place / folder.relative_to(toolchain.ROOT) for folder in toolchain.INCLUDE_DIRS]
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "ROOT", place)
        patch.setattr(toolchain, "INCLUDE_DIRS", tuple(copies))
        patch.setattr(toolchain, "cache_dir", lambda: place / "cache")
        (built,) = toolchain.compile_units([UNIT], compiler=compiler)
    toolchain.link_library([built], place / "library.so", compiler=compiler)
    return built.read_bytes(), (place / "library.so").read_bytes()


@pytest.mark.toolchain
def test_the_system_compiler_leaves_no_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = toolchain.find_compiler("system")
    first = build(compiler, tmp_path / "one", monkeypatch)
    assert first == build(compiler, tmp_path / "another place", monkeypatch)
    assert all(str(tmp_path).encode() not in content for content in first)


@pytest.mark.toolchain
def test_a_failure_names_the_compiler_and_the_error() -> None:
    with pytest.raises(CodegenError, match=r"compiling bad with .* failed: bad\.cc:1.*error"):
        toolchain.compile_units([toolchain.Unit("bad", "int x = ;")])


@pytest.fixture
def zig_compiler() -> toolchain.Compiler:
    if zig.find_zig() is None:
        pytest.skip("needs the package ziglang")
    return toolchain.find_compiler("zig")


def glibc_versions(library: bytes) -> set[tuple[int, int]]:
    """Of all symbols that a library asks of glibc."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)(?:\.\d+)?\0", library)
    return {(int(major), int(minor)) for major, minor in found}


@pytest.mark.slow
@pytest.mark.toolchain
def test_zig_makes_the_same_library_anywhere(
    zig_compiler: toolchain.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first link of a cache builds zig's C++ library, which takes a minute."""
    first = build(zig_compiler, tmp_path / "one", monkeypatch)
    assert first == build(zig_compiler, tmp_path / "another place", monkeypatch)
    assert all(str(tmp_path).encode() not in content for content in first)
    assert str(zig_compiler.command[0]).rpartition("/")[0].encode() not in first[1]


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("op", "isa"), [case for case in test_kernels.CASES if case.values[0].name in BY_ZIG]
)
def test_kernels_by_zig_equal_the_reference(
    zig_compiler: toolchain.Compiler,
    op: OpDef,
    isa: IsaLevel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warnings are errors here, as everywhere with kernels."""
    monkeypatch.setattr(toolchain, "_find_system", lambda: None)
    test_kernels.test_kernels_equal_the_reference(op, isa, tmp_path)


@pytest.mark.slow
@pytest.mark.toolchain
def test_a_plan_by_zig_runs_and_asks_for_an_old_glibc(
    zig_compiler: toolchain.Compiler,
    export: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, plan = export("llama3-int4-cpu"), tmp_path / "plan"
    flags = ["--ctx", "200", "--toolchain", "zig"]
    assert cli.main(["compile", str(model), "-o", str(plan), *flags]) == 0
    capsys.readouterr()
    library = (plan / "libplan.so").read_bytes()
    versions = glibc_versions(library)
    assert versions
    assert max(versions) <= (2, 28)
    assert b"GLIBCXX" not in library
    assert cli.main(["verify", str(plan), str(model), "--tokens", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
