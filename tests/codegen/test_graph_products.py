"""Products, convolutions and pools of general graphs, at each level, against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_runner import GraphRunner
from onnx import TensorProto, helper, numpy_helper

pytestmark = pytest.mark.toolchain
CPU_FLAGS = Path("/proc/cpuinfo").read_text("utf-8")
LEVELS = ("avx2", *(["avx512"] if "avx512dq" in CPU_FLAGS else []))
Shape = Sequence[int | str]


class Writer:
    """Nodes of a graph whose weights and inputs are random; every node may be an output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, np.ndarray[Any, Any]] = {}
        self.input_infos: list[onnx.ValueInfoProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(11)

    def input(self, *shape: int) -> str:
        """An input whose sizes are symbols, but for channels."""
        name = f"input{len(self.inputs)}"
        self.inputs[name] = self._rng.standard_normal(shape).astype(np.float32)
        symbols: Shape = [f"{name}_{a}" if a != 1 else size for a, size in enumerate(shape)]
        self.input_infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, symbols))
        return name

    def weight(self, *shape: int) -> str:
        """A random constant."""
        name = f"weight{len(self.weights)}"
        content = self._rng.standard_normal(shape).astype(np.float32)
        self.weights.append(numpy_helper.from_array(content, name))
        return name

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        """A node of one output."""
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attrs))
        return name

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The whole."""
        infos = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
        graph = helper.make_graph(self.nodes, "graph", self.input_infos, infos, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def check(self, outputs: Sequence[str], level: str) -> GraphRunner:
        """Compare with onnxruntime."""
        model = self.model(outputs)
        runner = GraphRunner(model, level)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        found: Mapping[str, Any] = runner(self.inputs)
        for name, wanted in zip(outputs, session.run(outputs, self.inputs), strict=True):
            assert found[name].shape == wanted.shape
            scale = float(np.abs(wanted).max(initial=0)) + 1e-3
            np.testing.assert_allclose(found[name] / scale, wanted / scale, rtol=0, atol=2e-5)
        return runner


@pytest.mark.parametrize("level", LEVELS)
def test_products(level: str) -> None:
    w = Writer()
    x, tall = w.input(2, 19, 37), w.input(1, 401, 24)
    heads = w.op("Reshape", w.input(3, 7, 40), _sizes(w, 0, 0, 5, 8))
    query = w.op("Transpose", heads, perm=[0, 2, 1, 3])
    key = w.op("Transpose", heads, perm=[0, 2, 3, 1])
    scores = w.op("MatMul", query, key)
    wide = w.op("MatMul", x, w.weight(37, 1024))
    outputs = [
        w.op("MatMul", x, w.weight(37, 70)),  # panels, the last one of less than half
        w.op("MatMul", x, w.weight(37, 1)),
        w.op("MatMul", tall, w.weight(24, 40)),  # more rows than a tile has
        w.op("MatMul", x, w.weight(2, 37, 33)),  # a constant for each batch
        scores,
        w.op("MatMul", scores, query),
        # Rows a multiple of 4 KiB apart are copied.
        w.op("MatMul", wide, w.weight(1024, 35)),
        # A transposed left operand, and one that is computed.
        w.op("MatMul", w.op("Transpose", x, perm=[0, 2, 1]), w.weight(19, 20)),
        w.op("MatMul", w.op("Exp", x), w.weight(37, 9)),
        w.op("Gemm", w.weight(1, 50), w.weight(33, 50), w.weight(33), transB=1, alpha=0.5),
    ]
    w.check(outputs, level)


def _sizes(w: Writer, *sizes: int) -> str:
    name = f"sizes{len(w.weights)}"
    w.weights.append(numpy_helper.from_array(np.array(sizes, np.int64), name))
    return name


@pytest.mark.parametrize("level", LEVELS)
def test_a_product_is_finished_by_its_readers(level: str) -> None:
    """Bias, an activation that reads it twice, residual: one kernel."""
    w = Writer()
    x, other = w.input(2, 19, 24), w.input(2, 19, 40)
    inner = w.op("Add", w.op("MatMul", x, w.weight(24, 40)), w.weight(40))
    activated = w.op("Mul", inner, w.op("Sigmoid", inner))
    runner = w.check([w.op("Add", activated, other)], level)
    assert len(runner.program.calls) == 1


def test_a_product_with_several_readers_is_computed_once() -> None:
    w = Writer()
    made = w.op("MatMul", w.input(2, 19, 24), w.weight(24, 40))
    relu, tanh = w.op("Relu", made), w.op("Tanh", made)
    total = w.op("ReduceSum", tanh, keepdims=0)
    runner = w.check([relu, total, w.op("Concat", made, relu, axis=1)], "avx2")
    products = [c for c in runner.program.calls if "product.h" in c.kernel.headers]
    assert len(products) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_convolutions(level: str) -> None:
    w = Writer()
    image, line = w.input(2, 6, 23, 37), w.input(3, 4, 50)
    small = w.input(2, 40, 7, 7)

    def conv(x: str, weight: tuple[int, ...], **attrs: object) -> str:
        made = w.op("Conv", x, w.weight(*weight), w.weight(weight[0]), **attrs)
        return w.op("Relu", made)

    same = [1, 1, 1, 1]
    outputs = [
        conv(image, (20, 6, 3, 3), pads=same),
        conv(image, (20, 6, 3, 3), pads=[0, 2, 1, 0], strides=[2, 3], dilations=[2, 1]),
        conv(image, (9, 2, 1, 3), group=3, dilations=[1, 4]),
        conv(image, (181, 6, 1, 1)),
        conv(image, (8, 6, 1, 1), strides=[2, 2]),
        conv(small, (40, 40, 3, 3), pads=same),
        # Depthwise: alone and with several outputs of a channel; wide and small planes.
        conv(image, (6, 1, 3, 3), group=6, pads=same),
        conv(image, (18, 1, 3, 2), group=6, pads=[1, 0, 0, 1], strides=[1, 2]),
        conv(small, (40, 1, 3, 3), group=40, pads=same),
        conv(small, (40, 1, 5, 5), group=40, pads=[2, 2, 2, 2], strides=[2, 2]),
        conv(small, (80, 1, 2, 2), group=40),
        conv(line, (5, 4, 3), pads=[2, 0], strides=[2]),
        conv(line, (4, 1, 5), group=4, dilations=[3]),
        w.op("ConvTranspose", small, w.weight(40, 3, 3, 3), strides=[2, 2]),
    ]
    w.check(outputs, level)


@pytest.mark.parametrize("level", LEVELS)
def test_pools(level: str) -> None:
    w = Writer()
    image, line = w.input(2, 3, 23, 40), w.input(1, 4, 50)
    outputs = [
        w.op("MaxPool", image, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        w.op("MaxPool", image, kernel_shape=[2, 3], dilations=[3, 2]),
        w.op("MaxPool", line, kernel_shape=[4], strides=[3], pads=[1, 2]),
        w.op("AveragePool", image, kernel_shape=[3, 2], pads=[1, 0, 1, 1]),
        w.op("AveragePool", image, kernel_shape=[3, 3], strides=[2, 3], pads=[1, 1, 1, 1],
             count_include_pad=1),
        w.op("AveragePool", w.op("Neg", line), kernel_shape=[5], auto_pad="SAME_UPPER"),
    ]  # fmt: skip
    w.check(outputs, level)


@pytest.mark.parametrize("level", LEVELS)
def test_rows(level: str) -> None:
    """Softmax and layer norm, of rows that are no multiple of a vector, and of two dimensions."""
    w = Writer()
    x = w.input(3, 5, 37)
    mask = np.where(np.arange(37) % 3, 0, -np.inf).astype(np.float32)
    w.weights.append(numpy_helper.from_array(mask, "mask"))
    outputs = [
        w.op("Softmax", w.op("Add", x, "mask"), axis=-1),
        w.op("Softmax", x, axis=1),
        w.op("LayerNormalization", x, w.weight(37), w.weight(37), axis=-1),
        w.op("LayerNormalization", w.op("Mul", x, x), w.weight(37), axis=-1, epsilon=1e-3),
    ]
    w.check(outputs, level)


def test_nan_stays_in_softmax_and_pools() -> None:
    w = Writer()
    x = w.input(1, 2, 24)
    runner = GraphRunner(
        w.model([w.op("Softmax", x), w.op("MaxPool", x, kernel_shape=[3], strides=[3])])
    )
    content = np.zeros((1, 2, 24), np.float32)
    content[0, 1, 20] = np.nan
    shares, tops = runner({x: content}).values()
    assert np.isnan(shares[0, 1]).all() and not np.isnan(shares[0, 0]).any()
    assert np.isnan(tops[0, 1]).tolist() == [False] * 6 + [True, False]
