"""RMSNorm and LayerNorm spelled out, to SimplifiedLayerNormalization and LayerNormalization.

    x / sqrt(mean(x^2) + eps) * w                      over the last axis
    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b

The anchor is what reduces the squares: a mean, a sum, or a length (then x / length * sqrt(W)).
What follows it, up to where it meets x again, and then the products and sums with constant rows,
are taken as they come; the whole is proved by its values, also where eps counts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

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

_STEPS = ("Add", "Sqrt", "Reciprocal", "Pow", "Div", "Mul", "Sub", "Max", "Clip", "Transpose")
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


@dataclass(frozen=True, slots=True)
class _Quotient:
    """Where the reduction meets x again."""

    value: Value
    normed: Value
    """x, or x with its axes in another order."""
    weight: Array
    """What x was multiplied by before."""
    constants: list[Array]
    """All that the reduction was added to, multiplied by or compared with."""


def _rewrite(editor: Editor, anchor: Node) -> None:
    x, centred = _source(anchor)
    for quotient in [] if x is None else _quotients(editor, anchor, x):
        assert x is not None
        if not _replaced(editor, anchor, x, quotient, centred):
            editor.refuse(
                anchor,
                "a norm that is none of x / sqrt(mean(x^2) + eps) over the last axis, nor the same "
                "of x - mean(x); eps belongs inside of the root",
            )
            leaves = {x, quotient.normed, anchor.outputs[0]}
            for node in between(editor.rounds, quotient.value, leaves.__contains__):
                editor.silence(node)


def _replaced(editor: Editor, anchor: Node, x: Value, found: _Quotient, centred: bool) -> bool:
    width = editor.rounds.shape(x, SMALL[0])[-1]
    weight, bias, output = _affine(editor, found.value, width, centred)
    # What divides by a length, and not by a root of a mean, leaves that much less.
    for factor, eps in itertools.product((1.0, width**-0.5), _epsilons(found.constants, width)):
        rows = weight * found.weight * np.float32(factor), bias
        if _holds(editor, (x, found.normed, output), rows, eps, centred):
            gamma, beta = (np.broadcast_to(row, (width,)) for row in rows)
            inputs: list[Value | None] = [found.normed]
            inputs.append(editor.constant(f"{output.name}/weight", gamma))
            if centred:
                inputs.append(editor.constant(f"{output.name}/bias", beta))
            op_type = "LayerNormalization" if centred else "SimplifiedLayerNormalization"
            name = f"{anchor.name or output.name or 'norm'}/norm"
            epsilon = max(eps, _LEAST_EPSILON)
            (y,) = editor.node(op_type, inputs, name, epsilon=epsilon, axis=-1)
            editor.replace(output, y)
            return True
    return False


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


def _quotients(editor: Editor, anchor: Node, x: Value) -> list[_Quotient]:
    """All places where the reduction meets x: norms of the same rows may share it."""
    value, one = anchor.outputs[0], np.ones(1, np.float32)
    constants: list[Array] = []
    if anchor.op_type == "LpNormalization":
        return [_Quotient(value, x, one, constants)]
    for _ in range(8):
        next_nodes = readers([value])
        if not next_nodes or any(node.op_type not in _STEPS for node in next_nodes):
            return []
        others = [_other(editor, node, value) for node in next_nodes]
        if all(other is not None for other in others):
            return [
                _Quotient(node.outputs[0], *_normed(editor, other, x), constants)
                for node, other in zip(next_nodes, others, strict=True)
                if other is not None
            ]
        if len(next_nodes) != 1:
            return []
        (node,) = next_nodes
        value = node.outputs[0]
        for constant in node.inputs:
            if constant is not None and editor.rounds.depends(constant) == "constant":
                constants.append(editor.rounds.value(constant, SMALL[0]))
    return []


def _other(editor: Editor, node: Node, value: Value) -> Value | None:
    """What a node combines a value with, if that carries activations too."""
    return next((v for v in data_inputs(editor.rounds, node) if v is not value), None)


def _normed(editor: Editor, value: Value, x: Value) -> tuple[Value, Array]:
    """What is divided, x or x in another order, and the constant row that it was multiplied by."""
    maker, one = value.producer(), np.ones(1, np.float32)
    source = None if maker is None or value is x else maker.inputs[0]
    if maker is None or source is None:
        return x, one
    if maker.op_type == "Transpose":
        inner, row = _normed(editor, source, x)
        if source is x or inner is not x:
            return value, row
        (moved,) = editor.node("Transpose", [x], f"{value.name}/x", **_attributes(maker))
        return moved, row
    data = data_inputs(editor.rounds, maker)
    rows = [v for v in maker.inputs if v is not None and editor.rounds.depends(v) == "constant"]
    if maker.op_type != "Mul" or len(data) != 1 or len(rows) != 1:
        return x, one
    array = editor.rounds.value(rows[0], SMALL[0])
    if not array.ndim or array.size != array.shape[-1]:
        return x, one
    inner, row = _normed(editor, data[0], x)
    return inner, row * array.reshape(-1).astype(np.float32)


def _attributes(node: Node) -> dict[str, Any]:
    return {attribute.name: attribute.value for attribute in node.attributes.values()}


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
    editor: Editor,
    values: tuple[Value, Value, Value],
    rows: tuple[Array, Array],
    eps: float,
    centred: bool,
) -> bool:
    """Whether the part of the graph is the norm, also where eps counts.

    Args:
        editor: of the graph.
        values: x, what is divided, and the output.
        rows: weight and bias.
        eps: what is added to the mean.
        centred: whether the mean of x is subtracted.
    """
    rng, (x, normed, output) = np.random.default_rng(0), values
    for at in SMALL[1::2]:
        shape = editor.rounds.shape(x, at)
        for size in (1.0, eps**0.5 or 1e-3):
            given = (size * rng.standard_normal(shape)).astype(np.float32)
            try:
                wide = editor.rounds.region(normed, at, {x: given}).astype(np.float64)
                actual = editor.rounds.region(output, at, {x: given})
            except NotEvaluable:
                return False
            wide = wide - wide.mean(-1, keepdims=True) if centred else wide
            root = np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
            if relative_error(actual, wide / root * rows[0] + rows[1]) > editor.tolerance:
                return False
    return True
