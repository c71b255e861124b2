"""select-rows: only the rows whose logits are wanted go through the final norm and the head."""

from __future__ import annotations

from dataclasses import dataclass

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import Graph, Node
from atsc.passes.rewrite import Readers, rebuild

_ROW_BY_ROW = ("linear", "activation", "add", "sub", "mul", "div")
_NORMS = ("rms_norm", "layer_norm")
_SUFFIX = "/logit_rows"


@dataclass(frozen=True)
class SelectRows:
    """Inserts `select_rows` before the final norm, or before the head where there is none."""

    name: str = "select-rows"

    def run(self, graph: Graph) -> Graph:
        """The graph with one `select_rows`; its output has R rows instead of M.

        Raises:
            ModelError: the output does not come from a head.
        """
        if any(node.op == "select_rows" for node in graph.nodes):
            return graph
        first = _first_of_head(graph)
        x = first.inputs[0]
        nodes: list[Node] = []
        for node in graph.nodes:
            if node is first:
                nodes.append(Node("select_rows", f"{x}{_SUFFIX}", (x,), (f"{x}{_SUFFIX}",)))
                node = node.replace(inputs=(f"{x}{_SUFFIX}", *node.inputs[1:]))
            nodes.append(node)
        return rebuild(graph, nodes)


def _first_of_head(graph: Graph) -> Node:
    """The final norm, else the last linear, on the one path to the logits."""
    readers = Readers(graph)
    name = graph.outputs[0].name
    head: Node | None = None
    while (node := readers.producer(name)) is not None:
        values = [i for i in node.inputs if i and i not in graph.weights]
        final = name == graph.outputs[0].name
        if node.op not in (*_ROW_BY_ROW, *_NORMS) or len(values) != 1:
            break
        if not final and not readers.read_once(name):
            break
        if node.op == "linear" and head is not None:
            break
        if node.op in _NORMS:
            return node
        head = node if node.op == "linear" else head
        name = values[0]
    if head is None:
        raise ModelError(f"output {graph.outputs[0].name} is not computed by a head")
    return head
