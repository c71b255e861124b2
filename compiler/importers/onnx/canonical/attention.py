"""Attention spelled out, or as Attention of opset 23, to com.microsoft GroupQueryAttention.

region.py finds the parts; here the parameters are measured (rope.py, masks.py, the scale and the
softcap from single scores), and then the whole part of the graph is computed on random activations
in several rounds and compared with the attention that takes its place. What differs stays, and is
refused by the name of its Softmax or Attention node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor, Refusal, relative_error
from atsc.compiler.importers.onnx.canonical.masks import expected, window_of
from atsc.compiler.importers.onnx.canonical.region import (
    Region,
    between,
    find_region,
    is_head_major,
    is_norm,
    is_rows,
    leaf,
    product_after,
)
from atsc.compiler.importers.onnx.canonical.rope import (
    Angles,
    Span,
    Turn,
    rows_as,
    run_span,
    turned,
)
from atsc.compiler.importers.onnx.canonical.rounds import (
    SMALL,
    TYPICAL,
    Array,
    Given,
    Node,
    NotEvaluable,
    Round,
    Value,
    data_inputs,
    readers,
)

_FIRST = Round(0, 1)


def rewrite_attention(editor: Editor) -> None:
    """Rewrite every attention of the graph, or note why not."""
    angles = Angles(editor)
    for node in list(editor.graph):
        if node.op_type not in ("Softmax", "Attention") or node.domain:
            continue
        if not editor.rounds.is_data(node.outputs[0]):
            continue
        if node.op_type == "Softmax" and product_after(node) is None:
            continue
        try:
            _rewrite(editor, angles, find_region(editor, node))
        except Refusal as reason:
            _refuse(editor, node, str(reason))
        except NotEvaluable as reason:
            _refuse(editor, node, f"a part of it cannot be evaluated: {reason}")


def _refuse(editor: Editor, anchor: Node, reason: str) -> None:
    """Name the anchor alone, and not every operator around it."""
    editor.refuse(anchor, reason)
    rounds = editor.rounds
    for node in readers(anchor.outputs):
        if node.op_type in ("IsNaN", "Where"):
            editor.silence(node)

    def is_outside(value: Value) -> bool:
        maker = value.producer()
        try:
            return maker is None or is_norm(maker) or is_rows(rounds, value)
        except NotEvaluable:
            return True

    caches = [v for v in editor.graph.outputs if v.shape is not None and len(v.shape) == 4]
    mix = product_after(anchor)
    mixed = [] if mix is None else data_inputs(rounds, mix)
    for value in [*data_inputs(rounds, anchor), *mixed, *caches]:
        for node in between(rounds, value, is_outside):
            editor.silence(node)


@dataclass(frozen=True, slots=True)
class _Side:
    """Heads of q, k or v: where they come from, and what happens to them after any norm."""

    span: Span
    turn: Turn
    rows: Value
    """What takes the place of the source: rows, normalised as the graph does."""


@dataclass(frozen=True, slots=True)
class _Found:
    region: Region
    q: _Side
    k: _Side
    v: _Side
    scale: float
    softcap: float
    window: int


def _rewrite(editor: Editor, angles: Angles, region: Region) -> None:
    if region.capacity:
        editor.places = min(editor.places or region.capacity, region.capacity)
        editor.context_length = min(editor.context_length or editor.places, editor.places)
    q = _side(editor, angles, region.query, region.heads, region.size)
    k = _side(editor, angles, region.keys.new, region.kv_heads, region.size)
    v = _side(editor, angles, region.values.new, region.kv_heads, region.size)
    if v.turn.tables is not None or abs(v.turn.scale - 1) > 1e-5:
        raise Refusal("its values are rotated or scaled")
    window = window_of(editor, region.masks, region.capacity) if region.masks else 0
    found = _Found(region, q, k, v, 1.0, 0.0, window)
    scale, softcap = _score_function(editor, found)
    found = replace(found, scale=scale, softcap=softcap)
    for at in SMALL:
        _check(editor, found, at)
    if region.capacity:
        _check_end(editor, found)
    _emit(editor, found)


def _side(editor: Editor, angles: Angles, heads: Value, count: int, size: int) -> _Side:
    """Follow heads back to rows; norms of heads on the way are written anew on rows."""
    source = leaf(editor.rounds, heads)
    node = source.producer()
    rounds, normed = editor.rounds, is_norm(node) and not _normalises_rows(editor, source)
    width = count * size
    columns = width if normed else rounds.shape(source, TYPICAL)[-1]
    source_major = normed and is_head_major(rounds, source, count)
    major = source_major if heads is source else is_head_major(rounds, heads, count)
    span = Span(source, heads, count, size, columns, (source_major, major))
    if not normed:
        span = replace(span, start=_first_column(editor, span))
        rows = source if columns == width else _columns(editor, span)
        return _Side(span, angles.measure(span), rows)
    assert node is not None and node.inputs[0] is not None
    before = _side(editor, angles, node.inputs[0], count, size)
    rows = _rotated(editor, before, f"{source.name}/rope")
    name = f"{node.name or source.name}/rows"
    if abs(before.turn.scale - 1) > 1e-5:
        factor = editor.constant(f"{name}/factor", np.array([before.turn.scale], np.float32))
        (rows,) = editor.node("Mul", [rows, factor], f"{name}/scaled")
    grouped = editor.reshape(rows, [1, -1, size], f"{name}/heads")
    given = [value for value in node.inputs[1:] if value is not None]
    weights = [rounds.value(value, TYPICAL).reshape(-1).astype(np.float32) for value in given]
    by_head = count > 1 and weights[0].size == width
    own = [np.ones(size, np.float32)] if by_head else weights
    constants = [editor.constant(f"{name}/{k}", row) for k, row in enumerate(own)]
    (y,) = editor.node(
        node.op_type,
        [grouped, *constants],
        name,
        epsilon=float(node.attributes["epsilon"].value) if "epsilon" in node.attributes else 1e-5,
        axis=-1,
    )
    y = editor.reshape(y, [1, -1, width], f"{name}/flat")
    if by_head:
        y = _affine(editor, y, weights, name)
    return _Side(span, angles.measure(span), y)


def _affine(editor: Editor, rows: Value, weights: list[Array], name: str) -> Value:
    """Rows times a row, and plus another if there is one: weights of norms that differ by head."""
    for op_type, row in zip(("Mul", "Add"), weights, strict=False):
        constant = editor.constant(f"{name}/{op_type}/row", row)
        (rows,) = editor.node(op_type, [rows, constant], f"{name}/{op_type}")
    return rows


def _normalises_rows(editor: Editor, value: Value) -> bool:
    """Whether a norm normalises whole rows: then it is no norm of heads."""
    return len(editor.rounds.shape(value, TYPICAL)) < 4


def _first_column(editor: Editor, span: Span) -> int:
    """Which columns of the source the heads are; found by moving numbered columns at position 0."""
    columns = np.arange(span.width)
    one = np.ones((1, span.width), np.float32)
    scale = run_span(editor, span, _FIRST, one).reshape(-1)
    if not (abs(scale - scale[0]) <= 1e-3 * abs(scale[0])).all() or not scale[0]:
        if span.width == span.heads * span.size:
            return 0
        raise Refusal(f"{span.output.name} does not select columns of {span.source.name}")
    digits = [
        np.rint(run_span(editor, span, _FIRST, part[None].astype(np.float32)).reshape(-1) / scale)
        for part in (columns // 64, columns % 64)
    ]
    taken = (64 * digits[0] + digits[1]).astype(np.int64)
    if not np.array_equal(taken, np.arange(taken[0], taken[0] + len(taken))):
        raise Refusal(f"{span.output.name} selects columns of {span.source.name} head by head")
    return int(taken[0])


def _columns(editor: Editor, span: Span) -> Value:
    """The selected columns of packed rows, by a Split."""
    width = span.heads * span.size
    sizes = [span.start, width, span.width - span.start - width]
    kept = [size for size in sizes if size]
    name = f"{span.output.name}/columns"
    split = editor.constant(f"{name}/sizes", np.array(kept, np.int64))
    parts = editor.node("Split", [span.source, split], name, num_outputs=len(kept), axis=-1)
    return parts[0 if not span.start else 1]


def _rotated(editor: Editor, side: _Side, name: str) -> Value:
    if side.turn.tables is None:
        return side.rows
    cos, sin = side.turn.tables
    assert cos.const_value is not None
    pairs = cos.const_value.numpy().shape[1]
    (y,) = editor.node(
        "RotaryEmbedding",
        [side.rows, editor.positions(), cos, sin],
        name,
        domain="com.microsoft",
        interleaved=int(side.turn.interleaved),
        num_heads=side.span.heads,
        rotary_embedding_dim=2 * pairs,
    )
    return y


def _score_function(editor: Editor, found: _Found) -> tuple[float, float]:
    """Scale and softcap, from the score of the first token with itself."""
    region, size = found.region, found.region.size
    if region.scores is None:
        return _attributes(found)

    def score(q: float, k: float) -> float:
        given = {}
        for side, factor in ((found.q, q), (found.k, k)):
            rows = np.zeros((1, side.span.width), np.float32)
            rows[:, side.span.start] = factor
            first = rows.reshape(1, -1)
            first[:, side.span.selected] = np.tile(
                factor * np.eye(1, size, dtype=np.float32)[0], side.span.heads
            )
            given[side.span.source] = rows_as(editor, side.span, _FIRST, first)
        given |= _empty_caches(region)
        assert region.scores is not None
        result = editor.rounds.region(region.scores, _FIRST, given)
        return float(result.reshape(-1)[0])

    scale = 256 * score(0.0625, 0.0625) / _aligned(found)
    usual = 1 / math.sqrt(size)
    if abs(scale - usual) < 1e-5 * usual:
        scale = usual
    if not region.has_tanh:
        return scale, 0.0
    softcap = abs(score(1e3, 1e3))
    # A score of 1/256 of the unit is far from the cap only to the third order of their ratio.
    return scale, round(softcap, 4)


def _aligned(found: _Found) -> float:
    """The product of the first unit vector as query and as key, both turned as at position 0."""
    unit = np.eye(1, found.region.size, dtype=np.float32)[None]
    q, k = (turned(unit, side.turn, _FIRST) for side in (found.q, found.k))
    return float((q * k).sum())


def _attributes(found: _Found) -> tuple[float, float]:
    attributes, size = found.region.anchor.attributes, found.region.size
    given = float(attributes["scale"].value) if "scale" in attributes else 0.0
    softcap = float(attributes["softcap"].value) if "softcap" in attributes else 0.0
    scale = (given or 1 / math.sqrt(size)) * found.q.turn.scale * found.k.turn.scale
    return scale, softcap


def _empty_caches(region: Region) -> dict[Value, Array]:
    empty = np.zeros((1, region.kv_heads, region.capacity, region.size), np.float32)
    return {cache.past: cache.stored(empty) for cache in (region.keys, region.values)}


def _random(editor: Editor, found: _Found, at: Round) -> tuple[Given, Given]:
    """Random rows [M, width] by source, and all that the attention reads: these and caches."""
    region, rng = found.region, np.random.default_rng(at.total)
    rows: dict[Value, Array] = {}
    given: dict[Value, Array] = {}
    for span in (found.q.span, found.k.span, found.v.span):
        if span.source not in rows:
            array = rng.standard_normal((at.tokens, span.width)).astype(np.float32)
            rows[span.source] = array
            given[span.source] = rows_as(editor, span, at, array)
    shape = (1, region.kv_heads, region.capacity or at.past, region.size)
    for cache in (region.keys, region.values):
        given[cache.past] = cache.stored(rng.standard_normal(shape).astype(np.float32))
    return rows, given


def _check_end(editor: Editor, found: _Found) -> None:
    """A graph with caches of a fixed size must fail where they end: ours would go on growing."""
    region, at = found.region, Round(found.region.capacity, 1)
    try:
        editor.rounds.region(region.output, at, _random(editor, found, at)[1])
    except NotEvaluable:
        return
    raise Refusal(f"{region.keys.present.name} begins anew after {region.capacity} tokens")


def _check(editor: Editor, found: _Found, at: Round) -> None:
    """Compare the part of the graph with the attention that takes its place."""
    region = found.region
    rows, given = _random(editor, found, at)
    heads = []
    for side in (found.q, found.k, found.v):
        span = side.span
        shaped = rows[span.source][:, span.selected].reshape(at.tokens, span.heads, span.size)
        heads.append(turned(shaped, side.turn, at).astype(np.float64))
    pasts = [cache.ordered(given[cache.past]) for cache in (region.keys, region.values)]
    # The graph's cache holds scaled keys, ours does not: the scale is part of `found.scale`.
    old_keys, old_values = (past[0].swapaxes(0, 1)[: at.past] for past in pasts)
    keys = np.concatenate([old_keys / found.k.turn.scale, heads[1]])
    values = np.concatenate([old_values, heads[2]])
    wanted = _attend(found, at, heads[0], keys, values)
    actual = editor.rounds.region(region.output, at, given)
    if relative_error(actual.reshape(at.tokens, -1), wanted) > editor.tolerance:
        raise Refusal(
            f"what it computes is not causal attention of {region.heads} heads of {region.size}: "
            f"it differs for {at.tokens} tokens after {at.past}"
        )
    _check_present(editor, found, at, given)


def _attend(found: _Found, at: Round, q: Array, k: Array, v: Array) -> Array:
    group = found.region.heads // found.region.kv_heads
    scores = np.einsum("mhd,thd->hmt", q, np.repeat(k, group, 1)) * found.scale
    if found.softcap:
        scores = found.softcap * np.tanh(scores / found.softcap)
    scores = np.where(expected(at, found.window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hmt,thd->mhd", weights, np.repeat(v, group, 1))
    rows: Array = mixed.reshape(at.tokens, -1)
    return rows


def _check_present(editor: Editor, found: _Found, at: Round, given: Given) -> None:
    """The caches that go out must be those that came in, and the new heads behind them."""
    for cache in (found.region.keys, found.region.values):
        present = cache.ordered(editor.rounds.region(cache.present, at, given))
        old = cache.ordered(given[cache.past])[:, :, : at.past]
        length = found.region.capacity or at.total
        shape = (1, found.region.kv_heads, length, found.region.size)
        if present.shape != shape or not np.array_equal(present[:, :, : at.past], old):
            raise Refusal(f"{cache.present.name} is not {cache.past.name} with new tokens behind")


def _emit(editor: Editor, found: _Found) -> None:
    region, q, k, v = found.region, found.q, found.k, found.v
    name = region.anchor.name or region.output.name or "attention"
    tables = q.turn.tables
    if tables == k.turn.tables and q.turn.interleaved == k.turn.interleaved:
        names: list[Value | None] = [q.rows, k.rows, v.rows]
    else:
        tables = None
        names = [_rotated(editor, q, f"{name}/q_rope"), _rotated(editor, k, f"{name}/k_rope")]
        names.append(v.rows)
    sources = [side.span.source for side in (q, k, v)]
    starts = [0, region.heads * region.size, (region.heads + region.kv_heads) * region.size]
    packed = sources[0] is sources[1] is sources[2] and q.span.width > region.heads * region.size
    if packed and names[0] is q.rows and [s.span.start for s in (q, k, v)] == starts:
        names = [sources[0], None, None]
    seqlens, total = editor.lengths()
    outputs = editor.node(
        "GroupQueryAttention",
        [*names, region.keys.past, region.values.past, seqlens, total, *(tables or ())],
        f"{name}/attention",
        domain="com.microsoft",
        num_outputs=3,
        num_heads=region.heads,
        kv_num_heads=region.kv_heads,
        scale=found.scale,
        softcap=found.softcap,
        local_window_size=found.window or -1,
        do_rotary=int(tables is not None),
        rotary_interleaved=int(q.turn.interleaved and tables is not None),
    )
    editor.replace(region.output, outputs[0])
    for cache, output in zip((region.keys, region.values), outputs[1:], strict=True):
        editor.replace(cache.present, output)
