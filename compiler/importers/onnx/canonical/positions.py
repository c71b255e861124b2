"""Learned or sinusoidal positions: rows that depend on the position alone, added to activations.

    Add(x, rows)    rows [1, M, W] computed without activations     -> AddPositions(x, table)
    SkipLayerNormalization(x, rows, ...)                            -> the same, and a norm

The table is what the graph computes for every position, so that offsets into it, scales and casts
need no rule; that a row does not depend on the round is checked.
"""

from __future__ import annotations

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import (
    OWN_DOMAIN,
    Editor,
    Refusal,
    relative_error,
)
from atsc.compiler.importers.onnx.canonical.region import is_rows
from atsc.compiler.importers.onnx.canonical.rope import num_positions
from atsc.compiler.importers.onnx.canonical.rounds import (
    SMALL,
    TYPICAL,
    Array,
    Node,
    NotEvaluable,
    Round,
    Value,
)

_SKIP_NORMS = {
    "SkipLayerNormalization": ("LayerNormalization", 3),
    "SkipSimplifiedLayerNormalization": ("SimplifiedLayerNormalization", 2),
}
"""The norm of a sum that onnxruntime's optimiser writes -> the norm, and how many of its inputs
that takes before the bias; the sum is output 3."""
_DEFAULT_EPSILON = 1e-12


def rewrite_positions(editor: Editor) -> None:
    """Rewrite every sum of activations and rows by position."""
    for node in list(editor.graph):
        if node.op_type in _SKIP_NORMS and any(
            value is not None and editor.rounds.depends(value) == "round"
            for value in node.inputs[:2]
        ):
            _take_apart(editor, node)
    for node in list(editor.graph):
        if node.op_type != "Add" or node.domain or not editor.rounds.is_data(node.outputs[0]):
            continue
        a, b = node.inputs
        if a is not None and b is not None and editor.rounds.depends(a) == "round":
            a, b = b, a
        if a is None or b is None or editor.rounds.depends(b) != "round":
            continue
        try:
            if is_rows(editor.rounds, a):
                _rewrite(editor, node, a, b)
        except (Refusal, NotEvaluable) as reason:
            editor.refuse(node, f"what is added to activations is no row by position: {reason}")


def _take_apart(editor: Editor, node: Node) -> None:
    """Put a sum and a norm in the place of both in one."""
    kind, count = _SKIP_NORMS[node.op_type]
    name = node.name or node.outputs[0].name or kind
    (total,) = editor.node("Add", list(node.inputs[:2]), f"{name}/add")
    for bias in node.inputs[count + 1 :]:
        if bias is not None:
            (total,) = editor.node("Add", [total, bias], f"{name}/add_bias")
    epsilon = node.attributes["epsilon"].value if "epsilon" in node.attributes else _DEFAULT_EPSILON
    weights = list(node.inputs[2 : count + 1])
    (y,) = editor.node(kind, [total, *weights], f"{name}/norm", epsilon=float(epsilon), axis=-1)
    editor.replace(node.outputs[0], y)
    if len(node.outputs) > 3:
        editor.replace(node.outputs[3], total)


def _rewrite(editor: Editor, node: Node, x: Value, added: Value) -> None:
    rounds = editor.rounds
    width = rounds.shape(x, TYPICAL)[-1]

    def rows(at: Round) -> Array:
        array = rounds.value(added, at)
        if array.shape[-2:] != (at.tokens, width) or array.size != at.tokens * width:
            raise Refusal(f"{added.name} is {list(array.shape)}, not rows of {width}")
        return array.reshape(at.tokens, width).astype(np.float32)

    count = num_positions(editor, rows)
    editor.context_length = count
    table = rows(Round(0, count))
    for at in (*SMALL, Round(count - 1, 1)):
        if at.total <= count and relative_error(rows(at), table[at.past : at.total]) > 1e-6:
            raise Refusal(f"{added.name} does not depend on the position alone")
    weight = editor.constant(f"{added.name}/table", table)
    (y,) = editor.node("AddPositions", [x, weight], f"{node.name}/positions", domain=OWN_DOMAIN)
    editor.replace(node.outputs[0], y)
