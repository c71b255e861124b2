from __future__ import annotations

from collections.abc import Callable

import pytest
from graphs import parse_graph

from atsc.compiler.errors import ModelError
from atsc.compiler.invariants import check_graph
from atsc.compiler.ir import DType, Graph, Node, TensorType, Value

GRAPH = parse_graph("""
    weight table: int4b16[7, 32]
    weight w: f32[24, 32]
    x = embed(ids, table)
    a = linear(x, w)
    y = attention(a) {layer=0, num_heads=1, kv_heads=1, head_size=8, scale=1}
    out y
""")


def with_node(index: int, **changes: object) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        nodes = list(graph.nodes)
        nodes[index] = nodes[index].replace(**changes)
        return graph.replace(nodes=tuple(nodes))

    return change


def extra_node(graph: Graph) -> Graph:
    return graph.replace(nodes=(*graph.nodes, Node("quantize", "a", ("a",), ("b",))))


def wrong_type(graph: Graph) -> Graph:
    return graph.replace(values={**graph.values, "a": TensorType(DType.F32, ("M", 9))})


def wrong_output(graph: Graph) -> Graph:
    return graph.replace(outputs=(Value("z", TensorType(DType.F32, ("M", 8))),))


def no_scales(graph: Graph) -> Graph:
    table = graph.weights["table"]
    parts = {"codes": table.parts["codes"]}
    damaged = type(table)(table.name, table.shape, table.format, parts)
    return graph.replace(weights={**graph.weights, "table": damaged})


def unread_weight(graph: Graph) -> Graph:
    weight = graph.weights["w"]
    other = type(weight)("other", weight.shape, weight.format, weight.parts)
    return graph.replace(weights={**graph.weights, "other": other})


CASES: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "name": (extra_node, "two nodes are named a"),
    "order": (lambda g: g.replace(nodes=g.nodes[::-1]), "node y: reads a, which is not computed"),
    "operator": (with_node(1, op="conv"), "node a: conv is no canonical operator"),
    "attribute": (with_node(1, attrs={"alpha": 1}), "operator linear has no attribute alpha"),
    "missing attribute": (with_node(2, attrs={}), "operator attention needs attribute layer"),
    "missing input": (with_node(1, inputs=("x",)), "node a: input weight of linear is missing"),
    "slots": (with_node(0, inputs=("ids", "table", "x")), "node x: more inputs or outputs than"),
    "kind": (with_node(1, inputs=("x", "x")), "node a: a weight where linear wants a value, or"),
    "width": (with_node(1, inputs=("x", "table")), r"node y: rows of \[7\] for q, k, v of \[24\]"),
    "twice": (with_node(1, outputs=("x",)), "node a: its output x exists already"),
    "no output": (with_node(1, outputs=("",)), "node a: has no output"),
    "type": (wrong_type, r"value a: is f32\[M, 24\], the graph says f32\[M, 9\]"),
    "output": (wrong_output, "output z: is None"),
    "cache": (
        with_node(2, attrs={**GRAPH.nodes[2].attrs, "layer": 1}), r"number their caches \[1\]"
    ),
    "part": (no_scales, r"weight table: part scales has shape nothing, expected \(7, 2\)"),
    "unread": (unread_weight, "weight other is read by no node"),
}  # fmt: skip


def test_a_valid_graph() -> None:
    check_graph(GRAPH)


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(case: str) -> None:
    change, message = CASES[case]
    with pytest.raises(ModelError, match=message):
        check_graph(change(GRAPH))
