"""Products of 8-bit integers in general graphs, at each level: exact, with what finishes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_runner import GraphRunner
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime import InferenceSession

pytestmark = pytest.mark.toolchain
CPU_FLAGS = Path("/proc/cpuinfo").read_text("utf-8").split()
NEEDED = {"avxvnni": "avx_vnni", "avx512": "avx512dq", "avx512vnni": "avx512_vnni"}
LEVELS = ["avx2", *(level for level, flag in NEEDED.items() if flag in CPU_FLAGS)]
KINDS = ("uint8", "int8")
Array = np.ndarray[Any, Any]


class Integers:
    """A graph of products whose operands hold the extremes of their types, too."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}
        self._rng = np.random.default_rng(7)

    def bytes(self, kind: str, shape: Sequence[int]) -> Array:
        """Random ones; a quarter are the lowest or the highest, where 16-bit sums overflow."""
        limits = np.iinfo(kind)
        content = self._rng.integers(limits.min, limits.max + 1, shape)
        extreme = self._rng.random(shape) < 0.25
        return np.where(extreme, np.where(content % 2, limits.max, limits.min), content).astype(
            kind
        )

    def input(self, kind: str, *shape: int) -> str:
        """An input whose sizes are symbols."""
        name = f"input{len(self.inputs)}"
        self.inputs[name] = self.bytes(kind, shape)
        return name

    def constant(self, content: Array) -> str:
        """A constant of the model."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = content
        return name

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        """A node of one output."""
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attrs))
        return name

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The whole."""
        infos = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(array.dtype),
                [f"{name}_{axis}" if size != 1 else 1 for axis, size in enumerate(array.shape)],
            )
            for name, array in self.inputs.items()
        ]
        made = [helper.make_tensor_value_info(name, TensorProto.INT32, None) for name in outputs]
        tensors = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "graph", infos, made, tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def exact_product(left: Array, p: Array, right: Array, q: Array) -> Array:
    """In int64; zero points broadcast."""
    return (left.astype(np.int64) - p) @ (right.astype(np.int64) - q)


def check(w: Integers, wanted: Mapping[str, Array], level: str) -> GraphRunner:
    runner = GraphRunner(w.model(list(wanted)), level)
    found = runner(w.inputs)
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name
    return runner


@pytest.mark.parametrize("level", LEVELS)
def test_products_with_constants(level: str) -> None:
    """All pairs of types, zero points of the whole and of columns or rows, depths beyond quads."""
    w, wanted = Integers(), {}
    cases = [((19, 37, 70), *kinds) for kinds in itertools.product(KINDS, KINDS)]
    cases += [((401, 24, 33), "uint8", "int8"), ((5, 128, 32), "int8", "uint8")]
    cases += [((1, 3, 1), "uint8", "uint8")]
    for (m, k, n), left, right in cases:
        x = w.input(left, m, k)
        weight = w.bytes(right, (k, n))
        points = [(0, None), (w.bytes(left, ()), w.bytes(right, ()))]
        points += [(w.bytes(left, (m,)), w.bytes(right, (n,)))]
        for p, q in points[0 if m == 19 else 2 :]:
            p = np.asarray(p, left)
            zeros = [w.constant(p)]
            if q is not None:
                zeros.append(w.constant(q))
            name = w.op("MatMulInteger", x, w.constant(weight), *zeros)
            rows = p.astype(np.int64)[..., None] if p.ndim else p.astype(np.int64)
            columns = np.int64(0) if q is None else q.astype(np.int64)
            wanted[name] = exact_product(w.inputs[x], rows, weight, columns)
    runner = check(w, wanted, level)
    assert all("product_i8.h" in call.kernel.headers for call in runner.program.calls)


@pytest.mark.parametrize("level", LEVELS)
def test_products_of_two_inputs(level: str) -> None:
    w, wanted = Integers(), {}
    for left, right in itertools.product(KINDS, KINDS):
        a, b = w.input(left, 2, 3, 19, 21), w.input(right, 2, 3, 21, 40)
        p, q = w.bytes(left, ()), w.bytes(right, ())
        turned = w.op("Transpose", b, perm=[0, 1, 3, 2])
        other = w.input(right, 2, 3, 21, 35)
        made = w.op("MatMulInteger", a, b, w.constant(p), w.constant(q))
        wanted[made] = exact_product(w.inputs[a], p.astype(int), w.inputs[b], q.astype(int))
        made = w.op("MatMulInteger", turned, other)
        columns = w.inputs[b].swapaxes(2, 3)
        wanted[made] = exact_product(columns, np.int64(0), w.inputs[other], np.int64(0))
    check(w, wanted, level)


def test_a_batch_shares_a_constant() -> None:
    """Rows of all batches are rows of one product."""
    w = Integers()
    x, weight = w.input("uint8", 3, 5, 16), w.bytes("int8", (16, 40))
    made = w.op("MatMulInteger", x, w.constant(weight))
    runner = check(w, {made: exact_product(w.inputs[x], np.int64(0), weight, np.int64(0))}, "avx2")
    assert len(runner.program.calls) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_what_quantize_dynamic_writes_is_one_kernel_a_product(level: str) -> None:
    """Cast, scales, bias and activation finish the product; ranges and codes are kernels before."""
    rng = np.random.default_rng(1)
    w = Integers()
    x = rng.standard_normal((2, 9, 24)).astype(np.float32)
    w.inputs["x"] = x
    codes, scale, zero = (f"x_{part}" for part in ("codes", "scale", "zero"))
    w.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], [codes, scale, zero], "q"))
    weight = w.constant(w.bytes("int8", (24, 40)))
    total = w.op("MatMulInteger", codes, weight, zero, w.constant(np.int8(0)))
    factor = w.op("Mul", scale, w.constant(np.float32(0.01)))
    scaled = w.op("Mul", w.op("Cast", total, to=TensorProto.FLOAT), factor)
    biased = w.op("Add", scaled, w.constant(rng.standard_normal(40).astype(np.float32)))
    made = w.op("Relu", biased)
    model = w.model([made])
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    runner = GraphRunner(model, level)
    products = [c for c in runner.program.calls if "product_i8.h" in c.kernel.headers]
    assert len(products) == 1
    assert runner.program.calls[-1] is products[0]
    (wanted,) = ReferenceEvaluator(model).run(None, w.inputs)
    np.testing.assert_allclose(runner(w.inputs)[made], wanted, rtol=1e-6, atol=1e-6)


Attributes = Mapping[str, Any]
CONVOLUTIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], Attributes], ...] = (
    ((2, 6, 23, 37), (20, 6, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 6, 23, 37), (9, 2, 1, 3), {"group": 3, "dilations": [1, 4]}),
    ((1, 8, 9, 11), (181, 8, 1, 1), {}),  # more rows than a tile has
    ((2, 5, 9, 12), (8, 5, 1, 1), {"strides": [2, 2]}),
    ((1, 3, 30, 30), (7, 3, 7, 7), {"pads": [3, 3, 3, 3], "strides": [2, 2]}),
    ((1, 200, 7, 7), (40, 200, 3, 3), {"pads": [0, 2, 1, 0], "strides": [1, 2]}),
    ((3, 4, 50), (6, 4, 5), {"pads": [2, 2]}),
    # Depthwise: alone, and with several outputs of a channel.
    ((2, 6, 23, 37), (6, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1]}),
    ((2, 6, 13, 17), (18, 1, 3, 2), {"group": 6, "strides": [1, 2]}),
    # Of three dimensions: without tiles.
    ((1, 2, 4, 5, 6), (3, 2, 2, 2, 2), {"pads": [1] * 6}),
)


@pytest.mark.parametrize("level", LEVELS)
def test_convolutions(level: str) -> None:
    """Zero points of the image, and of the whole or each kernel; padding is of zero points."""
    w, wanted = Integers(), {}
    kinds = itertools.cycle(itertools.product(KINDS, KINDS))
    for shape, kernel, attrs in CONVOLUTIONS:
        for (left, right), points in itertools.product([next(kinds), next(kinds)], ("one", "each")):
            x, weight = w.input(left, *shape), w.bytes(right, kernel)
            p, q = w.bytes(left, ()), w.bytes(right, () if points == "one" else kernel[:1])
            name = w.op("ConvInteger", x, w.constant(weight), w.constant(p), w.constant(q), **attrs)
            wanted[name] = exact_convolution(
                w.inputs[x].astype(int) - int(p), weight.astype(int).T - q.astype(int), attrs
            )
    check(w, wanted, level)


def exact_convolution(image: Array, mirrored: Array, attrs: Attributes) -> Array:
    """By the reference's Conv of doubles, which hold the sums exactly."""
    inputs = {"x": image.astype(np.float64), "w": mirrored.T.astype(np.float64)}
    infos = [
        helper.make_tensor_value_info(n, TensorProto.DOUBLE, a.shape) for n, a in inputs.items()
    ]
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attrs)
    made = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)]
    model = helper.make_model(helper.make_graph([node], "conv", infos, made))
    (found,) = ReferenceEvaluator(model).run(None, inputs)
    assert np.abs(found).max() < 2**53
    return np.asarray(found).astype(np.int64).astype(np.int32)


def qdq_network() -> tuple[Integers, onnx.ModelProto]:
    """Convolutions with residual and pool, then a product, quantised at every step.

    Scales are powers of two and sums small, so that no float is rounded but by QuantizeLinear.
    """
    w, rng = Integers(), np.random.default_rng(2)
    w.inputs["image"] = rng.integers(-40, 40, (1, 6, 12, 13)).astype(np.float32) / 16

    def grid(power: int, zero: int = 3) -> tuple[str, str]:
        return w.constant(np.float32(2.0**power)), w.constant(np.int8(zero))

    def requantised(x: str, power: int) -> str:
        own = grid(power)
        return w.op("DequantizeLinear", w.op("QuantizeLinear", x, *own), *own)

    def weight(*shape: int) -> str:
        scale = w.constant(np.exp2(rng.integers(-6, -3, shape[0])).astype(np.float32))
        zero = w.constant(np.zeros(shape[0], np.int8))
        content = w.constant(rng.integers(-9, 9, shape).astype(np.int8))
        return w.op("DequantizeLinear", content, scale, zero, axis=0)

    x = requantised("image", -4)
    bias = w.constant((rng.integers(-64, 64, 8) / 64).astype(np.float32))
    first = requantised(w.op("Relu", w.op("Conv", x, weight(8, 6, 3, 3), bias, pads=[1] * 4)), -2)
    second = w.op("Conv", first, weight(8, 1, 3, 3), pads=[1] * 4, group=8)
    residual = requantised(w.op("Add", requantised(second, -2), first), -1)
    pooled = requantised(w.op("MaxPool", residual, kernel_shape=[2, 2], strides=[2, 2]), -1)
    flat = w.op("Flatten", pooled)
    made = w.op("Gemm", requantised(flat, -1), weight(10, 8 * 6 * 6), transB=1)
    model = w.model([made])
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return w, model


@pytest.mark.parametrize("level", LEVELS)
def test_a_quantised_network_is_equal_in_every_step(level: str) -> None:
    """No step of any tensor differs from the reference, and all products are of integers."""
    w, model = qdq_network()
    quantised = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    runner = GraphRunner(model, level)
    (plain,) = runner(w.inputs).values()
    assert not any("product.h" in h and "product_i8.h" not in h for h in headers(runner))
    for name in quantised:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT8, None))
    found = GraphRunner(model, level)(w.inputs)
    wanted = ReferenceEvaluator(model).run(None, w.inputs)
    for info, array in zip(model.graph.output, wanted, strict=True):
        assert np.array_equal(found[info.name], array), info.name
        assert np.unique(array).size > 5
    assert np.array_equal(plain, wanted[0])


def test_weights_alone_become_constant_floats() -> None:
    """Activations that are floats meet floats, made and packed when the plan is written."""
    w, rng = Integers(), np.random.default_rng(3)
    w.inputs["x"] = rng.standard_normal((5, 12)).astype(np.float32)
    w.inputs["image"] = rng.standard_normal((1, 3, 8, 8)).astype(np.float32)

    def weight(axis: int, *shape: int) -> str:
        scale = w.constant(rng.uniform(0.01, 0.1, shape[axis]).astype(np.float32))
        zero = w.constant(w.bytes("uint8", shape[axis : axis + 1]))
        return w.op("DequantizeLinear", w.constant(w.bytes("uint8", shape)), scale, zero, axis=axis)

    outputs = [
        w.op("MatMul", "x", weight(1, 12, 40)),
        w.op("Gemm", "x", weight(0, 33, 12), transB=1),
        w.op("Conv", "image", weight(0, 6, 3, 3, 3)),
    ]
    model = w.model(outputs)
    for info in model.graph.output:
        info.type.tensor_type.elem_type = TensorProto.FLOAT
    runner = GraphRunner(model)
    assert sum("product.h" in h for h in headers(runner)) == 3
    # Nothing but products, and the frame of the image.
    assert len(runner.program.calls) <= 4
    found = runner(w.inputs)
    for name, wanted in zip(outputs, ReferenceEvaluator(model).run(None, w.inputs), strict=True):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-4)


def headers(runner: GraphRunner) -> list[tuple[str, ...]]:
    return [call.kernel.headers for call in runner.program.calls]


@pytest.mark.parametrize("content", [np.zeros(5), np.full(40, 3.0), np.full(40, -3.0)])
def test_ranges_hold_zero(content: Array) -> None:
    w = Integers()
    w.inputs["x"] = content.astype(np.float32)
    outputs = ["codes", "scale", "zero"]
    w.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], outputs, "q"))
    model = w.model(outputs)
    kinds = (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8)
    for info, kind in zip(model.graph.output, kinds, strict=True):
        info.type.tensor_type.elem_type = kind
    found = GraphRunner(model)(w.inputs)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, wanted in zip(outputs, session.run(outputs, w.inputs), strict=True):
        assert np.array_equal(found[name], wanted), name
