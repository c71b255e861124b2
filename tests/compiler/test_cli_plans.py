"""Every command on a real plan: a public exporter's small model, with a tokenizer of our own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atsc.compiler import cli
from atsc.compiler.check_plan import check_plan

pytestmark = pytest.mark.toolchain

VOCABULARY = 1056
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def write_tokenizer(folder: Path) -> None:
    """Bytes, and a word for every other token id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"w{index}" for index in range(len(alphabet), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def model(export: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a mödel") / "llama 3"
    shutil.copytree(export("llama3-int4-cpu"), folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(model: Path) -> Path:
    output = model.parent / "plän 1.atsplan"
    command = ["compile", str(model), "-o", str(output), "--ctx", "200", "--chunk", "64"]
    assert cli.main(command) == 0
    return output


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert cli.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_is_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "check", folder, "--full")["ok"]
    found = document(capsys, "inspect", folder)
    assert (found["options"]["ctx"], found["options"]["chunk"]) == (200, 64)
    assert {"tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"} <= found["files"].keys()
    assert found["memory"]["kv_bytes"] > 0
    nodes = [node for unit in found["units"] for node in unit["nodes"]]
    assert len(nodes) == len(set(nodes)) > 10
    assert not list(folder.parent.glob(".atsc*")), "nothing is left behind"


def test_verify(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "verify", folder, model, "--tokens", "150")
    assert (found["ok"], found["failures"], found["num_tokens"]) == (True, [], 150)
    assert 1e-4 < found["relative_l2"] < 4e-2
    assert found["num_clear"] > 10


def test_verify_finds_a_plan_of_another_model(
    folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    data = bytearray((other / "model.onnx.data").read_bytes())
    quarter = len(data) // 4
    data[-quarter:] = bytes(quarter)
    (other / "model.onnx.data").write_bytes(data)
    assert cli.main(["verify", str(folder), str(other), "--tokens", "40", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] is False
    assert "is out of bounds: " in captured.err


def test_verify_says_what_does_not_fit(
    folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(folder), str(model), "--tokens", "201"]) == 2
    assert "the plan's context is 200 tokens" in capsys.readouterr().err
    (tmp_path / "text").write_text("short")
    command = ["verify", str(folder), str(model), "--tokens", "9", "--text", str(tmp_path / "text")]
    assert cli.main(command) == 2
    assert "has 5 tokens; give --tokens 5 or fewer" in capsys.readouterr().err


def test_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = document(capsys, "run", folder, "-p", "Hello", "-n", "12")
    assert len(greedy["tokens"]) == 12
    assert greedy == {
        **document(capsys, "run", folder, "-p", "Hello", "-n", "12"),
        **_speeds(greedy),
    }
    sampling = ("--temperature", "2", "--seed", "5")
    first = document(capsys, "run", folder, "-p", "Hello", "-n", "12", *sampling)
    second = document(capsys, "run", folder, "-p", "Hello", "-n", "12", *sampling)
    assert first["tokens"] == second["tokens"] != greedy["tokens"]
    chat = document(capsys, "run", folder, "--chat", "-p", "Hi", "-n", "3", "--threads", "1")
    assert chat["num_prompt_tokens"] == len("[user] Hi\n[assistant] ")


def _speeds(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key.endswith("_per_s")}


def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "bench", folder, "-p", "70", "-n", "4", "-d", "0,16", "-r", "2")["rows"]
    assert [row["test"] for row in rows] == ["pp70", "tg4", "pp70 @ d16", "tg4 @ d16"]
    assert all(row["avg_ts"] > 0 for row in rows)


def test_replanning_links_the_weights(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same units: only tables and kernels change with the chunk."""
    before = (folder / "weights.bin").stat().st_ino
    document(capsys, "compile", model, "-o", folder, "--ctx", "200", "--chunk", "32")
    assert (folder / "weights.bin").stat().st_ino == before
    assert check_plan(folder, full=True).options.chunk == 32
    document(capsys, "run", folder, "-p", "Hello", "-n", "2")


def test_a_damaged_plan_does_not_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.atsplan"
    shutil.copytree(folder, copy)
    data = bytearray((copy / "libplan.so").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "libplan.so").write_bytes(data)
    assert cli.main(["run", str(copy), "-p", "Hello"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "libplan.so: its content is not what was compiled" in captured.err


def test_ctrl_c_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """In a terminal the whole group of processes gets it, compilers included."""
    command = [sys.executable, "-m", "atsc.compiler.cli", "compile", str(model), "-v"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out" / "plan")],
        env={**os.environ, "ATSC_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    (tmp_path / "out").mkdir()
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"4 "):
            break
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert list((tmp_path / "out").iterdir()) == []
