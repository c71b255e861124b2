"""Rules with odd semantics against onnx's reference evaluator, for sizes that are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from graph_runner import compile_model
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from atsc.codegen import tvm_kernels
from atsc.compiler.errors import ModelError

pytestmark = pytest.mark.toolchain
_RNG = np.random.default_rng(7)
_OPEN = 3


def _model(
    node: onnx.NodeProto, inputs: Sequence[np.ndarray], constants: dict[str, np.ndarray]
) -> onnx.ModelProto:
    """A node whose inputs' first axes are open; `constants` are initializers."""
    given = [name for name in node.input if name and name not in constants]
    values = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            ["open" if axis == 0 and size == _OPEN else size
             for axis, size in enumerate(array.shape)],
        )
        for name, array in zip(given, inputs, strict=True)
    ]  # fmt: skip
    fixed = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "one", values, outputs, fixed)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def _check(
    node: onnx.NodeProto,
    inputs: Sequence[np.ndarray],
    constants: dict[str, np.ndarray] | None = None,
    tolerance: float = 1e-5,
) -> list[np.ndarray]:
    model = _model(node, inputs, constants or {})
    given = dict(zip([value.name for value in model.graph.input], inputs, strict=True))
    found = compile_model(model)(given)
    expected: Any = ReferenceEvaluator(model).run(None, given)
    results = [found[name] for name in node.output]
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)
    return results


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_orders_ties_by_index(largest: int) -> None:
    data = _RNG.integers(0, 4, (_OPEN, 9)).astype(np.float32)
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=1, largest=largest)
    _check(node, [data], {"k": np.array([5], np.int64)})


def test_top_k_takes_nan_for_the_largest() -> None:
    data = np.array([[1, np.nan, 3], [np.nan, 2, np.nan], [4, 5, 6]], np.float32)
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=1)
    model = _model(node, [data], {"k": np.array([2], np.int64)})
    indices = compile_model(model)({"x": data})["i"]
    assert indices.tolist() == [[1, 2], [0, 2], [2, 1]]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("where", ["half_pixel", "align_corners", "asymmetric"])
def test_resize_of_an_open_batch(mode: str, where: str) -> None:
    node = helper.make_node(
        "Resize", ["x", "", "s"], ["y"], mode=mode, coordinate_transformation_mode=where
    )
    scales = np.array([1, 1, 1.75, 0.6], np.float32)
    _check(node, [_floats(_OPEN, 2, 5, 7)], {"s": scales}, 1e-4)


def test_resize_with_antialias_to_sizes() -> None:
    node = helper.make_node(
        "Resize", ["x", "", "", "s"], ["y"], mode="cubic", antialias=1, axes=[2, 3],
        keep_aspect_ratio_policy="not_larger",
    )  # fmt: skip
    _check(node, [_floats(_OPEN, 1, 9, 12)], {"s": np.array([4, 4], np.int64)}, 1e-4)


def test_an_axis_of_open_size_is_not_resized() -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="linear")
    data = _floats(_OPEN, 4)
    with pytest.raises(ModelError, match="axis 0, which it changes, is open"):
        compile_model(_model(node, [data], {"s": np.array([2, 2], np.float32)}))


def test_quantising_rounds_to_even_and_saturates() -> None:
    data = np.array(
        [[0.5, 1.5, 2.5, -0.5], [1e9, -1e9, 127.5, 3.5], [254, 255, 256, 0]], np.float32
    )
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
    fixed = {"s": np.array(1, np.float32), "z": np.array(3, np.uint8)}
    (result,) = _check(node, [data], fixed)
    assert result[1].tolist() == [255, 0, 131, 7]


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
def test_scales_of_blocks(op: str) -> None:
    data = _floats(_OPEN, 8) * 20
    if op == "DequantizeLinear":
        data = data.astype(np.int8)
    fixed = {
        "s": np.abs(_floats(_OPEN, 4)) + 0.5,
        "z": _RNG.integers(-3, 3, (_OPEN, 4)).astype(np.int8),
    }
    node = helper.make_node(op, ["x", "s", "z"], ["y"], axis=1, block_size=2)
    _check(node, [data], fixed)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_recurrent_layers_of_rows_that_end_early(op: str, direction: str) -> None:
    gates, ways, hidden, size = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 1, 5, 4
    if direction == "bidirectional":
        # The reference evaluator has one direction: two of those, side by side, are both.
        ways = 2
    weights = {
        "w": _floats(ways, gates * hidden, size),
        "r": _floats(ways, gates * hidden, hidden),
        "b": _floats(ways, 2 * gates * hidden),
    }
    data = _floats(_OPEN + 3, 2, size)
    lengths = np.array([4, 6], np.int32)
    outputs = ["y", "h", "c"] if op == "LSTM" else ["y", "h"]

    def run(direction: str, chosen: slice, data: np.ndarray, names: list[str]) -> dict[str, Any]:
        node = helper.make_node(
            op, names, outputs, hidden_size=hidden, direction=direction
        )  # fmt: skip
        fixed = {name: value[chosen] for name, value in weights.items()}
        if "lengths" in names:
            fixed["lengths"] = lengths
        return compile_model(_model(node, [data], fixed))({"x": data})

    found = run(direction, slice(0, ways), data, ["x", "w", "r", "b", "lengths"])
    back = slice(ways - 1, ways)
    for row, length in enumerate(lengths):
        # A row alone, cut to its length and turned around, runs forward to the same states.
        turned = np.ascontiguousarray(data[:length, row : row + 1][::-1])
        alone = run("forward", back, turned, ["x", "w", "r", "b"])
        mine = found["y"][:length, ways - 1, row]
        np.testing.assert_allclose(mine, alone["y"][::-1, 0, 0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["h"][ways - 1, row], alone["h"][0, 0], 1e-5, 1e-6)
        assert not found["y"][length:, :, row].any()


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_equal_the_reference(op: str) -> None:
    gates, hidden, size = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 5, 4
    fixed = {
        "w": _floats(1, gates * hidden, size),
        "r": _floats(1, gates * hidden, hidden),
        "b": _floats(1, 2 * gates * hidden),
    }
    node = helper.make_node(op, ["x", "w", "r", "b"], ["y", "h"], hidden_size=hidden)
    _check(node, [_floats(6, _OPEN, size)], fixed)


def test_reversed_sequences() -> None:
    node = helper.make_node("ReverseSequence", ["x", "n"], ["y"], time_axis=1, batch_axis=0)
    _check(node, [_floats(_OPEN, 5), np.array([1, 5, 3], np.int64)])


@pytest.mark.skipif(
    not tvm_kernels.is_installed(), reason="TVM is not installed; pip install 'atsc[tvm]'"
)
def test_an_operator_without_a_rule_goes_through_tvm() -> None:
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], mode="nearest")
    grid = _RNG.uniform(-0.9, 0.9, (2, 4, 5, 2)).astype(np.float32)
    _check(node, [_floats(2, 3, 6, 7), grid], tolerance=1e-4)
