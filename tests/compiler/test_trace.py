"""`--trace`: what `run` and `bench` write, for plans for the CPU and for the virtual device."""

from __future__ import annotations

import dataclasses
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from chat_plan import write_tokenizer
from tiny_model import CHUNK

from atsc.compiler import cli
from atsc.compiler import plan as manifests
from atsc.runtime.tokenizer import TextStream

pytestmark = pytest.mark.toolchain

NODES = {
    "table": ("embed",),
    "w1": ("norm", "linear", "add", "attention"),
    "w2": ("norm2", "linear2", "add2", "attention2"),
    "head": ("gate", "select", "head"),
}
ROUNDS, CPU, GPU, COPIES = range(4)
Row = dict[str, Any]


def build(directory: Path, rungs: int) -> Path:
    """A plan with a tokenizer; the virtual device holds w2, and chunks stream w1."""
    tiny_model.build_plan(directory, rungs=rungs)
    write_tokenizer(directory)
    units = tuple(
        dataclasses.replace(unit, nodes=NODES[unit.name])
        for unit in manifests.load(directory).units
    )
    tiny_model.save_manifest(directory, "tiny", units, {"gpu": "virtual"} if rungs > 0 else {})
    return directory


@pytest.fixture(scope="module")
def cpu_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("trace") / "cpu.atsplan", -1)


@pytest.fixture(scope="module")
def device_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("trace") / "device.atsplan", 2)


def trace(tmp_path: Path, command: str, folder: Path, *arguments: str) -> list[Row]:
    """Run a command, and read the trace; nothing else is left beside it."""
    folder_of_trace = tmp_path / "träces"
    folder_of_trace.mkdir()
    path = folder_of_trace / "my trace.json"
    flags = ("--threads", "2", "--trace", str(path))
    assert cli.main([command, str(folder), *arguments, *flags]) == 0
    assert list(folder_of_trace.iterdir()) == [path]
    rows: list[Row] = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X"}
    return rows


def tracks(rows: list[Row]) -> dict[int, str]:
    return {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}


def on(rows: list[Row], track: int) -> list[Row]:
    return [row for row in rows if row["ph"] == "X" and row["tid"] == track]


def inside(rows: list[Row], outer: Row) -> list[Row]:
    """Everything that ran within another, to the nanosecond."""
    begin, end = outer["ts"], outer["ts"] + outer["dur"]
    return [r for r in rows if begin - 1e-3 <= r["ts"] and r["ts"] + r["dur"] <= end + 1e-3]


def assert_sound(rows: list[Row]) -> list[Row]:
    """Rounds follow each other from 0 on; all else lies in one, and the CPU does one at a time."""
    rounds = on(rows, ROUNDS)
    assert rounds[0]["ts"] == 0
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(rounds))
    parts = [row for row in rows if row["ph"] == "X" and row["tid"] != ROUNDS]
    assert sum(len(inside(parts, one)) for one in rounds) == len(parts) > len(rounds)
    for one in rounds:
        segments = inside(on(rows, CPU), one)
        assert 0 < sum(segment["dur"] for segment in segments) <= one["dur"] + 1e-3
    return rounds


def test_a_run_on_the_cpu(cpu_plan: Path, tmp_path: Path) -> None:
    rows = trace(tmp_path, "run", cpu_plan, "-p", "a" * (CHUNK + 5), "-n", "3")
    assert tracks(rows) == {ROUNDS: "rounds", CPU: "CPU"}
    rounds = assert_sound(rows)
    assert [one["name"] for one in rounds] == [
        f"prefill {CHUNK} tokens",
        "prefill 5 tokens",
        *["decode"] * 2,
    ]
    assert rounds[1]["args"] == {"rows": 5, "position": CHUNK, "logit_rows": 1}
    decoded = inside(on(rows, CPU), rounds[-1])
    assert [row["name"] for row in decoded][:2] == ["table … w1", "w1"]
    assert decoded[0]["args"] == {"first_node": "embed", "last_node": "add"}


def test_a_run_with_a_device_shows_copies_and_waits(device_plan: Path, tmp_path: Path) -> None:
    rows = trace(tmp_path, "run", device_plan, "-p", "b" * (CHUNK + 5), "-n", "3")
    assert list(tracks(rows).values()) == ["rounds", "CPU", "GPU", "copy engine"]
    rounds = assert_sound(rows)
    streamed, *others = rounds
    (copy,) = inside(on(rows, COPIES), streamed)
    assert copy["name"] == "w1" and copy["args"]["bytes"] == 1024
    waits = [row for row in inside(on(rows, GPU), streamed) if row["cat"] == "device wait"]
    assert copy["args"]["exposed_wait_us"] >= sum(row["dur"] for row in waits)
    for one in others:
        assert not inside(on(rows, COPIES), one)
        runs = [row for row in inside(on(rows, GPU), one) if row["cat"] == "device"]
        assert [(run["name"], run["args"]["first_node"]) for run in runs] == [("w2", "norm2")]


def test_a_bench_says_what_rounds_were_for(device_plan: Path, tmp_path: Path) -> None:
    arguments = ("-p", f"{2 * CHUNK}", "-n", "2", "-r", "2")
    rounds = assert_sound(trace(tmp_path, "bench", device_plan, *arguments))
    calls = [one["args"]["call"] for one in rounds]
    prompt, text = f"pp{2 * CHUNK}", "tg2"
    assert calls == [
        *["warm-up"] * 2,
        *[f"{prompt}, 1 of 2"] * 2,
        *[f"{prompt}, 2 of 2"] * 2,
        *["warm-up"] * 2,
        *[f"{text}, 1 of 2"] * 2,
        *[f"{text}, 2 of 2"] * 2,
    ]


def test_a_chat_is_one_trace(
    cpu_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    rounds = assert_sound(trace(tmp_path, "run", cpu_plan, "--chat", "-n", "2"))
    assert sum(one["name"].startswith("prefill") for one in rounds) >= 2
    positions = [one["args"]["position"] for one in rounds]
    assert positions == sorted(positions)


def test_what_cannot_be_written(
    cpu_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before the plan is loaded; a run that fails leaves no trace, and keeps an old one."""
    for path, reason in ((tmp_path / "no" / "t.json", "No such file"), (tmp_path, "a folder")):
        assert cli.main(["run", "no plan", "-p", "a", "--trace", str(path)]) != 0
        assert cli.main(["run", str(cpu_plan), "-p", "a", "--trace", str(path)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"--trace {path}: " in error and reason in error
    old = tmp_path / "old.json"
    old.write_text("kept")
    assert cli.main(["run", str(cpu_plan), "-p", "a" * 200, "--trace", str(old)]) == 2
    assert old.read_text() == "kept" and list(tmp_path.iterdir()) == [old]


def test_ctrl_c_keeps_the_rounds_until_then(
    cpu_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the text."""
    push, pieces = TextStream.push, iter(range(3))

    def interrupted(self: TextStream, token: int) -> str:
        if next(pieces, None) is None:
            raise KeyboardInterrupt
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", interrupted)
    path = tmp_path / "t.json"
    assert cli.main(["run", str(cpu_plan), "-p", "abc", "-n", "20", "--trace", str(path)]) == 130
    assert list(tmp_path.iterdir()) == [path]
    rows: list[Row] = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert [one["name"] for one in assert_sound(rows)] == ["prefill 3 tokens", *["decode"] * 3]
