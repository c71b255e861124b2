from __future__ import annotations

from graphs import parse_graph

from atsc.compiler.ir import Node
from atsc.compiler.text import print_graph, print_node


def test_a_graph() -> None:
    graph = parse_graph("""
        weight head: int4b16[7, 32]
        weight gamma: f16[32]
        x = embed(ids, head)
        _, n = rms_norm(x, gamma) {group=0, eps=1e-05}
        y = linear(n, head) {accuracy_level=4}
        out y
    """)
    assert print_graph(graph) == (
        "graph test vocab=7 context=64\n"
        "in ids: i32[M]\n"
        "weight head: int4b16[7, 32]\n"
        "weight gamma: f16[32]\n"
        "x: f32[M, 32] = embed(ids, head)\n"
        "_, n: q8[M, 32] = rms_norm(x, gamma) {eps=1e-05, group=0}\n"
        "y: f32[M, 7] = linear(n, head) {accuracy_level=4}\n"
        "out y: f32[M, 7]\n"
    )


def test_a_node_without_types() -> None:
    node = Node("linear", "n", ("x", "w", "", "g"), ("y",), {"activation": "silu"})
    assert print_node(node) == "y = linear(x, w, _, g) {activation=silu}"
