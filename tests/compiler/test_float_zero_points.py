"""Nodes without a kernel in onnxruntime, rewritten: they mean what they meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from mini_decoder import MICROSOFT, MiniDecoder

from atsc.compiler.commands.float_zero_points import round_float_zero_points


@pytest.mark.parametrize(("width", "size"), [(64, 32), (48, 16), (70, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 2e-3)])
def test_it_means_the_same(
    width: int, size: int, has_bias: bool, dtype: Any, tolerance: float, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    blocks = -(-width // size)
    codes = rng.integers(0, 256, (5, blocks, size), np.uint8)
    scales = rng.uniform(-0.1, 0.1, (5, blocks)).astype(np.float32)
    zeros = rng.uniform(-40, 300, (5, blocks)).astype(np.float32)
    bias = rng.standard_normal(5).astype(np.float32) if has_bias else np.zeros(5, np.float32)
    x = rng.standard_normal((7, width)).astype(np.float32)
    scales, zeros, bias, x = (array.astype(dtype) for array in (scales, zeros, bias, x))
    decoder = MiniDecoder(x)
    for name, array in {"codes": codes, "scales": scales, "zeros": zeros, "bias": bias}.items():
        decoder.constant(name, array)
    names = ["x", "codes", "scales", "zeros", *(["", "bias"] if has_bias else [])]
    decoder.node(
        "MatMulNBits", names, ["logits"], MICROSOFT,
        N=5, K=width, bits=8, block_size=size, accuracy_level=1,
    )  # fmt: skip
    model = onnx.load(decoder.save(tmp_path, external=True), load_external_data=False)
    round_float_zero_points(model.graph, tmp_path)
    onnx.save(model, tmp_path / "exact.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "exact.onnx")
    (logits,) = session.run(None, {"input_ids": np.arange(7, dtype=np.int64)[None]})
    weight = (codes - zeros[..., None].astype(np.float64)) * scales[..., None]
    expected = x @ weight.reshape(5, -1)[:, :width].T + bias
    assert np.linalg.norm(logits[0] - expected) <= tolerance * np.linalg.norm(expected)


def test_other_nodes_stay(tmp_path: Path) -> None:
    decoder = MiniDecoder(np.ones((3, 32), np.float32))
    decoder.constant("codes", np.zeros((5, 1, 32), np.uint8))
    decoder.constant("scales", np.ones((5, 1), np.float32))
    decoder.constant("points", np.ones((5, 1), np.uint8))
    for output, names in (
        ("y", ["x", "codes", "scales"]),
        ("logits", ["y", "codes", "scales", "points"]),
    ):
        decoder.node(
            "MatMulNBits", names, [output], MICROSOFT, name=output, N=5, K=32, bits=8, block_size=32
        )
    graph = decoder.model().graph
    before = graph.SerializeToString()
    round_float_zero_points(graph, tmp_path)
    assert graph.SerializeToString() == before
