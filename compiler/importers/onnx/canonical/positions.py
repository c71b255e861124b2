"""Learned or sinusoidal positions: rows that depend on the position alone, added to activations.

    Add(x, rows)    rows [1, M, W] computed without activations     -> AddPositions(x, table)

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


def rewrite_positions(editor: Editor) -> None:
    """Rewrite every sum of activations and rows by position."""
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
