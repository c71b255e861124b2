"""Rebuilding a graph after a rewrite: dead nodes out, types anew, unread weights dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atsc.compiler.invariants import infer_values
from atsc.compiler.ir import Graph, Node, Value, Weight


def rebuild(
    graph: Graph, nodes: Iterable[Node], weights: Mapping[str, Weight] | None = None
) -> Graph:
    """`graph` with other nodes, of which only those that the outputs need are kept."""
    live: set[str] = {value.name for value in graph.outputs}
    kept: list[Node] = []
    for node in reversed(list(nodes)):
        if live.intersection(filter(None, node.outputs)):
            outputs = tuple(name if name in live else "" for name in node.outputs)
            kept.append(node.replace(outputs=outputs))
            live.update(filter(None, node.inputs))
    kept.reverse()
    available = graph.weights if weights is None else weights
    used = {name: weight for name, weight in available.items() if name in live}
    values = infer_values(graph.inputs, kept, used)
    types = tuple(Value(value.name, values[value.name]) for value in graph.outputs)
    return graph.replace(nodes=tuple(kept), weights=used, values=values, outputs=types)


def int_attr(node: Node, name: str) -> int:
    """An attribute that is an integer by its operator's definition."""
    value = node.attrs[name]
    assert isinstance(value, int)
    return value


class Readers:
    """Who reads what in a graph, for patterns that need a value to have one reader."""

    def __init__(self, graph: Graph) -> None:
        self._readers = graph.consumers()
        self._outputs = {value.name for value in graph.outputs}
        self._producer = graph.producer()

    def producer(self, name: str) -> Node | None:
        """The node that computes a value; None for inputs and weights."""
        return self._producer.get(name)

    def only_reader(self, name: str) -> Node | None:
        """The one node that reads a value; None if there are more or it is an output."""
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def read_once(self, name: str) -> bool:
        """Whether exactly one node reads a value, once, and it is no output."""
        reader = self.only_reader(name)
        return reader is not None and reader.inputs.count(name) == 1
