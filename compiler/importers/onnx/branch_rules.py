"""If on the length of the sequence: tables of angles for short and for long ones (longrope).

The exporter's file chooses anew in every round, by the tokens so far, so that a sequence that
grows past the limit has keys of both kinds in its cache. We choose once, for the context that the
plan is compiled for: the short tables where they suffice, which is what the file does too, else
the long ones for everything. Sources: ONNX If, Greater, Less; ONNX Runtime GenAI's builder.
"""

from __future__ import annotations

import onnx_ir

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.operands import TOTAL, Affine, Ints, LengthTest, Unknown


def _compare(lowering: Lowering, node: OnnxNode) -> None:
    """`tokens > limit` in its eight spellings."""
    sides = [operand for operand in node.inputs if isinstance(operand, Ints)]
    flat = [side.values.reshape(-1) for side in sides]
    if len(flat) != 2 or any(len(values) != 1 for values in flat):
        raise ModelError("a comparison of something that is no size")
    first, second = flat[0][0], flat[1][0]
    greater = node.op_type.startswith("Greater")
    with_equal = node.op_type.endswith("OrEqual")
    if second == TOTAL:
        first, second, greater = second, first, not greater
    if first != TOTAL or not isinstance(second, Affine) or not second.is_constant:
        raise ModelError("a comparison other than the length of the sequence with a number")
    # T >= n is T > n - 1; T < n is not (T > n - 1); T <= n is not (T > n).
    limit = second.constant - (with_equal if greater else not with_equal)
    lowering.bind(node.output(), LengthTest(limit, negated=not greater))


def _if(lowering: Lowering, node: OnnxNode) -> None:
    test = node.input(0)
    if not isinstance(test, LengthTest):
        raise ModelError("a condition other than the length of the sequence against a number")
    is_long = lowering.context is not None and lowering.context > test.limit
    body = node.attrs["then_branch" if is_long != test.negated else "else_branch"]
    if not is_long:
        lowering.length_limits.append(test.limit)
    assert lowering.lower_body is not None
    lowering.lower_body(body)
    for name, value in zip(node.outputs, body.outputs, strict=True):
        lowering.bind(name, lowering.operands.get(value.name or "", Unknown()))


_BRANCH = Attr(kind=onnx_ir.Graph, required=True)
RULES = (
    *(
        Rule("", op, _compare, ("a", "b"))
        for op in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    ),
    Rule("", "If", _if, ("condition",), {"then_branch": _BRANCH, "else_branch": _BRANCH}, ("*",)),
)
