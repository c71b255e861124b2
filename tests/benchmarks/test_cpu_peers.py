from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cpu_peers
import make_model
import numpy as np
import onnxruntime
import pytest
from gguf import GGUFReader

ECHO = """
import json, sys
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    if line.strip() in DEADLY:
        sys.exit(3)
    print(json.dumps({"seconds": SECONDS[line.strip()]}), flush=True)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("tiny-qwen3-0.6b", "tiny-qwen3-14b"):
        make_model.make_random(name, folder / name, layers=1, context=64)
    return folder


def engine(tmp_path: Path, name: str, seconds: dict[str, float], deadly: str = "") -> object:
    script = tmp_path / f"{name}.py"
    script.write_text(f"DEADLY, SECONDS = {[deadly]!r}, {seconds!r}\n{ECHO}")
    return cpu_peers.Engine(name, (str(script),), (sys.executable,))


def arguments(*more: str) -> object:
    return cpu_peers._parser().parse_args(["--prompt", "64", "--decode", "16", *more])


def compare(
    engines: list[object],
    monkeypatch: pytest.MonkeyPatch,
    absent: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> cpu_peers.Result:
    def chosen(model: Path, reader: None, result: cpu_peers.Result, args: object) -> list[object]:
        result.absent.update(absent or {})
        return engines

    monkeypatch.setattr(cpu_peers, "_engines", chosen)
    monkeypatch.setattr(cpu_peers, "PAUSE_SECONDS", 0)
    cores = cpu_peers._choose_cores(1)
    return cpu_peers._compare("m", Path(), None, cores, arguments("--repeats", "3", *options))


def test_speeds_are_tokens_by_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [
        engine(tmp_path, "atsc", {"pp": 0.5, "tg": 0.25}),
        engine(tmp_path, "llama.cpp", {"pp": 1.0, "tg": 2.0}),
        engine(tmp_path, cpu_peers.READ, {"pp": 0.01, "tg": 0.01}),
    ]
    prefill, decode = cpu_peers._rows(compare(engines, monkeypatch), arguments())
    assert (prefill["test"], prefill["atsc"], prefill["peers"]) == ("pp64", 128, {"llama.cpp": 64})
    assert (decode["test"], decode["atsc"], decode["peers"]) == ("tg16", 64, {"llama.cpp": 8})
    assert decode["read_limit"] == pytest.approx(100)
    assert prefill["read_limit"] == pytest.approx(6400)
    assert prefill["spread"]["llama.cpp"] == [64, 64]


def test_a_dead_or_missing_peer_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [
        engine(tmp_path, "llama.cpp", {"pp": 1.0}, deadly="tg"),
        cpu_peers.Engine("genai", ("-c", 'print(\'{"error": "no such module"}\')'), ("python3",)),
    ]
    result = compare(engines, monkeypatch, {"atsc": "no plan"})
    assert result.absent == {
        "llama.cpp": "the engine died with exit code 3",
        "genai": "no such module",
        "atsc": "no plan",
    }
    rows = list(cpu_peers._rows(result, arguments()))
    assert [(row["atsc"], row["peers"], row["read_limit"]) for row in rows] == [
        (None, {}, None)
    ] * 2
    document = {
        "rows": rows,
        "absent": {"m": result.absent},
        "load_average": [0, 0],
        "threads": 1,
    }
    assert "m: llama.cpp is absent: the engine died" in cpu_peers._table(document)


def test_a_killed_peer_names_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "peer.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    engines = [cpu_peers.Engine("llama.cpp, amx", (str(program),), (sys.executable,))]
    assert compare(engines, monkeypatch).absent == {"llama.cpp, amx": "died by SIGILL"}


def test_peers_may_take_fewer_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [
        engine(tmp_path, "atsc", {"pp": 0.5, "tg": 0.25}),
        engine(tmp_path, "llama.cpp", {"pp": 1.0, "tg": 2.0}),
    ]
    options = ("--peer-repeats", "1", "--warm-ups", "0")
    result = compare(engines, monkeypatch, options=options)
    turns = {name: len(tests["pp"]) for name, tests in result.seconds.items()}
    assert turns == {"atsc": 3, "llama.cpp": 1}


def test_engines_are_chosen_and_llama_libraries_added(models: Path) -> None:
    options = ("--engines", "llama.cpp", "--llama-lib", f"amx={models}")
    found = list(
        cpu_peers._engines(
            models / "tiny-qwen3-0.6b", None, cpu_peers.Result("m"), arguments(*options)
        )
    )
    assert [engine.name for engine in found] == ["llama.cpp", "llama.cpp, amx"]
    assert found[1].environment == {"LLAMA_CPP_LIB_PATH": str(models.resolve())}


def test_decode_reads_everything_but_an_untied_embedding(models: Path) -> None:
    tied, untied = (
        {t.name: t.n_bytes for t in GGUFReader(models / name / make_model.GGUF_NAME).tensors}
        for name in ("tiny-qwen3-0.6b", "tiny-qwen3-14b")
    )
    assert cpu_peers.decode_bytes(models / "tiny-qwen3-0.6b") == sum(tied.values())
    expected = sum(untied.values()) - untied["token_embd.weight"]
    assert cpu_peers.decode_bytes(models / "tiny-qwen3-14b") == expected


def test_the_last_row_model_computes_the_last_row(models: Path) -> None:
    folder = models / "tiny-qwen3-0.6b"
    logits = []
    for path in (folder / make_model.ONNX_NAME, cpu_peers._last_row_model(folder)):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        past = np.zeros((1, 2, 0, 128), np.float32)
        integers = {
            "input_ids": np.array([[5, 9, 2]], np.int64),
            "attention_mask": np.ones((1, 3), np.int64),
        }
        feeds = {value.name: integers.get(value.name, past) for value in session.get_inputs()}
        logits.append(np.asarray(session.run(["logits"], feeds)[0]))
    assert (logits[0].shape[1], logits[1].shape[1]) == (3, 1)
    np.testing.assert_allclose(logits[1][0, 0], logits[0][0, 2], rtol=1e-5, atol=1e-6)


@pytest.mark.toolchain
@pytest.mark.slow
def test_a_whole_run(models: Path) -> None:
    command = [sys.executable, str(Path(cpu_peers.__file__)), "--json", "--repeats", "1"]
    command += ["--models", "tiny-qwen3-0.6b", "--folder", str(models)]
    command += ["--prompt", "8", "--decode", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["test"] for row in document["rows"]] == ["pp8", "tg4"]
    for row in document["rows"]:
        assert row["read_limit"] > 0
        assert row["atsc"] is None or row["atsc"] > 0
    engines = {*document["rows"][0]["peers"], *document["absent"]["tiny-qwen3-0.6b"], "atsc"}
    assert engines >= {"atsc", "llama.cpp", "onnxruntime-genai", "onnxruntime-genai, last row"}
