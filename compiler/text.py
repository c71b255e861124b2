"""Graphs as text: stable and readable, for dumps, error notes, and tests that compare graphs."""

from __future__ import annotations

from atsc.compiler.ir import AttrValue, Graph, Node, TensorType


def print_graph(graph: Graph) -> str:
    """All of a graph but its constants' bytes; weights in the order in which nodes read them."""
    info = graph.info
    lines = [f"graph {info.name} vocab={info.vocab_size} context={info.context_length}"]
    lines += [f"in {value.name}: {value.type}" for value in graph.inputs]
    readers = graph.consumers()
    for name in (name for name in readers if name in graph.weights):
        weight = graph.weights[name]
        lines.append(f"weight {name}: {weight.format}{list(weight.shape)}")
    lines += [print_node(node, graph.values) for node in graph.nodes]
    lines += [f"out {value.name}: {value.type}" for value in graph.outputs]
    return "\n".join(lines) + "\n"


def print_node(node: Node, values: object = None) -> str:
    """One node in one line: `y: f32[M, 64] = linear(x, w) {accuracy_level=4}`."""
    types = values if isinstance(values, dict) else {}
    outputs = ", ".join(_typed(name, types.get(name)) for name in node.outputs)
    inputs = ", ".join(name or "_" for name in node.inputs)
    attrs = ", ".join(f"{key}={_print_attr(node.attrs[key])}" for key in sorted(node.attrs))
    return f"{outputs} = {node.op}({inputs})" + (f" {{{attrs}}}" if attrs else "")


def _typed(name: str, value_type: TensorType | None) -> str:
    if not name:
        return "_"
    return name if value_type is None else f"{name}: {value_type}"


def _print_attr(value: AttrValue) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
