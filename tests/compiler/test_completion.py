"""Completion scripts: what each shell is offered, asked of the shell itself where it is there."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from atsc.compiler import cli
from atsc.compiler.commands.completion import Command, commands_of

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def need(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"needs {shell}")
    return found


@pytest.fixture
def commands() -> dict[str, Command]:
    parsers = next(
        action
        for action in cli.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {command.name: command for command in commands_of(parsers)}


def test_arguments_are_those_of_the_parser(commands: dict[str, Command]) -> None:
    assert list(commands) == [m.__name__.rpartition(".")[2] for m in cli.COMMANDS]
    assert all(command.help for command in commands.values())
    kinds = {name: flag.kind for flag in commands["compile"].flags for name in flag.names}
    assert kinds["--toolchain"] == "choice"
    assert (kinds["-o"], kinds["--output"]) == ("folder", "folder")
    assert (kinds["--target"], kinds["--ctx"], kinds["--json"]) == ("file", "value", "nothing")
    assert "--ram" not in kinds, "flags of features to come are hidden"
    assert [p.kind for p in commands["compile"].positionals] == ["file"]
    assert [p.kind for p in commands["run"].positionals] == ["folder"]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_valid(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script(shell, capsys))
    done = subprocess.run(
        [need(shell), "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["com"], ["compile", "completion"]),
        (["compile", "--to"], ["--toolchain"]),
        (["compile", "m.onnx", "--toolchain", ""], ["system", "zig"]),
        (["compile", "--accuracy-level", ""], ["1", "4"]),
        (["run", "--chat", "--thr"], ["--threads"]),
        (["run", "--threads", "-"], []),
        (["completion", "f"], ["fish"]),
        (["compile", "mod"], []),
        (["nonsense", ""], []),
    ],
)
def test_bash_offers(
    words: list[str], offered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 'COMP_WORDS=(atsc "$@"); COMP_CWORD=$#; _atsc; printf \'%s\\n\' "${COMPREPLY[@]}"'
    done = subprocess.run(
        [need("bash"), "-c", f"{script('bash', capsys)}\n{asked}", "bash", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == offered
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("atsc com", ["compile", "completion"]),
        ("atsc compile --tool", ["--toolchain"]),
        ("atsc compile --toolchain ", ["system", "zig"]),
        ("atsc completion z", ["zsh"]),
    ],
)
def test_fish_offers(line: str, offered: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [need("fish"), "--no-config", "-c", f"{script('fish', capsys)}\ncomplete -C '{line}'"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [found.split("\t")[0] for found in done.stdout.splitlines()] == offered


def test_zsh_offers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real shell on a terminal: zsh completes nowhere else."""
    pexpect = pytest.importorskip("pexpect")
    (tmp_path / "_atsc").write_text(script("zsh", capsys))
    child = pexpect.spawn(
        need("zsh"), ["-f"], encoding="utf-8", timeout=30, cwd=str(tmp_path), dimensions=(40, 120)
    )
    try:
        child.sendline(f"PS1='ready> '; fpath=('{tmp_path}' $fpath)")
        child.sendline("autoload -Uz compinit && compinit -u -D; echo loaded")
        child.expect("\nloaded")
        child.expect_exact("ready> ")
        for typed, expected in (
            ("atsc compl", "atsc completion"),
            ("atsc compile --toolc", "atsc compile --toolchain"),
            ("atsc compile --toolchain z", "atsc compile --toolchain zig"),
            ("atsc completion fi", "atsc completion fish"),
        ):
            # Ctrl-A and an echo before it print what the line has become.
            child.send(typed + "\t\x01echo made: \r")
            child.expect_exact("\nmade: " + expected)
            child.expect_exact("ready> ")
    finally:
        child.close(force=True)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
