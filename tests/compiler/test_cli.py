"""The command line with everything behind it replaced: usage, errors, output, exit codes."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_plan import write_plan

from atsc.compiler import cli, driver
from atsc.compiler.check_plan import check_plan
from atsc.compiler.commands.compile import _unused_gpu
from atsc.compiler.commands.console import Console, ProgressBar, format_size, parse_size, table
from atsc.compiler.errors import ModelError, UsageError
from atsc.targets.target import Target


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Atsc = Callable[..., Outcome]


@pytest.fixture
def atsc(capsys: pytest.CaptureFixture[str]) -> Atsc:
    def run(*arguments: str | Path) -> Outcome:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_plan(tmp_path / "a plän.atsplan")
    return tmp_path / "a plän.atsplan"


def one_line(outcome: Outcome, code: int) -> str:
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("atsc")
    return outcome.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["complie", "x"], "no command 'complie'; did you mean compile?"),
        (["xyzzy"], "commands are compile, run,"),
        (["check"], "arguments are required: PLAN"),
        (["check", "a", "b"], "atsc check: unrecognized arguments: b (see atsc check --help)"),
        (
            ["run", "p", "--promt", "x"],
            "arguments: --promt x; did you mean --prompt? (see atsc run",
        ),
        (["run", "p", "x y"], "unrecognized arguments: x y; a prompt is given with -p"),
        (["check", "p", "--sha256", ""], "--sha256: '' is no sha256; it has 64 hexadecimal"),
        (["compile", "m", "--ctx", "0"], "--ctx: '0' is no whole number from 1 up"),
        (["compile", "m", "--threads", "two"], "'two' is no whole number from 1 to"),
        (["run", "p", "-p", "x", "--threads", "513"], "'513' is no whole number from 1 to 512"),
        (["compile", "m", "--accuracy-level", "2"], "--accuracy-level: invalid choice: 2"),
        (["run", "p", "-p", "x", "--top-p", "1.5"], "--top-p: '1.5' is no number from 0 to 1"),
        (["run", "p", "-p", "x", "--temperature", "nan"], "'nan' is no number"),
        (["run", "p"], "give a prompt with -p TEXT"),
        (["run", "p", "-p", "x", "--system", "y"], "--system belongs to --chat"),
        (["bench", "p", "-p", "1,x"], "-p: 'x' is no whole number from 0 up"),
        (["bench", ".", "-p", "0", "-n", "0"], "nothing to measure"),
        (["verify", "p", "m", "--tokens", "1"], "--tokens: '1' is no whole number from 2 up"),
        (["convert", "m.gguf"], "arguments are required: -o/--output"),
    ],
)
def test_wrong_usage(atsc: Atsc, arguments: list[str], expected: str) -> None:
    assert expected in one_line(atsc(*arguments), 2)


@pytest.mark.parametrize("flag", ["--ram", "--disk"])
def test_flags_of_features_to_come_are_refused_by_name(atsc: Atsc, flag: str) -> None:
    assert f"{flag} is not supported yet" in one_line(atsc("compile", "m", flag, "6G"), 2)


def test_help_and_version(atsc: Atsc) -> None:
    assert atsc("--version").out.startswith("atsc ")
    for module in cli.COMMANDS:
        name = module.__name__.rpartition(".")[2]
        outcome = atsc(name, "--help")
        assert (outcome.code, outcome.err) == (0, "")
        assert f"usage: atsc {name}" in outcome.out


def test_without_a_command_there_is_help(atsc: Atsc) -> None:
    outcome = atsc()
    assert (outcome.code, outcome.out) == (2, "")
    assert "what this machine has and lacks" in outcome.err


def test_paths_that_do_not_exist_name_their_neighbour(atsc: Atsc, folder: Path) -> None:
    typo = folder.with_name("a plan.atsplan")
    for arguments in (["check", typo], ["inspect", typo], ["run", typo, "-p", "x"]):
        assert f"no such plan folder; did you mean {folder}?" in one_line(atsc(*arguments), 1)
    absent = folder.parent / "nowhere" / "m.onnx"
    assert f"there is no folder {absent.parent} either" in one_line(atsc("compile", absent), 1)


def test_check(atsc: Atsc, folder: Path) -> None:
    assert ": ok, tïny, 3 files" in atsc("check", folder).out
    outcome = atsc("check", folder, "--full", "--json")
    assert outcome.code == 0
    assert outcome.document["ok"] is True
    digest = outcome.document["sha256"]
    assert digest == hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest()
    assert digest in atsc("check", folder, "--sha256", digest.upper()).out
    assert "pins" in one_line(atsc("check", folder, "--sha256", "0" * 64), 1)
    (folder / "libplan.so").write_bytes(b"")
    assert "truncated" in one_line(atsc("check", folder), 1)


def test_with_json_a_failure_is_a_document_too(atsc: Atsc, folder: Path) -> None:
    (folder / "libplan.so").unlink()
    outcome = atsc("check", folder, "--json")
    assert outcome.code == 1
    assert outcome.document["ok"] is False
    assert outcome.err == f"atsc: {outcome.document['error']}\n"
    outcome = atsc("run", folder, "--chat", "--json")
    assert outcome.code == 2
    assert "--json takes one prompt" in outcome.document["error"]


def test_inspect(atsc: Atsc, folder: Path) -> None:
    text = atsc("inspect", folder).out
    for expected in ("tïny", "layer 0 · qkv", "int4b32", "KV cache, 1 x 256 tokens", "13.00 KiB"):
        assert expected in text
    assert re.search(r"^layer 0 · qkv +int4b32 ", text, re.MULTILINE)
    told = atsc("inspect", folder, "-v").out
    assert re.search(r"^layer 0 · qkv +1: layer 0 · qkv +int4b32 ", told, re.MULTILINE)
    document = atsc("inspect", folder, "--json").document
    assert document["memory"]["peak_bytes"] == 13312
    assert [unit["name"] for unit in document["units"]] == ["embed", "layer 0 · qkv", "head"]


def test_targets(atsc: Atsc) -> None:
    text = atsc("targets").out
    assert re.search("laptop-rtx3060-6g .* 6.00 GiB  NVIDIA GeForce RTX 3060 Laptop GPU", text)
    found = atsc("targets", "--json").document["targets"]
    assert found[0]["target"] == "auto"
    assert "x86-64-v3" in [target["target"] for target in found]
    assert found[0]["default_threads"] >= 1


class FakeDriver:
    """Stands in for compile_model; `work` may raise."""

    def __init__(self, result: Path | None, work: Callable[[], None] = lambda: None) -> None:
        self.result = result
        self.work = work
        self.options: driver.CompileOptions | None = None

    def __call__(self, options: driver.CompileOptions, observer: driver.Observer) -> Path | None:
        self.options = options
        observer.on_stage(0, "import", Path("model.onnx"), 0.25)
        observer.on_progress("writing weights", 1, 2)
        self.work()
        return self.result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.touch()
    return path


def test_compile_passes_its_flags(
    atsc: Atsc, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(folder)
    monkeypatch.setattr(driver, "compile_model", fake)
    outcome = atsc(
        *("compile", model, "-o", folder, "--ctx", "99", "--chunk", "7", "--threads", "3"),
        *("--sessions", "2", "--accuracy-level", "4", "--stop-after", "import", "--json", "-v"),
        *("--target", "x86-64-v3", "--policy", "cpu", "--dump", folder.parent / "dump"),
        *("--toolchain", "zig"),
    )
    assert fake.options == driver.CompileOptions(
        model=model,
        output=folder,
        ctx=99,
        chunk=7,
        threads=3,
        accuracy_level=4,
        target="x86-64-v3",
        policy="cpu",
        sessions=2,
        toolchain="zig",
        stop_after="import",
    )
    assert outcome.code == 0
    assert outcome.document["plan"] == str(folder)
    assert outcome.document["peak_bytes"] == 13312
    assert outcome.document["stages"] == [{"name": "import", "seconds": 0.25}]
    assert outcome.err == "1 import          0.25 s  model.onnx\n"
    assert (folder.parent / "dump" / "01-import.txt").read_text() == "model.onnx\n"


def test_compile_leaves_defaults_to_the_driver(
    atsc: Atsc, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(folder)
    monkeypatch.setattr(driver, "compile_model", fake)
    outcome = atsc("compile", model)
    assert fake.options == driver.CompileOptions(model=model)
    assert f"run it with: atsc run '{folder}'" in outcome.out
    assert outcome.err == ""


def test_a_compilation_that_was_told_to_stop(
    atsc: Atsc, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "compile_model", FakeDriver(None))
    assert "stopped after import" in atsc("compile", model).out
    assert atsc("compile", model, "--json").document["plan"] is None


def test_a_stage_that_does_not_come_is_no_reason_to_write_a_plan() -> None:
    stages, done = driver.Stages(None, "place"), []
    stages.run("generate", lambda: done.append("generate"))
    with pytest.raises(UsageError, match="--stop-after place: compiling this model for this"):
        stages.run("package", lambda: done.append("package"))
    assert done == ["generate"]
    driver.Stages(None, "package").run("package", lambda: done.append("package"))
    assert done == ["generate", "package"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("auto", "--vram: this machine has no GPU that atsc can use (atsc doctor says what is"),
        ("x86-64-v3", "--vram: target x86-64-v3 has no GPU that atsc can use; leave it out"),
    ],
)
def test_a_budget_without_a_gpu(
    atsc: Atsc, model: Path, monkeypatch: pytest.MonkeyPatch, spec: str, expected: str
) -> None:
    monkeypatch.setattr(driver, "resolve", lambda name: Target(spec, isa="x86-64-v3"))
    monkeypatch.setattr(driver, "find_compiler", lambda toolchain: None)
    assert expected in one_line(atsc("compile", model, "--vram", "6G", "--target", spec), 2)


def test_dumps_need_a_folder(atsc: Atsc, model: Path) -> None:
    text = one_line(atsc("compile", model, "--dump", model), 2)
    assert f"--dump {model}: File exists; give a folder" in text


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ModelError("node a:\n  no\n  good"), 1, "atsc: node a:; no; good\n"),
        (UsageError("--ctx 9: too much"), 2, "atsc: --ctx 9: too much\n"),
        (ModuleNotFoundError("no", name="onnx"), 1, "pip install 'atsc[compiler]'"),
        (ModuleNotFoundError("no", name="jinja2"), 1, "pip install 'atsc[compiler]'"),
        (ModuleNotFoundError("no", name="atsc.x"), 1, "internal error, please report it"),
        (KeyError("x"), 1, "internal error, please report it: KeyError: 'x'; run again with -v"),
        (PermissionError(13, "Permission denied", "f"), 1, "atsc: f: Permission denied\n"),
        (MemoryError(), 1, "out of memory; "),
    ],
)
def test_every_error_is_one_line(
    atsc: Atsc,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    expected: str,
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(driver, "compile_model", FakeDriver(None, fail))
    assert expected in one_line(atsc("compile", model), code)
    assert "Traceback" in atsc("compile", model, "-v").err


def test_a_cache_that_cannot_be_written_is_named(
    atsc: Atsc, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    cache = model.parent / "cache" / "atsc"
    monkeypatch.setenv("ATSC_CACHE_DIR", str(cache))
    for path, is_cache in ((cache.parent, True), (cache / "objects", True), (model, False)):
        monkeypatch.setattr(driver, "compile_model", FakeDriver(None, partial(fail_at, path)))
        text = one_line(atsc("compile", model), 1)
        assert text.startswith(f"atsc: {path}: Read-only file system")
        assert (f"kept in {cache}: set ATSC_CACHE_DIR to a folder" in text) == is_cache


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_quiet(
    atsc: Atsc, model: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(driver, "compile_model", FakeDriver(None, interrupt))
    assert atsc("compile", model) == Outcome(130, "", "")
    assert signal.getsignal(signal.SIGTERM) == before


def test_models_that_cannot_be_compiled_as_they_are(atsc: Atsc, tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    assert "give the name of an .onnx file" in one_line(atsc("convert", gguf, "-o", tmp_path), 2)
    (tmp_path / "old.toml").write_text('isa = "x86-64-v2"')
    outcome = atsc("compile", tmp_path / "old.toml", "--target", tmp_path / "old.toml")
    assert "kernels need x86-64-v3 (AVX2)" in one_line(outcome, 2)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(folder: Path, closed: str) -> None:
    command = f"{sys.executable} -m atsc.compiler.cli check '{folder}' {closed}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def test_output_that_its_encoding_lacks(folder: Path) -> None:
    command = [sys.executable, "-m", "atsc.compiler.cli", "check", str(folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert result.returncode == 0
    assert b": ok, t?ny" in result.stdout


def test_a_reader_that_goes_away(folder: Path) -> None:
    command = [sys.executable, "-m", "atsc.compiler.cli", "inspect", str(folder), "--json"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (process.returncode, process.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("6G", 6 << 30),
        ("6GiB", 6 << 30),
        ("6GB", 6 * 10**9),
        ("800M", 800 << 20),
        ("1.5g", 3 << 29),
        ("2 TB", 2 * 10**12),
        ("4096", 4096),
        ("4096B", 4096),
        ("7k", 7 << 10),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "6X", "6GG", "1e9", "0x10", "6 G B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 GiB",
        "3.00 TiB",
    ]


def test_tables_align() -> None:
    text = table([["name", "size"], ["a", "10"], ["longer", "5"]], right=(1,))
    assert text.splitlines() == ["name    size", "------  ----", "a         10", "longer     5"]


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    Console(json=True).result({"a": [float("inf"), 1.5, (float("nan"),)], "b": "x"}, "")
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None]], "b": "x"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_after_a_second_and_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, now = Terminal(), [0.0]
    bar = ProgressBar(terminal, clock=lambda: now[0])
    for tick in range(1, 11):
        bar.update("writing", tick, 100)
        now[0] += 0.1
    assert terminal.getvalue() == ""
    now[0] = 1.5
    bar.update("writing", 50, 100)
    assert "writing" in terminal.getvalue()
    assert " 50%  2 s left" in terminal.getvalue()
    written = len(terminal.getvalue())
    bar.update("writing", 51, 100)
    assert len(terminal.getvalue()) == written, "not redrawn at once"
    now[0] = 2.0
    bar.update("writing", 100, 100)
    assert terminal.getvalue().endswith("\r\x1b[K")
    bar.update("next", 1, 2)
    assert terminal.getvalue().endswith("\r\x1b[K"), "another second for another thing"


@pytest.mark.parametrize("kind", ["no terminal", "dumb"])
def test_no_progress_where_a_line_cannot_be_redrawn(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, now = Terminal() if kind == "dumb" else io.StringIO(), [0.0]
    monkeypatch.setenv("TERM", kind)
    bar = ProgressBar(stream, clock=lambda: now[0])
    bar.update("writing", 1, 100)
    now[0] = 60
    bar.update("writing", 2, 100)
    assert stream.getvalue() == ""


def test_the_plan_of_these_tests_is_one(folder: Path) -> None:
    check_plan(folder, full=True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"gpu": "", "gpu_model": "RTX 9"}, "add --vram SIZE to use the RTX 9 as well"),
        ({"gpu": "cuda", "gpu_model": "RTX 9"}, ""),
        ({"gpu": "", "gpu_model": ""}, ""),
    ],
)
def test_a_gpu_that_is_left_alone_is_named(target: dict[str, str], expected: str) -> None:
    manifest = SimpleNamespace(target=target)
    assert expected in _unused_gpu(manifest)  # type: ignore[arg-type]
    assert bool(expected) == bool(_unused_gpu(manifest))  # type: ignore[arg-type]
