"""What is not supported is refused by node and reason, all of it in one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto, helper

from atsc.compiler.cli import main
from atsc.compiler.errors import ModelError


def refusal(decoder: MiniDecoder) -> str:
    with pytest.raises(ModelError) as error:
        decoder.imported()
    return str(error.value)


def decoder_with(op: str, inputs: list[str], domain: str = MICROSOFT, **attrs: object) -> str:
    """The refusal of a decoder whose one node reads x and some constants."""
    decoder = MiniDecoder(np.ones((3, 32), np.float32))
    decoder.constant("codes", np.zeros((5, 1, 16), np.uint8))
    decoder.constant("scales", np.ones((5, 1), np.float32))
    decoder.constant("order", np.zeros(32, np.int32))
    decoder.constant("row", np.ones(32, np.float32))
    decoder.node(op, inputs, ["logits"], domain, name="/layer/node", **attrs)
    return refusal(decoder)


BITS = {"N": 5, "K": 32, "block_size": 32}
WEIGHT = ["x", "codes", "scales"]
CASES: dict[str, tuple[str, list[str], dict[str, object], str]] = {
    "block size 512": (
        "MatMulNBits", WEIGHT, BITS | {"block_size": 512},
        "attribute block_size is 512, supported: 16 or 32 or 64 or 128 or 256",
    ),
    "3 bits": (
        "MatMulNBits", WEIGHT, BITS | {"bits": 3}, "attribute bits is 3, supported: 2 or 4 or 8"
    ),
    "permuted bytes": (
        "MatMulNBits", WEIGHT, BITS | {"weight_prepacked": 1},
        "attribute weight_prepacked is 1, supported: 0",
    ),
    "g_idx": ("MatMulNBits", [*WEIGHT, "", "order"], BITS, "input 4 (g_idx) is not supported"),
    "unknown attribute": (
        "MatMulNBits", WEIGHT, BITS | {"act_order": 1}, "attribute act_order is not supported"
    ),
    "unknown input": (
        "MatMulNBits", [*WEIGHT, "", "", "", "row"], BITS, "input 6 is not supported"
    ),
    "accuracy level 9": (
        "MatMulNBits", WEIGHT, BITS | {"accuracy_level": 9}, "attribute accuracy_level is 9"
    ),
    "missing attribute": (
        "MatMulNBits", WEIGHT, {"N": 5, "K": 32}, "attribute block_size is missing"
    ),
    "attribute of another type": (
        "MatMulNBits", WEIGHT, BITS | {"N": 5.5}, "attribute N is 5.5, expected int"
    ),
    "missing input": ("MatMulNBits", ["x", "codes"], BITS, "input 2 (scales) is missing"),
    "wrong width": (
        "MatMulNBits", WEIGHT, BITS | {"K": 16},
        "codes has 16 inputs, the activations have 32",
    ),
    "norm in fp16": (
        "LayerNormalization", ["x", "row"], {"stash_type": 10},
        "attribute stash_type is 10, supported: 1",
    ),
    "norm of another axis": (
        "LayerNormalization", ["x", "row"], {"axis": 1}, "attribute axis is 1, supported: the last"
    ),
    "scaled rope": (
        "RotaryEmbedding", ["x", "order", "row", "row"], {"scale": 2.0},
        "attribute scale is 2.0, supported: 1.0",
    ),
    "unknown operator": ("QMoE", ["x"], {"k": 2}, "operator QMoE is not supported"),
    "product of values": ("MatMul", ["x", "x"], {}, "input 1 is activations, expected a constant"),
    "columns gathered": (
        "GatherBlockQuantized", ["codes", "input_ids", "scales"],
        {"gather_axis": 1, "quantize_axis": 2},
        "rows of a table along axis 1: no Transpose behind it makes rows of 160",
    ),
    "cache that is written in place": (
        "ScatterND", ["x", "order", "row"], {}, "operator ScatterND is not supported"
    ),
    "cast to integers": ("Cast", ["x"], {"to": 7}, "a cast to INT64"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_node(case: str) -> None:
    op, inputs, attrs, reason = CASES[case]
    domain = "" if op in ("LayerNormalization", "MatMul", "Cast", "ScatterND") else MICROSOFT
    message = decoder_with(op, inputs, domain, **attrs)
    opset = 1 if domain else 22
    named = f"/layer/node: {op} ({domain or 'ai.onnx'}, opset {opset}): {reason}"
    assert f"model.onnx: 1 node is not supported: {named}" in message
    assert "\n" not in message


ATTENTION: dict[str, tuple[dict[str, object], dict[int, str], str]] = {
    "preallocated ring": (
        {"sliding_window_cache": 1}, {},
        "attribute sliding_window_cache is 1 and local_window_size is absent",
    ),
    "quantised keys": (
        {"k_quant_type": "PER_TENSOR"}, {}, "attribute k_quant_type is PER_TENSOR, supported: NONE"
    ),
    "no causal mask": ({"causal": 0}, {}, "attribute causal is 0, supported: 1"),
    "smooth softmax": ({"smooth_softmax": 1}, {}, "attribute smooth_softmax is 1"),
    "no window": ({"local_window_size": 0}, {}, "attribute local_window_size is 0"),
    "bias": ({}, {10: "row"}, "input 10 (attention_bias) is not supported"),
    "key scales": ({}, {12: "row"}, "input 12 (k_scale) is not supported"),
    "one norm": ({}, {14: "row"}, "only one of q_norm_weight and k_norm_weight is given"),
    "no angles": ({"do_rotary": 1}, {}, "do_rotary is 1 and cos_cache or sin_cache is absent"),
    "foreign lengths": ({}, {5: "total"}, "seqlens_k is not the sum of attention_mask minus one"),
    "foreign total": ({}, {6: "seqlens"}, "total_sequence_length is not the width of"),
    "swapped layers": (
        {}, {4: "past_key_values.1.value"}, "it mixes the KV caches of several layers"
    ),
    "heads": ({"num_heads": 3}, {}, "num_heads 3 is no multiple of kv_num_heads 2"),
    "widths": ({"num_heads": 6}, {}, "widths [48] do not fit 6 and 2 heads of 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case: str) -> None:
    attrs, changes, reason = ATTENTION[case]
    decoder = MiniDecoder(np.ones((3, 48), np.float32))
    decoder.constant("row", np.ones(8, np.float32))
    seqlens, total = decoder.lengths()
    past, present = decoder.cache(0, 2, 6)
    if case == "swapped layers":
        decoder.cache(1, 2, 6)
        del decoder.outputs[-2:]
    names = ["x", "", "", *past, seqlens, total, *[""] * 9]
    for slot, name in changes.items():
        names[slot] = name
    decoder.node(
        "GroupQueryAttention", names, ["logits", *present], MICROSOFT, name="/layer/attention",
        **{"num_heads": 4, "kv_num_heads": 2} | attrs,
    )  # fmt: skip
    assert f"GroupQueryAttention (com.microsoft, opset 1): {reason}" in refusal(decoder)


def test_every_problem_is_named_and_only_once() -> None:
    decoder = MiniDecoder(np.ones((3, 32), np.float32))
    decoder.node("QMoE", ["x"], ["a"], MICROSOFT, name="moe_0", k=1)
    decoder.node("QMoE", ["a"], ["b"], MICROSOFT, name="moe_1", k=1)
    decoder.node("Relu", ["b"], ["c"], name="fine_but_fed_by_moe")
    decoder.node("Gelu", ["c"], ["d"], name="wrong_gelu", approximate="cubic")
    decoder.node("Softmax", ["d"], ["logits"], name="softmax")
    message = refusal(decoder).splitlines()
    moe = "QMoE (com.microsoft, opset 1): operator QMoE is not supported"
    gelu = "attribute approximate is cubic, supported: none or tanh"
    assert message[0].endswith(f"model.onnx: 4 nodes are not supported: moe_0: {moe}")
    assert message[1:] == [
        f"  moe_1: {moe}",
        f"  wrong_gelu: Gelu (ai.onnx, opset 22): {gelu}",
        "  softmax: Softmax (ai.onnx, opset 22): operator Softmax is not supported",
    ]


def test_a_node_is_named_once_with_all_that_is_wrong_with_it() -> None:
    message = decoder_with("MatMulNBits", WEIGHT, MICROSOFT, **BITS | {"bits": 3, "sorted": 1})
    assert "1 node is not supported: /layer/node: " in message
    assert message.endswith(
        "attribute bits is 3, supported: 2 or 4 or 8; attribute sorted is not supported"
    )


def test_programs_read_the_same_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = MiniDecoder(np.ones((3, 32), np.float32))
    decoder.lengths()
    past, present = decoder.cache(0, 2, 6)
    decoder.node("QMoE", ["x", *past], ["a", *present], MICROSOFT, name="moe_0", k=1)
    decoder.node("Softmax", ["a"], ["logits"], name="softmax")
    path = decoder.save(tmp_path)
    assert main(["compile", str(path), "-o", str(tmp_path / "p.atsplan"), "--json"]) == 1
    output = capsys.readouterr()
    assert output.err == (
        f"atsc: {path}: 2 nodes are not supported: "
        "moe_0: QMoE (com.microsoft, opset 1): operator QMoE is not supported\n"
        "  softmax: Softmax (ai.onnx, opset 22): operator Softmax is not supported\n"
    )
    document = json.loads(output.out)
    assert document["unsupported"] == [
        {
            "node": "moe_0",
            "operator": "QMoE (com.microsoft)",
            "opset": 1,
            "reason": "operator QMoE is not supported",
        },
        {
            "node": "softmax",
            "operator": "Softmax (ai.onnx)",
            "opset": 22,
            "reason": "operator Softmax is not supported",
        },
    ]


def test_what_no_output_needs_may_be_anything() -> None:
    decoder = MiniDecoder(np.ones((3, 8), np.float32))
    decoder.constant("mask", np.zeros(3, np.bool_))
    decoder.node("NonZero", ["mask"], ["unread"])
    decoder.node("Relu", ["x"], ["logits"])
    assert [node.op for node in decoder.imported().nodes] == ["embed", "activation"]


def three_axes(decoder: MiniDecoder) -> None:
    info = helper.make_tensor_value_info("position_ids", TensorProto.INT64, [3, "B", "M"])
    decoder.inputs.append(info)
    decoder.constant("first", np.array([0], np.int64))
    decoder.node("ReduceSum", ["position_ids", "first"], ["place"])
    decoder.node("Gather", ["table", "place"], ["z"], name="gather_places")
    decoder.node("Add", ["x", "z"], ["sum"])
    decoder.nodes[1].input[0] = "sum"
    decoder.nodes.append(decoder.nodes.pop(1))


def hidden_states(decoder: MiniDecoder) -> None:
    decoder.outputs.append(helper.make_tensor_value_info("x", 1, ["B", "M", 8]))


def embeddings(decoder: MiniDecoder) -> None:
    """The builder's exclude_embeds."""
    shape = ["B", "M", 8]
    decoder.inputs[0] = helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, shape)
    decoder.nodes[:] = decoder.nodes[1:]
    decoder.nodes[0].input[0] = "inputs_embeds"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            three_axes,
            "position_ids: input of the model: an input with shape [3, ?, ?] and this name; ",
        ),
        (hidden_states, "expected logits as the one output beside the caches: logits, x"),
        (embeddings, "a plan reads token ids, not embeddings; export the model with its"),
    ],
)
def test_inputs_and_outputs(change: Callable[[MiniDecoder], None], reason: str) -> None:
    decoder = MiniDecoder(np.ones((3, 8), np.float32))
    decoder.node("Relu", ["x"], ["logits"])
    change(decoder)
    assert reason in refusal(decoder)
