"""What gpu_product.py finds in traces, pages and plans, right ones and wrong ones."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any, cast

import gpu_product
import pytest
import tiny_model
from chat_plan import write_tokenizer
from gpu_plan import MIB, Shape, write_gpu_plan

from atsc.compiler import cli
from atsc.compiler import plan as manifests
from atsc.targets.target import resolve, save

Record = dict[str, Any]


def event(kind: str, begin: float, end: float, name: str = "", **more: Any) -> Record:
    length = end - begin
    return {"cat": kind, "name": name, "ph": "X", "ts": begin, "dur": length, "args": more}


def good_trace() -> list[Record]:
    """A prefill of 1000 us whose copies run beside the GPU, and two steps of 100 us."""
    events = [
        event("round", 0, 1000, "prefill 64 tokens"),
        event("device", 0, 900, "layers"),
        event("device wait", 100, 150, "waits for w"),
        event("copy", 0, 150, "w", bytes=1.5e6),
        event("copy", 150, 400, "w", bytes=2.5e6),
        event("cpu", 900, 1000, "head"),
    ]
    for begin in (1000, 1100):
        events += [
            event("round", begin, begin + 100, "decode"),
            event("cpu", begin, begin + 60, "layers"),
            event("copy", begin, begin + 50, "w", bytes=0.5e6),
            event("device", begin + 60, begin + 90, "layers"),
        ]
    return events


SIMULATED = {"prefill": {"gpu_busy": 0.9}, "decode": {"gpu_busy": 0.25}}


def wrong(events: list[Record], rate: float = 10_000, link: float = 10e9) -> list[str]:
    found = gpu_product.summary(events)
    checks = gpu_product.trace_checks(events, found, rate, SIMULATED, link)
    return [check["check"] for check in checks if not check["ok"]]


def test_a_sound_trace() -> None:
    found = gpu_product.summary(good_trace())
    prefill, decode = found["prefill"], found["decode"]
    assert (prefill["rounds"], decode["rounds"]) == (1, 2)
    assert prefill["gpu_busy"] == pytest.approx(0.85)
    assert decode["gpu_busy"] == pytest.approx(0.3) and decode["cpu_busy"] == pytest.approx(0.6)
    assert prefill["copies_beside_computing"] == 1
    assert decode["copied_bytes_per_s"] == pytest.approx(10e9)
    assert decode["tokens_per_s"] == pytest.approx(10_000)
    assert wrong(good_trace()) == []


def test_what_is_wrong_with_a_trace() -> None:
    """Each change breaks the check that is for it."""
    beside_nothing = [e for e in good_trace() if e["cat"] != "copy"]
    beside_nothing.append(event("copy", 1090, 1100, "w", bytes=0.1e6))
    for events, expected in (
        ([e for e in good_trace() if e["cat"] != "device"], "device events"),
        ([e for e in good_trace() if e["cat"] != "copy"], "copy events"),
        ([e for e in good_trace() if e["cat"] != "cpu"], "cpu events"),
        ([*good_trace(), event("cpu", 20, 10)], "events with a negative duration"),
        ([*good_trace(), event("copy", 1150, 1300, bytes=1.5e6)], "events outside of rounds"),
        (
            [*good_trace(), event("cpu", 1010, 1040)],
            "microseconds in which the CPU runs two segments",
        ),
        (beside_nothing, "decode, share of copying beside computing"),
    ):
        assert expected in wrong(events), expected
    assert wrong(good_trace(), rate=13_000) == ["tokens/s of the trace by those reported"]
    copies = [f"{kind}, copies' rate by the link's" for kind in ("prefill", "decode")]
    assert wrong(good_trace(), link=30e9) == copies
    busier = [*good_trace(), event("device", 1010, 1050), event("device", 1110, 1150)]
    assert wrong(busier) == ["decode, GPU busy share minus the simulated"]


def test_a_warm_up_does_not_count() -> None:
    events = [event("round", 0, 9, "decode", call="warm-up"), event("round", 9, 19, "decode")]
    assert gpu_product.summary(events)["decode"]["rounds"] == 1


def test_overlaps() -> None:
    spans = gpu_product.united([(5, 7), (0, 2), (1, 3), (7, 8)])
    assert spans == [(0, 3), (5, 8)]
    assert gpu_product.overlap_of([(0, 1), (2, 6), (7, 20)], spans) == 1 + 1 + 1 + 1
    assert gpu_product.overlap_of([], spans) == gpu_product.overlap_of(spans, []) == 0


class Commands:
    """Stands for gpu.Run: commands run in this process."""

    def __init__(self, **options: Any) -> None:
        self.args = argparse.Namespace(p=24, threads=2, target="auto", **options)
        self.asked: list[tuple[str, ...]] = []

    def atsc(self, *arguments: object) -> Any:
        words = tuple(map(str, arguments))
        self.asked.append(words)
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            assert cli.main([*words, "--json"]) == 0
        return json.loads(captured.getvalue())


@pytest.mark.toolchain
@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_trace_of_a_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """On the virtual device; its plan has no times to simulate, so those are made up."""
    plan = tiny_model.build_plan(tmp_path / "tiny.atsplan", rungs=2)
    write_tokenizer(plan)
    tiny_model.save_manifest(plan, "tiny", manifests.load(plan).units, {"gpu": "virtual"})
    commands = Commands()
    real = commands.atsc
    monkeypatch.setattr(gpu_product, "WORDS", "ab")
    found_spec = None if command == "bench" else object()
    monkeypatch.setattr(gpu_product.importlib.util, "find_spec", lambda name: found_spec)

    def atsc(*arguments: object) -> Any:
        if arguments[0] == "simulate":
            return {**SIMULATED, "dynamic": None}
        if arguments[0] == "inspect":
            return {"device": {"link": {"to_gpu_ns_per_byte": 1.0}}}
        return real(*arguments)

    monkeypatch.setattr(commands, "atsc", atsc)
    found = gpu_product.look_at_trace(cast(Any, commands), plan)
    assert found["command"] == command == commands.asked[0][0]
    assert found["rounds"]["prefill"]["rounds"] == 2
    by_name = {check["check"]: check for check in found["checks"]}
    for name in ("events with a negative duration", "events outside of rounds", "copy events"):
        assert by_name[name]["ok"], by_name[name]


def test_a_tokenizer_of_characters(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    gpu_product.write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    ids = tokenizer.encode(gpu_product.WORDS).ids
    assert len(ids) == len(gpu_product.WORDS) and tokenizer.decode(ids) == gpu_product.WORDS
    path.write_text("a model's own")
    gpu_product.write_tokenizer(tmp_path)
    assert path.read_text() == "a model's own"


def test_a_page(tmp_path: Path) -> None:
    plan = tmp_path / "p"
    write_gpu_plan(plan, Shape(layers=4), vram_bytes=512 * MIB)
    found = gpu_product.look_at_page(cast(Any, Commands()), plan)
    assert found["ok"], found["error"]
    assert found["boxes"]["vram"] > 4


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("<p><b></p>", "wrong"),
        ("<svg><rect width='nan' height='1'/></svg>", "bad_numbers"),
        ("<svg><rect width='-1'/></svg>", "bad_numbers"),
        ("<svg><rect x='-1' width='1'/></svg>", None),
        ("<script src='https://x.example/y.js'></script>", "references"),
        ("<br/><meta charset='utf-8'><p>right</p>", None),
    ],
)
def test_what_is_wrong_with_a_page(text: str, field: str | None) -> None:
    page = gpu_product.Page()
    page.feed(text)
    counts = {name: getattr(page, name) for name in ("wrong", "bad_numbers", "references")}
    assert {name for name, count in counts.items() if count} == ({field} if field else set())


@pytest.mark.toolchain
@pytest.mark.parametrize("same", [True, False])
def test_a_plan_for_the_file_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """Profile and compile are stood in for: what is compared is real plans."""
    shape = Shape(layers=4, hidden=1024, inner=2048, context=2560, chunk=512)
    plan = tmp_path / "m.atsplan"
    write_gpu_plan(plan, shape, vram_bytes=325 * MIB)
    commands = Commands(ctx=2560, chunk=512)
    real = commands.atsc

    def atsc(*arguments: object) -> Any:
        words = tuple(map(str, arguments))
        if words[0] == "profile":
            save(resolve("laptop-rtx3060-6g"), Path(words[words.index("-o") + 1]))
            return {}
        if words[0] == "compile":
            budget = int(words[words.index("--vram") + 1])
            assert budget == 325 * MIB
            shutil.rmtree(plan)
            write_gpu_plan(plan, shape, vram_bytes=budget if same else 2048 * MIB)
            return {"stages": [{"name": "annotate", "seconds": 0.1 if same else 30}]}
        return real(*arguments)

    monkeypatch.setattr(commands, "atsc", atsc)
    found = gpu_product.look_at_profile(cast(Any, commands), plan, tmp_path)
    mistakes = {check["check"] for check in found["checks"] if not check["ok"]}
    assert "isa" in found["file"]
    expected = {
        "seconds of annotate, which measures nothing",
        "bytes read in vram by the plan's before",
        "bytes read in ram by the plan's before",
    }
    assert mistakes & expected == (set() if same else expected)
