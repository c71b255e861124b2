from __future__ import annotations

import pytest
from graphs import rewritten

from atsc.passes.fuse_norm import FuseNormResidual

START = """
    weight table: f32[7, 8]
    weight gamma: f32[8]
    x = embed(ids, table)
    n = rms_norm(x, gamma) {eps=0.1}
"""


@pytest.mark.parametrize("order", ["x, n", "n, x"])
def test_a_residual_goes_into_the_norm(order: str) -> None:
    lines = rewritten(FuseNormResidual(), f"{START}\ny = add({order})\nout y").splitlines()
    assert lines[1:] == ["y = rms_norm(x, gamma, x) {eps=0.1}"]


def test_a_norm_with_another_reader_stays() -> None:
    text = f"{START}\na = add(x, n)\ny = mul(a, n)\nout y"
    assert "a = add(x, n)" in rewritten(FuseNormResidual(), text)


def test_a_norm_of_heads_stays() -> None:
    text = f"{START}\ny = add(x, n)\nout y".replace("f32[8]", "f32[4]").replace(
        "eps=0.1", "eps=0.1, group=4"
    )
    assert rewritten(FuseNormResidual(), text).endswith("y = add(x, n)")
