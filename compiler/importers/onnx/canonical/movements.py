"""Reshapes and their like on activations, with what the importer can follow as target.

A node that moves elements and leaves each in its place in memory becomes a Reshape with constant
sizes, or disappears where not even the shape changes; slices that take the last row become Gather.
Which place each element has is found by moving numbered ones.
"""

from __future__ import annotations

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor
from atsc.compiler.importers.onnx.canonical.rounds import (
    MOVEMENTS,
    SMALL,
    TYPICAL,
    Array,
    Node,
    NotEvaluable,
    Round,
    Value,
    constant_of,
    data_inputs,
)

_FROM_TABLES = ("Gather", "GatherND", "GatherElements")


def rewrite_movements(editor: Editor) -> None:
    """Rewrite every movement that the importer could not follow."""
    for node in list(editor.graph):
        if node.op_type not in MOVEMENTS or node.domain or node.op_type in ("Cast", "Split"):
            continue
        inputs = data_inputs(editor.rounds, node)
        if len(inputs) != 1:
            continue
        if node.op_type in _FROM_TABLES and inputs[0] is not node.inputs[0]:
            continue
        if _is_followable(node):
            continue
        try:
            _rewrite(editor, node, inputs[0])
        except NotEvaluable:
            continue


def _is_followable(node: Node) -> bool:
    """Whether the importer reads the node as it is: a Reshape to a known width."""
    target = constant_of(node.inputs[1]) if node.op_type == "Reshape" else None
    return target is not None and target.size > 0 and int(target.reshape(-1)[-1]) > 0


def _rewrite(editor: Editor, node: Node, source: Value) -> None:
    rounds, output = editor.rounds, node.outputs[0]
    moved = [_moved(editor, node, source, at) for at in SMALL]
    numbers = [np.arange(array.size) for array in moved]
    in_place = [array.reshape(-1) for array in moved]
    sizes = [np.prod(rounds.shape(source, at), dtype=np.int64) for at in SMALL]
    width = moved[-1].shape[-1] if moved[-1].ndim else 0
    if all(map(np.array_equal, in_place, numbers)) and [a.size for a in moved] == sizes:
        same = all(a.shape == rounds.shape(source, at) for a, at in zip(moved, SMALL, strict=True))
        if same or rounds.kind(source) == "ids":
            editor.replace(output, source)
        elif _is_seen_as_rows(moved, TYPICAL.tokens):
            heads = [moved[-1].shape[-2]] if moved[-1].ndim == 4 else []
            shape = [-1, width] if moved[-1].ndim == 2 else [1, -1, *heads, width]
            name = f"{node.name or output.name}/movement"
            editor.replace(output, editor.reshape(source, shape, name))
    elif all(
        np.array_equal(flat, np.arange(size - width, size))
        for flat, size in zip(in_place, sizes, strict=True)
    ):
        last = editor.constant(f"{output.name}/last", np.array(-1, np.int64))
        name = f"{node.name or output.name}/last_row"
        editor.replace(output, editor.node("Gather", [source, last], name, axis=1)[0])


def _is_seen_as_rows(moved: list[Array], tokens: int) -> bool:
    """Whether the last shape is that of rows, or of the heads of rows."""
    shape = moved[-1].shape
    if len(shape) == 4:
        return shape[:2] == (1, tokens)
    return len(shape) in (2, 3) and shape[0] in (1, tokens)


def _moved(editor: Editor, node: Node, source: Value, at: Round) -> Array:
    shape = editor.rounds.shape(source, at)
    numbers = np.arange(np.prod(shape, dtype=np.int64), dtype=np.float64).reshape(shape)
    return editor.rounds.region(node.outputs[0], at, {source: numbers})
