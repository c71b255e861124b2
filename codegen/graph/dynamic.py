"""Activations that are quantised by their own range, and products of such.

DynamicQuantizeLinear (ONNX 11), and what onnxruntime's optimiser makes of it with the product that
follows: DynamicQuantizeMatMul and MatMulIntegerToFloat of com.microsoft.
"""

from __future__ import annotations

from typing import Any

from atsc.codegen.graph.elementwise import cast, elementwise
from atsc.codegen.graph.kernels import finished_call
from atsc.codegen.graph.linear import integer_product, without_dimensions
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.quantized import saturated
from atsc.codegen.graph.reduce import binary, reduced
from atsc.codegen.graph.tensor import Code, Tensor, stored
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import OnnxNode

_PART = 8192
"""Elements whose range is taken by one item."""


def _ranges(g: Lowering, x: Tensor) -> Tensor:
    """The smallest and the largest of each part of a tensor: [parts, 2]."""
    source = g.store(x)
    parts = (x.size + (_PART - 1)) // _PART
    target = g.buffer("float32", (parts, Dim.of(2)))
    code = Code()
    code.headers["ranges.h"] = None
    with code.block("for (int64_t item = lo; item < hi; ++item)"):
        count = f"least({_PART}, {code.dim(x.size)} - item * {_PART})"
        place = f"{code.buffer(source.buffer)} + item * {_PART}"
        code.line(f"range_of({place}, {count}, out + 2 * item);")
    g.calls.append(finished_call(g.node, code, target, parts, Dim.of(_PART // 4)))
    return stored(target)


def quantised_by_range(g: Lowering, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of uint8, their scale and zero point; the range is widened to hold 0.

    Zeros alone have the scale 1, as in onnxruntime.
    """
    if x.dtype != "float32":
        raise RefusedError(f"{x.dtype}, not float32")
    x = g.store(x)
    ranges = _ranges(g, x)

    def limit(place: int, function: str) -> Tensor:
        column = Tensor(
            "float32", ranges.shape[:1], lambda code, index: ranges.at(code, [index[0], str(place)])
        )
        combined = reduced(g, column, [0], "0.0f", lambda a, b: f"{function}<float>({a}, {b})")
        return Tensor("float32", (), lambda code, index: combined.at(code, ["0"]), combined.cost)

    low, high = limit(0, "smaller"), limit(1, "larger")
    width = "({1} - {0}) / 255.0f"
    scale = g.store(binary(g, low, high, f"({{0}} == {{1}} ? 1.0f : {width})"))
    text = "cast<uint8_t>(__builtin_nearbyintf(smaller<float>(larger<float>({}, 0.0f), 255.0f)))"
    zero = g.store(
        elementwise(g, [low, scale], "uint8", lambda a, b: text.format(f"0.0f - {a} / {b}"))
    )
    # In one long row, whatever the last dimension is.
    flat = stored(x.buffer, (x.size,))
    codes = elementwise(
        g,
        [flat, scale, zero],
        "uint8",
        lambda a, b, c: saturated("uint8", f"__builtin_nearbyintf({a} / {b}) + (float){c}"),
        6,
    )
    return stored(g.store(codes).buffer, x.shape), scale, zero


def _dynamic_quantize_linear(g: Lowering, node: OnnxNode, x: list[Tensor]) -> tuple[Tensor, ...]:
    return quantised_by_range(g, x[0])


def _scaled(
    g: Lowering, total: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None
) -> Tensor:
    left, right = (without_dimensions(g, g.held(scale)) for scale in scales)
    if left.rank:
        raise RefusedError("scales of the rows of its input A")
    factor = binary(g, left, right, "{0} * {1}")
    result = binary(g, cast(g, total, "float32"), factor, "{0} * {1}")
    return result if bias is None else binary(g, result, bias, "{0} + {1}")


def _dynamic_quantize_matmul(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    data, weight, weight_scale, weight_zero, bias = [*x, None, None][:5]
    codes, scale, zero = quantised_by_range(g, data)
    total = integer_product(g, codes, zero, weight, weight_zero)
    return _scaled(g, total, (scale, weight_scale), bias)


def _matmul_integer_to_float(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    left, right, left_scale, right_scale, left_zero, right_zero, bias = [*x, *[None] * 3][:7]
    if left_scale.dtype != "float32":
        raise RefusedError(f"scales of {left_scale.dtype}, not float32")
    left_zero = without_dimensions(g, left_zero)
    total = integer_product(g, left, left_zero, right, without_dimensions(g, right_zero))
    return _scaled(g, total, (left_scale, right_scale), bias)


RULES: dict[tuple[str, str], Rule] = {
    ("", "DynamicQuantizeLinear"): _dynamic_quantize_linear,
    ("com.microsoft", "DynamicQuantizeMatMul"): _dynamic_quantize_matmul,
    ("com.microsoft", "MatMulIntegerToFloat"): _matmul_integer_to_float,
}
