from __future__ import annotations

import pytest
from graphs import lines, rewritten

from atsc.passes.canonicalize import Canonicalize

HEAD = """
    weight table: f32[7, 8]
    weight gate: f32[8, 8]
    weight up: f32[8, 8]
    x = embed(ids, table)
"""


@pytest.mark.parametrize("product", ["mul(x, s)", "mul(s, x)"])
def test_sigmoid_times_x_is_silu(product: str) -> None:
    text = """
        weight table: f32[7, 8]
        x = embed(ids, table)
        s = activation(x) {kind=sigmoid}
        y = PRODUCT
        out y
    """.replace("PRODUCT", product)
    assert rewritten(Canonicalize(), text) == lines("""
        x = embed(ids, table)
        y = activation(x) {kind=silu}
    """)


@pytest.mark.parametrize("product", ["mul(a, u)", "mul(u, a)"])
@pytest.mark.parametrize("kind", ["gelu_tanh", "silu", "relu"])
def test_gates(product: str, kind: str) -> None:
    text = f"""{HEAD}
        g = linear(x, gate)
        u = linear(x, up)
        a = activation(g) {{kind={kind}}}
        y = {product}
        out y
    """
    assert rewritten(Canonicalize(), text) == lines(f"""
        x = embed(ids, table)
        g = linear(x, gate)
        u = linear(x, up)
        y = gated_activation(g, u) {{kind={kind}}}
    """)


def test_silu_as_a_gate_needs_both_rewrites() -> None:
    text = f"""{HEAD}
        g = linear(x, gate)
        s = activation(g) {{kind=sigmoid}}
        a = mul(g, s)
        u = linear(x, up)
        y = mul(a, u)
        out y
    """
    assert rewritten(Canonicalize(), text).endswith("y = gated_activation(g, u) {kind=silu}")


def test_squared_relu() -> None:
    text = """
        weight table: f32[7, 8]
        x = embed(ids, table)
        r = activation(x) {kind=relu}
        y = mul(r, r)
        out y
    """
    assert rewritten(Canonicalize(), text).endswith("y = activation(x) {kind=relu2}")


def test_an_activation_with_two_readers_stays() -> None:
    text = f"""{HEAD}
        g = linear(x, gate)
        u = linear(x, up)
        a = activation(g) {{kind=gelu}}
        p = mul(a, u)
        y = add(p, a)
        out y
    """
    assert "p = mul(a, u)" in rewritten(Canonicalize(), text)


def test_a_product_with_a_constant_is_no_gate() -> None:
    text = """
        weight table: f32[7, 8]
        weight row: f32[8]
        x = embed(ids, table)
        a = activation(x) {kind=tanh}
        y = mul(a, row)
        out y
    """
    assert "y = mul(a, row)" in rewritten(Canonicalize(), text)


@pytest.mark.parametrize(("found", "level"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 4)])
def test_accuracy_levels(found: int, level: int) -> None:
    text = f"""
        weight table: f32[7, 32]
        weight w: int4b32[8, 32]
        x = embed(ids, table)
        y = linear(x, w) {{accuracy_level={found}}}
        out y
    """
    assert rewritten(Canonicalize(), text).endswith(f"{{accuracy_level={level}}}")


def test_dead_nodes_and_their_weights_go() -> None:
    text = f"""{HEAD}
        unread = linear(x, gate)
        y = linear(x, up)
        out y
    """
    assert "unread" not in rewritten(Canonicalize(), text)
