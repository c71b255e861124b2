"""fuse-linear: pointwise neighbours go into the linear that makes their input.

    add(linear, weight [N])             -> bias
    gated_activation(gate, linear)      -> gate and activation
    activation(linear)                  -> activation
    add(residual, linear), either order -> residual

Each only where nothing else reads the linear's output, in the order in which linear applies them. A
fused linear stands where its neighbour stood, so that everything it reads is computed before it.
Never are two linears merged: each big weight stays a unit of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from atsc.compiler.ir import Graph, Node
from atsc.passes.rewrite import Readers, rebuild

_BIAS, _GATE, _RESIDUAL = 2, 3, 4


@dataclass(frozen=True)
class FuseLinear:
    """Fuses bias, gate, activation and residual; see the module."""

    name: str = "fuse-linear"

    def run(self, graph: Graph) -> Graph:
        """The graph with fewer pointwise nodes."""
        for rewrite in (_bias, _gate, _activation, _residual):
            readers = Readers(graph)
            nodes = [rewrite(graph, readers, node) or node for node in graph.nodes]
            graph = rebuild(graph, nodes)
        return graph


def _linear(readers: Readers, name: str, *, free_from: int) -> Node | None:
    """The linear that makes `name` for one reader and has nothing in slots from `free_from` on."""
    maker = readers.producer(name)
    if maker is None or maker.op != "linear" or not readers.read_once(name):
        return None
    late = any(maker.inputs[free_from:])
    active = maker.attrs.get("activation", "none") != "none" and free_from <= _GATE
    return None if late or active else maker


def _fused(linear: Node, node: Node, slot: int, name: str) -> Node:
    inputs = [*linear.inputs, *[""] * 5][:5]
    inputs[slot] = name or inputs[slot]
    while not inputs[-1]:
        inputs.pop()
    return linear.replace(inputs=tuple(inputs), outputs=node.outputs)


def _bias(graph: Graph, readers: Readers, node: Node) -> Node | None:
    if node.op != "add" or node.inputs[1] not in graph.weights:
        return None
    linear = _linear(readers, node.inputs[0], free_from=_BIAS)
    if linear is None:
        return None
    outputs = graph.weights[linear.inputs[1]].shape[0]
    if graph.weights[node.inputs[1]].shape != (outputs,):
        return None
    return _fused(linear, node, _BIAS, node.inputs[1])


def _gate(graph: Graph, readers: Readers, node: Node) -> Node | None:
    if node.op != "gated_activation":
        return None
    gate, x = node.inputs
    linear = _linear(readers, x, free_from=_GATE)
    if linear is None or gate == x:
        return None
    return _fused(linear, node, _GATE, gate).with_attrs(activation=node.attrs["kind"])


def _activation(graph: Graph, readers: Readers, node: Node) -> Node | None:
    if node.op != "activation":
        return None
    linear = _linear(readers, node.inputs[0], free_from=_GATE)
    if linear is None:
        return None
    return _fused(linear, node, _GATE, "").with_attrs(activation=node.attrs["kind"])


def _residual(graph: Graph, readers: Readers, node: Node) -> Node | None:
    if node.op != "add" or node.inputs[1] in graph.weights or len(set(node.inputs)) < 2:
        return None
    order = {made.outputs[0]: i for i, made in enumerate(graph.nodes)}
    candidates = []
    for x, other in (node.inputs, node.inputs[::-1]):
        linear = _linear(readers, x, free_from=_RESIDUAL)
        if linear is not None:
            candidates.append((order[x], linear, other))
    if not candidates:
        return None
    _, linear, other = max(candidates, key=lambda found: found[0])
    return _fused(linear, node, _RESIDUAL, other)
