"""GroupQueryAttention and RotaryEmbedding.

Sources: com.microsoft GroupQueryAttention and RotaryEmbedding; ONNX RotaryEmbedding-23. Found by
running onnxruntime 1.32: local_window_size counts the keys that a query sees, itself among them,
which is our `window`; the softcap comes before the mask; sliding_window_cache says that the
caller's buffers hold a window and not the whole past, and changes no result. Our attention owns its
cache.
"""

from __future__ import annotations

import math
import re

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.operands import TOTAL, Affine, Ints, Rows, Symbol

_SEQLENS, _TOTAL = 5, 6
_COS, _SIN, _POSITIONS = 7, 8, 9
_SINKS, _Q_NORM, _K_NORM = 11, 14, 15


def _attention(lowering: Lowering, node: OnnxNode) -> None:
    _check_state(node)
    heads, kv_heads, size, parts = _projections(node)
    names = [part.name for part in parts] + [""] * (3 - len(parts))
    names += _angles(lowering, node, size)
    norms = [node.optional_constant(slot) for slot in (_Q_NORM, _K_NORM)]
    if (norms[0] is None) != (norms[1] is None):
        raise ModelError("only one of q_norm_weight and k_norm_weight is given")
    names += ["" if n is None else lowering.vector(n, size) for n in norms]
    sinks = node.optional_constant(_SINKS)
    names.append("" if sinks is None else lowering.vector(sinks, heads))
    attrs = node.attrs
    lowering.emit(
        "attention",
        node.name,
        tuple(names),
        node.output(),
        layer=lowering.num_attentions,
        num_heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        scale=float(attrs["scale"]) or 1.0 / math.sqrt(size),
        softcap=float(attrs["softcap"]),
        window=max(0, int(attrs["local_window_size"])),
        interleaved=bool(attrs["rotary_interleaved"]),
        qk_norm_eps=_norm_epsilon(node),
    )
    lowering.num_attentions += 1
    lowering.bind(node.output(), Rows(node.output(), heads * size))
    for output in node.outputs[1:3]:
        lowering.bind(output, Symbol("present", output))


def _norm_epsilon(node: OnnxNode) -> float:
    common = node.attrs["qk_norm_epsilon"]
    own = {node.attrs[name] for name in ("q_norm_epsilon", "k_norm_epsilon")} - {None}
    if own - {common} and len(own) > 1:
        raise ModelError("q_norm_epsilon and k_norm_epsilon differ")
    return float(own.pop() if own else common)


def _check_state(node: OnnxNode) -> None:
    """Refuse what is not plain causal attention over an ordinary, growing cache."""
    names = list(filter(None, node.outputs[1:3]))
    for slot in (3, 4):
        past = node.input(slot)
        if past is not None and not (isinstance(past, Symbol) and past.kind == "past"):
            raise ModelError(f"input {slot} is no KV cache that is an input of the model")
        names += [past.name] if isinstance(past, Symbol) else []
    if len({tuple(re.findall(r"\d+", name)) for name in names}) > 1:
        raise ModelError(f"it mixes the KV caches of several layers: {', '.join(names)}")
    seqlens, total = node.input(_SEQLENS), node.input(_TOTAL)
    if not isinstance(seqlens, Ints) or not seqlens.is_only(TOTAL - Affine(1)):
        raise ModelError("seqlens_k is not the sum of attention_mask minus one")
    if not isinstance(total, Ints) or not total.is_only(TOTAL):
        raise ModelError("total_sequence_length is not the width of attention_mask")
    window = node.attrs["local_window_size"]
    if window < 1 and window != -1:
        raise ModelError(f"attribute local_window_size is {window}, supported: -1 or at least 1")
    if node.attrs["sliding_window_cache"] and window < 1:
        raise ModelError("attribute sliding_window_cache is 1 and local_window_size is absent")


def _projections(node: OnnxNode) -> tuple[int, int, int, list[Rows]]:
    """Heads, K/V heads, head size; q, k, v or one packed input."""
    heads, kv_heads = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"num_heads {heads} is no multiple of kv_num_heads {kv_heads}")
    packed = node.input(1) is None
    if packed != (node.input(2) is None):
        raise ModelError("only one of key and value is given")
    parts = [node.rows(0)] if packed else [node.rows(i) for i in range(3)]
    shares = heads + 2 * kv_heads if packed else heads
    size = parts[0].width // shares
    widths = [shares * size] if packed else [heads * size, kv_heads * size, kv_heads * size]
    if [part.width for part in parts] != widths:
        found = [part.width for part in parts]
        raise ModelError(f"widths {found} do not fit {heads} and {kv_heads} heads of {size}")
    return heads, kv_heads, size, parts


def _angles(lowering: Lowering, node: OnnxNode, size: int) -> list[str]:
    if not node.attrs["do_rotary"]:
        return ["", ""]
    if node.input(_COS) is None or node.input(_SIN) is None:
        raise ModelError("do_rotary is 1 and cos_cache or sin_cache is absent")
    if node.input(_POSITIONS) is not None:
        _check_positions(node, _POSITIONS)
    return _tables(lowering, node, _COS, _SIN, size)


def _tables(lowering: Lowering, node: OnnxNode, cos: int, sin: int, size: int) -> list[str]:
    tables = [node.constant(cos), node.constant(sin)]
    shape = tables[0].shape
    if shape != tables[1].shape or len(shape) != 2 or 2 * shape[1] > size:
        raise ModelError(
            f"cos_cache {list(shape)} and sin_cache {list(tables[1].shape)} do not fit "
            f"heads of {size}"
        )
    lowering.rope_rows.append(shape[0])
    return [lowering.matrix(table) for table in tables]


def _check_positions(node: OnnxNode, slot: int) -> None:
    operand = node.input(slot)
    if not isinstance(operand, Symbol) or operand.kind != "positions":
        raise ModelError(f"input {slot} is not the model's position_ids")


def _rope(lowering: Lowering, node: OnnxNode) -> None:
    x = node.rows(0)
    onnx_order = node.op_type == "RotaryEmbedding" and node.attrs.get("scale") is None
    cos, sin, positions = (1, 2, 3) if onnx_order else (2, 3, 1)
    if node.input(positions) is None:
        raise ModelError("position_ids is absent")
    _check_positions(node, positions)
    table = node.constant(cos)
    heads = node.attrs["num_heads"] or 0
    rotary_dim = node.attrs["rotary_embedding_dim"]
    size = x.width // heads if heads else 2 * table.shape[-1]
    if x.width % size or (rotary_dim and (not heads or rotary_dim != 2 * table.shape[-1])):
        raise ModelError(f"heads of {size} do not fit rows of {x.width}")
    names = _tables(lowering, node, cos, sin, size)
    lowering.emit(
        "rope",
        node.name,
        (x.name, *names),
        node.output(),
        head_size=size,
        interleaved=bool(node.attrs["interleaved"]),
    )
    lowering.bind(node.output(), Rows(node.output(), x.width))


_ROPE_ATTRS = {
    "num_heads": Attr(0),
    "rotary_embedding_dim": Attr(0),
    "interleaved": Attr(0, (0, 1)),
}
RULES = (
    Rule("", "RotaryEmbedding", _rope, ("x", "cos", "sin", "positions?"), _ROPE_ATTRS),
    Rule(
        "com.microsoft",
        "RotaryEmbedding",
        _rope,
        ("x", "positions", "cos", "sin"),
        _ROPE_ATTRS | {"scale": Attr(1.0, (1.0,)), "is_packed_batching": Attr(0, (0,))},
    ),
    Rule(
        "com.microsoft",
        "GroupQueryAttention",
        _attention,
        (
            "query",
            "key?",
            "value?",
            "past_key?",
            "past_value?",
            "seqlens_k",
            "total_sequence_length",
            "cos_cache?",
            "sin_cache?",
            "position_ids?",
            "!attention_bias",
            "head_sink?",
            "!k_scale",
            "!v_scale",
            "q_norm_weight?",
            "k_norm_weight?",
            "!query_seqlens",
        ),
        {
            "num_heads": Attr(required=True),
            "kv_num_heads": Attr(required=True),
            "scale": Attr(0.0),
            "softcap": Attr(0.0),
            "local_window_size": Attr(-1),
            "do_rotary": Attr(0, (0, 1)),
            "rotary_interleaved": Attr(0, (0, 1)),
            "qk_norm_epsilon": Attr(9.999999974752427e-07),
            "q_norm_epsilon": Attr(kind=float),
            "k_norm_epsilon": Attr(kind=float),
            "causal": Attr(1, (1,)),
            "smooth_softmax": Attr(-1, (-1, 0)),
            "qk_output": Attr(0, (0,)),
            "sliding_window_cache": Attr(0, (0, 1)),
            "k_quant_type": Attr("NONE", ("NONE",)),
            "v_quant_type": Attr("NONE", ("NONE",)),
            "kv_cache_bit_width": Attr(0, (0,)),
        },
        ("y", "present_key", "present_value"),
    ),
)
