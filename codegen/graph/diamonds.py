"""Values that several nodes read and that need no memory: all their readers end in one kernel."""

from __future__ import annotations

from collections.abc import Mapping

from atsc.compiler.tensor_graph import TensorGraph

_MOST_NODES = 24
"""From a value's first reader on, within which its readers must meet."""
FINISHING = frozenset(
    {
        *(
            ("", name)
            for name in (
                *(
                    "Abs",
                    "Neg",
                    "Exp",
                    "Log",
                    "Sqrt",
                    "Reciprocal",
                    "Floor",
                    "Ceil",
                    "Round",
                    "Erf",
                ),
                *("Tanh", "Sigmoid", "Relu", "Sign", "Add", "Sub", "Mul", "Div", "Min", "Max"),
                *("Sum", "PRelu", "Clip", "Pow", "Mean", "Identity", "Cast", "Where", "Dropout"),
                *("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"),
                *("BatchNormalization", "Reshape", "Flatten", "Squeeze", "Unsqueeze"),
                *("QuantizeLinear", "DequantizeLinear"),
            )
        ),
        *(
            ("com.microsoft", name)
            for name in (
                *("QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu"),
                *("Gelu", "BiasGelu"),
            )
        ),
    }
)
"""Operators whose rules take a product of matrices that is not stored: products.py."""


def meeting_values(graph: TensorGraph) -> frozenset[str]:
    """Values with several readers that all end in one elementwise value, as x * sigmoid(x) does."""
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        for name in node.reads:
            readers.setdefault(name, []).append(place)
    return frozenset(
        name
        for name, places in readers.items()
        if len(places) > 1 and name not in graph.outputs and _meets(graph, readers, name)
    )


def _meets(graph: TensorGraph, readers: Mapping[str, list[int]], start: str) -> bool:
    waiting = {start: len(readers[start])}
    place = min(readers[start])
    for node in graph.nodes[place : place + _MOST_NODES]:
        own = [name for name in node.inputs if name in waiting]
        if not own:
            continue
        if (node.domain, node.op) not in FINISHING or len(node.outputs) != 1:
            return False
        for name in own:
            waiting[name] -= 1
            if not waiting[name]:
                del waiting[name]
        made = node.outputs[0]
        if not waiting:
            return True
        if made in graph.outputs or not readers.get(made):
            return False
        waiting[made] = len(readers[made])
    return False
