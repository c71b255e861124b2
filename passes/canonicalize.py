"""canonicalize: one spelling for what exporters write in several ways.

sigmoid(x) * x, either order        -> activation silu
relu(x) * relu(x)                   -> activation relu2
act(gate) * x, either order         -> gated_activation
accuracy levels 0, 2 and 3          -> 1, float inputs (0 leaves the choice to us, 2 and 3 ask
                                       for at least half floats)
"""

from __future__ import annotations

from dataclasses import dataclass

from atsc.compiler.ir import Graph, Node
from atsc.passes.rewrite import Readers, rebuild

_GATES = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh")


@dataclass(frozen=True)
class Canonicalize:
    """Rewrites to canonical spellings; see the module."""

    name: str = "canonicalize"

    def run(self, graph: Graph) -> Graph:
        """The graph in canonical spelling."""
        graph = rebuild(graph, [_plain_level(graph, node) for node in graph.nodes])
        for rewrite in (_activation, _gate):
            readers = Readers(graph)
            graph = rebuild(graph, [rewrite(readers, node) or node for node in graph.nodes])
        return graph


def _plain_level(graph: Graph, node: Node) -> Node:
    if node.op != "linear" or "accuracy_level" not in node.attrs:
        return node
    return node.with_attrs(accuracy_level=4 if node.attrs["accuracy_level"] == 4 else 1)


def _activation(readers: Readers, node: Node) -> Node | None:
    """The activation that a product of x and a function of x is."""
    if node.op != "mul":
        return None
    for x, other in (node.inputs, node.inputs[::-1]):
        maker = readers.producer(other)
        if maker is None or maker.op != "activation":
            continue
        if maker.attrs["kind"] == "sigmoid" and maker.inputs == (x,):
            return node.replace(op="activation", inputs=(x,), attrs={"kind": "silu"})
        if maker.attrs["kind"] == "relu" and other == x:
            return node.replace(op="activation", inputs=maker.inputs, attrs={"kind": "relu2"})
    return None


def _gate(readers: Readers, node: Node) -> Node | None:
    """A product with an activation that nothing else reads."""
    if node.op != "mul":
        return None
    for gated, x in (node.inputs, node.inputs[::-1]):
        maker = readers.producer(gated)
        if maker is None or maker.op != "activation" or not readers.read_once(gated):
            continue
        is_value = readers.producer(x) is not None
        if is_value and maker.attrs["kind"] in _GATES:
            attrs = {"kind": maker.attrs["kind"]}
            return node.replace(op="gated_activation", inputs=(*maker.inputs, x), attrs=attrs)
    return None
