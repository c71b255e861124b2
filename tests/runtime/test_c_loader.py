"""The C loader and the C example: the same answers as Python's, and the same refusals."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CONTEXT, RUNTIME

from atsc.compiler.errors import PlanError
from atsc.compiler.plan import API_VERSION
from atsc.runtime import capi
from atsc.runtime.loader import load

pytestmark = pytest.mark.toolchain

EXAMPLE = Path(__file__).parents[2] / "examples" / "c"
MakePlan = Callable[[Callable[[dict[str, Any]], None]], Path]


@pytest.fixture(scope="session")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built example."""
    folder = tmp_path_factory.mktemp("example")
    command = ["make", "-C", str(EXAMPLE), f"OUT={folder}", "CFLAGS=-O1 -Wall -Wextra -Werror"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "generate"


def _run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_example_prints_what_python_generates(generate: Path, tiny_folder: Path) -> None:
    with load(tiny_folder) as plan:
        expected = list(plan.generate([5, 6, 7], max_new_tokens=64))
    shown = _run(generate, tiny_folder, 5, 6, 7)
    assert shown.returncode == 0, shown.stderr
    assert [int(token) for token in shown.stdout.split()] == expected
    assert "tokens/s" in shown.stderr


def test_example_reports_errors_in_one_line(generate: Path, tiny_folder: Path) -> None:
    for arguments, code, message in (
        ((tiny_folder, 99), 1, "token 99 is not in the vocabulary"),
        ((tiny_folder, *[1] * (CONTEXT + 1)), 1, "97 tokens more do not fit"),
        ((tiny_folder, "1x"), 2, "1x is no token id"),
        ((tiny_folder,), 2, "usage"),
        ((tiny_folder / "absent", 1), 1, "no plan folder"),
        ((EXAMPLE, 1), 1, "no plan (it has no plan.json)"),
    ):
        shown = _run(generate, *arguments)
        assert shown.returncode == code
        assert message in shown.stderr and shown.stderr.count("\n") == 1
        assert shown.stdout == ""


def _edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "plan.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest, ensure_ascii=True))


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _link_out(folder: Path) -> None:
    shutil.move(folder / "weights.bin", folder.parent / "weights.bin")
    os.symlink(folder.parent / "weights.bin", folder / "weights.bin")


def _leave(manifest: dict[str, Any]) -> None:
    manifest["files"]["../weights.bin"] = manifest["files"]["weights.bin"]


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda f: (f / "weights.bin").unlink(), "weights.bin is missing"),
    "truncated": (lambda f: os.truncate(f / "weights.bin", 99), "99 bytes instead of 14336"),
    "altered": (lambda f: _flip(f / "libplan.so", 5000), "libplan.so is not what was compiled"),
    "schema": (lambda f: _edit(f, lambda m: m.update(schema=9)), "plan schema 9"),
    "newer": (
        lambda f: _edit(f, lambda m: m.update(interface=99, oldest_interface=98, library=[])),
        f"another version of atsc (C interface 99, this loader has {API_VERSION})",
    ),
    "older": (
        lambda f: _edit(f, lambda m: m.update(interface=1, oldest_interface=1, library=[])),
        f"another version of atsc (C interface 1, this loader has {API_VERSION})",
    ),
    "no interface": (lambda f: _edit(f, lambda m: m.pop("interface")), "plan.json is damaged"),
    "platform": (lambda f: _edit(f, lambda m: m.update(platform="linux-arm64")), "linux-arm64"),
    "isa": (lambda f: _edit(f, lambda m: m.update(isa="x86-64-v9")), "level x86-64-v9"),
    "no isa": (lambda f: _edit(f, lambda m: m.pop("isa")), "plan.json is damaged"),
    "leaves": (lambda f: _edit(f, _leave), "no path inside the plan"),
    "absolute": (
        lambda f: _edit(f, lambda m: m["files"].update({"/etc/passwd": m["files"]["libplan.so"]})),
        "no path inside the plan",
    ),
    "link": (_link_out, "weights.bin is reached through a link"),
    "no library": (lambda f: _edit(f, lambda m: m.update(library="x")), "does not list x"),
    "text": (lambda f: (f / "plan.json").write_text("{]"), "damaged near byte 1"),
    "empty": (lambda f: (f / "plan.json").write_text(""), "damaged near byte 0"),
    "cut": (lambda f: os.truncate(f / "plan.json", 300), "damaged near byte"),
    "trailing": (
        lambda f: (f / "plan.json").write_text((f / "plan.json").read_text() + "x"),
        "damaged near byte",
    ),
    "doubled": (
        lambda f: (f / "plan.json").write_text(
            '{"plan_id": "a", "plan_id": "b",' + (f / "plan.json").read_text().lstrip()[1:]
        ),
        "damaged near byte",
    ),
    "deep": (
        lambda f: (f / "plan.json").write_text('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "damaged near byte",
    ),
    "another's": (
        lambda f: _edit(f, lambda m: m.update(plan_id="other")),
        "belongs to another plan",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_both_loaders_refuse(generate: Path, tiny_copy: Path, damage: str) -> None:
    harm, message = DAMAGES[damage]
    harm(tiny_copy)
    shown = _run(generate, tiny_copy, 1)
    assert shown.returncode == 1
    assert message in shown.stderr and shown.stderr.count("\n") == 1
    with pytest.raises(PlanError):
        load(tiny_copy)


def test_json_is_read_as_python_writes_it(generate: Path, tiny_copy: Path) -> None:
    """Escapes, surrogate pairs, numbers and nesting in parts that the loader skips."""
    (tiny_copy / "tokenizer").mkdir()
    name = "tokenizer/ü 😀\t"
    (tiny_copy / name).write_text("content")
    digest = hashlib.sha256(b"content").hexdigest()

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = {"bytes": 7, "sha256": digest}
        manifest["target"] = {"a": [1.5e-3, -2, True, None, {"\ud83d\ude00": '\\"\n/'}], "b": {}}

    _edit(tiny_copy, change)
    assert _run(generate, tiny_copy, 1).returncode == 0
    (tiny_copy / name).write_text("Content")
    assert "is not what was compiled" in _run(generate, tiny_copy, 1).stderr


class _Options(capi._Sized):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("expected_sha256", ctypes.c_char_p),
        ("num_threads", ctypes.c_int32),
        ("weights_mode", ctypes.c_int32),
        ("verify", ctypes.c_int32),
        ("max_sessions", ctypes.c_int32),
        ("isa", ctypes.c_char_p),
    )


class _Opened(capi._Sized):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("api", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("library", ctypes.c_void_p),
        ("descriptor", ctypes.c_int),
    )


def test_pinned_and_verified(tiny_copy: Path, tmp_path: Path) -> None:
    """atsc_open's options, through a library of the loader alone; no descriptor is left open."""
    library = tmp_path / "libopen.so"
    source = RUNTIME / "src" / "atsc_open.c"
    subprocess.run(
        [
            *("cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *(f"-I{RUNTIME / 'include'}", str(source), "-o", str(library), "-ldl"),
        ],
        check=True,
    )
    loader = ctypes.CDLL(str(library))
    digest = hashlib.sha256((tiny_copy / "plan.json").read_bytes()).hexdigest()
    descriptors = len(os.listdir("/proc/self/fd"))

    def attempt(**options: Any) -> tuple[int, str]:
        opened, message = _Opened(), capi.Message()
        folder = os.fsencode(tiny_copy)
        given = _Options(**options)
        status = loader.atsc_open(
            folder, ctypes.byref(given), ctypes.byref(opened), ctypes.byref(message)
        )
        assert bool(opened.plan) == (status == 0)
        assert loader.atsc_close(ctypes.byref(opened), None) == 0
        return status, message.text.decode()

    assert attempt(expected_sha256=digest.upper().encode(), verify=1) == (0, "")
    status, text = attempt(expected_sha256=b"0" * 64)
    assert status == 4 and "expected_sha256" in text
    _flip(tiny_copy / "weights.bin", 4096)
    assert attempt() == (0, "")
    for options in ({"verify": 1}, {"weights_mode": 1}):
        status, text = attempt(**options)
        assert status == 4 and "unit w1 is damaged" in text
    assert len(os.listdir("/proc/self/fd")) == descriptors
