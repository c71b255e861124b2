"""Activations spelled out, to Gelu, Sigmoid, x * Sigmoid(x) and Relu.

    x * 0.5 * (1 + erf(x / sqrt(2)))                               the exact GELU, around an Erf
    x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))      around a Tanh
    1 / (1 + exp(-x)), x / (1 + exp(-x))                           around an Exp
    max(x, 0)                                                      a Max, or a Clip without maximum

Products, sums and powers of x come in any order; the first value after the anchor whose values are
those of the activation is taken for it.
"""

from __future__ import annotations

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor, relative_error
from atsc.compiler.importers.onnx.canonical.region import between
from atsc.compiler.importers.onnx.canonical.rounds import (
    TYPICAL,
    Node,
    NotEvaluable,
    Value,
    data_inputs,
    readers,
)
from atsc.compiler.ops.activation import apply_activation

_KINDS = {"Erf": ("gelu",), "Tanh": ("gelu_tanh",), "Exp": ("sigmoid", "silu")}
_STEPS = ("Add", "Sum", "Mul", "Div", "Pow", "Sub", "Neg", "Reciprocal", "Identity")


def rewrite_activations(editor: Editor) -> None:
    """Rewrite every such activation of the graph."""
    for node in list(editor.graph):
        if node.domain or not editor.rounds.is_data(node.outputs[0]):
            continue
        try:
            if node.op_type in _KINDS:
                _rewrite(editor, node)
            elif node.op_type in ("Max", "Clip"):
                _rewrite_relu(editor, node)
        except NotEvaluable:
            continue


def _rewrite_relu(editor: Editor, node: Node) -> None:
    rounds, inputs = editor.rounds, [value for value in node.inputs if value is not None]
    (x, *others) = sorted(inputs, key=rounds.is_data, reverse=True)
    no_limit = node.op_type == "Max" or len(node.inputs) < 3 or node.inputs[2] is None
    if not no_limit or len(others) != 1 or rounds.depends(others[0]) != "constant":
        return
    if not rounds.value(others[0], TYPICAL).any():
        name = f"{node.name or node.outputs[0].name}/relu"
        editor.replace(node.outputs[0], editor.node("Relu", [x], name)[0])


def _rewrite(editor: Editor, anchor: Node) -> None:
    for x in _sources(editor, anchor):
        value = anchor.outputs[0]
        for _ in range(6):
            nodes = readers([value])
            if len(nodes) != 1 or nodes[0].op_type not in _STEPS:
                break
            value = nodes[0].outputs[0]
            for kind in _KINDS[anchor.op_type]:
                if _holds(editor, x, value, kind):
                    name = f"{anchor.name or value.name}/{kind}"
                    editor.replace(value, _activation(editor, x, kind, name))
                    return


def _activation(editor: Editor, x: Value, kind: str, name: str) -> Value:
    if kind.startswith("gelu"):
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        return editor.node("Gelu", [x], name, approximate=approximate)[0]
    (y,) = editor.node("Sigmoid", [x], f"{name}/sigmoid")
    return y if kind == "sigmoid" else editor.node("Mul", [x, y], name)[0]


def _sources(editor: Editor, anchor: Node) -> list[Value]:
    """Values that x may be, nearest first."""
    found: list[Value] = []
    level = data_inputs(editor.rounds, anchor)
    for _ in range(6):
        found += [value for value in level if value not in found]
        makers = [value.producer() for value in level]
        level = [
            value
            for maker in makers
            if maker is not None and maker.op_type in _STEPS
            for value in data_inputs(editor.rounds, maker)
        ]
    return found


def _holds(editor: Editor, x: Value, value: Value, kind: str) -> bool:
    try:
        shape = editor.rounds.shape(x, TYPICAL)
        given = (3 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
        if not between(editor.rounds, value, lambda v: v is x):
            return False
        actual = editor.rounds.region(value, TYPICAL, {x: given})
    except NotEvaluable:
        return False
    return relative_error(actual, apply_activation(kind, given)) <= editor.tolerance
