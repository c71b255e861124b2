"""Decoders that onnxruntime's own optimiser has written: its fused operators beside plain ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from decomposed import Decoder
from decomposed_logits import IDS, PROMPT, logits_of
from decomposed_parts import Spelling
from interpreter import replay
from onnxruntime.quantization import quantize_dynamic

from atsc.compiler.importers.onnx import import_onnx
from atsc.passes.optimise import optimise

SPELLINGS = {
    "plain": Spelling(),
    "Gemma": Spelling(softcap=5.0, window=9, activation="gelu_tanh", norm="cast"),
    "Phi-2": Spelling(
        order="parallel", rope="partial", norm="layer", activation="gelu_tanh", mlp="plain",
        bias=True, head_bias=True,
    ),
    "learned positions": Spelling(rope="learned", norm="layer", activation="gelu_erf", bias=True),
    "boolean mask, guarded": Spelling(mask="boolean", guard=True),
    "cache of a fixed size": Spelling(cache="scatter_nd"),
}  # fmt: skip


def optimised(path: Path) -> set[str]:
    """Let onnxruntime rewrite a file as it would for itself; what operators there are now."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    written = path.with_name("optimised.onnx")
    options.optimized_model_filepath = str(written)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    written.replace(path)
    return {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("name", SPELLINGS)
def test_fused_operators(tmp_path: Path, name: str) -> None:
    path = Decoder(SPELLINGS[name]).save(tmp_path)
    expected = logits_of(path, SPELLINGS[name])
    assert "FusedMatMul" in optimised(path)
    actual = replay(optimise(import_onnx(path)), IDS, PROMPT)
    assert np.linalg.norm(actual - expected) <= 2e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["plain", "learned positions"])
def test_dynamically_quantised_products(tmp_path: Path, name: str) -> None:
    """With a table that is dequantised anew for each reader, and biases within the products."""
    spelling = SPELLINGS[name]
    path = Decoder(spelling).save(tmp_path)
    floats = logits_of(path, spelling)
    written = tmp_path / "quantised.onnx"
    quantize_dynamic(path, written)
    theirs = logits_of(written, spelling)
    assert {"MatMulIntegerToFloat", "DynamicQuantizeMatMul"} <= optimised(written)
    ours = replay(optimise(import_onnx(written)), IDS, PROMPT)
    assert np.linalg.norm(ours - floats) <= 1.1 * np.linalg.norm(theirs - floats)
