"""Small models as onnxruntime's quantisers write them, against onnxruntime not optimising."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from bert import BertShape, bert_model, random_weights
from graph_runner import GraphRunner
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

pytestmark = pytest.mark.toolchain
Arrays = dict[str, np.ndarray[Any, Any]]
STEP = 0.01
"""Of an output of 8 bits: a value between two may fall either way where floats are rounded."""


class OneInput(CalibrationDataReader):
    """Calibration data."""

    def __init__(self, inputs: Arrays) -> None:
        self._left = [inputs]

    def get_next(self) -> Arrays:
        """It, once."""
        return self._left.pop() if self._left else {}


def cnn() -> tuple[onnx.ModelProto, Arrays]:
    """Convolutions with a residual, a depthwise one, pools, functions, a join, a classifier."""
    rng = np.random.default_rng(5)
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def weight(*shape: int) -> str:
        scale = np.sqrt(1.6 / max(1, int(np.prod(shape[1:]))))
        content = (rng.standard_normal(shape) * scale).astype(np.float32)
        weights.append(numpy_helper.from_array(content, f"w{len(weights)}"))
        return weights[-1].name

    def op(kind: str, *inputs: str, **attrs: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"v{len(nodes)}"], f"n{len(nodes)}", **attrs))
        return str(nodes[-1].output[0])

    x = op("Relu", op("Conv", "image", weight(16, 3, 3, 3), weight(16), pads=[1] * 4))
    x = op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = op("Relu", op("Add", op("Conv", x, weight(16, 16, 3, 3), weight(16), pads=[1] * 4), x))
    x = op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = op("Sigmoid", op("Conv", x, weight(16, 1, 3, 3), weight(16), pads=[1] * 4, group=16))
    x = op("GlobalAveragePool", op("Concat", x, op("LeakyRelu", x, alpha=0.1), axis=1))
    x = op("Gemm", op("Flatten", x), weight(20, 32), weight(20), transB=1)
    graph = helper.make_graph(
        nodes,
        "cnn",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 32, 32])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 20])],
        weights,
    )
    opsets = [helper.make_opsetid("", 17)]
    image = rng.standard_normal((1, 3, 32, 32)).astype(np.float32)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), {"image": image}


def encoder() -> tuple[onnx.ModelProto, Arrays]:
    """Two layers."""
    shape = BertShape(vocab=50, positions=32, width=32, heads=2, inner=64, layers=2)
    ids = np.random.default_rng(1).integers(0, shape.vocab, (2, 9))
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    return bert_model(shape, random_weights(shape)), inputs


def difference(model: onnx.ModelProto, inputs: Arrays) -> float:
    """The largest of any output, by its largest element."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    found = GraphRunner(model)(inputs)
    return max(
        float(np.abs(found[name] - wanted).max() / np.abs(wanted).max())
        for name, wanted in zip(names, session.run(names, dict(inputs)), strict=True)
    )


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", list(QuantFormat))
@pytest.mark.parametrize("make", [cnn, encoder])
def test_static(make: Any, form: QuantFormat, per_channel: bool, tmp_path: Path) -> None:
    model, inputs = make()
    source, target = tmp_path / "floats.onnx", tmp_path / "integers.onnx"
    onnx.save(model, source)
    # Of 7 bits: onnxruntime's products of bytes saturate on processors without VNNI.
    quantize_static(
        source, target, OneInput(inputs), form, per_channel=per_channel, reduce_range=True
    )
    distance = difference(onnx.load(target), inputs)
    if make is cnn and form is QuantFormat.QOperator:
        assert distance == 0
    else:
        assert distance < STEP


@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("is_optimised", [False, True])
def test_dynamic(kind: QuantType, is_optimised: bool, tmp_path: Path) -> None:
    """As it is written, and with the fusions of onnxruntime's optimiser."""
    model, inputs = encoder()
    source, target = tmp_path / "floats.onnx", tmp_path / "integers.onnx"
    onnx.save(model, source)
    quantize_dynamic(source, target, weight_type=kind, per_channel=True, reduce_range=True)
    if is_optimised:
        options = onnxruntime.SessionOptions()
        level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
        target = tmp_path / "optimised.onnx"
    written = onnx.load(target)
    operators = {node.op_type for node in written.graph.node}
    assert ("DynamicQuantizeMatMul" in operators) == is_optimised
    assert difference(written, inputs) < STEP
