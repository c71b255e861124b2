"""Writes a `Decoder` as ONNX in the conventions of the ONNX Runtime GenAI model builder.

Opset 22 with com.microsoft 1, IR 10, float32 activations, every initializer external. Weights go
through in chunks of rows, so that a model of any size takes a few megabytes. Two conventions are
ours, since the builder has no such files: float matrices keep their storage type and the order
[N, K] (Cast and Transpose lead to MatMul), and quantised blocks may have float zero points, in the
embedding as a second table of what they add to each block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from atsc.compiler.importers.onnx.decoder import (
    Array,
    Attention,
    Decoder,
    GatedMlp,
    Layer,
    Matrix,
    MoeMlp,
    Norm,
    PlainMlp,
    Rotary,
)
from atsc.compiler.importers.onnx.graph_writer import GraphWriter, Progress
from atsc.compiler.ir import BlockFormat, DType

_ROTARY_ROWS = 4096


def write_decoder(
    decoder: Decoder,
    graph_path: Path,
    data_path: Path,
    *,
    data_name: str,
    accuracy_level: int = 4,
    progress: Progress | None = None,
) -> None:
    """Write the graph to one file and the weights to another.

    Args:
        decoder: what to write; its matrices are read once, in execution order.
        graph_path: where the ModelProto goes.
        data_path: where the weights go.
        data_name: the name of the weights' file as the graph has it, relative to the graph.
        accuracy_level: of every MatMulNBits; 4 allows int8 activations.
        progress: called with a label, the bytes written and the bytes in all.
    """
    with data_path.open("wb", buffering=1 << 20) as stream:
        writer = GraphWriter(stream, data_name, accuracy_level, decoder.num_bytes(), progress)
        _write_graph(writer, decoder)
    model = helper.make_model(
        helper.make_graph(
            writer.nodes, "main_graph", _inputs(decoder), _outputs(decoder), writer.initializers
        ),
        opset_imports=[helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
        producer_name="atsc",
    )
    graph_path.write_bytes(model.SerializeToString())


def _write_graph(w: GraphWriter, decoder: Decoder) -> None:
    lengths = _mask_lengths(w)
    hidden, head_names = _embedding(w, decoder)
    rotary, window_rotary = _all_rotary_caches(w, decoder)
    residual, update = hidden, ""
    for index, layer in enumerate(decoder.layers):
        prefix = f"/model/layers.{index}"
        x, residual = _norm(
            w, decoder, f"{prefix}/input_layernorm", layer.attention_norm, residual, update
        )
        caches = window_rotary if layer.attention.window > 0 else rotary
        update = _attention(w, decoder, index, layer.attention, x, (*lengths, *caches))
        name = "post_attention_layernorm"
        if layer.attention_post_norm is not None:
            update, _ = _norm(w, decoder, f"{prefix}/{name}", layer.attention_post_norm, update, "")
            name = "pre_feedforward_layernorm"
        x, residual = _norm(w, decoder, f"{prefix}/{name}", layer.mlp_norm, residual, update)
        update = _mlp(w, decoder, prefix, layer, x)
        if layer.mlp_post_norm is not None:
            name = "post_feedforward_layernorm"
            update, _ = _norm(w, decoder, f"{prefix}/{name}", layer.mlp_post_norm, update, "")
    name = f"/model/layers.{len(decoder.layers)}/final_norm_layernorm"
    x, _ = _norm(w, decoder, name, decoder.final_norm, residual, update, is_last=True)
    if decoder.head is None:
        w.matmul_with("/lm_head/MatMul", x, [decoder.embedding], head_names, "logits")
    else:
        w.matmul("/lm_head/MatMul", x, [decoder.head], "logits")


def _mask_lengths(w: GraphWriter) -> tuple[str, str]:
    """attention_mask -> seqlens_k int32 [B] and total_sequence_length int32 []."""
    prefix = "/model/attn_mask_reformat/attn_mask_subgraph"
    total = w.node(
        "ReduceSum", ["attention_mask", w.constant([1])], f"{prefix}/ReduceSum", keepdims=0
    )
    last = w.node("Sub", [total, w.constant([1])], f"{prefix}/Sub")
    seqlens = w.node("Cast", [last], f"{prefix}/Sub/Cast", to=TensorProto.INT32)
    shape = w.node("Shape", ["attention_mask"], f"{prefix}/Shape")
    length = w.node("Gather", [shape, w.constant(1)], f"{prefix}/Gather", axis=0)
    return seqlens, w.node("Cast", [length], f"{prefix}/Gather/Cast", to=TensorProto.INT32)


def _embedding(w: GraphWriter, decoder: Decoder) -> tuple[str, list[str]]:
    """The hidden state of the tokens, and the table's initializers for a tied head."""
    matrix, name = decoder.embedding, "/model/embed_tokens"
    is_tied = decoder.head is None
    stem = "lm_head.MatMul.weight" if is_tied else "model.embed_tokens.weight"
    vocab, width = matrix.shape
    if isinstance(matrix.format, BlockFormat):
        flat = [vocab, width * matrix.format.bits // 8]
        names = w.matrix(stem, [matrix], codes_shape=None if is_tied else flat)
        codes = names[0]
        if is_tied:
            codes = w.node("Reshape", [codes, w.constant(flat)], f"{name}/Reshape")
        hidden = w.node(
            "GatherBlockQuantized",
            [codes, "input_ids", names[1]],
            f"{name}/GatherBlockQuantized",
            domain="com.microsoft",
            bits=matrix.format.bits,
            block_size=matrix.format.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        if matrix.format.has_zero_points:
            hidden = _add_offsets(w, name, matrix, hidden)
    else:
        names = w.matrix("model.embed_tokens.weight", [matrix])
        hidden = w.node("Gather", [*names, "input_ids"], f"{name}/Gather")
        if matrix.format.dtype is not DType.F32:
            hidden = w.node("Cast", [hidden], f"{name}/Cast", to=TensorProto.FLOAT)
    if decoder.embedding_scale != 1.0:
        scale = w.floats(
            f"{stem.removesuffix('.weight')}.scale", np.array([decoder.embedding_scale])
        )
        hidden = w.node("Mul", [hidden, scale], f"{name}/Mul")
    if decoder.positions is not None:
        hidden = _add_positions(w, decoder, hidden)
    return hidden, names


def _add_offsets(w: GraphWriter, name: str, matrix: Matrix, rows: str) -> str:
    """GatherBlockQuantized has no float zero points: their share is a float a block."""
    fmt = matrix.format
    assert isinstance(fmt, BlockFormat)
    vocab, width = matrix.shape
    blocks = width // fmt.block_size

    def offsets() -> Iterator[Array]:
        parts = (matrix.parts[part]() for part in ("scales", "zero_points"))
        for scales, points in zip(*parts, strict=True):
            exact = (fmt.implicit_zero_point - points.astype(np.float64)) * scales
            yield exact.astype(np.float32)

    table = w.stream(
        "model.embed_tokens.weight_offsets", TensorProto.FLOAT, (vocab, blocks, 1), offsets()
    )
    offset = w.node("Gather", [table, "input_ids"], f"{name}/Gather_offsets")
    grouped = w.node(
        "Reshape", [rows, w.constant([0, 0, blocks, fmt.block_size])], f"{name}/Reshape_blocks"
    )
    total = w.node("Add", [grouped, offset], f"{name}/Add_offsets")
    return w.node("Reshape", [total, w.constant([0, 0, width])], f"{name}/Reshape_rows")


def _add_positions(w: GraphWriter, decoder: Decoder, hidden: str) -> str:
    name = "/model/embed_positions"
    assert decoder.positions is not None
    table = w.floats("model.embed_positions.weight", decoder.positions)
    rows = "position_ids"
    if decoder.position_offset:
        rows = w.node("Add", [rows, w.constant([decoder.position_offset])], f"{name}/Add")
    position = w.node("Gather", [table, rows], f"{name}/Gather")
    return w.node("Add", [hidden, position], "/model/embed/Add")


def _all_rotary_caches(w: GraphWriter, decoder: Decoder) -> tuple[tuple[str, str], tuple[str, str]]:
    """cos and sin of layers that see everything, and of those with a window."""
    if decoder.rotary is None:
        return ("", ""), ("", "")
    if decoder.window_rotary is None:
        caches = _rotary_caches(w, decoder, decoder.rotary, "")
        return caches, caches
    return (
        _rotary_caches(w, decoder, decoder.rotary, "_global"),
        _rotary_caches(w, decoder, decoder.window_rotary, "_local"),
    )


def _rotary_caches(
    w: GraphWriter, decoder: Decoder, rotary: Rotary, suffix: str
) -> tuple[str, str]:
    frequencies = rotary.inverse_frequencies
    shape = (decoder.context_length, len(frequencies))

    def rows(function: np.ufunc) -> Iterator[Array]:
        for start in range(0, shape[0], _ROTARY_ROWS):
            positions = np.arange(start, min(start + _ROTARY_ROWS, shape[0]), dtype=np.float64)
            angles = np.outer(positions, frequencies)
            yield (function(angles) * rotary.magnitude).astype(np.float32)

    cos = w.stream(f"cos_cache{suffix}", TensorProto.FLOAT, shape, rows(np.cos))
    return cos, w.stream(f"sin_cache{suffix}", TensorProto.FLOAT, shape, rows(np.sin))


def _norm(
    w: GraphWriter,
    decoder: Decoder,
    name: str,
    norm: Norm,
    residual: str,
    update: str,
    *,
    is_last: bool = False,
) -> tuple[str, str]:
    """The normalised sum and the sum itself; the first norm has nothing to add."""
    stem = name.removeprefix("/").replace("/", ".")
    weights = [w.floats(f"{stem}.weight", norm.weight)]
    if norm.bias is not None:
        weights.append(w.floats(f"{stem}.bias", norm.bias))
    kind = "LayerNormalization" if norm.bias is not None else "SimplifiedLayerNormalization"
    output = f"{name}/output_0"
    if not update:
        x = w.node(
            kind,
            [residual, *weights],
            f"{name}/LayerNorm",
            [output],
            axis=-1,
            epsilon=decoder.epsilon,
            stash_type=1,
        )
        return x, residual
    total = f"{name}/output_3"
    outputs = [output] if is_last else [output, "", "", total]
    x = w.node(
        f"Skip{kind}",
        [residual, update, *weights],
        f"{name}/SkipLayerNorm",
        outputs,
        "com.microsoft",
        epsilon=decoder.epsilon,
    )
    return x, total


def _attention(
    w: GraphWriter,
    decoder: Decoder,
    index: int,
    attention: Attention,
    x: str,
    shared: tuple[str, str, str, str],
) -> str:
    """Projections, norms of q and k, GroupQueryAttention and the output projection."""
    prefix = f"/model/layers.{index}/attn"
    query = _query_inputs(w, decoder, attention, x, prefix)
    sinks = ""
    if attention.sinks is not None:
        sinks = w.floats(f"model.layers.{index}.attn.sinks", attention.sinks)
    past = [f"past_key_values.{index}.key", f"past_key_values.{index}.value"]
    inputs = [*query, *past, *shared, "", "", sinks]
    while not inputs[-1]:
        inputs.pop()
    y = w.node(
        "GroupQueryAttention",
        inputs,
        f"{prefix}/GroupQueryAttention",
        [
            f"{prefix}/GroupQueryAttention/output_0",
            f"present.{index}.key",
            f"present.{index}.value",
        ],
        "com.microsoft",
        num_heads=decoder.num_heads,
        kv_num_heads=decoder.num_kv_heads,
        scale=decoder.scale,
        softcap=0.0,
        local_window_size=attention.window,
        do_rotary=int(decoder.rotary is not None),
        rotary_interleaved=0,
    )
    return w.linear(f"{prefix}/o_proj", y, [attention.o])


def _query_inputs(
    w: GraphWriter, decoder: Decoder, attention: Attention, x: str, prefix: str
) -> list[str]:
    """Inputs 0 to 2 of GroupQueryAttention; q, k, v are packed into the first where possible."""
    linears = (attention.q, attention.k, attention.v)
    is_packable = (
        len({linear.matrix.format for linear in linears}) == 1
        and len({linear.bias is None for linear in linears}) == 1
    )
    if is_packable:
        packed = w.linear(f"{prefix}/qkv_proj", x, linears)
        if attention.q_norm is None or attention.k_norm is None:
            return [packed, "", ""]
        sizes = w.constant([linear.matrix.shape[0] for linear in linears])
        name = f"{prefix}/qkv_proj/Split"
        parts = [f"{name}/output_{i}" for i in range(3)]
        w.node("Split", [packed, sizes], name, parts, axis=-1)
    else:
        names = ("q_proj", "k_proj", "v_proj")
        parts = [
            w.linear(f"{prefix}/{name}", x, [linear])
            for name, linear in zip(names, linears, strict=True)
        ]
    norms = (("q_norm", attention.q_norm), ("k_norm", attention.k_norm))
    for i, (kind, weight) in enumerate(norms):
        if weight is not None:
            parts[i] = _head_norm(w, decoder, f"{prefix}/{kind}", weight, parts[i])
    return parts


def _head_norm(w: GraphWriter, decoder: Decoder, name: str, weight: Array, x: str) -> str:
    """RMSNorm over each head of x [B, M, H * D]."""
    size = decoder.head_size
    num_heads = decoder.num_heads if name.endswith("q_norm") else decoder.num_kv_heads
    stem = f"{name.removeprefix('/').replace('/', '.')}.layernorm.weight"
    heads = w.node("Reshape", [x, w.constant([0, -1, size])], f"{name}/Reshape_1")
    normed = w.node(
        "SimplifiedLayerNormalization",
        [heads, w.floats(stem, weight)],
        f"{name}/SimplifiedLayerNormalization",
        axis=-1,
        epsilon=decoder.epsilon,
        stash_type=1,
    )
    return w.node("Reshape", [normed, w.constant([0, -1, num_heads * size])], f"{name}/Reshape_2")


def _mlp(w: GraphWriter, decoder: Decoder, prefix: str, layer: Layer, x: str) -> str:
    match layer.mlp:
        case GatedMlp(gate, up, down, activation):
            g = w.linear(f"{prefix}/mlp/gate_proj", x, [gate])
            u = w.linear(f"{prefix}/mlp/up_proj", x, [up])
            name = f"{prefix}/mlp/act_fn"
            if activation == "silu":
                sigmoid = w.node("Sigmoid", [g], f"{name}/Sigmoid")
                active = w.node("Mul", [g, sigmoid], f"{name}/Mul")
            else:
                active = w.node("Gelu", [g], f"{name}/Gelu", approximate="tanh")
            return w.linear(
                f"{prefix}/mlp/down_proj", w.node("Mul", [active, u], f"{prefix}/mlp/Mul"), [down]
            )
        case PlainMlp(up, down):
            y = w.linear(f"{prefix}/mlp/fc1", x, [up])
            y = w.node("Relu", [y], f"{prefix}/mlp/act_fn/Relu")
            return w.linear(f"{prefix}/mlp/fc2", y, [down])
        case MoeMlp():
            return _moe(w, prefix, layer.mlp, x)


def _moe(w: GraphWriter, prefix: str, moe: MoeMlp, x: str) -> str:
    """The router in float and com.microsoft QMoE; no slot for fc3 or zero points is used."""
    router = f"{prefix}/moe/router"
    stem = router.removeprefix("/").replace("/", ".")
    weight = w.floats(f"{stem}.MatMul.weight", moe.router.T)
    logits = w.node("MatMul", [x, weight], f"{router}/MatMul")
    if moe.router_bias is not None:
        bias = w.floats(f"{stem}.Add.bias", moe.router_bias)
        logits = w.node("Add", [logits, bias], f"{router}/Add")
    num_experts = moe.router.shape[0]
    logits = w.node("Reshape", [logits, w.constant([-1, num_experts])], f"{router}/Reshape")
    inputs = [x, logits]
    experts = f"{prefix}/moe/experts".removeprefix("/").replace("/", ".")
    fmt = moe.gate_up.format
    assert isinstance(fmt, BlockFormat)
    for kind, matrix, bias_values in (
        ("gate_up_proj", moe.gate_up, moe.gate_up_bias),
        ("down_proj", moe.down, moe.down_bias),
    ):
        shape = [*matrix.shape[:-1], matrix.shape[-1] * fmt.bits // 8]
        inputs += w.matrix(
            f"{experts}.{kind}",
            [matrix],
            codes_shape=shape,
            suffixes={"codes": ".qweight", "scales": ".scales"},
        )
        inputs.append(w.floats(f"{experts}.{kind}.bias", bias_values))
    attrs: dict[str, Any] = {}
    if moe.swiglu_limit is not None:
        attrs["swiglu_limit"] = moe.swiglu_limit
    return w.node(
        "QMoE",
        inputs,
        f"{prefix}/moe/QMoE",
        domain="com.microsoft",
        activation_alpha=moe.swiglu_alpha,
        activation_beta=moe.swiglu_beta,
        activation_type="swiglu",
        block_size=fmt.block_size,
        expert_weight_bits=fmt.bits,
        k=moe.num_chosen,
        normalize_routing_weights=1,
        swiglu_fusion=1,
        use_sparse_mixer=0,
        **attrs,
    )


def _inputs(decoder: Decoder) -> list[onnx.ValueInfoProto]:
    int64, names = TensorProto.INT64, ["input_ids", "attention_mask"]
    lengths = ["sequence_length", "total_sequence_length"]
    if decoder.positions is not None:
        names.append("position_ids")
        lengths.append("sequence_length")
    values = [
        helper.make_tensor_value_info(name, int64, ["batch_size", length])
        for name, length in zip(names, lengths, strict=True)
    ]
    return values + _caches(decoder, "past_key_values", "past_sequence_length")


def _outputs(decoder: Decoder) -> list[onnx.ValueInfoProto]:
    shape: list[str | int | None] = ["batch_size", "sequence_length", decoder.vocab_size]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)
    return [logits, *_caches(decoder, "present", "total_sequence_length")]


def _caches(decoder: Decoder, prefix: str, length: str) -> list[onnx.ValueInfoProto]:
    shape: list[str | int | None] = [
        "batch_size",
        decoder.num_kv_heads,
        length,
        decoder.head_size,
    ]
    return [
        helper.make_tensor_value_info(f"{prefix}.{index}.{kind}", TensorProto.FLOAT, shape)
        for index in range(len(decoder.layers))
        for kind in ("key", "value")
    ]
