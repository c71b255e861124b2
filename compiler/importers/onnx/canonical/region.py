"""Where an attention begins and ends in a decomposed graph.

    rows -> [norm] -> rope -> Concat with the cache -> repeat -> products, mask, softmax -> rows

The anchor is a Softmax over activations, or an Attention node (opset 23). From there the parts are
found by walking over whatever operators there are, until a value has the shape of rows again, or
comes of a norm, or of a cache that is an input of the model. Nothing is concluded from the
operators on the way: attention.py proves the whole by its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor, Refusal
from atsc.compiler.importers.onnx.canonical.masks import Mask
from atsc.compiler.importers.onnx.canonical.rounds import (
    MOVEMENTS,
    SCATTERS,
    SMALL,
    TYPICAL,
    Array,
    Node,
    Rounds,
    Value,
    data_inputs,
    readers,
)

_NORMS = ("SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization")
_PRODUCTS = ("MatMul", "Einsum")
_AFTER_SOFTMAX = ("Where", "Identity", "Dropout", "Slice")


@dataclass(frozen=True, slots=True)
class Cache:
    """Where new keys or values join those of earlier rounds.

    They are heads too, perhaps with the tokens outside; they go behind the old ones, or into a
    cache of a fixed size, at their positions.
    """

    past: Value
    new: Value
    present: Value
    layout: tuple[int, int, int]
    """Axes of heads, tokens and elements in past and present, whose axis 0 is the batch."""

    def stored(self, array: Array) -> Array:
        """Keys or values [1, heads, P, size] in the cache's layout."""
        return np.moveaxis(array, (1, 2, 3), self.layout)

    def ordered(self, array: Array) -> Array:
        """A cache as [1, heads, P, size]."""
        return np.moveaxis(array, self.layout, (1, 2, 3))


@dataclass(frozen=True, slots=True)
class Region:
    """One attention of the graph."""

    anchor: Node
    query: Value
    """Heads as they enter the product with the keys."""
    keys: Cache
    values: Cache
    scores: Value | None
    """What the softmax reads; None inside of an Attention node."""
    output: Value
    """Rows [1, M, heads * size]."""
    heads: int
    kv_heads: int
    size: int
    has_tanh: bool
    masks: list[Mask]
    capacity: int
    """Places in caches of a fixed size; 0: the caches grow."""


def is_norm(node: Node | None) -> bool:
    """Whether a node normalises its last axis."""
    return node is not None and node.op_type in _NORMS and not node.domain


def is_rows(rounds: Rounds, value: Value) -> bool:
    """Whether a value is [1, M, W] or [M, W] in every round."""
    for at in SMALL:
        shape = rounds.shape(value, at)
        if not (len(shape) in (2, 3) and shape[-2] == at.tokens and shape[0] in (1, at.tokens)):
            return False
        if len(shape) == 3 and shape[0] != 1:
            return False
    return True


def is_head_major(rounds: Rounds, value: Value, heads: int) -> bool:
    """Whether a value [.., M, D] has its heads outside, and not [1, M, H, D] or rows.

    Raises:
        Refusal: it is neither.
    """
    shape, single = (rounds.shape(value, at) for at in (TYPICAL, SMALL[2]))
    if len(shape) >= 3 and shape[-2] == TYPICAL.tokens and single[-2] == 1:
        return not is_rows(rounds, value) or heads == 1
    if len(shape) >= 3 and shape[-2] == heads and shape[-3] == TYPICAL.tokens:
        return False
    raise Refusal(f"{value.name} {list(shape)} are no heads")


def find_region(editor: Editor, anchor: Node) -> Region:
    """The attention around an anchor.

    Raises:
        Refusal: some part is missing.
        NotEvaluable: a shape cannot be told.
    """
    rounds = editor.rounds
    fused = anchor.op_type == "Attention"
    query, keys, values, mixed = _fused_parts(anchor) if fused else _plain_parts(rounds, anchor)
    caches = [_cache(editor, value, anchor, k) for k, value in enumerate((keys, values))]
    kv_heads, size, capacity = _sizes(rounds, caches[0])
    if (kv_heads, size, capacity) != _sizes(rounds, caches[1]):
        raise Refusal(f"{caches[0].past.name} and {caches[1].past.name} differ in shape")
    width = _size(rounds.shape(query, TYPICAL)) // TYPICAL.tokens
    if width % size or (width // size) % kv_heads:
        raise Refusal(f"{width} columns of queries do not fit {kv_heads} heads of {size}")
    output = _output(rounds, mixed, width)
    scores = None if fused else anchor.inputs[0]
    leaves = [query, caches[0].present, caches[1].present, caches[0].new, caches[1].new]
    nodes = between(rounds, output, lambda value: value in leaves)
    return Region(
        anchor,
        query,
        caches[0],
        caches[1],
        scores,
        output,
        width // size,
        kv_heads,
        size,
        any(node.op_type == "Tanh" for node in nodes),
        _masks(rounds, nodes, capacity),
        capacity,
    )


def _sizes(rounds: Rounds, cache: Cache) -> tuple[int, int, int]:
    """Heads, elements of a head, and the places of a cache of fixed size, 0 where it grows."""
    shape, first = (rounds.shape(cache.past, at) for at in (TYPICAL, SMALL[0]))
    heads, tokens, size = cache.layout
    capacity = shape[tokens] if shape[tokens] == first[tokens] else 0
    if shape[0] != 1 or shape[tokens] not in (TYPICAL.past, capacity):
        raise Refusal(f"{cache.past.name} {list(shape)} is no cache of [1, heads, P, size]")
    return shape[heads], shape[size], capacity


def _layout(rounds: Rounds, past: Value) -> tuple[int, int, int]:
    """Which axes of a cache are heads, tokens and elements; that of tokens grows."""
    shapes = [rounds.shape(past, at) for at in (TYPICAL, SMALL[0])]
    grows = [axis for axis in range(1, 4) if shapes[0][axis] != shapes[1][axis]]
    return {1: (2, 1, 3), 3: (1, 3, 2)}.get(grows[0] if grows else 2, (1, 2, 3))


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _fused_parts(anchor: Node) -> tuple[Value, Value, Value, Value]:
    query, keys, values = anchor.inputs[:3]
    if query is None or keys is None or values is None:
        raise Refusal("an input of q, k, v is missing")
    return query, keys, values, anchor.outputs[0]


def _plain_parts(rounds: Rounds, anchor: Node) -> tuple[Value, Value, Value, Value]:
    """q and k of the product before the softmax, v of the one after it, and its result."""
    mix = product_after(anchor)
    if mix is None:
        raise Refusal("its result does not go into a product with values")
    if any(node.op_type == "Slice" for node in readers(anchor.outputs)):
        raise Refusal(
            "a part of its result is left out, as of attention sinks: these are taken of "
            "GroupQueryAttention alone (its input head_sink)"
        )
    value = mix.inputs[1]
    node, reached = anchor, anchor.inputs[0]
    for _ in range(16):
        assert reached is not None
        maker = reached.producer()
        if maker is None:
            break
        inputs = data_inputs(rounds, maker)
        if maker.op_type in _PRODUCTS and len(inputs) == 2:
            assert value is not None
            return inputs[0], inputs[1], value, mix.outputs[0]
        if len(inputs) != 1:
            break
        node, reached = maker, inputs[0]
    raise Refusal(f"no product of queries and keys leads to it (from {node.name})")


def product_after(anchor: Node) -> Node | None:
    """The product of attention weights with the values; None: the softmax is for something else."""
    weights = anchor.outputs[0]
    for _ in range(6):
        nodes = [node for node in readers([weights]) if node.op_type != "IsNaN"]
        if len(nodes) == 1 and nodes[0].op_type in _PRODUCTS and nodes[0].inputs[0] is weights:
            return nodes[0]
        if len(nodes) != 1 or nodes[0].op_type not in _AFTER_SOFTMAX:
            break
        weights = nodes[0].outputs[0]
    return None


def _cache(editor: Editor, value: Value, anchor: Node, index: int) -> Cache:
    """Where keys (0) or values (1) join the cache."""
    rounds = editor.rounds
    if anchor.op_type == "Attention" and len(anchor.inputs) > 5 and anchor.inputs[4 + index]:
        past = anchor.inputs[4 + index]
        assert past is not None
        if len(anchor.outputs) < 3:
            raise Refusal("it has a past and no present")
        return Cache(past, value, anchor.outputs[1 + index], (1, 2, 3))
    path, makers = [value], dict[Node, None]()
    for reached in path:
        maker = reached.producer()
        if maker is None or len(path) > 64:
            break
        inputs = data_inputs(rounds, maker)
        joins = maker.op_type == "Concat" and len(inputs) == 2 and rounds.is_past(inputs[0])
        if joins or (maker.op_type in SCATTERS and not maker.domain):
            makers[maker] = None
        else:
            path += [v for v in inputs if v not in path]
    else:
        if len(makers) == 1:
            (maker,) = makers
            if maker.op_type in SCATTERS:
                return _scattered(rounds, maker, path)
            past, new = data_inputs(rounds, maker)
            return _joined(rounds, past, new, maker.outputs[0])
    raise Refusal(
        f"{'values' if index else 'keys'} {value.name} do not come of a Concat with a cache that "
        "is an input of the model (export with past_key_values, and rope before the cache)"
    )


def _joined(rounds: Rounds, past: Value, new: Value, present: Value) -> Cache:
    """A cache that grows; heads are transposed for one that has its tokens last."""
    layout = _layout(rounds, past)
    if layout[1] == 3:
        shape = rounds.shape(past, TYPICAL)
        heads, size = shape[layout[0]], shape[layout[2]]
        new = _before_moves(rounds, new, lambda value: _are_heads(rounds, value, heads, size))
    return Cache(past, new, present, layout)


def _are_heads(rounds: Rounds, value: Value, heads: int, size: int) -> bool:
    """Whether a value is keys or values of the round, as heads or with the tokens outside."""
    tokens = TYPICAL.tokens
    return rounds.shape(value, TYPICAL) in ((1, heads, tokens, size), (1, tokens, heads, size))


def _scattered(rounds: Rounds, scatter: Node, path: list[Value]) -> Cache:
    """A cache of a fixed size, written to by a Scatter; `path` is what is made of it, last first.

    Any of the three may be transposed for the Scatter and back.
    """
    past, new = scatter.inputs[0], scatter.inputs[SCATTERS[scatter.op_type]]
    assert past is not None and new is not None
    past = _before_moves(rounds, past, rounds.is_past)
    shape = rounds.shape(past, TYPICAL)

    def is_new(value: Value) -> bool:
        return _are_heads(rounds, value, shape[1], shape[3])

    new = _before_moves(rounds, new, is_new)
    # An optimiser may have merged the transposes on the way to the product.
    path = [*_moved_on(scatter.outputs[0]), *path]
    presents = [value for value in path if rounds.shape(value, TYPICAL) == shape]
    if not (rounds.is_past(past) and is_new(new) and presents):
        raise Refusal(
            f"{scatter.op_type} {scatter.name} does not write heads of keys or values "
            "into a cache that is an input of the model"
        )
    return Cache(past, new, presents[-1], (1, 2, 3))


def _moved_on(value: Value) -> list[Value]:
    """What movements make of a value, nearest last."""
    found = [value]
    for current in found:
        nodes = (node for node in readers([current]) if node.op_type in MOVEMENTS)
        found += [node.outputs[0] for node in nodes if node.outputs[0] not in found]
    return found[::-1]


def _before_moves(rounds: Rounds, value: Value, wanted: Callable[[Value], bool]) -> Value:
    """The value before the movements that lead to it, up to one that is wanted."""
    for _ in range(8):
        maker = value.producer()
        inputs = [] if maker is None else data_inputs(rounds, maker)
        if wanted(value) or maker is None or maker.op_type not in MOVEMENTS or len(inputs) != 1:
            break
        value = inputs[0]
    return value


def _output(rounds: Rounds, value: Value, width: int) -> Value:
    """The mixed values as rows."""
    for _ in range(8):
        if is_rows(rounds, value) and rounds.shape(value, TYPICAL)[-1] == width:
            return value
        nodes = readers([value])
        moves = [n for n in nodes if n.op_type in MOVEMENTS]
        if len(nodes) != 1 or not moves:
            break
        value = nodes[0].outputs[0]
    raise Refusal("its heads are not put side by side as rows")


def between(rounds: Rounds, output: Value, is_leaf: Callable[[Value], bool]) -> list[Node]:
    """The nodes with activations that lead from the leaves to a value."""
    found: dict[Node, None] = {}
    stack = [output]
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or node in found or is_leaf(value):
            continue
        found[node] = None
        if node.op_type not in ("Shape", "Size"):
            stack.extend(data_inputs(rounds, node))
    return list(found)


def _masks(rounds: Rounds, nodes: list[Node], capacity: int) -> list[Mask]:
    masks: dict[Value, Mask] = {}
    for node in nodes:
        for slot, value in enumerate(node.inputs):
            if value is None or rounds.depends(value) != "round":
                continue
            shape = rounds.shape(value, TYPICAL)
            if len(shape) < 2 or shape[-1] != (capacity or TYPICAL.total):
                continue
            hides = node.op_type == "Where" and slot == 0 and rounds.is_data(node.inputs[2])
            masks[value] = Mask(value, hides)
    return list(masks.values())


def leaf(rounds: Rounds, value: Value) -> Value:
    """The rows, or the output of a norm over heads, that heads come of.

    Raises:
        Refusal: they come of several values, or of none of these.
    """
    leaves: dict[Value, None] = {}
    stack, seen = [value], set[Value]()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        node = current.producer()
        rotated = node is not None and node.op_type == "RotaryEmbedding"
        if (is_rows(rounds, current) and not rotated) or is_norm(node):
            leaves[current] = None
            continue
        inputs = [] if node is None else data_inputs(rounds, node)
        if not inputs or len(seen) > 64:
            raise Refusal(f"{value.name} does not come of rows of activations")
        stack.extend(inputs)
    if len(leaves) != 1:
        names = ", ".join(v.name or "?" for v in leaves)
        raise Refusal(f"{value.name} comes of several rows of activations: {names}")
    return next(iter(leaves))
