"""Products that are several operators in one, taken apart.

    FusedMatMul(a, b)    -> Mul(MatMul(Transpose(a), Transpose(b)), alpha)     what of it there is
    FusedGemm(a, b, c)   -> Relu(Gemm(a, b, c)), or another activation
    Einsum(x, weight)    -> MatMul between Reshapes, where rows are multiplied by a matrix

onnxruntime's optimiser writes the first two. Attention is proved on plain operators. Transposes of
batch axes stay as they are, and are refused.
Sources: com.microsoft FusedMatMul and FusedGemm.
"""

from __future__ import annotations

import math

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor
from atsc.compiler.importers.onnx.canonical.rounds import TYPICAL, Node, NotEvaluable, Value

_ACTIVATIONS = ("Relu", "Sigmoid", "Tanh")
"""Of FusedGemm, those without numbers of their own that there is a rule for."""


def rewrite_fused_products(editor: Editor) -> None:
    """Rewrite every such product of the graph."""
    for node in list(editor.graph):
        if node.op_type == "FusedGemm" and node.domain == "com.microsoft":
            _rewrite_gemm(editor, node)
        if node.op_type == "Einsum" and not node.domain and len(node.inputs) == 2:
            _rewrite_einsum(editor, node)
        if node.op_type != "FusedMatMul" or node.domain != "com.microsoft":
            continue
        moved = any(_number(node, f"transBatch{side}", 0) for side in "AB")
        a, b = node.inputs
        try:
            if a is not None and b is not None and not moved:
                _rewrite(editor, node, a, b)
        except NotEvaluable:
            continue


def _rewrite(editor: Editor, node: Node, a: Value, b: Value) -> None:
    name = f"{node.name or node.outputs[0].name}/plain"
    if _number(node, "transA", 0):
        a = _turned(editor, a, f"{name}/a")
    if _number(node, "transB", 0):
        b = _turned(editor, b, f"{name}/b")
    (product,) = editor.node("MatMul", [a, b], name)
    alpha = _number(node, "alpha", 1.0)
    if alpha != 1:
        factor = editor.constant(f"{name}/alpha", np.array(alpha, np.float32))
        (product,) = editor.node("Mul", [product, factor], f"{name}/scaled")
    editor.supersede(node, product)


def _rewrite_gemm(editor: Editor, node: Node) -> None:
    kind = node.attributes["activation"].value if "activation" in node.attributes else ""
    if kind not in _ACTIVATIONS:
        return
    name = f"{node.name or node.outputs[0].name}/plain"
    kept = (a for a in node.attributes.values() if not a.name.startswith("activation"))
    attributes = {attribute.name: attribute.value for attribute in kept}
    (product,) = editor.node("Gemm", list(node.inputs), name, **attributes)
    editor.supersede(node, editor.node(kind, [product], f"{name}/{kind}")[0])


def _rewrite_einsum(editor: Editor, node: Node) -> None:
    """x [P.., K..] times a constant [K.., N..] or [N.., K..] is [P.., N..], each in that order."""
    terms, _, result = str(node.attributes["equation"].value).replace(" ", "").partition("->")
    x, weight = node.inputs
    first, _, second = terms.partition(",")
    if x is None or weight is None or "." in terms or editor.rounds.depends(weight) != "constant":
        return
    inner = "".join(c for c in first if c in second)
    rows, columns = first.removesuffix(inner), second.removeprefix(inner)
    flipped = columns == second
    columns = columns.removesuffix(inner)
    whole = second == (columns + inner if flipped else inner + columns)
    if (
        not inner
        or not whole
        or first != rows + inner
        or result != rows + columns
        or len(rows) != 2
    ):
        return
    sizes = dict(zip(second, editor.rounds.shape(weight, TYPICAL), strict=True))
    widths = [math.prod(sizes[c] for c in letters) for letters in (inner, columns)]
    name = f"{node.name or node.outputs[0].name}/plain"
    if len(second) > 2:
        shape = widths[::-1] if flipped else widths
        weight = editor.reshape(weight, shape, f"{name}/matrix")
    if flipped:
        (weight,) = editor.node("Transpose", [weight], f"{name}/turned", perm=[1, 0])
    if len(inner) > 1:
        x = editor.reshape(x, [1, -1, widths[0]], f"{name}/rows")
    (y,) = editor.node("MatMul", [x, weight], name)
    if len(columns) > 1:
        y = editor.reshape(y, [1, -1, *(sizes[c] for c in columns)], f"{name}/heads")
    editor.supersede(node, y)


def _turned(editor: Editor, value: Value, name: str) -> Value:
    """The last two axes the other way round."""
    axes = list(range(len(editor.rounds.shape(value, TYPICAL))))
    perm = [*axes[:-2], axes[-1], axes[-2]]
    return editor.node("Transpose", [value], name, perm=perm)[0]


def _number(node: Node, name: str, default: float) -> float:
    return float(node.attributes[name].value) if name in node.attributes else default
