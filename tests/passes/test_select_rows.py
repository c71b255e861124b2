from __future__ import annotations

import pytest
from graphs import lines, parse_graph, rewritten

from atsc.compiler.errors import ModelError
from atsc.passes.select_rows import SelectRows

START = """
    weight table: f32[7, 8]
    weight gamma: f32[8]
    weight head: f32[7, 8]
    weight cap: f32[1]
    x = embed(ids, table)
    x2 = mul(x, cap)
    s = add(x, x2)
"""


def test_before_the_final_norm() -> None:
    text = f"""{START}
        n = rms_norm(s, gamma) {{eps=0.1}}
        h = linear(n, head)
        d = div(h, cap)
        t = activation(d) {{kind=tanh}}
        y = mul(t, cap)
        out y
    """
    assert rewritten(SelectRows(), text) == lines("""
        x = embed(ids, table)
        x2 = mul(x, cap)
        s = add(x, x2)
        s/logit_rows = select_rows(s)
        n = rms_norm(s/logit_rows, gamma) {eps=0.1}
        h = linear(n, head)
        d = div(h, cap)
        t = activation(d) {kind=tanh}
        y = mul(t, cap)
    """)


def test_output_has_the_wanted_rows() -> None:
    graph = SelectRows().run(
        parse_graph(f"{START}\ny = linear(s, head)\nout y".replace("weight gamma: f32[8]", ""))
    )
    assert str(graph.outputs[0].type) == "f32[R, 7]"


def test_before_the_head_where_something_else_reads_the_norm() -> None:
    text = f"""{START}
        n = rms_norm(s, gamma) {{eps=0.1}}
        a = linear(n, head)
        b = linear(n, head)
        y = add(a, b)
        out y
    """
    with pytest.raises(ModelError, match="output y is not computed by a head"):
        SelectRows().run(parse_graph(text))


def test_it_runs_once() -> None:
    text = f"""{START}
        n = layer_norm(s, gamma) {{eps=0.1}}
        y = linear(n, head)
        out y
    """
    once = SelectRows().run(parse_graph(text))
    assert SelectRows().run(once) is once
    assert [node.op for node in once.nodes].count("select_rows") == 1
