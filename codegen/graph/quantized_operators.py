"""Operators between 8-bit tensors, as onnxruntime's quantisers write them (format QOperator).

QLinearMatMul and QLinearConv of ONNX, and those of com.microsoft. Products are exact and scaled
once, by left scale * right scale / output scale in that order, as onnxruntime rounds it; what is
computed elementwise is computed on the dequantised values. Results are rounded to even, then the
zero point is added, then they saturate. Source: ONNX's specification and onnxruntime's schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from atsc.codegen.graph import convolution, moves, reduce
from atsc.codegen.graph.convolution import integer_convolution, of_first, windows_of
from atsc.codegen.graph.elementwise import cast, elementwise
from atsc.codegen.graph.integers import BYTES
from atsc.codegen.graph.linear import integer_product, without_dimensions, without_zero_point
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import reshaped, transposed, unsqueezed
from atsc.codegen.graph.quantized import saturated
from atsc.codegen.graph.reduce import binary, unary
from atsc.codegen.graph.tensor import Tensor
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import OnnxNode

Values = Callable[[Lowering, OnnxNode, Tensor], Tensor]


def _quantised(g: Lowering, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Floats by one scale; without a zero point, unsigned."""
    return _rounded(g, binary(g, x, _whole(g, scale, "scale"), "{0} / {1}"), zero)


def _rounded(g: Lowering, x: Tensor, zero: Tensor | None) -> Tensor:
    """Floats that are scaled already; without a zero point, unsigned."""
    zero = g.array(np.zeros((), np.uint8)) if zero is None else _whole(g, zero, "zero point")
    dtype = zero.dtype
    if dtype not in BYTES:
        raise RefusedError(f"a result of {dtype}, supported: {', '.join(BYTES)}")
    return elementwise(
        g,
        [x, cast(g, zero, "int32")],
        dtype,
        lambda a, b: saturated(dtype, f"__builtin_nearbyintf({a}) + {b}"),
        4,
    )


def _whole(g: Lowering, x: Tensor, what: str) -> Tensor:
    """A parameter that must be of the whole tensor.

    Raises:
        RefusedError: it is not.
    """
    if x.size != Dim.of(1):
        raise RefusedError(f"a {what} of shape [{', '.join(map(str, x.shape))}], expected one")
    return reshaped(g, g.held(x) if x.dtype == "float32" else x, ())


def _centred(g: Lowering, x: Tensor, zero: Tensor | None) -> Tensor:
    """8-bit integers less their zero point, as floats."""
    if x.dtype not in BYTES:
        raise RefusedError(f"an operand of {x.dtype}, supported: {', '.join(BYTES)}")
    zero = None if zero is None else _whole(g, zero, "zero point")
    return cast(g, without_zero_point(g, x, zero, False), "float32")


def _floats(g: Lowering, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """What 8-bit integers stand for."""
    return binary(g, _centred(g, x, zero), _whole(g, scale, "scale"), "{0} * {1}")


def _scaled_sum(g: Lowering, total: Tensor, factor: Tensor, zero: Tensor | None) -> Tensor:
    factor = cast(g, factor, "float32")
    return _rounded(g, binary(g, cast(g, total, "float32"), factor, "{0} * {1}"), zero)


def _q_linear_matmul(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = x
    if min(a.rank, b.rank) < 2:
        raise RefusedError(f"operands with {a.rank} and {b.rank} dimensions")
    total = integer_product(g, a, without_dimensions(g, a_zero), b, without_dimensions(g, b_zero))
    left, right = (without_dimensions(g, g.held(v)) for v in (a_scale, b_scale))
    left = unsqueezed(g, left, [1]) if left.rank == 1 else left
    factor = binary(g, left, right, "{0} * {1}")
    factor = binary(g, factor, _whole(g, y_scale, "scale"), "{0} / {1}")
    return _scaled_sum(g, total, factor, y_zero)


def _q_linear_conv(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    image, x_scale, x_zero, weight, w_scale, w_zero, y_scale, y_zero, bias = [*x, None][:9]
    _refuse_channels_last(node)
    windows = windows_of(g, node, image, weight)
    total = integer_convolution(g, node, windows, (image, x_zero), (weight, w_zero))
    if bias is not None:
        total = binary(g, total, of_first(g, g.held(bias), total.rank - 1), "{0} + {1}")
    factor = binary(
        g, _whole(g, x_scale, "scale"), of_first(g, g.held(w_scale), total.rank - 1), "{0} * {1}"
    )
    factor = binary(g, factor, _whole(g, y_scale, "scale"), "{0} / {1}")
    return _scaled_sum(g, total, factor, y_zero)


def _q_gemm(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = [*x, None, None, None][:9]
    a = transposed(a, [1, 0]) if node.attrs.get("transA", 0) else a
    b = transposed(b, [1, 0]) if node.attrs.get("transB", 0) else b
    total = integer_product(g, a, without_dimensions(g, a_zero), b, without_dimensions(g, b_zero))
    if bias is not None:
        total = binary(g, total, g.held(bias), "{0} + {1}")
    alpha = g.array(np.asarray(node.attrs.get("alpha", 1.0), np.float32))
    factor = binary(g, alpha, _whole(g, a_scale, "scale"), "{0} * {1}")
    factor = binary(g, factor, without_dimensions(g, g.held(b_scale)), "{0} * {1}")
    if y_scale is None:
        return binary(g, cast(g, total, "float32"), factor, "{0} * {1}")
    factor = binary(g, factor, _whole(g, y_scale, "scale"), "{0} / {1}")
    return _scaled_sum(g, total, factor, y_zero)


def _q_linear_add(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = [*x, None][:8]
    total = binary(g, _floats(g, a, a_scale, a_zero), _floats(g, b, b_scale, b_zero), "{0} + {1}")
    return _quantised(g, total, scale, zero)


def _q_linear_mul(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = [*x, None][:8]
    product = binary(g, _centred(g, a, a_zero), _centred(g, b, b_zero), "{0} * {1}")
    factor = binary(g, _whole(g, a_scale, "scale"), _whole(g, b_scale, "scale"), "{0} * {1}")
    factor = binary(g, factor, _whole(g, scale, "scale"), "{0} / {1}")
    return _rounded(g, binary(g, product, factor, "{0} * {1}"), zero)


def _by_floats(values: Values) -> Rule:
    """X, its scale and zero point, those of the result; what floats become of floats."""

    def rule(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
        data, x_scale, x_zero, y_scale, y_zero = [*x, None][:5]
        _refuse_channels_last(node)
        return _quantised(g, values(g, node, _floats(g, data, x_scale, x_zero)), y_scale, y_zero)

    return rule


def _refuse_channels_last(node: OnnxNode) -> None:
    if node.attrs.get("channels_last", 0):
        raise RefusedError("attribute channels_last is 1, supported: 0")


def _sigmoid(g: Lowering, node: OnnxNode, x: Tensor) -> Tensor:
    return unary(g, x, "sigmoid({0})", 12)


def _leaky_relu(g: Lowering, node: OnnxNode, x: Tensor) -> Tensor:
    alpha = float(np.float32(node.attrs.get("alpha", 0.01))).hex()
    return unary(g, x, f"({{0}} < 0 ? {{0}} * (float){alpha} : {{0}})", 2)


def _as_float_operator(name: str) -> Values:
    """An operator of ONNX with the same attributes."""
    rule = {**convolution.RULES, **reduce.RULES}["", name]

    def values(g: Lowering, node: OnnxNode, x: Tensor) -> Tensor:
        opset = int(node.attrs.get("opset", node.opset))  # of the Softmax that it was
        made = rule(g, replace(node, op=name, domain="", opset=opset), [x])
        assert isinstance(made, Tensor)
        return made

    return values


def _q_linear_concat(g: Lowering, node: OnnxNode, x: list[Any]) -> Any:
    """Parts that have the result's scale and zero point are moved as they are."""
    scale, zero, *rest = x
    names = [node.inputs[0:2], *(node.inputs[i + 1 : i + 3] for i in range(2, len(x), 3))]
    parts = []
    for place, own in zip(range(0, len(rest), 3), names[1:], strict=True):
        part, part_scale, part_zero = rest[place : place + 3]
        if own != names[0]:
            part = _quantised(g, _floats(g, part, part_scale, part_zero), scale, zero)
        parts.append(g.store(part))
    return moves.RULES["", "Concat"](g, node, parts)


def _q_linear_where(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    condition, a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = x
    then = _quantised(g, _floats(g, a, a_scale, a_zero), scale, zero)
    other = _quantised(g, _floats(g, b, b_scale, b_zero), scale, zero)
    return elementwise(
        g, [condition, then, other], zero.dtype, lambda c, u, v: f"({c} ? {u} : {v})"
    )


_MICROSOFT: dict[str, Rule] = {
    "QLinearConv": _q_linear_conv,
    "QGemm": _q_gemm,
    "QLinearAdd": _q_linear_add,
    "QLinearMul": _q_linear_mul,
    "QLinearSigmoid": _by_floats(_sigmoid),
    "QLinearLeakyRelu": _by_floats(_leaky_relu),
    "QLinearSoftmax": _by_floats(_as_float_operator("Softmax")),
    "QLinearAveragePool": _by_floats(_as_float_operator("AveragePool")),
    "QLinearGlobalAveragePool": _by_floats(_as_float_operator("GlobalAveragePool")),
    "QLinearConcat": _q_linear_concat,
    "QLinearWhere": _q_linear_where,
}
RULES: dict[tuple[str, str], Rule] = {
    ("", "QLinearMatMul"): _q_linear_matmul,
    ("", "QLinearConv"): _q_linear_conv,
    **{("com.microsoft", name): rule for name, rule in _MICROSOFT.items()},
}
