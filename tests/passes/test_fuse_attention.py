from __future__ import annotations

import pytest
from graphs import lines, rewritten

from atsc.passes.fuse_attention import FuseAttention

ATTRS = "{layer=0, num_heads=2, kv_heads=1, head_size=8, scale=0.5}"
WEIGHTS = """
    weight table: f32[7, 16]
    weight qkv: f32[32, 16]
    weight cos: f32[9, 4]
    weight sin: f32[9, 4]
"""
START = f"""{WEIGHTS}
    x = embed(ids, table)
    p = linear(x, qkv)
    q = columns(p) {{start=0, stop=16}}
    k = columns(p) {{start=16, stop=24}}
    v = columns(p) {{start=24, stop=32}}
"""
NORMS = """
    weight qn: f32[8]
    weight kn: f32[8]
"""


def attention_of(text: str) -> str:
    return rewritten(FuseAttention(), text).splitlines()[-1]


def test_packed_projection() -> None:
    text = f"""{START}
        y = attention(q, k, v, cos, sin) {ATTRS}
        out y
    """
    assert rewritten(FuseAttention(), text) == lines("""
        x = embed(ids, table)
        p = linear(x, qkv)
        y = attention(p, _, _, cos, sin) \
{head_size=8, kv_heads=1, layer=0, num_heads=2, scale=0.5}
    """)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_then_norm_then_packing(interleaved: bool) -> None:
    rope = f"{{head_size=8, interleaved={interleaved}}}"
    text = f"""{NORMS}{START}
        q1 = rms_norm(q, qn) {{eps=0.25, group=8}}
        k1 = rms_norm(k, kn) {{eps=0.25}}
        q2 = rope(q1, cos, sin) {rope}
        k2 = rope(k1, cos, sin) {rope}
        y = attention(q2, k2, v) {ATTRS}
        out y
    """
    attrs = (
        f"head_size=8, interleaved={interleaved}, kv_heads=1, layer=0, num_heads=2, "
        "qk_norm_eps=0.25, scale=0.5"
    )
    assert attention_of(text) == f"y = attention(p, _, _, cos, sin, qn, kn) {{{attrs}}}"


def test_a_norm_after_rope_keeps_rope_outside() -> None:
    """HunYuan's order; attention norms before it turns."""
    text = f"""{NORMS}{START}
        q1 = rope(q, cos, sin) {{head_size=8}}
        k1 = rope(k, cos, sin) {{head_size=8}}
        q2 = rms_norm(q1, qn) {{eps=0.25, group=8}}
        k2 = rms_norm(k1, kn) {{eps=0.25, group=8}}
        y = attention(q2, k2, v) {ATTRS}
        out y
    """
    assert attention_of(text).startswith("y = attention(q1, k1, v, _, _, qn, kn)")


REFUSED = {
    "norms of two kinds": """
        q1 = rms_norm(q, qn) {eps=0.25, group=8}
        k1 = rms_norm(k, kn) {eps=0.5, group=8}
    """,
    "a norm of the whole row": """
        q1 = rms_norm(q, wide) {eps=0.25}
        k1 = rms_norm(k, kn) {eps=0.25, group=8}
    """,
    "a norm of q alone": """
        q1 = rms_norm(q, qn) {eps=0.25, group=8}
        k1 = mul(k, kn)
    """,
    "rope by other angles": """
        q1 = rope(q, cos, sin) {head_size=8}
        k1 = rope(k, sin, cos) {head_size=8}
    """,
    "rope of other heads": """
        q1 = rope(q, cos, sin) {head_size=16}
        k1 = rope(k, cos, sin) {head_size=8}
    """,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_attention_cannot_take_stays(case: str) -> None:
    text = f"""{START}{REFUSED[case]}
        y = attention(q1, k1, v) {ATTRS}
        out y
    """
    weights = {"wide": "16", "qn": "8", "kn": "8"}
    text = "\n".join(f"weight {n}: f32[{s}]" for n, s in weights.items() if f" {n})" in text) + text
    for name in ("cos", "sin"):
        if f" {name}" not in REFUSED[case]:
            text = text.replace(f"weight {name}: f32[9, 4]", "")
    assert attention_of(text).startswith("y = attention(q1, k1, v) ")


def test_columns_in_another_order_are_not_packed() -> None:
    text = f"""{START}
        y = attention(q, v, k, cos, sin) {ATTRS}
        out y
    """
    assert attention_of(text).startswith("y = attention(q, v, k, cos, sin)")


def test_a_value_with_another_reader_stays() -> None:
    text = f"""{START}
        q1 = rope(q, cos, sin) {{head_size=8}}
        k1 = rope(k, cos, sin) {{head_size=8}}
        a = attention(q1, k1, v) {ATTRS}
        y = add(a, q1)
        out y
    """
    assert "a = attention(q1, k1, v)" in rewritten(FuseAttention(), text)
