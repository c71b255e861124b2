"""Norms of single heads, each with its own weights, as one norm whose weights differ by head.

    Concat(norm_0(head 0), norm_1(head 1), ...) of a Split into heads, as StableLM 2 12B has them

The result is a LayerNormalization (or SimplifiedLayerNormalization) with weights [H, 1, D], or
[H, D] where heads follow tokens; they are broadcast. The rewrite of attention takes it apart.
"""

from __future__ import annotations

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor
from atsc.compiler.importers.onnx.canonical.region import is_norm
from atsc.compiler.importers.onnx.canonical.rounds import (
    SMALL,
    TYPICAL,
    Array,
    Node,
    NotEvaluable,
    Value,
)

_DEFAULT_EPSILON = 1e-5


def rewrite_head_norms(editor: Editor) -> None:
    """Rewrite every such Concat of the graph."""
    for node in list(editor.graph):
        if node.op_type == "Concat" and editor.rounds.is_data(node.outputs[0]):
            try:
                _rewrite(editor, node)
            except NotEvaluable:
                continue


def _rewrite(editor: Editor, concat: Node) -> None:
    norms = [value.producer() for value in concat.inputs if value is not None]
    found = [norm for norm in norms if norm is not None and is_norm(norm)]
    if len(found) < 2 or len(found) != len(concat.inputs):
        return
    output, x = concat.outputs[0], _split(found)
    shape = editor.rounds.shape(output, TYPICAL)
    axis = int(concat.attributes["axis"].value) % len(shape)
    epsilons = {_epsilon(norm) for norm in found}
    kinds = {norm.op_type for norm in found}
    if x is None or len(shape) != 4 or axis not in (1, 2) or len(epsilons) > 1 or len(kinds) > 1:
        return
    rows = [_rows(editor, norm) for norm in found]
    if {len(parts) for parts in rows} not in ({1}, {2}):
        return
    if shape[axis] != len(found):
        return
    axes = {int(norm.attributes["axis"].value) for norm in found if "axis" in norm.attributes}
    if axes - {-1, 3} or any(row.shape != shape[-1:] for parts in rows for row in parts):
        return
    wide = (len(found), 1, shape[-1]) if axis == 1 else (len(found), shape[-1])
    weights = [np.stack(parts).reshape(wide) for parts in zip(*rows, strict=True)]
    if not _holds(editor, x, found, output, axis):
        return
    (eps,), (op_type,) = epsilons, kinds
    name = concat.name or output.name or "norm"
    constants = [editor.constant(f"{name}/{k}", array) for k, array in enumerate(weights)]
    (y,) = editor.node(op_type, [x, *constants], f"{name}/norm", epsilon=eps, axis=-1)
    editor.replace(output, y)


def _split(norms: list[Node]) -> Value | None:
    """What a Split takes into the very heads that are normalised, in order."""
    heads = [norm.inputs[0] for norm in norms]
    split = None if heads[0] is None else heads[0].producer()
    if split is None or split.op_type != "Split" or len(split.outputs) != len(heads):
        return None
    same = all(head is out for head, out in zip(heads, split.outputs, strict=True))
    return split.inputs[0] if same else None


def _epsilon(norm: Node) -> float:
    attribute = norm.attributes.get("epsilon")
    return _DEFAULT_EPSILON if attribute is None else float(attribute.value)


def _rows(editor: Editor, norm: Node) -> list[Array]:
    given = [value for value in norm.inputs[1:] if value is not None]
    if any(editor.rounds.depends(value) != "constant" for value in given):
        return []
    return [editor.rounds.value(v, SMALL[0]).astype(np.float32) for v in given]


def _holds(editor: Editor, x: Value, norms: list[Node], output: Value, axis: int) -> bool:
    """Whether each norm takes one head of x, in order, and the output is all of them again."""
    rng = np.random.default_rng(0)
    for at in SMALL[1::2]:
        given = rng.standard_normal(editor.rounds.shape(x, at)).astype(np.float32)
        heads = np.split(given, len(norms), axis)
        for norm, head in zip(norms, heads, strict=True):
            source = norm.inputs[0]
            assert source is not None
            if not np.array_equal(editor.rounds.region(source, at, {x: given}), head):
                return False
        made = {norm.outputs[0]: head for norm, head in zip(norms, heads, strict=True)}
        if not np.array_equal(editor.rounds.region(output, at, made), given):
            return False
    return True
