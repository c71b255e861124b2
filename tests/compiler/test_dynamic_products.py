"""Files of quantize_dynamic with float activations: the same weights, nothing else rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from interpreter import Interpreter
from mini_decoder import MiniDecoder
from onnxruntime.quantization import QuantType, quantize_dynamic

from atsc.compiler.commands.dynamic_products import use_exact_activations
from atsc.compiler.importers.onnx import import_onnx


def logits_of(model: onnx.ModelProto) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    # It makes MatMulNBits of DequantizeLinear, which would round activations by default.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (logits,) = session.run(None, {"input_ids": np.arange(6)[None]})
    return np.asarray(logits)[0]


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"weight_type": QuantType.QUInt8}])
def test_nothing_is_rounded_but_weights(
    tmp_path: Path, options: dict[str, Any], optimised: bool
) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((6, 96), np.float32), opset=21)
    for name, shape in (("w1", (96, 45)), ("bias", (45,)), ("w2", (45, 7)), ("w3", (45, 7))):
        decoder.constant(name, rng.standard_normal(shape, np.float32))
    decoder.node("MatMul", ["x", "w1"], ["y"], name="first")
    decoder.node("Add", ["y", "bias"], ["z"])
    decoder.node("MatMul", ["z", "w2"], ["a"], name="second")
    decoder.node("MatMul", ["z", "w3"], ["b"], name="third")
    decoder.node("Add", ["a", "b"], ["logits"], name="both")
    path, written = decoder.save(tmp_path), tmp_path / "written.onnx"
    quantize_dynamic(path, written, op_types_to_quantize=["MatMul"], **options)
    written.replace(path)
    expected = Interpreter(import_onnx(path, accuracy_level=1)).round(np.arange(6))
    if optimised:
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        settings.log_severity_level = 3
        settings.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        onnxruntime.InferenceSession(path, settings)
        path = tmp_path / "optimised.onnx"
    model = onnx.load(path)
    ops = {node.op_type for node in model.graph.node}
    fused = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    assert fused <= ops if optimised else "MatMulInteger" in ops

    def error(logits: np.ndarray) -> float:
        return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))

    assert error(logits_of(model)) > 1e-3
    assert use_exact_activations(model.graph)
    assert error(logits_of(model)) < 1e-5
    assert not use_exact_activations(model.graph)
