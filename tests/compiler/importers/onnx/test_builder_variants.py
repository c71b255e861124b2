"""Whole small decoders in the spellings of the GenAI builder's options, in onnxruntime and here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from interpreter import Interpreter
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto, helper

from atsc.compiler import cli
from atsc.compiler.ir import Graph
from atsc.passes.optimise import optimise

VOCAB, WIDTH, HEADS, KV_HEADS, SIZE, INNER, LAYERS = 48, 64, 4, 2, 16, 96, 2
WINDOW, CONTEXT, EPSILON = 5, 128, 1e-6
ROUNDS = [np.arange(11), np.array([4]), np.array([2, 9, 9]), np.array([0])]


@dataclass(frozen=True)
class Options:
    """The builder's options, and what the model or the provider brings with it."""

    fuse_qkv: bool = True
    fuse_mlp_gate_up: bool = False
    prune_lm_head: bool = False
    windowed_kv_cache: bool = False
    has_window: bool = False
    has_sinks: bool = False
    has_bias: bool = False
    qk_norm: str = ""
    """`slots`: inputs 14 and 15, as for CUDA; `nodes`: apart, as for the CPU."""
    bits: int = 0


@dataclass
class Builder:
    """Writes one decoder; random numbers depend on a weight's name alone."""

    options: Options
    decoder: MiniDecoder = field(init=False)
    lengths: tuple[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = MiniDecoder(random("table", VOCAB, WIDTH))
        self.lengths = self.decoder.lengths()
        angles = np.outer(np.arange(CONTEXT), 0.7 ** np.arange(SIZE // 2))
        self.decoder.constant("cos_cache", np.cos(angles).astype(np.float32))
        self.decoder.constant("sin_cache", np.sin(angles).astype(np.float32))
        residual, update = "x", ""
        for layer in range(LAYERS):
            prefix = f"/model/layers.{layer}"
            x, residual = self.norm(f"{prefix}/input_layernorm", residual, update)
            update = self.attention(layer, f"{prefix}/attn", x)
            x, residual = self.norm(f"{prefix}/post_attention_layernorm", residual, update)
            update = self.mlp(f"{prefix}/mlp", x)
        x, _ = self.norm("/model/final_norm", residual, update)
        if self.options.prune_lm_head:
            info = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", 1, VOCAB])
            self.decoder.outputs[0] = info
            scalar = helper.make_tensor("/model/constants/INT64/-1", TensorProto.INT64, [], [-1])
            self.decoder.initializers.append(scalar)
            self.integers("/model/constants/INT64/[1]", np.array([1]))
            x = self.node("Gather", "/lm_head/prune/Gather", x, "/model/constants/INT64/-1", axis=1)
            x = self.node("Unsqueeze", "/lm_head/prune/Unsqueeze", x, "/model/constants/INT64/[1]")
        self.linear("/lm_head", x, {"head": VOCAB}, WIDTH, output="logits")

    def node(self, op: str, name: str, *inputs: str, **attrs: object) -> str:
        return self.decoder.node(op, list(inputs), [f"{name}/output_0"], "", name, **attrs)

    def integers(self, name: str, array: np.ndarray) -> str:
        if name not in {tensor.name for tensor in self.decoder.initializers}:
            self.decoder.constant(name, array.astype(np.int64))
        return name

    def norm(self, name: str, residual: str, update: str) -> tuple[str, str]:
        weight = self.decoder.constant(f"{name}.weight", 1 + 0.3 * random(name, WIDTH))
        op = "SimplifiedLayerNormalization"
        if not update:
            attrs = {"axis": -1, "epsilon": EPSILON, "stash_type": 1}
            return self.node(op, f"{name}/LayerNorm", residual, weight, **attrs), residual
        outputs = [f"{name}/output_0", "", "", f"{name}/output_3"]
        inputs = [residual, update, weight]
        self.decoder.node(f"Skip{op}", inputs, outputs, MICROSOFT, name, epsilon=EPSILON)
        return outputs[0], outputs[3]

    def linear(self, name: str, x: str, parts: dict[str, int], width: int, output: str = "") -> str:
        """Rows of all parts stacked; every part's rows are the same however they are stacked."""
        outputs = sum(parts.values())
        rows = np.concatenate([random(part, size, width) for part, size in parts.items()])
        y = output or f"{name}/MatMul/output_0"
        if self.options.bits:
            codes, scales = quantised(rows * width**-0.5, self.options.bits)
            names = [
                self.decoder.constant(f"{name}.weight_Q", codes),
                self.decoder.constant(f"{name}.weight_scales", scales),
            ]
            self.decoder.node(
                "MatMulNBits", [x, *names], [y], MICROSOFT, f"{name}/MatMul_Q",
                N=outputs, K=width, bits=self.options.bits, block_size=32, accuracy_level=1,
            )  # fmt: skip
        else:
            weight = self.decoder.constant(f"{name}.weight", rows.T * width**-0.5)
            self.decoder.node("MatMul", [x, weight], [y], "", f"{name}/MatMul")
        if not self.options.has_bias or output:
            return y
        bias = np.concatenate([random(f"{part}.bias", size) for part, size in parts.items()])
        return self.node("Add", f"{name}/Add", y, self.decoder.constant(f"{name}.bias", bias))

    def split(self, name: str, x: str, sizes: list[int], outputs: list[str]) -> None:
        self.integers(f"{name}/sizes", np.array(sizes))
        self.decoder.node("Split", [x, f"{name}/sizes"], outputs, "", name, axis=-1)

    def attention(self, layer: int, name: str, x: str) -> str:
        counts = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        sizes = {f"{layer}.{part}": count * SIZE for part, count in counts.items()}
        if self.options.fuse_qkv:
            query = [self.linear(f"{name}/qkv_proj", x, sizes, WIDTH), "", ""]
        else:
            query = [self.linear(f"{name}/{p}_proj", x, {p: n}, WIDTH) for p, n in sizes.items()]
        if self.options.qk_norm == "nodes":
            query = self.normed(layer, name, query, sizes)
        past, present = self.decoder.cache(layer, KV_HEADS, SIZE)
        inputs = [*query, *past, *self.lengths, "cos_cache", "sin_cache", *[""] * 7]
        attrs: dict[str, object] = {"do_rotary": 1, "rotary_interleaved": 0, "softcap": 0.0}
        is_local = self.options.has_window and layer % 2 == 0
        attrs["local_window_size"] = WINDOW if is_local else -1
        if is_local and self.options.windowed_kv_cache:
            attrs["sliding_window_cache"] = 1
        if self.options.has_sinks:
            inputs[11] = self.decoder.constant(f"{name}.sinks", random(f"{layer}.sinks", HEADS))
        if self.options.qk_norm == "slots":
            inputs[14], inputs[15] = (
                self.decoder.constant(f"{name}.{p}_norm", head_norm(layer, p)) for p in "qk"
            )
            attrs["qk_norm_epsilon"] = EPSILON
        while not inputs[-1]:
            inputs.pop()
        outputs = [f"{name}/GroupQueryAttention/output_0", *present]
        self.decoder.node(
            "GroupQueryAttention", inputs, outputs, MICROSOFT, f"{name}/GroupQueryAttention",
            num_heads=HEADS, kv_num_heads=KV_HEADS, scale=SIZE**-0.5, **attrs,
        )  # fmt: skip
        return self.linear(f"{name}/o_proj", outputs[0], {f"{layer}.o": WIDTH}, HEADS * SIZE)

    def normed(self, layer: int, name: str, query: list[str], sizes: dict[str, int]) -> list[str]:
        if not query[1]:
            packed, query = query[0], [f"{name}/qkv_proj/Split/output_{i}" for i in range(3)]
            self.split(f"{name}/qkv_proj/Split", packed, list(sizes.values()), query)
        for i, (part, width) in enumerate(zip("qk", sizes.values(), strict=False)):
            step = f"{name}/{part}_norm"
            heads = self.integers("/heads", np.array([0, -1, SIZE]))
            x = self.node("Reshape", f"{step}/Reshape_1", query[i], heads)
            weight = self.decoder.constant(f"{step}.weight", head_norm(layer, part))
            attrs = {"axis": -1, "epsilon": EPSILON, "stash_type": 1}
            x = self.node("SimplifiedLayerNormalization", f"{step}/Norm", x, weight, **attrs)
            rows = self.integers(f"/rows/{width}", np.array([0, -1, width]))
            query[i] = self.node("Reshape", f"{step}/Reshape_2", x, rows)
        return query

    def mlp(self, name: str, x: str) -> str:
        layer = name.split("/")[2]
        parts = {f"{layer}.gate": INNER, f"{layer}.up": INNER}
        if self.options.fuse_mlp_gate_up:
            packed = self.linear(f"{name}/gate_up_proj", x, parts, WIDTH)
            gate, up = (f"{name}/{part}_proj/MatMul/output_0" for part in ("gate", "up"))
            self.decoder.node(
                "Split", [packed], [gate, up], "", f"{name}/Split", axis=-1, num_outputs=2
            )
        else:
            gate, up = (
                self.linear(f"{name}/{part}_proj", x, {f"{layer}.{part}": INNER}, WIDTH)
                for part in ("gate", "up")
            )
        sigmoid = self.node("Sigmoid", f"{name}/act_fn/Sigmoid", gate)
        silu = self.node("Mul", f"{name}/act_fn/Mul", gate, sigmoid)
        y = self.node("Mul", f"{name}/Mul", silu, up)
        return self.linear(f"{name}/down_proj", y, {f"{layer}.down": WIDTH}, INNER)


def random(name: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(list(name.encode()))
    return rng.standard_normal(shape).astype(np.float32)


def head_norm(layer: int, part: str) -> np.ndarray:
    return 1 + 0.4 * random(f"{layer}.{part}_norm", SIZE)


def quantised(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = rows.reshape(len(rows), -1, 32)
    scales = (np.abs(blocks).max(axis=-1) / (2 ** (bits - 1) - 1)).astype(np.float32)
    codes = (np.rint(blocks / scales[..., None]) + 2 ** (bits - 1)).astype(np.uint8)
    return (codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4), scales


def optimised(options: Options) -> Graph:
    return optimise(Builder(options).decoder.imported(accuracy_level=1))


def ours(options: Options) -> np.ndarray:
    interpreter = Interpreter(optimised(options))
    return np.concatenate([interpreter.round(ids) for ids in ROUNDS])


def onnxruntime_logits(options: Options, capacity: int = 0) -> np.ndarray:
    """Logits of all rounds; window layers get buffers of `capacity` tokens if they want them."""
    decoder = Builder(options).decoder
    if not capacity:
        return decoder.onnxruntime(ROUNDS)
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 4
    session = onnxruntime.InferenceSession(decoder.model().SerializeToString(), session_options)
    past = {
        value.name: np.zeros(
            (1, KV_HEADS, capacity if int(value.name.split(".")[1]) % 2 == 0 else 0, SIZE),
            np.float32,
        )
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    rows, position = [], 0
    for ids in ROUNDS:
        position += len(ids)
        feeds = {"input_ids": ids[None], "attention_mask": np.ones((1, position), np.int64), **past}
        logits, *present = session.run(None, feeds)
        past = dict(zip(past, present, strict=True))
        rows.append(logits[0])
    return np.concatenate(rows)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 2e-3) -> None:
    """Our KV cache is fp16."""
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


GPT_OSS = Options(has_window=True, has_sinks=True, has_bias=True)
VARIANTS = {
    "plain": Options(),
    "int4": Options(bits=4),
    "int8, separate": Options(bits=8, fuse_qkv=False),
    "separate q, k, v": Options(fuse_qkv=False),
    "separate and biased": Options(fuse_qkv=False, has_bias=True),
    "gate and up in one": Options(fuse_mlp_gate_up=True),
    "gate and up in one, biased, int4": Options(fuse_mlp_gate_up=True, has_bias=True, bits=4),
    "sinks, bias and windows": GPT_OSS,
    "sinks with separate q, k, v": replace(GPT_OSS, fuse_qkv=False, bits=4),
    "norms of q and k": Options(qk_norm="nodes", has_window=True),
    "norms with separate q, k, v": Options(qk_norm="nodes", fuse_qkv=False),
    "norms and sinks": replace(GPT_OSS, qk_norm="nodes", bits=8),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_agree_with_onnxruntime(name: str) -> None:
    assert_close(ours(VARIANTS[name]), onnxruntime_logits(VARIANTS[name]))


@pytest.mark.parametrize("options", [Options(), Options(has_window=True), GPT_OSS])
def test_norms_in_slots_mean_the_nodes(options: Options) -> None:
    """onnxruntime's CPU has no kernel for the slots, and one for the nodes."""
    expected = onnxruntime_logits(replace(options, qk_norm="nodes"))
    for fuse_qkv in (True, False):
        slots = replace(options, qk_norm="slots", fuse_qkv=fuse_qkv)
        assert_close(ours(slots), expected)
        assert all(node.inputs[5:7] for node in optimised(slots).attention_nodes())
    assert np.abs(expected - onnxruntime_logits(options)).max() > 0.1, "the norms do something"


@pytest.mark.parametrize("capacity", [WINDOW, WINDOW + 2, 64])
@pytest.mark.parametrize("options", [Options(has_window=True), GPT_OSS])
def test_preallocated_windows_are_ordinary_windows(options: Options, capacity: int) -> None:
    windowed = replace(options, windowed_kv_cache=True)
    expected = onnxruntime_logits(windowed, capacity)
    assert_close(expected, onnxruntime_logits(options), 1e-6)
    assert_close(ours(windowed), expected)
    assert [node.attrs["window"] for node in optimised(windowed).attention_nodes()] == [WINDOW, 0]


@pytest.mark.parametrize("bits", [0, 4])
def test_a_pruned_head_gives_the_rows_that_are_wanted(bits: int) -> None:
    """onnxruntime gives the last row alone; a plan gives any."""
    pruned = Options(prune_lm_head=True, bits=bits)
    last = np.cumsum([len(ids) for ids in ROUNDS]) - 1
    expected = onnxruntime_logits(pruned)
    assert_close(expected, onnxruntime_logits(Options(bits=bits))[last], 1e-5)
    assert_close(ours(pruned)[last], expected)
    assert [node.op for node in optimised(pruned).nodes][-2:] == ["select_rows", "linear"]


def test_variants_become_the_same_graph() -> None:
    """Few nodes, whatever the spelling: units stay apart, everything small is fused."""
    counts = {
        name: Counter(node.op for node in optimised(VARIANTS[name]).nodes)
        for name in ("separate q, k, v", "gate and up in one", "separate and biased")
    }
    assert counts["separate q, k, v"] == counts["separate and biased"]
    assert counts["separate q, k, v"]["linear"] == 7 * LAYERS + 1
    assert counts["gate and up in one"]["linear"] == 5 * LAYERS + 1
    for found in counts.values():
        assert found.keys() == {"embed", "rms_norm", "linear", "attention", "select_rows"}


@pytest.mark.toolchain
@pytest.mark.parametrize(
    "options",
    [
        replace(GPT_OSS, windowed_kv_cache=True, fuse_mlp_gate_up=True, qk_norm="nodes", bits=4),
        Options(prune_lm_head=True, fuse_qkv=False, bits=8),
    ],
    ids=["windows and sinks", "pruned"],
)
def test_plans_of_variants(
    options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels too, against onnxruntime, beyond the window and the chunk."""
    folder, plan = tmp_path / "model", tmp_path / "m.atsplan"
    folder.mkdir()
    Builder(options).decoder.save(folder)
    command = ["compile", str(folder), "-o", str(plan), "--ctx", "96", "--chunk", "16"]
    assert cli.main([*command, "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["verify", str(plan), str(folder), "--tokens", "90", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["relative_l2"] < 2e-3
