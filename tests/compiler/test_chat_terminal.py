"""The chat on a real terminal with a real plan: editing, Ctrl-C, pasted lines, prefix reuse."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_plan import build_chat_plan

pexpect = pytest.importorskip("pexpect")
pytestmark = pytest.mark.toolchain

SLOW = """
import sys, time
from atsc.compiler import cli
from atsc.runtime.loader import Session
fast = Session.generate
def generate(self, *args, **options):
    for token in fast(self, *args, **options):
        yield token
        time.sleep(0.05)
Session.generate = generate
sys.exit(cli.main())
"""
"""A tiny model answers faster than anybody can interrupt it."""

Spawn = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_plan(tmp_path_factory.mktemp("chat") / "a plan.atsplan")


@pytest.fixture
def chat(folder: Path) -> Iterator[Spawn]:
    """Starts a chat at its first prompt; `slow` at 20 tokens a second."""
    children = []

    def start(*flags: str, slow: bool = False) -> Any:
        program = ["-c", SLOW] if slow else ["-m", "atsc.compiler.cli"]
        arguments = [*program, "run", str(folder), "--chat", "--threads", "1", *flags]
        child = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=20)
        children.append(child)
        child.expect_exact("/help lists the commands")
        child.expect_exact("> ")
        return child

    yield start
    for child in children:
        child.close(force=True)


def leave(child: Any) -> int:
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus is None
    status: int = child.exitstatus
    return status


def say(child: Any, text: str) -> str:
    """Send a line; what comes before the next prompt, without the echo."""
    child.sendline(text)
    child.expect_exact(text)
    child.expect(r"\r\n(\x1b\[\?2004h)?> ")
    return str(child.before)


def prefilled(child: Any) -> tuple[int, int]:
    found = re.search(r"prefilled (\d+) tokens of (\d+)", say(child, "/stats"))
    assert found
    return int(found[1]), int(found[2])


def test_turns_and_prefix_reuse(chat: Spawn) -> None:
    child = chat("-n", "6")
    assert "c.hv." in say(child, "abc")
    first = len("u:abc\na:")
    assert prefilled(child) == (first, first)
    say(child, "more")
    # The last token of the answer is not in the session yet, and the template ends its line.
    new = 1 + len("\nu:more\na:")
    assert prefilled(child) == (first + new, first + first + 6 + len("\nu:more\na:"))
    shown = say(child, "/stats")
    assert "MiB resident" in shown
    assert "tok/s" in shown
    say(child, "/reset")
    assert "context   0 of 96 tokens" in say(child, "/stats")
    child.sendline("/exit")
    assert leave(child) == 0


def test_ctrl_c_ends_the_answer_alone(chat: Spawn) -> None:
    child = chat("-n", "80", slow=True)
    child.sendline("hello")
    child.expect_exact("hv.hv.hv")
    child.sendintr()
    child.expect_exact("(interrupted)")
    child.expect_exact("> ")
    shown = say(child, "/stats")
    found = re.search(r"answered  (\d+) tokens", shown)
    assert found
    assert 8 <= int(found[1]) < 60
    held = re.search(r"context   (\d+) of 96", shown)
    assert held
    child.sendline("more")
    child.expect_exact("hv")
    child.sendintr()
    child.expect_exact("> ")
    new, total = prefilled(child)
    assert new < total, "the interrupted answer was kept, and not read again"
    child.sendeof()
    assert leave(child) == 0


def test_ctrl_c_at_the_prompt_leaves_the_second_time(chat: Spawn) -> None:
    child = chat("-n", "2")
    child.sendintr()
    child.expect_exact("Ctrl-C again leaves")
    child.expect_exact("> ")
    assert "c" in say(child, "abc"), "a turn between them starts anew"
    child.sendintr()
    child.expect_exact("Ctrl-C again leaves")
    child.expect_exact("> ")
    child.sendintr()
    assert leave(child) == 0


def test_pasted_lines_are_one_turn(chat: Spawn) -> None:
    child = chat("-n", "3")
    child.send("one\ntwo\nthree\n")
    child.expect_exact("cut short")
    child.expect_exact("> ")
    length = len("u:one\ntwo\nthree\na:")
    assert prefilled(child) == (length, length)


def test_bracketed_paste_is_one_turn(chat: Spawn) -> None:
    child = chat("-n", "3")
    child.send("\x1b[200~one\ntwo\x1b[201~")
    child.expect_exact("two")
    child.send("\n")
    child.expect_exact("cut short")
    child.expect_exact("> ")
    length = len("u:one\ntwo\na:")
    assert prefilled(child) == (length, length)


def test_what_does_not_fit_is_said_and_the_chat_goes_on(chat: Spawn) -> None:
    child = chat("-n", "3")
    assert "the prompt has 105 tokens, and the plan's context is 96" in say(child, "x" * 100)
    assert "c." in say(child, "abc")


def test_being_terminated_is_no_ctrl_c(chat: Spawn) -> None:
    child = chat()
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
