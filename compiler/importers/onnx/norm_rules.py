"""Norms, alone or with the residual addition before them.

Sources: ONNX LayerNormalization-17, RMSNormalization-23; onnxruntime's SimplifiedLayerNormalization
(which sits in the default domain); com.microsoft SkipLayerNormalization and
SkipSimplifiedLayerNormalization: sum = input + skip + bias, output 3, and output 0 its norm.
"""

from __future__ import annotations

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.operands import Rows

_SKIP_EPSILON = 9.999999960041972e-13
_DEFAULT_EPSILON = 9.999999747378752e-06


def _emit_norm(
    lowering: Lowering, node: OnnxNode, x: Rows, gamma: int, beta: int | None, *, rms: bool
) -> None:
    """The norm of x by the constants in slots `gamma` and `beta`."""
    width = x.group or x.width
    weight = lowering.vector(node.constant(gamma), width)
    eps = float(node.attrs["epsilon"])
    output = node.output()
    if rms:
        lowering.emit("rms_norm", node.name, (x.name, weight), output, eps=eps, group=x.group)
    else:
        constant = None if beta is None else node.optional_constant(beta)
        bias = "" if constant is None else lowering.vector(constant, width)
        inputs = (x.name, weight, bias)
        lowering.emit("layer_norm", node.name, inputs, output, eps=eps, group=x.group)
    lowering.bind(output, Rows(output, x.width, x.group))


def _norm(lowering: Lowering, node: OnnxNode) -> None:
    _check_axis(node)
    rms = node.op_type != "LayerNormalization"
    _emit_norm(lowering, node, node.rows(0, grouped=True), 1, None if rms else 2, rms=rms)


def _check_axis(node: OnnxNode) -> None:
    """The batch dimension is still there, so that the last axis of [B, M, W] is 2."""
    axis = node.attrs["axis"]
    grouped = node.rows(0, grouped=True).group > 0
    if axis not in ((-1,) if grouped else (-1, 2)):
        raise ModelError(f"attribute axis is {axis}, supported: the last one (-1)")


def _skip_norm(lowering: Lowering, node: OnnxNode) -> None:
    x, skip = node.rows(0), node.rows(1)
    if x.width != skip.width:
        raise ModelError(f"the widths of its inputs differ: {x.width} and {skip.width}")
    rms = node.op_type == "SkipSimplifiedLayerNormalization"
    bias = node.optional_constant(3 if rms else 4)
    total = node.output(3) or f"{node.name}/sum"
    plain = total if bias is None else f"{node.name}/plain_sum"
    lowering.emit("add", f"{node.name}/add", (x.name, skip.name), plain)
    if bias is not None:
        weight = lowering.vector(bias, x.width)
        lowering.emit("add", f"{node.name}/add_bias", (plain, weight), total)
    summed = Rows(total, x.width)
    lowering.bind(total, summed)
    if node.output():
        _emit_norm(lowering, node, summed, 2, None if rms else 3, rms=rms)


_NORM_ATTRS = {
    "axis": Attr(-1),
    "epsilon": Attr(_DEFAULT_EPSILON),
    "stash_type": Attr(1, (1,)),
}
_SKIP_ATTRS = {"epsilon": Attr(_SKIP_EPSILON)}
_SKIP_OUTPUTS = ("y", "", "", "sum")
RULES = (
    Rule("", "LayerNormalization", _norm, ("x", "scale", "bias?"), _NORM_ATTRS),
    Rule("", "SimplifiedLayerNormalization", _norm, ("x", "scale"), _NORM_ATTRS),
    Rule("", "RMSNormalization", _norm, ("x", "scale"), _NORM_ATTRS),
    Rule(
        "com.microsoft",
        "SkipSimplifiedLayerNormalization",
        _skip_norm,
        ("x", "skip", "gamma", "bias?"),
        _SKIP_ATTRS,
        _SKIP_OUTPUTS,
    ),
    Rule(
        "com.microsoft",
        "SkipLayerNormalization",
        _skip_norm,
        ("x", "skip", "gamma", "beta?", "bias?"),
        _SKIP_ATTRS,
        _SKIP_OUTPUTS,
    ),
)
