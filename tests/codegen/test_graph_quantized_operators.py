"""Operators between 8-bit tensors, one by one, against onnxruntime without its optimisations.

Weights have 7 bits: onnxruntime's products of bytes saturate on processors without VNNI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_runner import GraphRunner
from onnx import helper, numpy_helper

from atsc.compiler.errors import UnsupportedError

pytestmark = pytest.mark.toolchain
KINDS = ("uint8", "int8")
MICROSOFT = "com.microsoft"
Array = np.ndarray[Any, Any]


class Writer:
    """One node; its inputs in order, of which some are constants."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.names: list[str] = []
        self.inputs: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}

    def give(self, content: Array) -> None:
        """An input of the model."""
        self.inputs[self._name()] = content

    def hold(self, content: Any, kind: str) -> None:
        """A constant."""
        self.constants[self._name()] = np.asarray(content, kind)

    def codes(self, kind: str, *shape: int, bits: int = 8) -> Array:
        """Random integers."""
        half = 1 << (bits - 1)
        middle = 128 if kind == "uint8" else 0
        return self.rng.integers(middle - half, middle + half, shape).astype(kind)

    def quantised(self, kind: str, *shape: int, scale: float = 0.02) -> None:
        """An input, its scale and its zero point."""
        self.give(self.codes(kind, *shape))
        self.grid(kind, scale)

    def grid(self, kind: str, scale: float) -> None:
        """A scale and a zero point."""
        self.hold(scale, "float32")
        self.hold(self.codes(kind, bits=5), kind)

    def _name(self) -> str:
        self.names.append(f"x{len(self.names)}")
        return self.names[-1]

    def model(self, operator: str, domain: str, kind: str, **attrs: object) -> onnx.ModelProto:
        """The whole."""

        def info(name: str, array: Array) -> onnx.ValueInfoProto:
            element = helper.np_dtype_to_tensor_dtype(array.dtype)
            return helper.make_tensor_value_info(name, element, array.shape)

        node = helper.make_node(operator, self.names, ["y"], "node", domain=domain, **attrs)
        element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        graph = helper.make_graph(
            [node],
            "graph",
            [info(*item) for item in self.inputs.items()],
            [helper.make_tensor_value_info("y", element, None)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def check(
    w: Writer,
    operator: str,
    kind: str,
    domain: str = MICROSOFT,
    ties: bool = False,
    **attrs: object,
) -> None:
    """Equal; with `ties`, but for steps of one where the value lies between two."""
    model = w.model(operator, domain, kind, **attrs)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (wanted,) = session.run(None, w.inputs)
    found = GraphRunner(model)(w.inputs)["y"]
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert np.unique(wanted).size > 1
    if kind == "float32":
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)
        return
    distance = np.abs(found.astype(int) - wanted.astype(int))
    assert distance.max() <= int(ties)
    assert (distance > 0).mean() < 0.01


def scales(w: Writer, count: int) -> Array:
    return w.rng.uniform(0.001, 0.003, count).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_convolution(kind: str, per_channel: bool) -> None:
    for shape, kernel, group in (((2, 8, 9, 10), (6, 8, 3, 3), 1), ((1, 6, 9, 7), (6, 1, 3, 3), 6)):
        w = Writer(1)
        w.quantised(kind, *shape)
        w.hold(w.codes("int8", *kernel, bits=7), "int8")
        w.hold(scales(w, kernel[0]) if per_channel else 0.002, "float32")
        w.hold(np.zeros(kernel[0] if per_channel else ()), "int8")
        w.grid(kind, 0.03)
        w.hold(w.rng.integers(-3000, 3000, kernel[0]), "int32")
        check(w, "QLinearConv", kind, "", pads=[1, 1, 1, 1], group=group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_column", [False, True])
def test_matrix_product(kind: str, per_column: bool) -> None:
    w = Writer(2)
    w.quantised(kind, 2, 9, 21)
    w.hold(w.codes("int8", 21, 40, bits=7), "int8")
    w.hold(scales(w, 40) if per_column else 0.002, "float32")
    w.hold(np.zeros(40 if per_column else ()), "int8")
    w.grid(kind, 0.02)
    check(w, "QLinearMatMul", kind, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_float", [False, True])
def test_gemm(kind: str, is_float: bool) -> None:
    w = Writer(3)
    w.quantised(kind, 9, 21)
    w.hold(w.codes("int8", 40, 21, bits=7), "int8")
    w.hold(0.002, "float32")
    w.hold(0, "int8")
    w.hold(w.rng.integers(-3000, 3000, 40), "int32")
    if not is_float:
        w.grid(kind, 0.02)
    check(w, "QGemm", "float32" if is_float else kind, transB=1, alpha=0.75)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("other", [(2, 9, 33), (33,), (9, 1)])
def test_pairs(kind: str, operator: str, other: Sequence[int]) -> None:
    w = Writer(4)
    w.quantised(kind, 2, 9, 33)
    w.quantised(kind, *other, scale=0.013)
    w.grid(kind, 0.017)
    check(w, operator, kind, ties=True)


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "QLinearSigmoid": {},
    "QLinearLeakyRelu": {"alpha": 0.2},
    "QLinearGlobalAveragePool": {},
    "QLinearAveragePool": {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", ATTRIBUTES)
def test_functions_of_one_tensor(kind: str, operator: str) -> None:
    w = Writer(5)
    w.quantised(kind, 2, 9, 8, 11)
    w.grid(kind, 0.004 if operator == "QLinearSigmoid" else 0.015)
    check(w, operator, kind, ties=True, **ATTRIBUTES[operator])


@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_of_the_opset_that_it_was_written_for(kind: str, opset: int) -> None:
    """Against doubles: onnxruntime's table of rounded exponentials is one step off now and then."""
    w = Writer(6)
    w.quantised(kind, 3, 4, 50)
    scale, zero = 0.002, 0 if kind == "uint8" else -128
    w.hold(scale, "float32")
    w.hold(zero, kind)
    model = w.model("QLinearSoftmax", MICROSOFT, kind, axis=1, opset=opset)
    found = GraphRunner(model)(w.inputs)["y"]
    codes, own = w.inputs["x0"].astype(float), w.constants["x2"].astype(float)
    power = np.exp((codes - own) * np.float32(0.02))
    real = power / power.sum((1, 2) if opset < 13 else 1, keepdims=True) / np.float32(scale)
    limits = np.iinfo(kind)
    wanted = np.clip(np.rint(real) + zero, limits.min, limits.max)
    is_tie = np.abs(real % 1 - 0.5) < 1e-4
    assert np.array_equal(found[~is_tie], wanted[~is_tie])
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (theirs,) = session.run(None, w.inputs)
    assert np.abs(found.astype(int) - theirs.astype(int)).max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_concatenation(kind: str) -> None:
    w = Writer(7)
    w.grid(kind, 0.02)
    scale, zero = w.names
    for channels in (3, 5):
        w.quantised(kind, 2, channels, 4, scale=0.01 * channels)
    w.give(w.codes(kind, 2, 1, 4))
    w.names += [scale, zero]  # on the result's own grid
    check(w, "QLinearConcat", kind, axis=1, ties=True)


def test_choice() -> None:
    w = Writer(8)
    w.give(w.rng.random((4, 9)) < 0.5)
    w.quantised("uint8", 4, 9)
    w.quantised("uint8", 4, 9, scale=0.03)
    w.grid("uint8", 0.025)
    check(w, "QLinearWhere", "uint8", ties=True)


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_with_their_quantisation(has_bias: bool) -> None:
    w = Writer(9)
    w.give(w.rng.standard_normal((2, 9, 24)).astype(np.float32))
    w.hold(w.codes("int8", 24, 40, bits=7), "int8")
    w.hold(scales(w, 40), "float32")
    w.hold(np.zeros(40), "int8")
    if has_bias:
        w.hold(w.rng.standard_normal(40), "float32")
    check(w, "DynamicQuantizeMatMul", "float32")
    w = Writer(10)
    w.give(w.codes("uint8", 9, 24))
    w.hold(w.codes("uint8", 24, 40, bits=7), "uint8")
    w.hold(0.02, "float32")
    w.hold(0.003, "float32")
    w.hold(131, "uint8")
    w.hold(125, "uint8")
    if has_bias:
        w.hold(w.rng.standard_normal(40), "float32")
    check(w, "MatMulIntegerToFloat", "float32")


@pytest.mark.parametrize("turned", ["transA", "transB"])
def test_fused_product_of_floats(turned: str) -> None:
    """Beside these operators in what onnxruntime's optimiser writes."""
    w = Writer(13)
    shapes = ((2, 5, 7), (2, 5, 9)) if turned == "transA" else ((2, 5, 7), (2, 9, 7))
    for shape in shapes:
        w.give(w.rng.standard_normal(shape).astype(np.float32))
    check(w, "FusedMatMul", "float32", alpha=0.375, **{turned: 1})


@pytest.mark.parametrize("count", [1, 2])
def test_gelu(count: int) -> None:
    w = Writer(14)
    w.give(w.rng.standard_normal((4, 9)).astype(np.float32) * 3)
    if count == 2:
        w.hold(w.rng.standard_normal(9), "float32")
    check(w, "Gelu" if count == 1 else "BiasGelu", "float32")


def test_norm_of_a_sum() -> None:
    w = Writer(15)
    for shape in ((2, 4, 9), (2, 4, 9), (9,), (9,), (9,)):
        w.give(w.rng.standard_normal(shape).astype(np.float32))
    check(w, "SkipLayerNormalization", "float32", epsilon=1e-3)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    w = Writer(11)
    w.quantised("uint8", 1, 4, 5, 5)
    w.grid("uint8", 0.02)
    model = w.model("QLinearGlobalAveragePool", MICROSOFT, "uint8", channels_last=1)
    with pytest.raises(UnsupportedError, match="channels_last is 1, supported: 0"):
        GraphRunner(model)
    w = Writer(12)
    w.quantised("uint8", 2, 3)
    w.give(w.codes("uint8", 2, 3))
    w.hold([0.1, 0.2, 0.3], "float32")
    w.hold([1, 2, 3], "uint8")
    w.grid("uint8", 0.02)
    with pytest.raises(UnsupportedError, match=r"zero point of shape \[3\], expected one"):
        GraphRunner(w.model("QLinearAdd", MICROSOFT, "uint8"))
