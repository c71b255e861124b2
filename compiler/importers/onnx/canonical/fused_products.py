"""Products that onnxruntime's optimiser makes of several operators, taken apart again.

    FusedMatMul(a, b)    -> Mul(MatMul(Transpose(a), Transpose(b)), alpha)     what of it there is
    FusedGemm(a, b, c)   -> Relu(Gemm(a, b, c)), or another activation

Attention is proved on plain operators. Transposes of batch axes stay as they are, and are refused.
Sources: com.microsoft FusedMatMul and FusedGemm.
"""

from __future__ import annotations

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
    editor.replace(node.outputs[0], product)


def _rewrite_gemm(editor: Editor, node: Node) -> None:
    kind = node.attributes["activation"].value if "activation" in node.attributes else ""
    if kind not in _ACTIVATIONS:
        return
    name = f"{node.name or node.outputs[0].name}/plain"
    kept = (a for a in node.attributes.values() if not a.name.startswith("activation"))
    attributes = {attribute.name: attribute.value for attribute in kept}
    (product,) = editor.node("Gemm", list(node.inputs), name, **attributes)
    editor.replace(node.outputs[0], editor.node(kind, [product], f"{name}/{kind}")[0])


def _turned(editor: Editor, value: Value, name: str) -> Value:
    """The last two axes the other way round."""
    axes = list(range(len(editor.rounds.shape(value, TYPICAL))))
    perm = [*axes[:-2], axes[-1], axes[-2]]
    return editor.node("Transpose", [value], name, perm=perm)[0]


def _number(node: Node, name: str, default: float) -> float:
    return float(node.attributes[name].value) if name in node.attributes else default
