"""fuse-norm: a residual addition after an RMSNorm goes into the norm (Gemma's post-norms)."""

from __future__ import annotations

from dataclasses import dataclass

from atsc.compiler.ir import Graph, Node
from atsc.passes.rewrite import Readers, rebuild


@dataclass(frozen=True)
class FuseNormResidual:
    """add(residual, rms_norm(x)), either order -> rms_norm with a residual."""

    name: str = "fuse-norm"

    def run(self, graph: Graph) -> Graph:
        """The graph with fewer additions."""
        readers = Readers(graph)
        return rebuild(graph, [_fuse(graph, readers, node) or node for node in graph.nodes])


def _fuse(graph: Graph, readers: Readers, node: Node) -> Node | None:
    if node.op != "add" or node.inputs[1] in graph.weights:
        return None
    for x, residual in (node.inputs, node.inputs[::-1]):
        norm = readers.producer(x)
        if norm is None or norm.op != "rms_norm" or not readers.read_once(x):
            continue
        if len(norm.inputs) == 2 and not norm.attrs.get("group"):
            return norm.replace(inputs=(*norm.inputs, residual), outputs=node.outputs)
    return None
