from __future__ import annotations

import pytest
from graphs import lines, parse_graph, rewritten

from atsc.compiler.errors import ModelError
from atsc.compiler.weights import dequantize
from atsc.passes.columns import SplitColumns

GATE_UP = """
    weight table: f32[7, 32]
    weight gate_up: FORMAT[8, 32]
    weight bias: f32[8]
    x = embed(ids, table)
    p = linear(x, gate_up, bias)
    g = columns(p) {start=0, stop=3}
    u = columns(p) {start=3, stop=6}
    y = mul(g, u)
    out y
"""


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16", "int4b32", "int8b16"])
def test_a_projection_is_split_by_rows(fmt: str) -> None:
    text = GATE_UP.replace("FORMAT", fmt)
    assert rewritten(SplitColumns(), text) == lines("""
        x = embed(ids, table)
        g = linear(x, gate_up[0:3], bias[0:3])
        u = linear(x, gate_up[3:6], bias[3:6])
        y = mul(g, u)
    """)
    before, after = parse_graph(text), SplitColumns().run(parse_graph(text))
    whole, part = before.weights["gate_up"], after.weights["gate_up[3:6]"]
    assert part.format == whole.format
    assert (dequantize(part) == dequantize(whole)[3:6]).all()


def test_columns_of_columns_and_of_a_sum() -> None:
    text = """
        weight table: f32[7, 32]
        weight w: f32[8, 32]
        weight row: f32[8]
        weight one: f32[1]
        x = embed(ids, table)
        p = linear(x, w)
        b = add(p, row)
        s = mul(b, one)
        y = columns(s) {start=2, stop=5}
        out y
    """
    assert rewritten(SplitColumns(), text) == lines("""
        x = embed(ids, table)
        y/plain/plain = linear(x, w[2:5])
        y/plain = add(y/plain/plain, row[2:5])
        y = mul(y/plain, one)
    """)


def test_columns_of_something_else_are_refused() -> None:
    text = """
        weight table: f32[7, 32]
        x = embed(ids, table)
        y = columns(x) {start=0, stop=3}
        out y
    """
    message = r"node y: columns of the output of embed \(x\) are not supported"
    with pytest.raises(ModelError, match=message):
        SplitColumns().run(parse_graph(text))
