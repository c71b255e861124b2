"""Products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atsc.codegen.graph.elementwise import FLOATS, cast, elementwise
from atsc.codegen.graph.integers import MOST_EXACT_DEPTH, code_product, constant_floats
from atsc.codegen.graph.kernels import product_call
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import reshaped, transposed, unsqueezed
from atsc.codegen.graph.products import LooseRight, Product
from atsc.codegen.graph.reduce import binary, total_of, unary
from atsc.codegen.graph.tensor import Stored, Tensor, stored
from atsc.compiler.dims import Dim, product
from atsc.compiler.tensor_graph import OnnxNode


def matrix_product(g: Lowering, left: Tensor, right: Tensor) -> Tensor:
    """[batch.., M, K] times [batch.., K, N], in memory; batches broadcast.

    fp16 and bf16 operands are multiplied as floats.
    """
    return g.store(pending_product(g, left, right))


def pending_product(g: Lowering, left: Tensor, right: Tensor) -> Tensor:
    """The same, to be finished by what reads it if it is of float32: products.py."""
    if right.rank == 2 and left.rank > 2 and isinstance(left, Stored):
        # One matrix for all batches: their rows are rows of one large operand.
        rows = stored(left.buffer, (product(left.shape[:-1]), left.shape[-1]))
        made = pending_product(g, rows, right)
        return reshaped(g, made, (*left.shape[:-1], right.shape[-1]))
    batch = g.broadcast([left.shape[:-2], right.shape[:-2]])
    left, right = (_batched(g, x, len(batch)) for x in (left, right))
    g.agree(left.shape[-1], right.shape[-2], "the sizes that are summed over")
    if left.dtype == right.dtype == "float32":
        left = left if left.view is not None else g.store(left)
        return Product(
            batch, left.shape[-2], right.shape[-1], left, g.packed(right) or LooseRight(right)
        ).tensor()
    target = g.buffer(left.dtype, (*batch, left.shape[-2], right.shape[-1]))
    g.calls.append(product_call(g.node, left, right, target, batch))
    return stored(target)


def _batched(g: Lowering, x: Tensor, batches: int) -> Tensor:
    """An operand that packing may read more than once, with all batch dimensions."""
    x = g.cheap(x)
    missing = batches + 2 - x.rank
    return unsqueezed(g, x, list(range(missing))) if missing else x


def _matmul(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    left, right = x
    if (made := dequantised_product(g, left, right)) is not None:
        return made
    return _as_matrices(g, constant_floats(g, left), constant_floats(g, right), pending_product)


Multiply = Callable[[Lowering, Tensor, Tensor], Tensor]


def _as_matrices(g: Lowering, left: Tensor, right: Tensor, multiply: Multiply) -> Tensor:
    """Vectors as matrices of one row or column."""
    if left.rank == 0 or right.rank == 0:
        raise RefusedError("a scalar operand")
    is_row, is_column = left.rank == 1, right.rank == 1
    if is_row:
        left = unsqueezed(g, left, [0])
    if is_column:
        right = unsqueezed(g, right, [1])
    result = multiply(g, left, right)
    shape = list(result.shape)
    if is_column:
        shape.pop()
    if is_row:
        shape.pop(-1 if is_column else -2)
    return reshaped(g, result, tuple(shape))


def _gemm(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    left, right = x[:2]
    bias = x[2] if len(x) > 2 else None
    if left.dtype not in FLOATS:
        raise RefusedError(f"operands of type {left.dtype}")
    left = transposed(left, [1, 0]) if node.attrs.get("transA", 0) else left
    right = transposed(right, [1, 0]) if node.attrs.get("transB", 0) else right
    result = dequantised_product(g, left, right)
    if result is None:
        result = pending_product(g, constant_floats(g, left), constant_floats(g, right))
    result = times(g, result, node.attrs.get("alpha", 1.0))
    if bias is not None:
        result = binary(g, result, times(g, bias, node.attrs.get("beta", 1.0)), "{0} + {1}")
    return result


def times(g: Lowering, x: Tensor, factor: float) -> Tensor:
    """By a number of float32."""
    return x if factor == 1 else unary(g, x, f"{{0}} * ({{kind}}){float(np.float32(factor)).hex()}")


def without_zero_point(g: Lowering, x: Tensor, zero: Tensor | None, rows: bool) -> Tensor:
    """Integers less their zero point, as int32; a vector of those is of rows, or of columns."""
    x = cast(g, x, "int32")
    if zero is None:
        return x
    zero = cast(g, zero, "int32")
    if zero.rank == 1 and zero.shape[0].constant != 1 and rows:
        zero = unsqueezed(g, zero, [1])
    return elementwise(g, [x, zero], "int32", lambda a, b: f"{a} - {b}")


def integer_product(
    g: Lowering, left: Tensor, left_zero: Tensor | None, right: Tensor, right_zero: Tensor | None
) -> Tensor:
    """MatMulInteger: the exact product of integers less their zero points, as int32."""

    def multiply(g: Lowering, a: Tensor, b: Tensor) -> Tensor:
        if b.rank == 2 and a.rank > 2 and (left_zero is None or left_zero.size == Dim.of(1)):
            source = g.store(a)
            rows = stored(source.buffer, (product(a.shape[:-1]), a.shape[-1]))
            return reshaped(g, multiply(g, rows, b), (*a.shape[:-1], b.shape[-1]))
        batches = max(a.rank, b.rank) - 2
        a, b = (_batched(g, x, batches) for x in (a, b))
        made = code_product(g, a, left_zero, b, right_zero)
        if made is not None:
            return made
        a = without_zero_point(g, a, left_zero, True)
        b = without_zero_point(g, b, right_zero, False)
        return matrix_product(g, a, b)

    return _as_matrices(g, left, right, multiply)


def dequantised_product(g: Lowering, left: Tensor, right: Tensor) -> Tensor | None:
    """A product of floats that stand for integers, by those; None where they do not.

    One scale for the left operand, one or one a column for the right one: the product of integers
    is exact, and scaled once. A sum of unknown length may overflow, as it does in onnxruntime.
    """
    a, b = left.quantised, right.quantised
    if a is None or b is None or min(left.rank, right.rank) < 2:
        return None
    if (left.shape[-1].constant or 0) > MOST_EXACT_DEPTH:
        return None
    if a.axis is not None or (b.axis is not None and b.axis != right.rank - 1):
        return None
    total = integer_product(
        g, a.codes, without_dimensions(g, a.zero), b.codes, without_dimensions(g, b.zero)
    )
    scale = binary(g, without_dimensions(g, a.scale), without_dimensions(g, b.scale), "{0} * {1}")
    return binary(g, cast(g, total, "float32"), scale, "{0} * {1}")


def without_dimensions(g: Lowering, x: Any) -> Any:
    """A parameter, which has no dimensions if it is of the whole tensor."""
    return reshaped(g, x, ()) if x is not None and x.rank == 1 and x.size == Dim.of(1) else x


def _matmul_integer(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    left_zero, right_zero = [*x[2:], None, None][:2]
    return integer_product(g, x[0], left_zero, x[1], right_zero)


def _einsum(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """Of one or two operands without ellipses and without an index twice in one of them."""
    equation = node.attrs["equation"].replace(" ", "")
    sources, _, target = equation.partition("->")
    terms = sources.split(",")
    if "->" not in equation:
        letters = "".join(terms)
        target = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    doubled = any(len(set(term)) < len(term) for term in terms)
    if "." in equation or len(x) > 2 or doubled:
        raise RefusedError(f"equation {equation}")
    sizes: dict[str, Dim] = {}
    for term, operand in zip(terms, x, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            sizes[letter] = g.agree(sizes.get(letter, size), size, f"sizes of {letter} in Einsum")
    operands = []
    for number, (term, operand) in enumerate(zip(terms, x, strict=True)):
        # What only this operand has and the result lacks is summed first.
        others = set(target).union(*(t for i, t in enumerate(terms) if i != number))
        gone = [axis for axis, letter in enumerate(term) if letter not in others]
        if gone:
            operand = total_of(g, operand, gone)
            kept = [axis for axis in range(len(term)) if axis not in gone]
            operand = reshaped(g, operand, tuple(operand.shape[axis] for axis in kept))
            term = "".join(term[axis] for axis in kept)
        operands.append((term, operand))
    if len(operands) == 1:
        term, operand = operands[0]
        return transposed(operand, [term.index(letter) for letter in target])
    (left, a), (right, b) = operands
    batch = [c for c in target if c in left and c in right]
    rows = [c for c in target if c in left and c not in right]
    columns = [c for c in target if c in right and c not in left]
    summed = [c for c in left if c in right and c not in target]

    def matrix(term: str, operand: Tensor, *groups: list[str]) -> Tensor:
        order = [term.index(letter) for letter in [*batch, *groups[0], *groups[1]]]
        flat = (*(sizes[c] for c in batch), *(product(sizes[c] for c in part) for part in groups))
        return reshaped(g, transposed(operand, order), flat)

    made = matrix_product(g, matrix(left, a, rows, summed), matrix(right, b, summed, columns))
    letters_made = [*batch, *rows, *columns]
    whole = reshaped(g, made, tuple(sizes[letter] for letter in letters_made))
    return transposed(whole, [letters_made.index(letter) for letter in target])


RULES: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "MatMulInteger"): _matmul_integer,
    ("", "Einsum"): _einsum,
}
