from __future__ import annotations

from graphs import lines, rewritten

from atsc.passes.quantize_activations import QuantizeActivations

WEIGHTS = """
    weight table: f32[7, 32]
    weight gamma: f32[32]
    weight a: int4b32[32, 32]
    weight b: int8b16[32, 32]
    x = embed(ids, table)
    n = rms_norm(x, gamma) {eps=0.1}
"""
CLOSE = 0.05
"""int8 activations change results by a few percent; level 4 asks for them."""


def test_one_quantisation_in_the_norm_serves_all_readers() -> None:
    text = f"""{WEIGHTS}
        p = linear(n, a) {{accuracy_level=4}}
        q = linear(n, b) {{accuracy_level=4}}
        y = add(p, q)
        out y
    """
    assert rewritten(QuantizeActivations(), text, tolerance=CLOSE) == lines("""
        x = embed(ids, table)
        _, n/q8 = rms_norm(x, gamma) {eps=0.1}
        p = linear(n/q8, a) {accuracy_level=4}
        q = linear(n/q8, b) {accuracy_level=4}
        y = add(p, q)
    """)


def test_the_float_output_stays_for_other_readers() -> None:
    text = f"""{WEIGHTS}
        p = linear(n, a) {{accuracy_level=4}}
        q = linear(n, b) {{accuracy_level=1}}
        y = add(p, q)
        out y
    """
    result = rewritten(QuantizeActivations(), text, tolerance=CLOSE)
    assert "n, n/q8 = rms_norm" in result
    assert "q = linear(n, b) {accuracy_level=1}" in result


def test_other_producers_get_one_quantize_node() -> None:
    text = f"""{WEIGHTS}
        s = add(x, n)
        p = linear(s, a) {{accuracy_level=4}}
        q = linear(s, b, _, p) {{accuracy_level=4, activation=silu}}
        y = add(q, s)
        out y
    """
    assert rewritten(QuantizeActivations(), text, tolerance=CLOSE) == lines("""
        x = embed(ids, table)
        n = rms_norm(x, gamma) {eps=0.1}
        s = add(x, n)
        s/q8 = quantize(s)
        p = linear(s/q8, a) {accuracy_level=4}
        q = linear(s/q8, b, _, p) {accuracy_level=4, activation=silu}
        y = add(q, s)
    """)


def test_float_weights_keep_float_inputs() -> None:
    text = f"""{WEIGHTS}
        y = linear(n, a) {{accuracy_level=4}}
        out y
    """.replace("int4b32[", "f16[").replace("weight b: int8b16[32, 32]", "")
    assert rewritten(QuantizeActivations(), text).endswith("y = linear(n, a) {accuracy_level=4}")
