"""`run` and `bench` on a plan made up of Python: what they ask of it, and what they print."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_plan import CONTEXT, FakePlan, FakeSession, FakeTokenizer

from atsc.compiler import cli
from atsc.runtime import loader


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> FakePlan:
    fake = FakePlan()

    def load(path: Path, **options: Any) -> FakePlan:
        fake.options = options
        return fake

    monkeypatch.setattr(loader, "load", load)
    return fake


def run(tmp_path: Path, *arguments: str) -> int:
    return cli.main(["run", str(tmp_path), *arguments])


def test_text_streams_and_speed_follows(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "-p", "abc", "-n", "5", "--threads", "2", "--vram", "6G") == 0
    captured = capsys.readouterr()
    assert captured.out == "12345\n"
    assert captured.err.startswith("prompt: 3 tokens, ")
    assert "text: 5 tokens, " in captured.err
    assert captured.err.endswith(" (length)\n")
    numbers = {"drift_threshold": 0.15, "reschedule_interval": 5.0, "yield_gpu": False}
    dynamic = {"transfer": "load-aware", **numbers}
    assert plan.options == {"threads": 2, "vram": 6 << 30, "verify": False, **dynamic}
    flags = ("--vram", "1G", "--transfer", "static", "--rounds", "synchronous")
    assert cli.main(["bench", str(tmp_path), "-p", "8", "-n", "0", "-r", "1", *flags]) == 0
    plain = {"transfer": "static", "rounds": "synchronous"}
    assert plan.options == {"threads": None, "vram": 1 << 30, **dynamic, **plain}
    assert run(tmp_path, "-p", "abc", "-n", "5", "--vram", "0", "--verify") == 0
    assert plan.options == {"threads": None, "device": False, "verify": True, **dynamic}


@pytest.mark.parametrize(
    ("flags", "most"),
    [((), 256), (("--chat",), CONTEXT), (("-n", "-1"), CONTEXT), (("--chat", "-n", "7"), 7)],
)
def test_most_new_tokens(plan: FakePlan, tmp_path: Path, flags: tuple[str, ...], most: int) -> None:
    """Answers end by themselves; texts may never."""
    assert run(tmp_path, "-p", "abc", *flags) == 0
    (session,) = plan.sessions
    (asked,) = [entry[2] for entry in session.log if entry[0] == "generate"]
    assert asked["max_new_tokens"] == most


def test_memory_of_the_gpu_is_told_where_there_is_any(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    bench = ["bench", str(tmp_path), "-p", "8", "-n", "0", "-r", "1"]
    assert run(tmp_path, "-p", "abc", "-v") == cli.main(bench) == 0
    assert "VRAM" not in "".join(capsys.readouterr())
    monkeypatch.setattr(FakePlan, "device_bytes", 3 << 30)
    assert run(tmp_path, "-p", "abc", "-v") == cli.main(bench) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("fake: 2 threads, avx2 kernels, 3.00 GiB of VRAM\n")
    assert "| fake  | 3.00 MiB | 3.00 GiB | 2       | pp8  |" in captured.out
    assert "| ----- | -------: | -------: | ------: | ---- |" in captured.out


def test_sampling_flags_reach_the_session(plan: FakePlan, tmp_path: Path) -> None:
    flags = ("--temperature", "0.7", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1")
    assert run(tmp_path, "-p", "abc", "-n", "2", *flags, "--seed", "11") == 0
    options = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 11}
    (session,) = plan.sessions
    assert session.log[-2] == ("generate", 3, {"max_new_tokens": 2, **options})


def test_json_is_one_document(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(FakeSession, "stop_at", 3)
    assert run(tmp_path, "-p", "abc", "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["text"], document["tokens"], document["finish"]) == (
        "123",
        [49, 50, 51],
        "stop",
    )
    assert (document["prompt"], document["num_prompt_tokens"]) == ("abc", 3)
    assert captured.err == ""


def test_an_interrupted_text_ends_its_line(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def interrupted(session: FakeSession, ids: list[int], **options: Any) -> Iterator[int]:
        yield from (ord("1"), ord("2"), ord("3"))
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeSession, "generate", interrupted)
    assert run(tmp_path, "-p", "abc") == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("12\n", "")
    assert run(tmp_path, "-p", "abc", "--json") == 130
    assert capsys.readouterr().out == ""


def test_a_full_context_is_said(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "-p", "x" * (CONTEXT - 2), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["finish"]) == ("123", "context")
    assert run(tmp_path, "-p", "x" * CONTEXT) == 2
    assert "the prompt has 40 tokens, and the plan's context is 40" in capsys.readouterr().err


def test_no_answer_at_all(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(FakeSession, "stop_at", 0)
    assert run(tmp_path, "-p", "abc", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["finish"]) == ("", "stop")
    assert document["decode_tokens_per_s"] is None


def test_long_prompts_go_in_by_chunks(plan: FakePlan, tmp_path: Path) -> None:
    assert run(tmp_path, "-p", "x" * 20, "-n", "1") == 0
    kinds = [entry[:3] for entry in plan.sessions[0].log if entry[0] in ("prefill", "generate")]
    assert kinds[:2] == [("prefill", 8, "none"), ("prefill", 8, "none")]
    assert kinds[2][:2] == ("generate", 4)


def test_a_prompt_from_stdin_and_an_empty_one(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert run(tmp_path, "-p", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "from stdin"
    assert run(tmp_path, "-p", "") == 2
    assert "the prompt is empty" in capsys.readouterr().err
    monkeypatch.setattr(FakePlan, "bos_token_id", 7)
    assert run(tmp_path, "-p", "", "-n", "1") == 0


def test_prompts_that_are_no_text(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    argument = os.fsdecode(b"caf\xe9")
    for flags in (("-p", argument), ("--chat", "-p", argument), ("-p", "a", "--chat", "--system")):
        more = (argument,) if flags[-1] == "--system" else ()
        assert run(tmp_path, *flags, *more) == 2
        assert "atsc: the prompt is not UTF-8 text" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    assert run(tmp_path, "-p", "-") == 1
    assert "atsc: a text that is not UTF-8" in capsys.readouterr().err


def test_one_turn_of_chat(plan: FakePlan, tmp_path: Path) -> None:
    assert run(tmp_path, "--chat", "-p", "hi", "--system", "s", "-n", "1") == 0
    assert "".join(map(chr, plan.sessions[0].held)).startswith("<s>s<u>hi<a>")


def test_an_empty_system_message_is_one(
    plan: FakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates put their own in where there is none."""
    assert run(tmp_path, "--chat", "-p", "hi", "--system", "", "-n", "1") == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert run(tmp_path, "--chat", "--system", "", "-n", "1") == 0
    for session in plan.sessions:
        assert "".join(map(chr, session.held)).startswith("<s><u>hi<a>")
    assert run(tmp_path, "-p", "hi", "--system", "") == 2


def test_a_conversation_keeps_what_it_has(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nyo\n"))
    assert run(tmp_path, "--chat", "-n", "3") == 0
    assert capsys.readouterr().out == "123\n123\n"
    (session,) = plan.sessions
    assert "".join(map(chr, session.held)) == "<u>hi<a>123<u>yo<a>123"
    # All of the first turn was held: prompt, and the answer's tokens.
    assert [entry for entry in session.log if entry[0] == "rewind"] == [
        ("rewind", 0),
        ("rewind", len("<u>hi<a>123")),
    ]


def test_a_conversation_starts_over_where_a_window_forgot(
    plan: FakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nyo\n"))
    monkeypatch.setattr(FakeSession, "remembers", 2)
    monkeypatch.setattr(
        FakeTokenizer,
        "render_chat",
        lambda self, messages: f"{len(messages)}:" + "".join(m["content"] for m in messages),
    )
    assert run(tmp_path, "--chat", "-n", "3") == 0
    assert "".join(map(chr, plan.sessions[0].held)) == "3:hi123yo123"


def test_bench_measures_what_it_says(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", str(tmp_path), "-p", "12,4", "-n", "10", "-d", "0,6", "-r", "3", "--json"]
    assert cli.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    names = ["pp12", "pp4", "tg10", "pp12 @ d6", "pp4 @ d6", "tg10 @ d6"]
    assert [row["test"] for row in document["rows"]] == names
    assert (document["threads"], document["model"]) == (2, "fake")
    for row in document["rows"]:
        assert len(row["samples_ts"]) == 3
        assert row["avg_ts"] == pytest.approx(np.mean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(np.std(row["samples_ts"], ddof=1))
    prefill = [e for e in plan.sessions[3].log if e != "closed"]
    warm_up = [("prefill", 6, "none"), ("prefill", 12, "last")]
    assert prefill == warm_up + 3 * [("rewind", 6), ("prefill", 12, "last")]
    decode = plan.sessions[5].log
    assert [e[0] for e in decode[1:9]] == ["decode"] * 8, "warm-up"
    assert [e[0] for e in decode[9:20]] == ["rewind"] + ["decode"] * 10


def test_bench_fills_the_context_again_where_a_window_forgot(
    plan: FakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSession, "remembers", 3)
    assert cli.main(["bench", str(tmp_path), "-p", "8", "-n", "0", "-d", "5", "-r", "1"]) == 0
    assert plan.sessions[0].log[2:5] == [
        ("rewind", 0),
        ("prefill", 5, "none"),
        ("prefill", 8, "last"),
    ]


def test_bench_prints_a_table_and_refuses_what_does_not_fit(
    plan: FakePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", str(tmp_path), "-p", "8", "-n", "0", "-r", "1"]) == 0
    head, rule, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["|", "model", "|", "size", "|", "threads", "|", "test", "|", "t/s", "|"]
    assert set(rule) <= set("|-: ")
    assert row.startswith("| fake  | 3.00 MiB | 2       | pp8")
    assert cli.main(["bench", str(tmp_path), "-p", "38", "-n", "0", "-d", "3"]) == 2
    assert "pp38 @ d3 needs 41 tokens, and the plan's context is 40" in capsys.readouterr().err
