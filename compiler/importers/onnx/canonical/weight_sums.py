"""Matrices that the graph computes of others, as LoRA adapters are added to them.

    x (P + Q)    -> x P + x Q
    x (A B)      -> (x A) B
    x (s P)      -> s (x P)                     s one number

So no sum of large matrices is ever made or stored, and a quantised P stays quantised. The price is
two narrow products for each matrix and token: export with the adapters merged to be rid of them.
"""

from __future__ import annotations

from atsc.compiler.importers.onnx.canonical.editor import Editor
from atsc.compiler.importers.onnx.canonical.rounds import TYPICAL, Node, NotEvaluable, Value

_THROUGH = ("Add", "MatMul", "Mul", "Transpose", "Cast", "Identity")


def rewrite_weight_sums(editor: Editor) -> None:
    """Rewrite every product of activations with a computed matrix."""
    for node in list(editor.graph):
        if node.op_type not in ("MatMul", "Gemm") or node.domain or len(node.inputs) < 2:
            continue
        x, matrix = node.inputs[:2]
        if x is None or matrix is None or not editor.rounds.is_data(x):
            continue
        try:
            if _is_plain(node) and _is_computed(editor, matrix):
                _rewrite(editor, node, x, matrix)
        except NotEvaluable:
            continue


def _is_plain(node: Node) -> bool:
    """Whether the node is x W or x W^T, perhaps with a row added."""
    defaults = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    return all(
        name not in node.attributes or node.attributes[name].value == value
        for name, value in defaults.items()
    )


def _is_computed(editor: Editor, matrix: Value) -> bool:
    """Whether a constant matrix has a sum or a product in it."""
    if editor.rounds.depends(matrix) != "constant":
        return False
    stack = [matrix]
    while stack:
        maker = stack.pop().producer()
        if maker is None or maker.op_type not in _THROUGH or maker.domain:
            continue
        if maker.op_type in ("Add", "MatMul"):
            return True
        stack.extend(v for v in maker.inputs if v is not None)
    return False


def _rewrite(editor: Editor, node: Node, x: Value, matrix: Value) -> None:
    name = f"{node.name or node.outputs[0].name}/parts"
    flipped = "transB" in node.attributes and bool(node.attributes["transB"].value)
    y = _product(editor, x, matrix, flipped, name)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        (y,) = editor.node("Add", [y, node.inputs[2]], f"{name}/bias")
    editor.replace(node.outputs[0], y)


def _product(editor: Editor, x: Value, matrix: Value, flipped: bool, name: str) -> Value:
    """x times a matrix, or times its transpose if `flipped`."""
    maker = matrix.producer()
    if maker is not None and not maker.domain and _is_computed(editor, matrix):
        parts = [value for value in maker.inputs if value is not None]
        if maker.op_type in ("Cast", "Identity"):
            return _product(editor, x, parts[0], flipped, name)
        if maker.op_type == "Transpose":
            return _product(editor, x, parts[0], not flipped, name)
        if maker.op_type == "MatMul":
            first, second = reversed(parts) if flipped else parts
            y = _product(editor, x, first, flipped, f"{name}/0")
            return _product(editor, y, second, flipped, f"{name}/1")
        shapes = [editor.rounds.shape(value, TYPICAL) for value in parts]
        if maker.op_type == "Add" and shapes[0] == shapes[1]:
            terms = [
                _product(editor, x, part, flipped, f"{name}/{k}") for k, part in enumerate(parts)
            ]
            return editor.node("Add", [*terms], name)[0]
        if maker.op_type == "Mul" and any(set(s) <= {1} for s in shapes):
            factor = next(v for v, s in zip(parts, shapes, strict=True) if set(s) <= {1})
            (other,) = (value for value in parts if value is not factor)
            y = _product(editor, x, other, flipped, f"{name}/0")
            return editor.node("Mul", [y, factor], name)[0]
    if flipped:
        (matrix,) = editor.node("Transpose", [matrix], f"{name}/flipped", perm=[1, 0])
    return editor.node("MatMul", [x, matrix], f"{name}/product")[0]
