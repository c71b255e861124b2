"""Every architecture and kind of RoPE: onnxruntime and llama.cpp compute what we say it means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf_sample import VOCAB, Sample, expected_logits, llama_cpp_logits, run_onnx, sample
from interpreter import Interpreter

from atsc.compiler import cli
from atsc.compiler.errors import ModelError
from atsc.compiler.importers.gguf import convert_gguf
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.ir import BlockFormat
from atsc.compiler.plan import load
from atsc.compiler.weights import dequantize
from atsc.passes.optimise import optimise

IDS = [3, 130, 17, 3, 64, 0, 99, 5, 5, 7, 8, 21, 33, 99, 100, 1, 2, 77, 76, 75]
WINDOW = {"attention.sliding_window": 5}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 3.0,
    "rope.scaling.original_context_length": 12,
}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}


def floats(architecture: str, keys: dict[str, Any] | None = None, **options: Any) -> Sample:
    return sample(Q.F32, Q.F32, architecture=architecture, keys=keys, **options)


MODELS: dict[str, Callable[[], Sample]] = {
    "llama with factors": lambda: floats("llama", has_factors=True),
    "llama linear": lambda: floats("llama", LINEAR),
    "llama linear, the old key": lambda: floats("llama", {"rope.scale_linear": 4.0}),
    "llama scaling of type none": lambda: floats("llama", LINEAR | {"rope.scaling.type": "none"}),
    "llama yarn": lambda: floats("llama", YARN),
    "qwen2": lambda: floats("qwen2", hidden=128),
    "qwen2 yarn": lambda: floats("qwen2", YARN, hidden=128, is_tied=False),
    "qwen3": lambda: floats("qwen3", is_tied=False),
    "qwen3 yarn with a factor": lambda: floats("qwen3", YARN | {"rope.scaling.attn_factor": 1.25}),
    "gemma3": lambda: floats("gemma3", WINDOW, layers=7),
    "gemma3 linear": lambda: floats("gemma3", WINDOW | LINEAR, layers=7),
    "gemma3, its own base": lambda: floats(
        "gemma3", WINDOW | {"rope.freq_base_swa": 500.0}, layers=2
    ),
    "gemma3, another pattern": lambda: floats(
        "gemma3", WINDOW | {"attention.sliding_window_pattern": 2}, layers=3
    ),
    "gemma3 without a window": lambda: floats("gemma3"),
}


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_agrees(name: str, tmp_path: Path) -> None:
    model, target = MODELS[name](), tmp_path / "out" / "model.onnx"
    convert_gguf(model.write(tmp_path / "m.gguf"), target)
    assert relative_l2(run_onnx(target, IDS), expected_logits(model, IDS)) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_agrees(name: str, tmp_path: Path) -> None:
    """It looks gelu up in a table of fp16."""
    model = MODELS[name]()
    found = llama_cpp_logits(model.write(tmp_path / "m.gguf"), IDS)
    tolerance = 1e-3 if model.architecture == "gemma3" else 1e-5
    assert relative_l2(found, expected_logits(model, IDS)) <= tolerance


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen3_4", lambda: sample(Q.Q4_0, Q.Q8_0, architecture="qwen3")),
        ("gemma3", lambda: sample(Q.Q5_0, Q.Q8_0, architecture="gemma3", keys=WINDOW, layers=7)),
        ("gemma3 mixed", lambda: sample(Q.Q4_0, Q.Q8_0, value=Q.Q8_0, architecture="gemma3")),
        ("qwen2", lambda: sample(Q.Q5_1, Q.Q5_0, architecture="qwen2", hidden=128)),
        ("k", lambda: sample(Q.Q4_K, Q.Q6_K, value=Q.Q5_K, hidden=256, inner=256, num_heads=8)),
    ],
)  # fmt: skip
def test_our_graph_agrees_after_all_passes(
    name: str, model: Callable[[], Sample], tmp_path: Path
) -> None:
    made = model()
    convert_gguf(made.write(tmp_path / "m.gguf"), tmp_path / "model.onnx")
    graph = optimise(import_onnx(tmp_path / "model.onnx", accuracy_level=1))
    interpreter = Interpreter(graph)
    rounds = [IDS[:9], IDS[9:10], IDS[10:13], IDS[13:]]
    logits = np.concatenate([interpreter.round(np.array(ids)) for ids in rounds])
    assert relative_l2(logits, expected_logits(made, IDS)) <= 2e-3  # Our KV cache is fp16.


@pytest.mark.parametrize(("kind", "bits"), [(Q.Q4_K, 4), (Q.Q5_K, 8)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_table_with_offsets_is_one_table(
    kind: Q, bits: int, is_tied: bool, tmp_path: Path
) -> None:
    """Rows with float zero points: two tables and an addition in ONNX, one gather in our graph."""
    options: dict[str, Any] = {"hidden": 256, "inner": 256, "num_heads": 8}
    made = sample(Q.Q4_K, kind, is_tied=is_tied, **options)
    convert_gguf(made.write(tmp_path / "m.gguf"), tmp_path / "model.onnx")
    graph = optimise(import_onnx(tmp_path / "model.onnx", accuracy_level=1))
    embed, *others = graph.nodes
    assert embed.op == "embed" and "embed" not in {node.op for node in others}
    table = graph.weights[embed.inputs[1]]
    assert table.format == BlockFormat(bits, 32, has_zero_points=True)
    expected = made.meaning()["token_embd.weight"]
    ulp = np.spacing(np.abs(expected).reshape(VOCAB, -1, 32).max(axis=2).astype(np.float32))
    error = np.abs(dequantize(table) - expected).reshape(VOCAB, -1, 32).max(axis=2)
    assert (error <= 2 * ulp).all()
    logits = Interpreter(graph).round(np.array(IDS))
    assert relative_l2(logits, expected_logits(made, IDS)) <= 2e-3


def test_gemma_is_fused_to_few_nodes(tmp_path: Path) -> None:
    """Post-norms take their residuals, attention its norms and rope, linears gate and gelu."""
    model = sample(Q.Q5_0, Q.Q8_0, architecture="gemma3", keys=WINDOW, layers=2)
    convert_gguf(model.write(tmp_path / "m.gguf"), tmp_path / "model.onnx")
    graph = optimise(import_onnx(tmp_path / "model.onnx"))
    layer = ["rms_norm", "linear", "attention", "quantize", "linear", "rms_norm"]
    layer += ["rms_norm", "linear", "linear", "quantize", "linear", "rms_norm"]
    ops = [node.op for node in graph.nodes]
    assert ops == ["embed", "mul", *layer * 2, "select_rows", "rms_norm", "linear"]
    assert {node.attrs["window"] for node in graph.attention_nodes()} == {5}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.sliding_window_pattern": [True] * 3}, r"_pattern has 3 entries for 2 layers"),
        ({"final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping is not supported"),
        ({"rope.freq_base_swa": "fast"}, r"rope\.freq_base_swa should hold a number"),
        ({"attention.sliding_window_pattern": 0}, r"_pattern is 0, expected at least 1 layer"),
    ],
)
def test_refusals_of_gemma(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = floats("gemma3", WINDOW | keys)
    with pytest.raises(ModelError, match=message):
        convert_gguf(model.write(tmp_path / "m.gguf"), tmp_path / "model.onnx")


def test_a_list_says_which_layers_have_a_window(tmp_path: Path) -> None:
    pattern = [False, True, True]
    model = floats("gemma3", WINDOW | {"attention.sliding_window_pattern": pattern}, layers=3)
    convert_gguf(model.write(tmp_path / "m.gguf"), tmp_path / "model.onnx")
    graph = import_onnx(tmp_path / "model.onnx")
    assert [node.attrs["window"] for node in graph.attention_nodes()] == [0, 5, 5]
    assert relative_l2(run_onnx(tmp_path / "model.onnx", IDS), expected_logits(model, IDS)) <= 1e-5


def test_the_27b_model_scales_scores_by_its_width(tmp_path: Path) -> None:
    model = floats("gemma3", WINDOW, layers=62, inner=32)
    convert_gguf(model.write(tmp_path / "m.gguf"), tmp_path / "model.onnx")
    graph = import_onnx(tmp_path / "model.onnx")
    scales = {node.attrs["scale"] for node in graph.attention_nodes()}
    assert scales == {0.25}


def test_the_kind_is_named_for_genai(tmp_path: Path) -> None:
    for architecture, kind in {"qwen2": "qwen2", "gemma3": "gemma3_text"}.items():
        source = floats(architecture, hidden=128).write(tmp_path / "m.gguf")
        convert_gguf(source, tmp_path / "model.onnx")
        config = json.loads((tmp_path / "genai_config.json").read_text())
        assert config["model"]["type"] == kind


@pytest.mark.toolchain
@pytest.mark.parametrize("level", [1, 4])
def test_a_plan_of_k_quants(level: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Convert, compile and verify: every type at once, a window shorter than the text."""
    made = sample(
        Q.Q5_K, Q.Q4_K, value=Q.Q6_K, architecture="gemma3", keys=WINDOW, hidden=256, inner=256,
        num_heads=8,
    )  # fmt: skip
    made.kinds |= {"blk.0.ffn_down.weight": Q.Q5_1, "blk.1.ffn_down.weight": Q.Q5_0}
    source, model, plan = tmp_path / "m.gguf", tmp_path / "model.onnx", tmp_path / "m.atsplan"
    made.write(source)
    assert cli.main(["convert", str(source), "-o", str(model), "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)
    assert 1 < sizes["weight_bytes"] / sizes["source_bytes"] < 2.5
    options = ["--ctx", "48", "--chunk", "16", "--accuracy-level", str(level), "--json"]
    assert cli.main(["compile", str(model), "-o", str(plan), *options]) == 0
    capsys.readouterr()
    code = cli.main(["verify", str(plan), str(model), "--tokens", "40", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["failures"]) == (0, [])
    assert found["relative_l2"] < (2e-3 if level == 1 else 4e-2)


@pytest.mark.toolchain
@pytest.mark.parametrize("name", ["tiny.Q8_0.gguf", "sha256-74f3"])
def test_compile_takes_the_file_itself(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does verify; what they convert for themselves is gone afterwards."""
    source = sample().write(tmp_path / name)
    assert cli.main(["compile", str(source), "--ctx", "48", "--chunk", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = Path(document["plan"])
    assert plan == source.parent / f"{source.stem}.atsplan"
    assert [stage["name"] for stage in document["stages"]][:2] == ["convert", "import"]
    assert load(plan).model.name == name.removesuffix(".gguf")
    assert cli.main(["verify", str(plan), str(source), "--tokens", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == []
    assert {path.name for path in tmp_path.iterdir()} == {name, plan.name}


def test_a_damaged_file_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sample().write(tmp_path / "m.gguf")
    source.write_bytes(source.read_bytes()[:-200])
    assert cli.main(["compile", str(source)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{source}: no GGUF file, or one that is damaged" in error
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_no_room_for_the_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sample().write(tmp_path / "m.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=source.stat().st_size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert cli.main(["compile", str(source)]) == 1
    assert "choose another -o" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
