"""GroupQueryAttention and RotaryEmbedding in onnxruntime and here, over a prefill and more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto, helper

from atsc.passes.fuse_attention import FuseAttention

FEW = settings(max_examples=25, deadline=None, derandomize=True)
ROUNDS = [np.arange(11), np.array([4]), np.array([2, 9, 9]), np.array([0])]
"""Token ids: a prefill of 11, a step, a chunk of 3, a step."""


def attention_decoder(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    packed: bool = True,
    rotary_dim: int = 0,
    norms: bool = False,
    sinks: bool = False,
    positions: bool = False,
    column: bool = False,
    peak: float = 1.0,
    **attrs: float | int | None,
) -> MiniDecoder:
    rng = np.random.default_rng(size + heads)
    widths = [heads * size, kv_heads * size, kv_heads * size]
    decoder = MiniDecoder(peak * rng.standard_normal((16, sum(widths)), np.float32))
    names = ["x", "", ""]
    if not packed:
        names = ["q", "k", "v"]
        decoder.constant("widths", np.array(widths, np.int64))
        decoder.node("Split", ["x", "widths"], names, axis=-1)
    seqlens, total = decoder.lengths(column)
    past, present = decoder.cache(0, kv_heads, size)
    names += [*past, seqlens, total, *[""] * 9]
    if rotary_dim:
        angles = np.outer(np.arange(64), 0.8 ** np.arange(rotary_dim // 2))
        names[7] = decoder.constant("cos", np.cos(angles).astype(np.float32))
        names[8] = decoder.constant("sin", np.sin(angles).astype(np.float32))
        attrs["do_rotary"] = 1
        if positions:
            names[9] = "position_ids"
            add_positions(decoder)
    if sinks:
        names[11] = decoder.constant("sinks", rng.standard_normal(heads).astype(np.float32))
    if norms:
        names[14] = decoder.constant("q_norm", rng.uniform(0.5, 2, size).astype(np.float32))
        names[15] = decoder.constant("k_norm", rng.uniform(0.5, 2, size).astype(np.float32))
    while not names[-1]:
        names.pop()
    decoder.node(
        "GroupQueryAttention", names, ["logits", *present], MICROSOFT,
        num_heads=heads, kv_num_heads=kv_heads, **attrs,
    )  # fmt: skip
    return decoder


def add_positions(decoder: MiniDecoder) -> None:
    shape = ["B", "M"]
    decoder.inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, shape))


@FEW
@given(
    group=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    size=st.sampled_from([8, 16, 32]),
    packed=st.booleans(),
    rotary=st.sampled_from([0, 1, 2]),
    interleaved=st.booleans(),
    window=st.sampled_from([-1, 1, 3, 11, 12, 40]),
    softcap=st.sampled_from([0.0, 2.0]),
    scale=st.sampled_from([None, 0.0, 0.5]),
    sinks=st.booleans(),
)
@example((4, 2), 16, True, 1, True, 3, 2.0, 0.5, True)
def test_group_query_attention(
    group: tuple[int, int],
    size: int,
    packed: bool,
    rotary: int,
    interleaved: bool,
    window: int,
    softcap: float,
    scale: float | None,
    sinks: bool,
) -> None:
    decoder = attention_decoder(
        heads=group[0],
        kv_heads=group[1],
        size=size,
        packed=packed,
        rotary_dim=rotary and size // rotary // 16 * 16 if size >= 16 else 0,
        sinks=sinks,
        rotary_interleaved=int(interleaved),
        local_window_size=window,
        softcap=softcap,
        scale=scale,
    )
    decoder.assert_agrees(ROUNDS, tolerance=2e-3)  # our KV cache is fp16


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_window_edge(window: int) -> None:
    """Equal scores and one-hot values show exactly which tokens a query sees."""
    decoder = attention_decoder(heads=1, kv_heads=1, size=16, local_window_size=window)
    table = np.zeros((16, 48), np.float32)
    table[:, 32:] = np.eye(16)
    decoder.initializers[0].raw_data = table.tobytes()
    rounds = [np.arange(7), np.arange(7, 8), np.arange(8, 12)]
    seen = decoder.ours(rounds) > 0
    np.testing.assert_array_equal(seen, decoder.onnxruntime(rounds) > 0)
    assert seen.sum(1).tolist() == [min(i + 1, window) for i in range(12)]


def test_softcap_comes_before_the_mask() -> None:
    """A softcap after the mask would leave masked keys a weight of exp(-2 * softcap)."""
    decoder = attention_decoder(softcap=0.25, local_window_size=2, peak=4.0)
    decoder.assert_agrees(ROUNDS, tolerance=2e-3)


def test_norms_of_q_and_k_in_slots_14_and_15() -> None:
    """onnxruntime's CPU has no kernel for the slots; it runs the same with the norms apart."""
    decoder = attention_decoder(norms=True, rotary_dim=16, qk_norm_epsilon=1e-3)
    (node,) = decoder.imported().attention_nodes()
    assert node.inputs[3:7] == ("cos", "sin", "q_norm", "k_norm")
    assert node.attrs["qk_norm_eps"] == pytest.approx(1e-3)

    apart = attention_decoder(rotary_dim=16, packed=False)
    apart.initializers += [t for t in decoder.initializers if t.name in ("q_norm", "k_norm")]
    attention = apart.nodes.pop()
    apart.constant("heads", np.array([0, -1, 16], np.int64))
    for index, (part, width) in enumerate((("q", 64), ("k", 32))):
        apart.constant(f"{part}_row", np.array([0, -1, width], np.int64))
        apart.node("Reshape", [part, "heads"], [f"{part}_heads"], name=f"{part}_split")
        apart.node(
            "SimplifiedLayerNormalization", [f"{part}_heads", f"{part}_norm"], [f"{part}_normed"],
            name=f"{part}_norm_node", epsilon=1e-3, axis=-1, stash_type=1,
        )  # fmt: skip
        names = [f"{part}_normed", f"{part}_row"]
        attention.input[index] = apart.node(
            "Reshape", names, [f"{part}_ready"], name=f"{part}_join"
        )
    apart.nodes.append(attention)
    apart.assert_agrees(ROUNDS, tolerance=2e-3)
    expected = apart.onnxruntime(ROUNDS)
    error = np.linalg.norm(decoder.ours(ROUNDS) - expected) / np.linalg.norm(expected)
    assert error <= 2e-3

    fused = FuseAttention().run(apart.imported())
    assert [made.op for made in fused.nodes] == ["embed", "attention"]
    assert fused.nodes[1].inputs == ("x", "", "", "cos", "sin", "q_norm", "k_norm")


def test_seqlens_may_be_a_column() -> None:
    attention_decoder(column=True).assert_agrees(ROUNDS, tolerance=2e-3)


def test_position_ids_are_the_contiguous_positions() -> None:
    decoder = attention_decoder(rotary_dim=16, positions=True)
    graph = decoder.imported()
    assert [value.name for value in graph.inputs] == ["input_ids"]
    decoder.assert_agrees(ROUNDS, tolerance=2e-3)


def test_a_short_table_of_angles_limits_the_context() -> None:
    assert attention_decoder(rotary_dim=16).imported().info.context_length == 64
    assert attention_decoder().imported().info.context_length == 128


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("domain", "rotary_dim"), [(MICROSOFT, 16), (MICROSOFT, 8), ("", 16)])
def test_rotary_embedding(domain: str, rotary_dim: int, interleaved: int) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((16, 64), np.float32), opset=23)
    add_positions(decoder)
    angles = np.outer(np.arange(64), 0.8 ** np.arange(rotary_dim // 2))
    decoder.constant("cos", np.cos(angles).astype(np.float32))
    decoder.constant("sin", np.sin(angles).astype(np.float32))
    partial = rotary_dim if rotary_dim < 16 else 0
    names = ["x", "position_ids", "cos", "sin"]
    names = names if domain else ["x", "cos", "sin", "position_ids"]
    decoder.node(
        "RotaryEmbedding", names, ["logits"], domain,
        num_heads=4, interleaved=interleaved, rotary_embedding_dim=partial,
    )  # fmt: skip
    decoder.assert_agrees(ROUNDS, tolerance=1e-6)


def test_rotary_embedding_before_attention_is_fused_into_it() -> None:
    """What the builder writes where it has no fused rope; results stay the same."""
    decoder = attention_decoder(packed=False)
    add_positions(decoder)
    angles = np.outer(np.arange(64), 0.8 ** np.arange(8))
    decoder.constant("cos", np.cos(angles).astype(np.float32))
    decoder.constant("sin", np.sin(angles).astype(np.float32))
    attention = decoder.nodes.pop()
    for part in ("q", "k"):
        names = [part, "position_ids", "cos", "sin"]
        decoder.node("RotaryEmbedding", names, [f"{part}_turned"], MICROSOFT, name=f"rope_{part}")
    attention.input[0], attention.input[1] = "q_turned", "k_turned"
    decoder.nodes.append(attention)
    decoder.assert_agrees(ROUNDS, tolerance=2e-3)
    fused = FuseAttention().run(decoder.imported())
    assert [node.op for node in fused.nodes] == ["embed", "attention"]
    assert fused.nodes[1].inputs == ("x", "", "", "cos", "sin")
