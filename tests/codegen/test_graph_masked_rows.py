"""Rows that may see no key: zeros of Attention, what softmax makes of them elsewhere.

ONNX's Attention gives a row of zeros where all of its biases are -infinity (erratum of onnx 1.23),
and onnxruntime does; Softmax of plain operators gives NaN, which exporters guard against.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_runner import compile_model
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

pytestmark = pytest.mark.toolchain
_RNG = np.random.default_rng(5)
Q, K, V = (
    _RNG.standard_normal(shape).astype(np.float32)
    for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
)
SEEN = np.array([[n % 3 != m % 3 for n in range(7)] for m in range(5)])
SEEN[2] = False
ADDED = np.where(SEEN, 0.5, -np.inf).astype(np.float32)
BY_HEAD = np.broadcast_to(SEEN, (2, 4, 5, 7)).copy()
BY_HEAD[1, 2, 0] = False
LENGTHS = np.array([3, 7], np.int64)
HIDDEN_ROW = np.zeros((2, 4, 5), bool)
HIDDEN_ROW[:, :, 2] = True


def _model(nodes: list[onnx.NodeProto], given: dict[str, Any], opset: int) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in given.items()
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "masked", infos, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _attention(opset: int, given: dict[str, Any], **attrs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ours and the reference's."""
    slots = ["q", "k", "v", "mask", "past_k", "past_v", "lengths"]
    given = {"q": Q, "k": K, "v": V, **given}
    last = max(slots.index(name) for name in given)
    names = [name if name in given else "" for name in slots[: last + 1]]
    model = _model([helper.make_node("Attention", names, ["y"], **attrs)], given, opset)
    (expected,) = ReferenceEvaluator(model).run(None, given)
    return compile_model(model)(given)["y"], np.asarray(expected)


HIDDEN_HEAD = HIDDEN_ROW.copy()
HIDDEN_HEAD[1, 2, 0] = True
EARLY = np.zeros((2, 4, 5), bool)
EARLY[0, :, :2] = True  # 5 queries after 3 keys, aligned at their ends
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], np.ndarray]] = {
    "boolean": ({"mask": SEEN}, {}, HIDDEN_ROW),
    "of each head": ({"mask": BY_HEAD}, {}, HIDDEN_HEAD),
    "added": ({"mask": ADDED}, {}, HIDDEN_ROW),
    "added after a softcap": ({"mask": ADDED}, {"softcap": 3.0}, HIDDEN_ROW),
    "causal too": ({"mask": SEEN}, {"is_causal": 1}, HIDDEN_ROW),
    "more queries than keys": ({"lengths": LENGTHS}, {"is_causal": 1}, EARLY),
    "no keys": ({"lengths": LENGTHS * 0}, {}, np.ones((2, 4, 5), bool)),
}


@pytest.mark.parametrize(
    ("name", "opset"),
    [(name, n) for name in CASES for n in (23, 24) if n > 23 or "lengths" not in CASES[name][0]],
)
def test_attention_of_a_row_that_sees_nothing_is_zero(name: str, opset: int) -> None:
    given, attrs, hidden = CASES[name]
    if name == "causal too":
        hidden = hidden | ~(SEEN & np.tri(5, 7, dtype=bool)).any(-1)
    found, expected = _attention(opset, given, **attrs)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal((found == 0).all(-1), hidden)


def test_a_finite_bias_hides_nothing() -> None:
    """A row of -3.4e38 is as a row of zeros: all keys alike (onnxruntime's opset 23 gives 0)."""
    low = np.where(SEEN, 0, np.finfo(np.float32).min).astype(np.float32)
    found, expected = _attention(23, {"mask": low})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    mean = np.repeat(V.mean(2), 2, axis=1)
    np.testing.assert_allclose(found[:, :, 2], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("guarded", [False, True])
def test_softmax_of_a_row_that_sees_nothing(guarded: bool) -> None:
    """NaN as onnxruntime has it, and 0 behind the guard that torch.onnx writes."""
    nodes = [
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights" if guarded else "y"], axis=-1),
    ]
    if guarded:
        zero = helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])
        nodes += [
            helper.make_node("Constant", [], ["zero"], value=zero),
            helper.make_node("IsNaN", ["weights"], ["lost"]),
            helper.make_node("Where", ["lost", "zero", "weights"], ["y"]),
        ]
    scores = _RNG.standard_normal((4, 5, 7)).astype(np.float32)
    given = {"scores": scores, "mask": ADDED}
    model = _model(nodes, given, 21)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = onnxruntime.InferenceSession(model.SerializeToString())
        (expected,) = session.run(None, given)
    found = compile_model(model)(given)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (found[:, 2] == 0).all() if guarded else np.isnan(found[:, 2]).all()
