"""Operators that compute each element from those at the same place: a table of C expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atsc.codegen.graph.lower import Lowering, RefusedError, Rule, aligned, element_type
from atsc.codegen.graph.products import Pending
from atsc.codegen.graph.tensor import (
    CHEAP,
    DEAR,
    Code,
    Index,
    Known,
    Tensor,
    c_type,
    known_tensor,
)
from atsc.codegen.tail import ElementType
from atsc.compiler.dims import Dim, largest, smallest
from atsc.compiler.tensor_graph import OnnxNode

FLOATS = ("float32", "float64", "float16", "bfloat16")
Expression = Callable[..., str]


def elementwise(
    g: Lowering,
    inputs: list[Tensor],
    dtype: ElementType,
    expression: Expression,
    cost: int = 1,
) -> Tensor:
    """One expression of the operands' elements, which broadcast.

    Args:
        g: the lowering.
        inputs: the operands.
        dtype: of the result.
        expression: from C expressions of the elements (in their computing types) to one of the
            result's.
        cost: operations of it.
    """
    shape = g.broadcast(x.shape for x in inputs)
    products = [x.product for x in inputs if x.product is not None and x.shape == shape]
    product = products[0] if products else None
    operands = [_operand(g, x, shape, product) for x in inputs]

    def at(code: Code, index: Index) -> str:
        values = [x.at(code, aligned(x, index)) for x in operands]
        return code.let(c_type(dtype), code.rounded(dtype, expression(*values)))

    total = cost + sum(x.cost for x in operands)
    return Tensor(dtype, shape, at, cost=total, product=product)


def _operand(g: Lowering, x: Tensor, shape: tuple[Dim, ...], product: Pending | None) -> Tensor:
    """An operand; computed once where more than one element of the result reads it, unless cheap.

    One product of matrices is finished by what reads it, others are stored.
    """
    if x.product is not None:
        return x if x.shape == shape and x.product is product else g.store(x)
    if x.shape != shape:
        return g.cheap(x)
    return g.store(x) if product is not None and x.cost >= DEAR else x


def _f(name: str) -> Expression:
    """A function of libm, in float or double."""
    return lambda x, kind: f"{name}{'f' if kind == 'float' else ''}({x})"


_UNARY: dict[str, tuple[Expression, int]] = {
    "Abs": (lambda x, kind: f"({x} < 0 ? ({kind})-{x} : {x})", 1),
    "Neg": (lambda x, kind: f"({kind})-{x}", 1),
    "Exp": (lambda x, kind: f"atsc::graph::exp({x})", 8),
    "Log": (_f("__builtin_log"), 16),
    "Sqrt": (_f("__builtin_sqrt"), 4),
    "Reciprocal": (lambda x, kind: f"({kind})1 / {x}", 4),
    "Floor": (_f("__builtin_floor"), 1),
    "Ceil": (_f("__builtin_ceil"), 1),
    "Round": (_f("__builtin_nearbyint"), 1),
    "Erf": (lambda x, kind: f"atsc::graph::erf({x})", 16),
    "Tanh": (lambda x, kind: f"atsc::graph::tanh({x})", 12),
    "Sigmoid": (lambda x, kind: f"sigmoid({x})", 12),
    "Relu": (lambda x, kind: f"({x} < 0 ? ({kind})0 : {x})", 1),
    "Sign": (lambda x, kind: f"({kind})(({x} > 0) - ({x} < 0))", 1),
    "BitwiseNot": (lambda x, kind: f"({kind})~{x}", 1),
    **{
        name: (_f(f"__builtin_{name.lower()}"), 16)
        for name in (
            *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan"),
            *("Sinh", "Cosh", "Asinh", "Acosh", "Atanh"),
        )
    },
}


def _unary(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    expression, cost = _UNARY[node.op]
    (operand,) = x
    if node.op == "Neg" and operand.known is not None:
        return known_tensor(np.vectorize(lambda d: -d, otypes=[object])(operand.known))
    kind = c_type(operand.dtype)
    if node.op == "Abs" and operand.dtype in FLOATS:
        expression = _f("__builtin_fabs")
    if node.op == "Sign" and operand.dtype in FLOATS:
        return elementwise(
            g, [operand], operand.dtype, lambda v: f"({v} != {v} ? {v} : {expression(v, kind)})"
        )
    return elementwise(g, [operand], operand.dtype, lambda v: expression(v, kind), cost)


def _predicate(text: str) -> Rule:
    def rule(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
        return elementwise(g, [x[0]], "bool", lambda v: text.format(v))

    return rule


def _is_inf(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    signs = [
        sign for sign, key in (("", "detect_positive"), ("-", "detect_negative"))
        if node.attrs.get(key, 1)
    ]  # fmt: skip
    text = " || ".join(f"{{0}} == {sign}__builtin_inf()" for sign in signs) or "false"
    return elementwise(g, [x[0]], "bool", lambda v: text.format(v))


_BINARY: dict[str, Callable[[str, str, str], str]] = {
    "Add": lambda a, b, kind: f"({kind})({a} + {b})",
    "Sub": lambda a, b, kind: f"({kind})({a} - {b})",
    "Mul": lambda a, b, kind: f"({kind})({a} * {b})",
    "Div": lambda a, b, kind: f"divide<{kind}>({a}, {b})",
    "Min": lambda a, b, kind: f"smaller<{kind}>({a}, {b})",
    "Max": lambda a, b, kind: f"larger<{kind}>({a}, {b})",
    "Sum": lambda a, b, kind: f"({kind})({a} + {b})",
    "And": lambda a, b, kind: f"{a} && {b}",
    "Or": lambda a, b, kind: f"{a} || {b}",
    "Xor": lambda a, b, kind: f"{a} != {b}",
    "BitwiseAnd": lambda a, b, kind: f"({kind})({a} & {b})",
    "BitwiseOr": lambda a, b, kind: f"({kind})({a} | {b})",
    "BitwiseXor": lambda a, b, kind: f"({kind})({a} ^ {b})",
    "PRelu": lambda a, b, kind: f"({a} < 0 ? ({kind})({a} * {b}) : {a})",
}
_COMPARISONS = {
    "Equal": "==", "Less": "<", "Greater": ">", "LessOrEqual": "<=", "GreaterOrEqual": ">=",
}  # fmt: skip


def _positive(dim: Dim) -> bool:
    """Whether a size is certainly not negative."""
    return all(factor >= 0 for _, factor in dim.terms)


def _quotient(a: Dim, b: Dim) -> Dim:
    """Truncated, as ONNX divides; the same as rounded down for sizes."""
    if not (_positive(a) and _positive(b)):
        if a.constant is None or not b.constant:
            raise RefusedError(f"the quotient of sizes {a} and {b}")
        return Dim.of(int(a.constant / b.constant))
    return a // b


_KNOWN: dict[str, Callable[[Dim, Dim], Dim]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _quotient,
    "Min": smallest,
    "Max": largest,
    "Sum": lambda a, b: a + b,
    "And": lambda a, b: a * b,
    "Or": largest,
}


def both_known(inputs: list[Tensor], function: Callable[..., Any]) -> Known | None:
    """A function of operands that are known; None if one is not."""
    contents = [x.known for x in inputs]
    if any(content is None for content in contents):
        return None
    made = np.vectorize(function, otypes=[object])(*contents)
    return made if all(value is not None for value in made.reshape(-1)) else None


def _binary(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    dtype, kind = x[0].dtype, c_type(x[0].dtype)
    if len({operand.dtype for operand in x}) > 1:
        raise RefusedError(f"operands of types {', '.join(o.dtype for o in x)}")
    result, fold = x[0], _KNOWN.get(node.op)
    expression = _BINARY[node.op]
    for operand in x[1:]:
        known = both_known([result, operand], fold) if fold and dtype in _INTEGERS else None
        if known is not None:
            result = known_tensor(known, dtype)
        else:
            result = elementwise(
                g, [result, operand], dtype, lambda a, b: expression(a, b, kind),
            )  # fmt: skip
    return result


_INTEGERS = ("int64", "int32", "bool")


def _truth(operator: str) -> Callable[[Dim, Dim], Dim | None]:
    """A comparison of sizes where it holds for all sizes, or for none."""

    def compare(a: Dim, b: Dim) -> Dim | None:
        difference = a - b
        if (known := difference.constant) is not None:
            return Dim.of(int(eval(f"{known} {operator} 0")))
        sign = 1 if b.constant is not None and b.constant < 0 and _positive(a) else 0
        if a.constant is not None and a.constant < 0 and _positive(b):
            sign = -1
        return Dim.of(int(eval(f"{sign} {operator} 0"))) if sign else None

    return compare


def _comparison(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    operator = _COMPARISONS[node.op]
    known = both_known(x, _truth(operator))
    if known is not None:
        return known_tensor(known, "bool")
    return elementwise(g, x, "bool", lambda a, b: f"{a} {operator} {b}")


def _where(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    def choose(condition: Dim, a: Dim, b: Dim) -> Dim | None:
        if condition.constant is None:
            return None
        return a if condition.constant else b

    known = both_known(x, choose)
    if known is not None:
        return known_tensor(known, x[1].dtype)
    return elementwise(g, x, x[1].dtype, lambda c, a, b: f"{c} ? {a} : {b}")


def _not(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    known = both_known(x, lambda d: None if d.constant is None else Dim.of(int(not d.constant)))
    if known is not None:
        return known_tensor(known, "bool")
    return elementwise(g, x, "bool", lambda v: f"!{v}")


ONNX_TYPES: dict[int, ElementType] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
"""TensorProto.DataType."""


def onnx_type(number: int) -> ElementType:
    """An element type by its number in ONNX."""
    if number not in ONNX_TYPES:
        raise RefusedError(f"elements of ONNX type {number} are not supported")
    return ONNX_TYPES[number]


def cast(g: Lowering, x: Tensor, dtype: ElementType) -> Tensor:
    """Another element type."""
    if x.dtype == dtype:
        return x
    if x.known is not None and dtype in _INTEGERS and dtype != "bool":
        return known_tensor(x.known, dtype)
    kind = c_type(dtype)
    if dtype == "float16" and x.dtype == "float64":
        # Straight from double: in two steps it would be rounded twice.
        raise RefusedError("float64 to float16")
    return elementwise(g, [x], dtype, lambda v: f"cast<{kind}>({v})")


def _cast(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    return cast(g, x[0], onnx_type(node.attrs["to"]))


def _cast_like(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    return cast(g, x[0], x[1].dtype)


def _pow(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    return elementwise(g, x, x[0].dtype, lambda a, b: f"power({a}, {b})", 24)


def _remainder(a: Dim, b: Dim) -> Dim | None:
    """Of sizes, where the signs cannot matter."""
    if b == Dim.of(0) or not (_positive(a) and _positive(b)):
        return None
    return a - a // b * b


def _mod(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    function = "c_mod" if node.attrs.get("fmod", 0) else "floor_mod"
    kind = c_type(x[0].dtype)
    known = both_known(x, _remainder) if x[0].dtype in _INTEGERS else None
    if known is not None:
        return known_tensor(known, x[0].dtype)
    return elementwise(g, x, x[0].dtype, lambda a, b: f"{function}<{kind}>({a}, {b})", 8)


def _shift(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    left = "true" if node.attrs["direction"] == "LEFT" else "false"
    kind = c_type(x[0].dtype)
    return elementwise(g, x, x[0].dtype, lambda a, b: f"shift<{kind}>({a}, {b}, {left})")


def _clip(g: Lowering, node: OnnxNode, x: list[Tensor | None]) -> Tensor:
    """Clip 6 has its limits as attributes, later ones as inputs."""
    result = x[0]
    assert result is not None
    kind = c_type(result.dtype)
    for place, name, sign in ((1, "min", "<"), (2, "max", ">")):
        limit = x[place] if len(x) > place else None
        if limit is None and name in node.attrs:
            limit = g.array(np.array(node.attrs[name], np.float32))
            limit = cast(g, limit, result.dtype)
        if limit is not None:
            expression = f"({{0}} {sign} {{1}} ? ({kind}){{1}} : {{0}})"
            result = elementwise(
                g, [result, limit], result.dtype, lambda a, b, e=expression: e.format(a, b)
            )
    return result


def _mean(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    total = x[0]
    for operand in x[1:]:
        total = elementwise(g, [total, operand], total.dtype, lambda a, b: f"{a} + {b}")
    return elementwise(g, [total], total.dtype, lambda v: f"{v} / {len(x)}")


def _identity(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    return x[0]


def _dropout(g: Lowering, node: OnnxNode, x: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    if len(x) > 2 and x[2] is not None and g.content(x[2], "training_mode").item():
        raise RefusedError("training mode draws random numbers")
    data = x[0]
    assert data is not None
    mask = Tensor("bool", data.shape, lambda code, index: "true")
    return data, mask


RULES: dict[tuple[str, str], Rule] = {
    **{("", name): _unary for name in _UNARY},
    **{("", name): _binary for name in _BINARY},
    **{("", name): _comparison for name in _COMPARISONS},
    ("", "Not"): _not,
    ("", "IsNaN"): _predicate("{0} != {0}"),
    ("", "IsInf"): _is_inf,
    ("", "Where"): _where,
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast_like,
    ("", "Pow"): _pow,
    ("", "Mod"): _mod,
    ("", "BitShift"): _shift,
    ("", "Clip"): _clip,
    ("", "Mean"): _mean,
    ("", "Identity"): _identity,
    ("", "Dropout"): _dropout,
}
__all__ = ["CHEAP", "FLOATS", "RULES", "cast", "element_type", "elementwise", "onnx_type"]
