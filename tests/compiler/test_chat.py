"""The chat on a plan made up of Python: commands, full contexts, scripts, interrupted prefills."""

from __future__ import annotations

import io
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_plan import CONTEXT, FakePlan, FakeSession

from atsc.compiler import cli
from atsc.compiler.commands.chat import Chat, process_memory
from atsc.compiler.commands.console import Console
from atsc.compiler.commands.writer import Writer
from atsc.compiler.errors import UsageError
from atsc.runtime import loader


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> FakePlan:
    fake = FakePlan()
    monkeypatch.setattr(loader, "load", lambda path, **options: fake)
    return fake


def script(
    monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *flags: str, tokens: int = 3
) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return cli.main(["run", str(folder), "--chat", "-n", str(tokens), *flags])


def held(plan: FakePlan) -> str:
    return "".join(map(chr, plan.sessions[0].held))


def test_commands_are_not_asked(
    plan: FakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script(monkeypatch, tmp_path, "/help\n/hlep me\n/stats\nhi\n/exit\nnever\n") == 0
    captured = capsys.readouterr()
    assert captured.out == "123\n"
    for expected in ("/reset ", "no command /hlep; ", "context   0 of 40 tokens"):
        assert expected in captured.err
    assert held(plan) == "<u>hi<a>123"


def test_a_text_may_begin_with_a_slash_and_have_lines(
    plan: FakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script(monkeypatch, tmp_path, "//x\\\ny\\\n\n", tokens=1) == 0
    assert held(plan) == "<u>/x\ny<a>1"


def test_reset_keeps_what_both_conversations_begin_with(
    plan: FakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "hi\n/reset\n/stats\nyo\n/stats\n"
    assert script(monkeypatch, tmp_path, text, "--system", "be") == 0
    assert held(plan) == "<s>be<u>yo<a>123"
    rewinds = [entry[1] for entry in plan.sessions[0].log if entry[0] == "rewind"]
    assert rewinds == [0, len("<s>be<u>")]
    err = capsys.readouterr().err
    assert "context   0 of 40 tokens" in err
    assert "context   16 of 40 tokens" in err
    assert "prefilled 18 tokens of 26" in err
    assert "answered  6 tokens" in err


def test_a_second_turn_prefills_what_is_new(
    plan: FakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script(monkeypatch, tmp_path, "hi\nyo\nme\n", tokens=2) == 0
    log = plan.sessions[0].log
    prefilled = [e[1] for e in log if e[0] in ("prefill", "generate")]
    assert prefilled == [len("<u>hi<a>"), len("<u>yo<a>"), len("<u>me<a>")]


def test_the_oldest_exchanges_make_room(
    plan: FakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script(monkeypatch, tmp_path, "aaaa\nbbbb\ncccc\ndd\n", "--system", "s") == 0
    assert held(plan).startswith("<s>s<u>")
    assert held(plan).endswith("<u>dd<a>123")
    assert "<u>aaaa" not in held(plan)
    captured = capsys.readouterr()
    assert "(the context is full: forgot the oldest " in captured.err
    assert captured.out == "123\n" * 4


def test_an_answer_that_fills_the_context(
    plan: FakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script(monkeypatch, tmp_path, "hello\nagain\n", tokens=99) == 0
    assert capsys.readouterr().err.count("(the context of 40 tokens is full; ") == 2
    assert held(plan).startswith("<u>again<a>123"), "the first exchange went"


def test_a_question_that_cannot_fit(
    plan: FakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script(monkeypatch, tmp_path, "x" * CONTEXT + "\n") == 2
    assert "the prompt has 46 tokens, and the plan's context is 40" in capsys.readouterr().err


def test_a_template_that_refuses_is_found_at_once(
    plan: FakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(self: object, messages: object) -> str:
        raise UsageError("no system messages")

    monkeypatch.setattr("fake_plan.FakeTokenizer.render_chat", refuse)
    assert script(monkeypatch, tmp_path, "") == 2
    assert capsys.readouterr().err == "atsc: no system messages\n"


def test_a_prefill_can_be_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, session = FakePlan(), FakeSession()
    flags = Namespace(n=3, temperature=0, top_k=0, top_p=1, min_p=0, seed=None, json=False)
    writer = Writer(flags, Console(), plan, session)  # type: ignore[arg-type]
    chat = Chat(writer, plan, Console(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(session, "hangs", True, raising=False)
    interrupt = threading.Thread(target=lambda: session.slow.wait(30) and writer.stop())
    interrupt.start()
    assert chat.take("a question of more than one chunk")
    interrupt.join()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "(interrupted, not asked)\n")
    session.hangs = False  # type: ignore[misc]
    assert chat.take("hi")
    assert "".join(map(chr, session.held)) == "<u>hi<a>123"


def test_memory(tmp_path: Path) -> None:
    found = process_memory()
    assert found is not None
    resident, private = found
    assert 1 << 20 < private <= resident
    (tmp_path / "status").write_text("VmRSS:\t 8 kB\nRssAnon:\t 2 kB\n")
    assert process_memory(tmp_path / "status") == (8192, 2048)
    assert process_memory(tmp_path / "absent") is None


def test_tokens_of_an_answer_are_kept_as_they_were(
    plan: FakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This model writes "1" as token 300, which the tokenizer never would."""

    def decode(self: object, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("1" if token == 300 else chr(token) for token in ids)

    generate = FakeSession.generate

    def unusual(self: FakeSession, ids: list[int], **options: Any) -> Iterator[int]:
        for token in generate(self, ids, **options):
            yield 300 if token == ord("1") else token
            self.held = [300 if t == ord("1") else t for t in self.held]

    monkeypatch.setattr("fake_plan.FakeTokenizer.decode", decode)
    monkeypatch.setattr("fake_plan.FakeStream.text_of", {300: "1"}, raising=False)
    monkeypatch.setattr(FakeSession, "generate", unusual)
    assert script(monkeypatch, tmp_path, "hi\nyo\n", tokens=2) == 0
    log = plan.sessions[0].log
    prefilled = [e[1] for e in log if e[0] in ("prefill", "generate")]
    assert prefilled == [len("<u>hi<a>"), len("<u>yo<a>")]
