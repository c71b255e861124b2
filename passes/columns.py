"""split-columns: columns of a projection's output become the output of some rows of its weight.

This is what is left of Split after fuse-attention: a fused gate_up projection, or q, k, v that an
attention cannot take packed. The new weights are lazy slices of the old one's parts, along N.
"""

from __future__ import annotations

from dataclasses import dataclass

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import ArraySource, Graph, Node, Weight
from atsc.passes.rewrite import Readers, int_attr, rebuild

_POINTWISE = ("add", "sub", "mul", "div")


@dataclass(frozen=True)
class SplitColumns:
    """Removes every `columns` node; see the module."""

    name: str = "split-columns"

    def run(self, graph: Graph) -> Graph:
        """The graph without `columns`.

        Raises:
            ModelError: columns of something that is no projection, perhaps with a bias, and no
                sum or product of such (adapters beside a projection).
        """
        weights = dict(graph.weights)
        while any(node.op == "columns" for node in graph.nodes):
            readers, nodes = Readers(graph), list[Node]()
            for node in graph.nodes:
                nodes += _split(readers, node, weights) if node.op == "columns" else [node]
            graph = rebuild(graph, nodes, weights)
        return graph


def _split(readers: Readers, node: Node, weights: dict[str, Weight]) -> list[Node]:
    """The node or nodes that compute these columns; a `columns` among them is split next."""
    maker = readers.producer(node.inputs[0])
    start, stop = int_attr(node, "start"), int_attr(node, "stop")
    if maker is not None and maker.op == "linear" and len(maker.inputs) <= 3:
        names = [_slice(weights, name, start, stop) for name in maker.inputs[1:]]
        return [
            maker.replace(name=node.name, inputs=(maker.inputs[0], *names), outputs=node.outputs)
        ]
    if maker is not None and maker.op in _POINTWISE and maker.inputs[1] in weights:
        constant, part = maker.inputs[1], f"{node.name}/plain"
        if weights[constant].shape != (1,):
            constant = _slice(weights, constant, start, stop)
        columns = node.replace(name=part, inputs=maker.inputs[:1], outputs=(part,))
        return [
            columns,
            maker.replace(name=node.name, inputs=(part, constant), outputs=node.outputs),
        ]
    if maker is not None and maker.op in _POINTWISE and maker.inputs[0] not in weights:
        parts = tuple(f"{node.name}/{k}" for k in range(2))
        halves = [
            node.replace(name=part, inputs=(whole,), outputs=(part,))
            for part, whole in zip(parts, maker.inputs, strict=True)
        ]
        return [*halves, maker.replace(name=node.name, inputs=parts, outputs=node.outputs)]
    made_by = "an input" if maker is None else f"{maker.op} ({maker.name})"
    raise ModelError(
        f"node {node.name}: columns of the output of {made_by} are not supported, "
        "only of a projection's"
    )


def _slice(weights: dict[str, Weight], name: str, start: int, stop: int) -> str:
    if not name:
        return ""
    weight = weights[name]
    sliced = f"{name}[{start}:{stop}]"
    weights[sliced] = Weight(
        sliced,
        (stop - start, *weight.shape[1:]),
        weight.format,
        {part: _rows(source, start, stop) for part, source in weight.parts.items()},
    )
    return sliced


def _rows(source: ArraySource, start: int, stop: int) -> ArraySource:
    shape = (stop - start, *source.shape[1:])
    return ArraySource(source.dtype, shape, lambda: source.read()[start:stop])
