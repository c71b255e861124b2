"""Softmax spelled out, to Softmax.

    e / sum(e), e = exp(x - max(x))        over the last axis, perhaps without the maximum

It is the body of the function that Softmax is: onnxruntime writes it where it has no kernel for the
type. The anchor is the Exp; the whole is proved by its values.
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
    readers,
)


def rewrite_softmaxes(editor: Editor) -> None:
    """Rewrite every softmax of the graph."""
    for node in list(editor.graph):
        if node.op_type == "Exp" and not node.domain and editor.rounds.is_data(node.outputs[0]):
            try:
                _rewrite(editor, node)
            except NotEvaluable:
                continue


def _rewrite(editor: Editor, exponential: Node) -> None:
    quotient = next((n for n in readers(exponential.outputs) if n.op_type == "Div"), None)
    if quotient is None or quotient.inputs[0] is not exponential.outputs[0]:
        return
    output, name = quotient.outputs[0], exponential.name or quotient.outputs[0].name
    for x in _sources(exponential):
        if _holds(editor, x, output):
            (y,) = editor.node("Softmax", [x], f"{name}/softmax", axis=-1)
            editor.replace(output, y)
            return


def _sources(exponential: Node) -> list[Value]:
    """What the softmax may be of: x of `x - max(x)`, or what the exponential reads."""
    difference = exponential.inputs[0]
    maker = None if difference is None else difference.producer()
    found = [difference]
    if maker is not None and maker.op_type == "Sub":
        found.insert(0, maker.inputs[0])
    return [value for value in found if value is not None]


def _holds(editor: Editor, x: Value, output: Value) -> bool:
    """Whether the output is the softmax of x over its last axis, hidden columns too."""
    rng = np.random.default_rng(0)
    for at in SMALL:
        shape = editor.rounds.shape(x, at)
        given = (3 * rng.standard_normal(shape)).astype(np.float32)
        given[..., 1::3] = -np.inf
        try:
            actual = editor.rounds.region(output, at, {x: given})
        except NotEvaluable:
            return False
        if relative_error(actual, _softmax(given)) > editor.tolerance:
            return False
    return True


def _softmax(x: Array) -> Array:
    exponentials = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    result: Array = exponentials / exponentials.sum(-1, keepdims=True)
    return result
