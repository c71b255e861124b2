"""All passes over whole small decoders, against onnxruntime's logits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from interpreter import Interpreter
from mini_decoder import MICROSOFT, MiniDecoder

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import Graph
from atsc.passes.optimise import optimise

ROUNDS = [np.arange(6), np.array([3]), np.array([1, 2])]
WIDTH, HEADS, KV_HEADS, SIZE = 32, 4, 2, 16


class Layers:
    """The parts of a decoder layer as exporters spell them."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.decoder = MiniDecoder(self.rng.standard_normal((8, WIDTH), np.float32))
        self.constant("angle_cos", np.cos(self.angles()))
        self.constant("angle_sin", np.sin(self.angles()))
        self.lengths = self.decoder.lengths()

    def angles(self) -> np.ndarray:
        return np.outer(np.arange(32), 0.7 ** np.arange(8))

    def constant(self, name: str, array: np.ndarray) -> str:
        return self.decoder.constant(name, array.astype(np.float32))

    def random(self, name: str, *shape: int) -> str:
        return self.constant(name, self.rng.standard_normal(shape) / np.sqrt(shape[0]))

    def op(self, op: str, *inputs: str, domain: str = "", **attrs: object) -> str:
        output = f"{op}_{len(self.decoder.nodes)}"
        return self.decoder.node(op, list(inputs), [output], domain, name=f"/{output}", **attrs)

    def project(self, x: str, name: str, width: int, outputs: int, *, bias: bool = False) -> str:
        y = self.op("MatMul", x, self.random(name, width, outputs))
        return self.op("Add", y, self.random(f"{name}_bias", outputs)) if bias else y

    def split(self, x: str, *sizes: int) -> list[str]:
        outputs = [f"{x}_part{index}" for index in range(len(sizes))]
        self.decoder.constant(f"{x}_sizes", np.array(sizes, np.int64))
        self.decoder.node("Split", [x, f"{x}_sizes"], outputs, name=f"split_{x}", axis=-1)
        return outputs

    def attention(self, layer: int, *qkv: str) -> str:
        past, present = self.decoder.cache(layer, KV_HEADS, SIZE)
        names = [*qkv, *[""] * (3 - len(qkv)), *past, *self.lengths, "angle_cos", "angle_sin"]
        output = f"attention_{layer}"
        return self.decoder.node(
            "GroupQueryAttention", names, [output, *present], MICROSOFT, name=output,
            num_heads=HEADS, kv_num_heads=KV_HEADS, do_rotary=1,
        )  # fmt: skip

    def logits(self, x: str) -> MiniDecoder:
        head = self.random("head", WIDTH, 8)
        self.decoder.node("MatMul", [x, head], ["logits"], name="/head")
        return self.decoder


def check(decoder: MiniDecoder) -> Graph:
    graph = optimise(decoder.imported())
    interpreter = Interpreter(graph)
    ours = np.concatenate([interpreter.round(ids) for ids in ROUNDS])
    theirs = decoder.onnxruntime(ROUNDS)
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) <= 2e-3
    return graph


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def test_fused_gate_up_and_biased_packed_projection() -> None:
    """Qwen2's biases and the builder's fuse_mlp_gate_up."""
    m = Layers()
    packed = (HEADS + 2 * KV_HEADS) * SIZE
    normed = m.op("SimplifiedLayerNormalization", "x", m.random("n0", WIDTH), epsilon=1e-5)
    y = m.attention(0, m.project(normed, "qkv", WIDTH, packed, bias=True))
    h = m.op("Add", "x", m.project(y, "o", HEADS * SIZE, WIDTH))
    normed = m.op("SimplifiedLayerNormalization", h, m.random("n1", WIDTH), epsilon=1e-5)
    gate, up = m.split(m.project(normed, "gate_up", WIDTH, 96), 48, 48)
    act = m.op("Mul", gate, m.op("Sigmoid", gate))
    h = m.op("Add", m.project(m.op("Mul", act, up), "down", 48, WIDTH), h)
    final = m.op("SimplifiedLayerNormalization", h, m.random("n2", WIDTH), epsilon=1e-5)
    graph = check(m.logits(final))
    assert ops(graph) == {
        "embed": 1, "rms_norm": 3, "linear": 6, "attention": 1, "select_rows": 1
    }  # fmt: skip
    assert {"gate_up[0:48]", "gate_up[48:96]"} <= graph.weights.keys()
    (qkv,) = (node for node in graph.nodes if "qkv" in node.inputs)
    assert qkv.inputs[2] == "qkv_bias"


def test_parallel_attention_and_mlp() -> None:
    """Phi-2: one LayerNorm, attention and MLP beside each other, three separate projections."""
    m = Layers()
    normed = m.op("LayerNormalization", "x", m.random("g", WIDTH), m.random("b", WIDTH))
    q = m.project(normed, "q", WIDTH, HEADS * SIZE, bias=True)
    k = m.project(normed, "k", WIDTH, KV_HEADS * SIZE, bias=True)
    v = m.project(normed, "v", WIDTH, KV_HEADS * SIZE, bias=True)
    o = m.project(m.attention(0, q, k, v), "o", HEADS * SIZE, WIDTH, bias=True)
    hidden = m.op("FastGelu", m.project(normed, "fc1", WIDTH, 64, bias=True), domain=MICROSOFT)
    both = m.op("Add", o, m.project(hidden, "fc2", 64, WIDTH, bias=True))
    h = m.op("Add", both, "x")
    final = m.op("LayerNormalization", h, m.random("g2", WIDTH), m.random("b2", WIDTH))
    graph = check(m.logits(final))
    assert ops(graph) == {
        "embed": 1, "layer_norm": 2, "linear": 7, "attention": 1, "add": 1, "select_rows": 1
    }  # fmt: skip
    (fc1,) = (node for node in graph.nodes if "fc1" in node.inputs)
    assert fc1.attrs["activation"] == "gelu_tanh"


def test_a_packed_projection_that_attention_cannot_take_is_split() -> None:
    """q alone is scaled on the way, so that q, k and v need three projections."""
    m = Layers()
    packed = m.project("x", "qkv", WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)
    q, k, v = m.split(packed, HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
    m.constant("half", np.array(0.5))
    y = m.attention(0, m.op("Mul", q, "half"), k, v)
    graph = check(m.logits(m.project(y, "o", HEADS * SIZE, WIDTH)))
    assert [name for name in graph.weights if name.startswith("qkv")] == [
        "qkv[0:64]", "qkv[64:96]", "qkv[96:128]"
    ]  # fmt: skip


def test_two_layers_keep_their_caches_apart() -> None:
    m = Layers()
    h = "x"
    for layer in range(2):
        packed = m.project(h, f"qkv{layer}", WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)
        y = m.project(m.attention(layer, packed), f"o{layer}", HEADS * SIZE, WIDTH)
        outputs = [f"normed{layer}", "", "", f"sum{layer}"]
        names = [h, y, m.random(f"gamma{layer}", WIDTH)]
        m.decoder.node(
            "SkipSimplifiedLayerNormalization", names, outputs, MICROSOFT, name=f"skip{layer}"
        )
        h = outputs[3]
    graph = check(m.logits("normed1"))
    assert [node.attrs["layer"] for node in graph.attention_nodes()] == [0, 1]
    assert "add" not in ops(graph)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_head_pruned_to_the_last_row(as_list: bool) -> None:
    """The builder's prune_lm_head gives the last row only; ours gives the wanted rows."""
    m = Layers()
    packed = m.project("x", "qkv", WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)
    h = m.project(m.attention(0, packed), "o", HEADS * SIZE, WIDTH)
    m.decoder.constant("last_row", np.array([-1] if as_list else -1, np.int64))
    last = m.op("Gather", h, "last_row", axis=1)
    if not as_list:
        m.decoder.constant("axis", np.array([1], np.int64))
        last = m.op("Unsqueeze", last, "axis")
    decoder = m.logits(last)
    graph = optimise(decoder.imported())
    assert ops(graph)["select_rows"] == 1
    ours = Interpreter(graph).round(ROUNDS[0], np.array([5]))
    theirs = decoder.onnxruntime(ROUNDS[:1])
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) <= 2e-3


def test_attention_over_selected_rows_is_refused() -> None:
    m = Layers()
    m.decoder.constant("last_row", np.array([-1], np.int64))
    packed = m.project(m.op("Gather", "x", "last_row", axis=1), "qkv", WIDTH, 128)
    decoder = m.logits(m.project(m.attention(0, packed), "o", HEADS * SIZE, WIDTH))
    with pytest.raises(ModelError, match=r"node attention_0: the rows .* are no contiguous"):
        decoder.imported()


def test_columns_of_an_embedding_are_refused_by_node() -> None:
    m = Layers()
    a, b = m.split("x", 16, 16)
    m.decoder.node("MatMul", [m.op("Add", a, b), m.random("head", 16, 8)], ["logits"], name="head")
    with pytest.raises(ModelError, match="node split_x/0: columns of the output of embed"):
        optimise(m.decoder.imported())


def test_nodes_need_no_names() -> None:
    m = Layers()
    decoder = m.logits(m.project(m.project("x", "first", WIDTH, WIDTH), "second", WIDTH, WIDTH))
    for node in decoder.nodes:
        node.name = ""
    assert len(check(decoder).nodes) == 5
