"""RMSNorm and LayerNorm spelled out, to SimplifiedLayerNormalization and LayerNormalization.

    x / sqrt(mean(x^2) + eps) * w                      over the last axis
    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b

The anchor is what reduces the squares: a mean, a sum, or a length (then x / length * sqrt(W)).
What follows it, up to where it meets x again, and then the products and sums with constant rows,
are taken as they come; the whole is proved by its values, also where eps counts.
"""

from __future__ import annotations

import itertools

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor, relative_error
from atsc.compiler.importers.onnx.canonical.region import between
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
_OF_SQUARES = ("ReduceMean", "ReduceSum")
"""Reductions of what was squared before."""
_OF_ELEMENTS = ("ReduceSumSquare", "ReduceL2", "LpNormalization")
"""Those that square by themselves; the last one divides, too."""
_LEAST_EPSILON = 1e-30
"""For norms without eps: a row of zeros is 0 and not NaN."""


def rewrite_norms(editor: Editor) -> None:
    """Rewrite every norm of the graph, or note why not."""
    for node in list(editor.graph):
        if node.op_type not in (*_OF_SQUARES, *_OF_ELEMENTS) or node.domain:
            continue
        if not editor.rounds.is_data(node.outputs[0]):
            continue
        try:
            _rewrite(editor, node)
        except NotEvaluable:
            continue


def _rewrite(editor: Editor, anchor: Node) -> None:
    x, centred = _source(anchor)
    merged = None if x is None else _merge(editor, anchor, x)
    if x is None or merged is None:
        return
    end, constants, scale = merged
    width = editor.rounds.shape(x, SMALL[0])[-1]
    weight, bias, output = _affine(editor, end, width, centred)
    # What divides by a length, and not by a root of a mean, leaves that much less.
    for factor, eps in itertools.product((1.0, width**-0.5), _epsilons(constants, width)):
        rows = weight * scale * np.float32(factor), bias
        if _holds(editor, x, output, rows, eps, centred):
            gamma, beta = (np.broadcast_to(row, (width,)) for row in rows)
            name = anchor.name or output.name or "norm"
            inputs: list[Value | None] = [x, editor.constant(f"{output.name}/weight", gamma)]
            if centred:
                inputs.append(editor.constant(f"{output.name}/bias", beta))
            op_type = "LayerNormalization" if centred else "SimplifiedLayerNormalization"
            epsilon = max(eps, _LEAST_EPSILON)
            (y,) = editor.node(op_type, inputs, f"{name}/norm", epsilon=epsilon, axis=-1)
            editor.replace(output, y)
            return
    editor.refuse(
        anchor,
        "a norm that is none of x / sqrt(mean(x^2) + eps) over the last axis, nor the same of "
        "x - mean(x); eps belongs inside of the root",
    )
    for node in between(editor.rounds, end, lambda value: value in (x, anchor.outputs[0])):
        editor.silence(node)


def _source(anchor: Node) -> tuple[Value | None, bool]:
    """x, of whose squares the mean is taken, and whether its own mean was subtracted before."""
    x = anchor.inputs[0]
    if anchor.op_type in _OF_SQUARES:
        square = None if x is None else x.producer()
        if square is None or square.op_type not in ("Pow", "Mul"):
            return None, False
        if square.op_type == "Mul" and square.inputs[0] is not square.inputs[1]:
            return None, False
        x = square.inputs[0]
    subtract = None if x is None else x.producer()
    if subtract is not None and subtract.op_type == "Sub":
        return subtract.inputs[0], True
    return x, False


def _merge(editor: Editor, anchor: Node, x: Value) -> tuple[Value, list[Array], Array] | None:
    """Where the reduction meets x again, the constants on the way, and what x was multiplied by."""
    value, one = anchor.outputs[0], np.ones(1, np.float32)
    constants: list[Array] = []
    if anchor.op_type == "LpNormalization":
        return value, constants, one
    for _ in range(8):
        next_nodes = readers([value])
        if len(next_nodes) != 1 or next_nodes[0].op_type not in _STEPS:
            return None
        (node,) = next_nodes
        before, value = value, node.outputs[0]
        inputs = data_inputs(editor.rounds, node)
        if len(inputs) > 1:
            other = next(v for v in inputs if v is not before)
            return value, constants, _factor(editor, other, x)
        for constant in node.inputs:
            if constant is not None and editor.rounds.depends(constant) == "constant":
                constants.append(editor.rounds.value(constant, SMALL[0]))
    return None


def _factor(editor: Editor, value: Value, x: Value) -> Array:
    """The constant row of a product with x; 1 for x itself."""
    maker = value.producer()
    if maker is not None and maker.op_type == "Mul" and x in maker.inputs:
        for other in maker.inputs:
            if other is not None and editor.rounds.depends(other) == "constant":
                row = editor.rounds.value(other, SMALL[0])
                if row.ndim and row.size == row.shape[-1]:
                    return row.reshape(-1).astype(np.float32)
    return np.ones(1, np.float32)


def _epsilons(constants: list[Array], width: int) -> list[float]:
    """What eps may be: a small constant, or a share of one that is added to a sum."""
    small = [float(c.item()) for c in constants if c.size == 1 and 0 < c.item() < 0.1]
    return [*small, *(eps / width for eps in small), 0.0]


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
        if row.size == 1 and level == 1:
            weight, value = weight * row.reshape(-1).astype(np.float32), node.outputs[0]
            continue
        if row.size != width or row.shape[-1:] != (width,):
            return weight, bias, value
        flat = row.reshape(-1).astype(np.float32)
        weight, bias = (weight * flat, bias) if level == 1 else (weight, flat)
        stage, value = level, node.outputs[0]


def _holds(
    editor: Editor, x: Value, output: Value, rows: tuple[Array, Array], eps: float, centred: bool
) -> bool:
    """Whether the part of the graph is the norm, also where eps counts."""
    rng = np.random.default_rng(0)
    for at in SMALL[1::2]:
        shape = editor.rounds.shape(x, at)
        for size in (1.0, eps**0.5 or 1e-3):
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
