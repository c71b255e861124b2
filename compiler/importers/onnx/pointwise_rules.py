"""Pointwise arithmetic and activations, and casts between float types, which do nothing.

The residual stream and all activations are fp32 whatever the file says, so a cast between float
types never loses anything. Sources: ONNX Add ... Tanh, Gelu-20; com.microsoft Gelu, FastGelu,
BiasGelu, QuickGelu.
"""

from __future__ import annotations

import numpy as np
import onnx_ir

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.canonical.editor import OWN_DOMAIN
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.matrix_rules import add_block_offsets
from atsc.compiler.importers.onnx.operands import (
    FLOATS,
    INTEGERS,
    BlockOffsets,
    Constant,
    Ints,
    Rows,
    Symbol,
)

_BINARY = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}


def _binary(lowering: Lowering, node: OnnxNode) -> None:
    kind, (a, b) = _BINARY[node.op_type], node.inputs
    if isinstance(a, Ints) and isinstance(b, Ints):
        _integer_binary(lowering, node, kind, a, b)
        return
    if isinstance(a, Constant) and isinstance(b, Rows) and kind in ("add", "mul"):
        node = OnnxNode(node.name, node.op_type, (b, a), node.outputs, node.attrs)
    x = node.rows(0, grouped=True)
    other = node.input(1)
    if isinstance(other, BlockOffsets) and kind == "add":
        add_block_offsets(lowering, node, x, other)
        return
    if isinstance(other, Rows):
        if (other.width, other.group) != (x.width, x.group):
            raise ModelError(f"rows of {x.width} and of {other.width} do not match")
        second = other.name
    else:
        constant = node.constant(1)
        one = np.prod(constant.shape, dtype=np.int64) == 1
        if x.group and not one:
            raise ModelError("a constant row over values that are reshaped to heads")
        second = lowering.vector(constant, 1 if one else x.width)
    lowering.emit(kind, node.name, (x.name, second), node.output())
    lowering.bind(node.output(), Rows(node.output(), x.width, x.group))


def _integer_binary(lowering: Lowering, node: OnnxNode, kind: str, a: Ints, b: Ints) -> None:
    if kind == "div":
        raise ModelError("division of sizes")
    try:
        values = {
            "add": lambda: a.values + b.values,
            "sub": lambda: a.values - b.values,
            "mul": lambda: a.values * b.values,
        }[kind]()
    except ArithmeticError as error:
        raise ModelError(str(error)) from None
    lowering.bind(node.output(), Ints.of(values))


def _emit_activation(
    lowering: Lowering, node: OnnxNode, kind: str, x: Rows, bias: Constant | None = None
) -> None:
    name = x.name
    if bias is not None:
        name = f"{node.name}/biased"
        weight = lowering.vector(bias, x.width)
        lowering.emit("add", f"{node.name}/bias", (x.name, weight), name)
    lowering.emit("activation", node.name, (name,), node.output(), kind=kind)
    lowering.bind(node.output(), Rows(node.output(), x.width))


_ACTIVATIONS = {
    ("", "Sigmoid"): "sigmoid",
    ("", "Tanh"): "tanh",
    ("", "Relu"): "relu",
    ("com.microsoft", "Gelu"): "gelu",
}


def _activation(kind: str) -> Rule:
    domain, op_type = next(key for key, value in _ACTIVATIONS.items() if value == kind)
    return Rule(
        domain,
        op_type,
        lambda lowering, node: _emit_activation(lowering, node, kind, node.rows(0)),
        ("x",),
    )


def _gelu(lowering: Lowering, node: OnnxNode) -> None:
    kind = "gelu_tanh" if node.attrs["approximate"] == "tanh" else "gelu"
    _emit_activation(lowering, node, kind, node.rows(0))


def _biased_gelu(lowering: Lowering, node: OnnxNode) -> None:
    kind = "gelu_tanh" if node.op_type == "FastGelu" else "gelu"
    _emit_activation(lowering, node, kind, node.rows(0), node.optional_constant(1))


def _quick_gelu(lowering: Lowering, node: OnnxNode) -> None:
    alpha = float(node.attrs["alpha"])
    if np.float32(alpha) not in (np.float32(1.702), np.float32(1.0)):
        raise ModelError(f"attribute alpha is {alpha:g}, supported: 1.702 or 1")
    kind = "silu" if alpha == 1.0 else "quick_gelu"
    _emit_activation(lowering, node, kind, node.rows(0))


def _pow(lowering: Lowering, node: OnnxNode) -> None:
    x, exponent = node.rows(0), node.input(1)
    if isinstance(exponent, Constant) and exponent.is_float:
        value = exponent.source.read().astype(np.float32).reshape(-1).tolist()
    else:
        value = list(exponent.known() or ()) if isinstance(exponent, Ints) else []
    if value != [2.0]:
        raise ModelError("the exponent is not the constant 2")
    lowering.emit("mul", node.name, (x.name, x.name), node.output())
    lowering.bind(node.output(), Rows(node.output(), x.width))


def _cast(lowering: Lowering, node: OnnxNode) -> None:
    operand, to = node.inputs[0], onnx_ir.DataType(node.attrs["to"])
    floats = isinstance(operand, Rows) or (isinstance(operand, Constant) and operand.is_float)
    integers = isinstance(operand, Ints | Symbol)
    if operand is None or not ((floats and to in FLOATS) or (integers and to in INTEGERS)):
        raise ModelError(f"a cast to {to.name} that changes more than the float type")
    lowering.bind(node.output(), operand)


def _add_positions(lowering: Lowering, node: OnnxNode) -> None:
    """What canonical/positions.py makes of positions that are added to activations."""
    x, table = node.rows(0), node.constant(1)
    lowering.rope_rows.append(table.shape[0])
    lowering.emit("add_positions", node.name, (x.name, lowering.matrix(table)), node.output())
    lowering.bind(node.output(), Rows(node.output(), x.width))


RULES = (
    Rule(OWN_DOMAIN, "AddPositions", _add_positions, ("x", "table")),
    *(Rule("", op_type, _binary, ("a", "b")) for op_type in _BINARY),
    *(_activation(kind) for kind in _ACTIVATIONS.values()),
    Rule("", "Gelu", _gelu, ("x",), {"approximate": Attr("none", ("none", "tanh"))}),
    Rule("com.microsoft", "BiasGelu", _biased_gelu, ("x", "bias")),
    Rule("com.microsoft", "FastGelu", _biased_gelu, ("x", "bias?")),
    Rule("com.microsoft", "QuickGelu", _quick_gelu, ("x",), {"alpha": Attr(1.702)}),
    Rule("", "Pow", _pow, ("x", "exponent")),
    Rule(
        "",
        "Cast",
        _cast,
        ("x",),
        {"to": Attr(None, tuple(onnx_ir.DataType), required=True), "saturate": Attr(1, (1,))},
    ),
)
