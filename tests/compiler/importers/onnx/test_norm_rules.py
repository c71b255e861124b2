"""The norms in onnxruntime and here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_decoder import MICROSOFT, MiniDecoder

FEW = settings(max_examples=15, deadline=None, derandomize=True)


def norm_decoder(
    op: str, *, dtype: Any = np.float32, peak: float = 1.0, width: int = 24, **attrs: float
) -> MiniDecoder:
    rng = np.random.default_rng(width)
    decoder = MiniDecoder((peak * rng.standard_normal((5, width))).astype(dtype), opset=23)
    for name in ("gamma", "beta"):
        decoder.constant(name, rng.standard_normal(width).astype(dtype))
    names = ["x", "gamma", "beta"] if op == "LayerNormalization" else ["x", "gamma"]
    decoder.node(op, names, ["logits"], **attrs)
    return decoder


@pytest.mark.parametrize("axis", [-1, 2])
@pytest.mark.parametrize(
    "op", ["LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"]
)
def test_norms(op: str, axis: int) -> None:
    norm_decoder(op, axis=axis, epsilon=1e-2, stash_type=1).assert_agrees()


@pytest.mark.parametrize("op", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_default_epsilon(op: str) -> None:
    norm_decoder(op, peak=3e-3).assert_agrees()


def test_rms_norm_of_large_fp16_values() -> None:
    """Squares of 30000 overflow fp16; the mean must be taken wider."""
    decoder = norm_decoder(
        "SimplifiedLayerNormalization", dtype=np.float16, peak=15000, axis=-1, epsilon=1e-6,
        stash_type=1,
    )  # fmt: skip
    decoder.assert_agrees(tolerance=2e-3)


@FEW
@given(
    rms=st.booleans(),
    bias=st.booleans(),
    beta=st.booleans(),
    total=st.booleans(),
    epsilon=st.sampled_from([None, 1e-5, 0.1]),
    width=st.sampled_from([1, 8, 40]),
)
def test_skip_norms(
    rms: bool, bias: bool, beta: bool, total: bool, epsilon: float | None, width: int
) -> None:
    rng = np.random.default_rng(width)
    decoder = MiniDecoder(rng.standard_normal((6, width), np.float32))
    for name in ("gamma", "beta", "bias"):
        decoder.constant(name, rng.standard_normal(width).astype(np.float32))
    decoder.node("Mul", ["x", "gamma"], ["skip"])
    names = ["x", "skip", "gamma"]
    if not rms:
        names.append("beta" if beta else "")
    names += ["bias"] if bias else []
    op = "SkipSimplifiedLayerNormalization" if rms else "SkipLayerNormalization"
    outputs = ["y", "", "", "total"] if total else ["y"]
    decoder.node(op, names, outputs, MICROSOFT, epsilon=epsilon)
    decoder.node("Add", ["y", "total" if total else "x"], ["logits"])
    decoder.assert_agrees(tolerance=1e-5)


def test_a_residual_beyond_fp16_stays_finite() -> None:
    """fp16 files overflow where activations are fp16; ours are fp32 whatever the file says."""
    table = np.full((3, 8), 40000, np.float16)
    table[:, ::2] = 12
    decoder = MiniDecoder(table)
    decoder.constant("gamma", np.ones(8, np.float16))
    outputs = ["y", "", "", "total"]
    decoder.node("SkipSimplifiedLayerNormalization", ["x", "x", "gamma"], outputs, MICROSOFT)
    decoder.node("Add", ["y", "total"], ["logits"])
    twice = 2 * table.astype(np.float64)
    expected = twice / np.sqrt((twice**2).mean(1, keepdims=True)) + twice
    np.testing.assert_allclose(decoder.ours([np.arange(3)]), expected, rtol=1e-6)
    assert not np.isfinite(decoder.onnxruntime([np.arange(3)])).all()
