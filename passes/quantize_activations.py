"""quantize-activations: inputs of level-4 linears become int8 once, however many linears read them.

The quantised value comes from the norm that makes the input, as its second output, or from a
`quantize` node before the first reader. Arithmetic belongs to the unit: the same on every backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from atsc.compiler.ir import BlockFormat, DType, Graph, Node
from atsc.passes.rewrite import rebuild

_INT8_LEVEL = 4
_NORMS = ("rms_norm", "layer_norm")
_SUFFIX = "/q8"


@dataclass(frozen=True)
class QuantizeActivations:
    """Feeds linears of accuracy level 4 with Q8 values; see the module."""

    name: str = "quantize-activations"

    def run(self, graph: Graph) -> Graph:
        """The graph with explicit quantisation."""
        wanted = {node.inputs[0] for node in graph.nodes if _reads_int8(graph, node)}
        done: set[str] = set()
        nodes: list[Node] = []
        for node in graph.nodes:
            if _reads_int8(graph, node):
                x = node.inputs[0]
                if x not in done:
                    nodes.append(Node("quantize", f"{x}{_SUFFIX}", (x,), (f"{x}{_SUFFIX}",)))
                    done.add(x)
                node = node.replace(inputs=(f"{x}{_SUFFIX}", *node.inputs[1:]))
            elif node.op in _NORMS and node.outputs[0] in wanted:
                y = node.outputs[0]
                node = node.replace(outputs=(y, f"{y}{_SUFFIX}"))
                done.add(y)
            nodes.append(node)
        return rebuild(graph, nodes)


def _reads_int8(graph: Graph, node: Node) -> bool:
    if node.op != "linear" or node.attrs.get("accuracy_level") != _INT8_LEVEL:
        return False
    is_float = graph.values[node.inputs[0]].dtype is DType.F32
    return is_float and isinstance(graph.weights[node.inputs[1]].format, BlockFormat)
