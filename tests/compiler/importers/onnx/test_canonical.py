"""Decomposed decoders in many spellings: right against onnxruntime, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from decomposed import Decoder
from decomposed_logits import IDS, PROMPT, logits_of
from decomposed_parts import CONTEXT, LAYERS, SIZE, Spelling
from interpreter import replay
from mini_decoder import MICROSOFT, MiniDecoder
from plan_logits import plan_logits

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.ir import Graph
from atsc.passes.optimise import optimise


def imported(spelling: Spelling, folder: Path) -> Graph:
    return optimise(import_onnx(Decoder(spelling).save(folder)))


PHI_2 = Spelling(
    order="parallel",
    rope="partial",
    norm="layer",
    activation="gelu_tanh",
    mlp="plain",
    bias=True,
    head_bias=True,
)
PERSIMMON = Spelling(
    order="parallel_two", rope="partial", norm="layer", qk_norm="before", activation="relu2",
    mlp="plain", bias=True,
)  # fmt: skip
RIGHT = {
    "plain": Spelling(),
    "boolean mask, guarded": Spelling(mask="boolean", guard=True),
    "window": Spelling(window=6),
    "window, boolean, tiled": Spelling(window=3, mask="boolean", repeat="tile"),
    "grouped heads": Spelling(repeat="grouped"),
    "pairs": Spelling(rope="pairs"),
    "pairs before the transpose": Spelling(rope="pairs", rope_in_heads_last=True),
    "partial": Spelling(rope="partial"),
    "partial before the transpose": Spelling(rope="partial", rope_in_heads_last=True),
    "yarn": Spelling(rope="yarn", bias=True),
    "no rope": Spelling(rope="none"),
    "SmolLM3": Spelling(rope="last_none"),
    "queries rotated alone": Spelling(rope="only_q"),
    "learned positions": Spelling(rope="learned", norm="layer", activation="gelu_tanh", bias=True),
    "qk norm": Spelling(qk_norm="before"),
    "qk norm after rope": Spelling(qk_norm="after", norm="cast"),
    "Gemma": Spelling(softcap=5.0, window=9, activation="gelu_tanh", norm="cast"),
    "exact gelu": Spelling(activation="gelu_erf", norm="layer"),
    "Nemotron": Spelling(activation="relu2", norm="layer", rope="partial", mlp="plain"),
    "OLMo2": Spelling(order="post", qk_norm="rows", norm="rms_div"),
    "norms divide": Spelling(qk_norm="before", norm="rms_div"),
    "Persimmon": PERSIMMON,
    "StableLM 2 12B": Spelling(
        norm="layer", qk_norm="each", rope="partial", order="parallel", activation="silu"
    ),
    "norms of each head": Spelling(qk_norm="each", norm="layer_node", rope_in_heads_last=False),
    "RMS norms of each head": Spelling(qk_norm="each", packed=True),
    "layer norms of heads after rope": replace(PERSIMMON, norm="layer_node", qk_norm="after"),
    "layer norms of heads, packed": Spelling(norm="layer_node", qk_norm="before", packed=True),
    "layer norms of heads, Attention": replace(PERSIMMON, fused="heads", activation="gelu_tanh"),
    "Granite": Spelling(multipliers=True),
    "packed": Spelling(packed=True, bias=True),
    "num_logits_to_keep": Spelling(keep_logits=True),
    "merged": Spelling(merged=True),
    "Attention": Spelling(fused="heads", mask="boolean"),
    "Attention of added mask": Spelling(fused="heads", window=5, qk_norm="before"),
    "Attention with its caches": Spelling(fused="rows", mask="boolean"),
    "Attention without rope": Spelling(fused="rows", rope="none", window=4),
    "positions from the mask": Spelling(positions="cumsum"),
    "positions from 1": Spelling(positions="shifted", rope="partial"),
    "Phi-2": PHI_2,
    "Phi-2 of old": replace(PHI_2, rope="chunks", rope_in_heads_last=True),
    "GPT-NeoX": replace(PHI_2, order="parallel_two", activation="gelu_erf", head_bias=False),
    "Cohere": Spelling(order="parallel", rope="ernie", multipliers=True, mlp="packed"),
    "GLM4": Spelling(order="sandwich", rope="glm", mlp="packed", bias=True),
    "Ernie": Spelling(rope="ernie", rope_in_heads_last=True),
    "yarn, then a norm": Spelling(rope="yarn", qk_norm="after", norm="rms_div"),
    "HunYuan": Spelling(qk_norm="after", repeat="tile", packed=True),
    "LoRA beside": Spelling(lora="pair"),
    "LoRA added": Spelling(lora="sum", bias=True),
    "LoRA added to transposes": Spelling(lora="turned"),
    "LoRA on packed rows": Spelling(lora="pair", packed=True, mlp="packed", qk_norm="before"),
    "positions from 1, one side": Spelling(rope="only_q", positions="shifted", softcap=5.0),
    "positions from 1, then a norm": Spelling(qk_norm="after", positions="shifted"),
    "ScatterND": Spelling(cache="scatter_nd"),
    "ScatterND, window": Spelling(cache="scatter_nd", window=5, mask="boolean", repeat="grouped"),
    "ScatterElements": Spelling(cache="scatter_elements", qk_norm="before", whole_mask=True),
    "TensorScatter": Spelling(cache="tensor_scatter", rope="none"),
    "TensorScatter, Attention": Spelling(cache="tensor_scatter", fused="heads", repeat="tile"),
    "positions with a gap": Spelling(positions="gap"),
    "positions with a gap, Attention": Spelling(positions="gap", fused="rows", mask="boolean"),
    "narrow": Spelling(narrow="float16", window=5),
    "narrow, -3.4e38": Spelling(narrow="float16", wide_low=True),
    "half": Spelling(stored="float16"),
    "bfloat16": Spelling(stored="bfloat16"),
    "batch of one": Spelling(batch=1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_spellings_match_onnxruntime(name: str, tmp_path: Path) -> None:
    graph = imported(RIGHT[name], tmp_path)
    expected = logits_of(tmp_path / "model.onnx", RIGHT[name])
    actual = replay(graph, IDS, PROMPT)
    tolerance = 1e-2 if RIGHT[name].narrow else 2e-3
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)
    assert sum(node.op == "attention" for node in graph.nodes) == LAYERS


@pytest.mark.toolchain
@pytest.mark.parametrize("qk_norm", ["before", "after", "each"])
def test_plans_with_layer_norms_of_heads(tmp_path: Path, qk_norm: str) -> None:
    """The norms stay nodes of their own before attention, on the CPU and on the device."""
    spelling = replace(PERSIMMON, qk_norm=qk_norm)
    nodes = imported(spelling, tmp_path).nodes
    assert (
        sum(node.op == "layer_norm" and node.attrs["group"] == SIZE for node in nodes) == 2 * LAYERS
    )
    expected = logits_of(tmp_path / "model.onnx", spelling)
    ids = [int(token) for token in IDS]
    for logits in plan_logits(tmp_path / "model.onnx", tmp_path, ids, PROMPT):
        assert np.linalg.norm(logits - expected) <= 2e-3 * np.linalg.norm(expected)


def test_heads_that_change_places_are_refused(tmp_path: Path) -> None:
    spelling = Spelling(norm="layer_node", qk_norm="crossed")
    with pytest.raises(ModelError, match="comes of several rows of activations"):
        imported(spelling, tmp_path)


def test_bfloat16_throughout(tmp_path: Path) -> None:
    """onnxruntime has no bf16 products on CPUs: the same weights computed in 32 bits are right."""
    twin = replace(Spelling(), stored="bfloat16")
    (tmp_path / "twin").mkdir()
    expected = logits_of(Decoder(twin).save(tmp_path / "twin"), twin)
    graph = imported(replace(Spelling(), narrow="bfloat16"), tmp_path)
    actual = replay(graph, IDS, PROMPT)
    assert np.linalg.norm(actual - expected) <= 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("rope", ["halves", "none", "last_none"])
@pytest.mark.parametrize("cache", ["scatter_nd", "scatter_elements", "tensor_scatter"])
def test_a_cache_of_fixed_size_limits_the_context(tmp_path: Path, cache: str, rope: str) -> None:
    path = Decoder(Spelling(cache=cache, rope=rope)).save(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 500}')
    assert import_onnx(path).info.context_length == CONTEXT
    (tmp_path / "config.json").unlink()
    assert import_onnx(path).info.context_length == CONTEXT


REFUSED = {
    "circular": (
        Spelling(cache="circular", rope="none", whole_mask=True),
        "begins anew after 64 tokens",
    ),
    "one place too far": (Spelling(cache="late"), "is not causal attention"),
    "future": (Spelling(mask="future"), "its mask is not causal"),
    "one ahead": (Spelling(mask="ahead"), "its mask is not causal"),
    "a first row that sees nothing": (Spelling(mask="blind"), "its mask is not causal"),
    "that row in Attention": (Spelling(fused="rows", mask="blind"), "its mask is not causal"),
    "padding only": (Spelling(mask="padding"), "its mask is not causal"),
    "ALiBi": (Spelling(mask="biased"), "values that are neither 0 nor -infinity"),
    "dynamic": (Spelling(rope="dynamic"), "do not depend on the position alone"),
    "Attention one ahead": (Spelling(fused="rows", mask="ahead"), "its mask is not causal"),
    "cache in front": (Spelling(cache="behind"), "do not come of a Concat with a cache"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_causal_attention_is_refused(name: str, tmp_path: Path) -> None:
    """By the name of its Softmax, and nothing else: not every operator of its mask."""
    spelling, reason = REFUSED[name]
    with pytest.raises(ModelError, match=r"Softmax|Attention") as error:
        imported(spelling, tmp_path)
    lines = str(error.value).splitlines()
    assert f"model.onnx: {LAYERS} nodes are not supported: " in lines[0]
    operator = "Softmax" if spelling.fused == "no" else "Attention"
    assert len(lines) == LAYERS
    assert all(f"{operator} (ai.onnx, opset" in line and reason in line for line in lines)


def test_a_window_is_measured(tmp_path: Path) -> None:
    graph = imported(Spelling(window=6), tmp_path)
    assert [n.attrs["window"] for n in graph.nodes if n.op == "attention"] == [6] * LAYERS


def test_layers_share_tables_of_angles(tmp_path: Path) -> None:
    graph = imported(replace(Spelling(), rope="partial"), tmp_path)
    cos = {node.inputs[3] for node in graph.nodes if node.op == "attention"}
    assert len(cos) == 1
    assert graph.weights[cos.pop()].shape == (64, SIZE // 4)


UNKNOWN = (
    *("PagedAttention", "MultiHeadAttention", "CausalConvWithState", "LinearAttention"),
    "GatedDeltaNet",
)


@pytest.mark.parametrize("operator", UNKNOWN)
def test_other_attentions_are_refused_by_name(operator: str, tmp_path: Path) -> None:
    model = onnx.load(Decoder(Spelling()).save(tmp_path))
    (node,) = (n for n in model.graph.node if n.op_type == "Softmax" and n.name < "n3")
    node.op_type, node.domain = operator, "com.microsoft"
    del node.attribute[:]
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError) as error:
        import_onnx(tmp_path)
    named = (
        f"{node.name}: {operator} (com.microsoft, opset 1): operator {operator} is not supported"
    )
    assert named in str(error.value)


def test_nodes_in_a_circle_are_refused(tmp_path: Path) -> None:
    model = onnx.load(Decoder(Spelling()).save(tmp_path))
    first = next(n for n in model.graph.node if n.op_type == "Softmax")
    last = next(n for n in model.graph.node if first.output[0] in n.input)
    first.input[0] = last.output[0]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="cannot be put in order"):
        import_onnx(tmp_path)


def test_positions_with_a_gap_are_refused_by_a_fused_attention() -> None:
    """Its tables are read by the positions that the model is given: no others."""
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((16, 64)).astype(np.float32))
    shape = ["B", "M"]
    positions = onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, shape)
    decoder.inputs.append(positions)
    decoder.constant("gap", np.array([3], np.int64))
    decoder.node("Add", ["position_ids", "gap"], ["late"])
    angles = np.outer(np.arange(64), 0.8 ** np.arange(8)).astype(np.float32)
    tables = [decoder.constant("cos", np.cos(angles)), decoder.constant("sin", np.sin(angles))]
    seqlens, total = decoder.lengths(False)
    past, present = decoder.cache(0, 1, 16)
    inputs = ["x", "", "", *past, seqlens, total, *tables, "late"]
    heads = {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1}
    outputs = ["logits", *present]
    decoder.node("GroupQueryAttention", inputs, outputs, MICROSOFT, name="attention", **heads)
    with pytest.raises(ModelError, match=r"the_Add: .* the positions position_ids"):
        decoder.imported()
