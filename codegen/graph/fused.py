"""Fusions of com.microsoft that onnxruntime's optimiser writes beside quantised products.

Source: onnxruntime's schemas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atsc.codegen.graph import linear, reduce
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import transposed
from atsc.codegen.graph.reduce import binary, unary
from atsc.codegen.graph.tensor import Tensor
from atsc.compiler.tensor_graph import OnnxNode

_SKIP_EPSILON = 1e-12
"""Of SkipLayerNormalization without the attribute."""


def _fused_matmul(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Any:
    """A product of operands whose last two dimensions may be exchanged, times `alpha`."""
    for name in ("transBatchA", "transBatchB"):
        if node.attrs.get(name, 0):
            raise RefusedError(f"attribute {name} is 1, supported: 0")
    operands = []
    for operand, name in zip(x, ("transA", "transB"), strict=True):
        turned = [*range(operand.rank - 2), operand.rank - 1, operand.rank - 2]
        is_turned = node.attrs.get(name, 0) and operand.rank > 1
        operands.append(transposed(operand, turned) if is_turned else operand)
    made = linear.RULES["", "MatMul"](g, replace(node, op="MatMul", domain=""), operands)
    assert isinstance(made, Tensor)
    return linear.times(g, made, node.attrs.get("alpha", 1.0))


def _gelu(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """By erf, of the sum of both inputs if there are two."""
    total = x[0] if len(x) == 1 else binary(g, x[0], x[1], "{0} + {1}")
    root = (0.5**0.5).hex()
    text = f"({{0}} * ({{kind}})0.5 * (({{kind}})1 + atsc::graph::erf({{0}} * ({{kind}}){root})))"
    return unary(g, total, text, 20)


def _skip_layer_norm(
    g: Lowering, node: OnnxNode, x: list[Any]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """LayerNormalization of a sum, which is its fourth output."""
    data, skip, scale, shift, bias = [*x, None, None][:5]
    total = binary(g, data, skip, "{0} + {1}")
    if bias is not None:
        total = binary(g, total, bias, "{0} + {1}")
    if len(node.outputs) > 3 and node.outputs[3]:
        total = g.store(total)
    own = replace(
        node,
        op="LayerNormalization",
        domain="",
        outputs=node.outputs[:1],
        attrs={"axis": -1, "epsilon": node.attrs.get("epsilon", _SKIP_EPSILON)},
    )
    given = [total, scale, *([] if shift is None else [shift])]
    made = reduce.RULES["", "LayerNormalization"](g, own, given)
    return made[0] if isinstance(made, tuple) else made, None, None, total


RULES: dict[tuple[str, str], Rule] = {
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
    ("com.microsoft", "Gelu"): _gelu,
    ("com.microsoft", "BiasGelu"): _gelu,
    ("com.microsoft", "SkipLayerNormalization"): _skip_layer_norm,
}
