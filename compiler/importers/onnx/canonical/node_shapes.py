"""Shapes of what a node makes, from the shapes of what it reads; nothing is computed for it."""

from __future__ import annotations

import numpy as np
import onnx_ir

Node = onnx_ir.Node
Shape = tuple[int, ...]

TABLES = {"Gather": "axis", "GatherBlockQuantized": "gather_axis"}
"""Operators that may read a weight by token id, and the attribute that says along which axis."""
_PRODUCTS = {"MatMul", "DynamicMatMul", "DynamicQuantizeMatMul"}
_AS_FIRST = {"AddPositions", "Attention", "RotaryEmbedding"}


def number(node: Node, name: str, default: int | None) -> int | None:
    """An attribute that is an integer."""
    attr = node.attributes.get(name)
    return default if attr is None else int(attr.value)


def shapes_of(node: Node, shapes: list[Shape], total: int) -> list[Shape]:
    """The shapes of a node's outputs, or of the first ones alone.

    Args:
        node: anything but a movement, whose shapes hang on values.
        shapes: of its inputs, `()` for absent ones.
        total: tokens in the caches after the round.

    Raises:
        ValueError: they do not fit.
    """
    op = node.op_type
    if op in _PRODUCTS:
        return [_product(shapes[0], shapes[1])]
    if op == "Einsum":
        return [_einsum(str(node.attributes["equation"].value), shapes)]
    if op == "Gemm":
        (a, b), swap = shapes[:2], number(node, "transB", 0)
        return [(a[1 if number(node, "transA", 0) else 0], b[0 if swap else 1])]
    if op == "MatMulNBits":
        return [(*shapes[0][:-1], number(node, "N", 0) or 0)]
    if op == "GroupQueryAttention":
        return _attention(node, shapes[0], total)
    if op == "TableRows":
        return [(*shapes[1], number(node, "width", 0) or 0)]
    if op in TABLES:
        return [_gathered(node, shapes[0], shapes[1])]
    if op in _AS_FIRST:
        return [shapes[0]]
    return [np.broadcast_shapes(*shapes)] * len(node.outputs)


def _attention(node: Node, query: Shape, total: int) -> list[Shape]:
    heads, kv_heads = number(node, "num_heads", 1) or 1, number(node, "kv_num_heads", 1) or 1
    shares = heads if node.inputs[1] is not None else heads + 2 * kv_heads
    size = query[-1] // shares
    cache = (1, kv_heads, total, size)
    return [(*query[:-1], heads * size), cache, cache]


def _gathered(node: Node, table: Shape, places: Shape) -> Shape:
    """What a Gather makes of a table; codes in bytes are packed along the last axis."""
    axis = number(node, TABLES[node.op_type], 0) or 0
    axis += len(table) if axis < 0 else 0
    elements = None if node.inputs[0] is None else node.inputs[0].dtype
    if node.op_type == "GatherBlockQuantized" and elements is onnx_ir.DataType.UINT8:
        table = (*table[:-1], table[-1] * 8 // (number(node, "bits", 4) or 4))
    return (*table[:axis], *places, *table[axis + 1 :])


def _product(a: Shape, b: Shape) -> Shape:
    if min(len(a), len(b)) < 2:
        raise ValueError("a product with a vector")
    return (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])


def _einsum(equation: str, shapes: list[Shape]) -> Shape:
    terms, _, result = equation.replace(" ", "").partition("->")
    if "." in equation or not result:
        raise ValueError(f"the shape of a product {equation}")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms.split(","), shapes, strict=True):
        sizes |= dict(zip(term, shape, strict=True))
    return tuple(sizes[letter] for letter in result)
