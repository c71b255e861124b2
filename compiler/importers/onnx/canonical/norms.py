"""RMSNorm and LayerNorm spelled out, to SimplifiedLayerNormalization and LayerNormalization.

    x / sqrt(mean(x^2) + eps) * w                      mean by ReduceMean, over the last axis
    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b

The anchor is the ReduceMean over squares. What follows it, up to where it meets x again, and then
the products and sums with constant rows, are taken as they come; the whole is proved by its values.
"""

from __future__ import annotations

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor, relative_error
from atsc.compiler.importers.onnx.canonical.rounds import (
    SMALL,
    Array,
    Node,
    NotEvaluable,
    Value,
    data_inputs,
    readers,
)

_STEPS = ("Add", "Sqrt", "Reciprocal", "Pow", "Div", "Mul", "Sub", "Max", "Clip")


def rewrite_norms(editor: Editor) -> None:
    """Rewrite every norm of the graph."""
    for node in list(editor.graph):
        if node.op_type == "ReduceMean" and editor.rounds.is_data(node.outputs[0]):
            try:
                _rewrite(editor, node)
            except NotEvaluable:
                continue


def _rewrite(editor: Editor, mean: Node) -> None:
    rounds = editor.rounds
    x = _source(editor, mean)
    merged = None if x is None else _merge(editor, mean)
    if x is None or merged is None:
        return
    width = rounds.shape(x, SMALL[0])[-1]
    epsilons = [float(c.item()) for c in merged[1] if c.size == 1 and 0 < c.item() < 0.1]
    centred = _is_centred(mean)
    weight, bias, output = _affine(editor, merged[0], width, centred)
    for eps in epsilons or [0.0]:
        if _holds(editor, x, output, (weight, bias), eps, centred):
            gamma, beta = np.broadcast_to(weight, (width,)), np.broadcast_to(bias, (width,))
            name = mean.name or output.name or "norm"
            inputs: list[Value | None] = [x, editor.constant(f"{output.name}/weight", gamma)]
            if centred:
                inputs.append(editor.constant(f"{output.name}/bias", beta))
            op_type = "LayerNormalization" if centred else "SimplifiedLayerNormalization"
            (y,) = editor.node(op_type, inputs, f"{name}/norm", epsilon=eps, axis=-1)
            editor.replace(output, y)
            return


def _is_centred(mean: Node) -> bool:
    square = mean.inputs[0]
    maker = None if square is None else square.producer()
    centre = None if maker is None else maker.inputs[0]
    inner = None if centre is None else centre.producer()
    return inner is not None and inner.op_type == "Sub"


def _source(editor: Editor, mean: Node) -> Value | None:
    """x, of which the mean of squares is taken."""
    square = mean.inputs[0]
    maker = None if square is None else square.producer()
    if maker is None or maker.op_type not in ("Pow", "Mul"):
        return None
    if maker.op_type == "Mul" and maker.inputs[0] is not maker.inputs[1]:
        return None
    x = maker.inputs[0]
    if x is not None and _is_centred(mean):
        subtract = x.producer()
        assert subtract is not None
        x = subtract.inputs[0]
    return x


def _merge(editor: Editor, mean: Node) -> tuple[Value, list[Array]] | None:
    """Where the mean meets x again, and the constants on the way."""
    value = mean.outputs[0]
    constants: list[Array] = []
    for _ in range(8):
        next_nodes = readers([value])
        if len(next_nodes) != 1 or next_nodes[0].op_type not in _STEPS:
            return None
        (node,) = next_nodes
        value = node.outputs[0]
        if len(data_inputs(editor.rounds, node)) > 1:
            return value, constants
        for other in node.inputs:
            if other is not None and editor.rounds.depends(other) == "constant":
                constants.append(editor.rounds.value(other, SMALL[0]))
    return None


def _affine(editor: Editor, value: Value, width: int, centred: bool) -> tuple[Array, Array, Value]:
    """The rows that the normalised x is multiplied by and added to, and the last value."""
    weight, bias = np.ones(1, np.float32), np.zeros(1, np.float32)
    stage, wanted = 0, {"Mul": 1, "Add": 2 if centred else 9}
    while True:
        nodes = readers([value])
        if len(nodes) != 1 or value.is_graph_output():
            return weight, bias, value
        (node,) = nodes
        others = [v for v in node.inputs if v is not None and v is not value]
        level = wanted.get(node.op_type, 0)
        if len(others) != 1 or not stage < level <= 2:
            return weight, bias, value
        if editor.rounds.depends(others[0]) != "constant":
            return weight, bias, value
        row = editor.rounds.value(others[0], SMALL[0])
        if row.size != width or row.shape[-1:] != (width,):
            return weight, bias, value
        flat = row.reshape(-1).astype(np.float32)
        weight, bias = (flat, bias) if level == 1 else (weight, flat)
        stage, value = level, node.outputs[0]


def _holds(
    editor: Editor, x: Value, output: Value, rows: tuple[Array, Array], eps: float, centred: bool
) -> bool:
    """Whether the part of the graph is the norm, also where eps counts."""
    rng = np.random.default_rng(0)
    for at in SMALL[1::2]:
        shape = editor.rounds.shape(x, at)
        for size in (1.0, eps**0.5):
            given = (size * rng.standard_normal(shape)).astype(np.float32)
            wide = given.astype(np.float64)
            wide = wide - wide.mean(-1, keepdims=True) if centred else wide
            root = np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
            try:
                actual = editor.rounds.region(output, at, {x: given})
            except NotEvaluable:
                return False
            if relative_error(actual, wide / root * rows[0] + rows[1]) > editor.tolerance:
                return False
    return True
