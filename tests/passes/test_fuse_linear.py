from __future__ import annotations

import pytest
from graphs import lines, rewritten

from atsc.passes.fuse_linear import FuseLinear

START = """
    weight table: f32[7, 8]
    weight w: f32[8, 8]
    weight up: f32[8, 8]
    weight row: f32[8]
    x = embed(ids, table)
    a = linear(x, w)
    u = linear(x, up)
"""


def _without_unread(text: str) -> str:
    """Drop what a case does not read: an unread weight is no valid graph."""
    kept = []
    for line in text.splitlines():
        name = line.strip().removeprefix("weight ").split(":")[0]
        if not line.strip().startswith("weight ") or text.count(f", {name})"):
            kept.append(line)
    return "\n".join(kept)


def fused(rest: str) -> str:
    return rewritten(FuseLinear(), _without_unread(f"{START}\n{rest}"))


def test_bias_gate_and_residual() -> None:
    assert fused("""
        b = add(u, row)
        g = gated_activation(a, b) {kind=silu}
        y = add(x, g)
        out y
    """) == lines("""
        x = embed(ids, table)
        a = linear(x, w)
        y = linear(x, up, row, a, x) {activation=silu}
    """)


def test_activation_and_residual() -> None:
    assert fused("""
        b = activation(u) {kind=relu}
        y = add(b, a)
        out y
    """).endswith("y = linear(x, up, _, _, a) {activation=relu}")


@pytest.mark.parametrize("order", ["a, u", "u, a"])
def test_of_two_linears_the_later_takes_the_other_as_residual(order: str) -> None:
    assert fused(f"y = add({order})\nout y") == lines("""
        x = embed(ids, table)
        a = linear(x, w)
        y = linear(x, up, _, _, a)
    """)


REFUSED = {
    "another reader": ("b = add(u, x)\ny = mul(b, u)\nout y", "b = add(u, x)"),
    "a residual before the activation": (
        "b = add(u, x)\ny = activation(b) {kind=relu}\nout y",
        "y = activation(b) {kind=relu}",
    ),
    "a bias after the activation": (
        "b = activation(u) {kind=relu}\ny = add(b, row)\nout y",
        "y = add(b, row)",
    ),
    "a gate by itself": (
        "y = gated_activation(u, u) {kind=silu}\nout y",
        "y = gated_activation(u, u) {kind=silu}",
    ),
    "twice the same": ("y = add(u, u)\nout y", "y = add(u, u)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_result_stays(case: str) -> None:
    rest, kept = REFUSED[case]
    assert kept in fused(rest)


def test_a_scalar_is_no_bias() -> None:
    text = _without_unread(START + "y = add(u, one)\nout y").replace(
        "x = embed", "weight one: f32[1]\nx = embed"
    )
    assert rewritten(FuseLinear(), text).endswith("y = add(u, one)")
