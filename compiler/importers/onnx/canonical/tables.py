"""Tables that token ids read along another axis than the first, to rows of a table.

    Gather(table [W, V], ids, axis 1) -> Transpose        -> TableRows(table, ids)
    GatherBlockQuantized(codes [1, V, W], ...) -> Squeeze  -> TableRows(codes, ids, ...)

What stands behind the Gather must only put each token's elements side by side, in the order in
which the table has them; that is proved by moving numbered elements.
"""

from __future__ import annotations

import math

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import OWN_DOMAIN, Editor, Refusal
from atsc.compiler.importers.onnx.canonical.node_shapes import TABLES
from atsc.compiler.importers.onnx.canonical.region import is_rows
from atsc.compiler.importers.onnx.canonical.rounds import (
    MOVEMENTS,
    SMALL,
    TYPICAL,
    Array,
    Node,
    NotEvaluable,
    Round,
    Value,
    data_inputs,
    readers,
)

TABLE_ROWS = "TableRows"
"""Inputs and attributes as the node has them in the file, and `axis` (not negative) and `width`."""
_DIGITS = (1 << 12, 1 << 6, 1)
"""Numbers of columns are moved in parts that any float type holds."""


def rewrite_tables(editor: Editor) -> None:
    """Rewrite every such table, or note why not."""
    for node in list(editor.graph):
        if node.op_type not in TABLES or len(node.inputs) < 2:
            continue
        try:
            if _is_turned(editor, node):
                _rewrite(editor, node)
        except (Refusal, NotEvaluable) as reason:
            editor.refuse(node, f"rows of a table along axis {_axis(editor, node)}: {reason}")


def _is_turned(editor: Editor, node: Node) -> bool:
    """Whether token ids read a constant that is no matrix of rows."""
    rounds, (table, ids) = editor.rounds, node.inputs[:2]
    if table is None or rounds.depends(table) != "constant" or not _are_ids(editor, ids):
        return False
    in_blocks = node.op_type == "GatherBlockQuantized"
    return _axis(editor, node) > 0 or (in_blocks and len(rounds.shape(table, TYPICAL)) != 2)


def _axis(editor: Editor, node: Node) -> int:
    table, attribute = node.inputs[0], node.attributes.get(TABLES[node.op_type])
    assert table is not None
    axis = 0 if attribute is None else int(attribute.value)
    return axis + (len(editor.rounds.shape(table, TYPICAL)) if axis < 0 else 0)


def _are_ids(editor: Editor, value: Value | None) -> bool:
    """Whether a value is input_ids, perhaps in another shape."""
    while value is not None and editor.rounds.kind(value) != "ids":
        maker = value.producer()
        inputs = [] if maker is None else data_inputs(editor.rounds, maker)
        if maker is None or maker.op_type not in MOVEMENTS or len(inputs) != 1:
            return False
        value = inputs[0]
    return value is not None


def _rewrite(editor: Editor, node: Node) -> None:
    rounds, axis = editor.rounds, _axis(editor, node)
    shape, (ids,) = rounds.shape(node.outputs[0], TYPICAL), data_inputs(rounds, node)
    width = math.prod(shape) // TYPICAL.tokens
    rows = _rows(editor, node.outputs[0], width)
    for at in SMALL:
        _check(editor, node, rows, axis, at)
    name = node.name or f"{rows.name}/rows"
    attributes = {a.name: a.value for a in node.attributes.values()}
    attributes |= {"axis": axis, "width": width}
    attributes.pop("gather_axis", None)
    inputs = list(node.inputs)
    (made,) = editor.node(TABLE_ROWS, inputs, name, domain=OWN_DOMAIN, **attributes)
    if rounds.shape(rows, TYPICAL) != (*rounds.shape(ids, TYPICAL), width):
        made = editor.reshape(made, [1, -1, width], f"{name}/shaped")
    editor.replace(rows, made)


def _rows(editor: Editor, value: Value, width: int) -> Value:
    """Where the elements of a token lie side by side.

    Raises:
        Refusal: nowhere.
    """
    for _ in range(8):
        shape = editor.rounds.shape(value, TYPICAL)
        if is_rows(editor.rounds, value) and shape[-1] == width:
            return value
        nodes = readers([value])
        if len(nodes) != 1 or nodes[0].op_type not in MOVEMENTS or nodes[0].domain:
            break
        value = nodes[0].outputs[0]
    raise Refusal(f"no Transpose behind it makes rows of {width}, gather along axis 0 instead")


def _check(editor: Editor, node: Node, rows: Value, axis: int, at: Round) -> None:
    """Move the number of each token and of each column to where `rows` has them."""
    rounds, gathered = editor.rounds, node.outputs[0]
    shape, ids = rounds.shape(gathered, at), node.inputs[1]
    assert ids is not None
    rank = len(rounds.shape(ids, at))
    outside, inside = shape[:axis], shape[axis + rank :]
    columns = np.arange(math.prod(outside) * math.prod(inside))
    places = columns.reshape(*outside, *[1] * rank, *inside)
    numbers = np.arange(at.tokens).reshape(
        *[1] * axis, *shape[axis : axis + rank], *[1] * len(inside)
    )
    expected = np.broadcast_to(columns, (at.tokens, len(columns)))
    tokens = np.broadcast_to(np.arange(at.tokens)[:, None], expected.shape)

    def moved(array: Array) -> Array:
        given = np.broadcast_to(array, shape).astype(np.float32)
        return rounds.region(rows, at, {gathered: given}).reshape(expected.shape)

    same = np.array_equal(moved(numbers), tokens)
    for digit in _DIGITS:
        same = same and np.array_equal(moved(places // digit % 64), expected // digit % 64)
    if not same:
        raise Refusal("what stands behind it moves columns, gather along axis 0 instead")
