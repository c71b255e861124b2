"""Plans of general graphs, whole: compiled, loaded, run, and compared with onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from bert import BertShape, bert_model, minilm_folder, minilm_shape, random_weights
from bert import read_safetensors as read_tensors
from onnx import TensorProto, helper, numpy_helper

import atsc
from atsc.runtime.loader import Plan

pytestmark = pytest.mark.toolchain
Compile = Callable[[onnx.ModelProto], Plan]
Arrays = Mapping[str, np.ndarray[Any, Any]]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    def compile_model(model: onnx.ModelProto) -> Plan:
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        plan = atsc.compile(path)
        assert plan is not None
        return atsc.load(plan, threads=2)

    return compile_model


def _reference(model: onnx.ModelProto, inputs: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _sentences(shape: BertShape, batch: int, length: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(batch * 100 + length)
    lengths = rng.integers(1, length + 1, (batch, 1))
    return {
        "input_ids": rng.integers(0, shape.vocab, (batch, length)),
        "attention_mask": (np.arange(length)[None] < lengths).astype(np.int64),
        "token_type_ids": rng.integers(0, 2, (batch, length)),
    }


def _cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))).min())


def test_an_encoder_of_any_sizes(compiled: Compile) -> None:
    shape = BertShape()
    model = bert_model(shape, random_weights(shape))
    with compiled(model) as plan:
        # Smaller after larger: memory is planned anew.
        for batch, length in ((1, 3), (2, 40), (3, 17), (1, 1)):
            inputs = _sentences(shape, batch, length)
            found, wanted = plan.run(inputs), _reference(model, inputs)
            assert list(found) == list(wanted)
            for name, array in wanted.items():
                assert found[name].dtype == array.dtype
                np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(minilm_folder() is None, reason="all-MiniLM-L6-v2's package is not installed")
@pytest.mark.slow
def test_minilm_embeds_as_onnxruntime_does(compiled: Compile) -> None:
    folder = minilm_folder()
    assert folder is not None
    shape = minilm_shape(folder)
    model = bert_model(shape, read_tensors(folder / "model.safetensors"))
    with compiled(model) as plan:
        for batch, length in ((1, 9), (4, 64)):
            inputs = _sentences(shape, batch, length)
            found, wanted = plan.run(inputs), _reference(model, inputs)
            for name, array in wanted.items():
                assert _cosine(found[name], array) > 0.9999


def _small_cnn() -> onnx.ModelProto:
    rng = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    variance = numpy_helper.from_array(rng.random(6).astype(np.float32) + 0.5, "variance")
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c1", "s", "b", "m", "variance"], ["n1"]),
        helper.make_node("Relu", ["n1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], group=3, auto_pad="VALID", dilations=[1, 2]),
        helper.make_node("MaxPool", ["c2"], ["p"], kernel_shape=[2, 3], strides=[2, 1]),
        helper.make_node("GlobalAveragePool", ["p"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], transB=1, alpha=0.5),
        helper.make_node("Softmax", ["y"], ["shares"], axis=-1),
        helper.make_node("ArgMax", ["y"], ["best"], axis=1, keepdims=0),
    ]
    names = [("w1", (6, 3, 3, 3)), ("b1", (6,)), ("s", (6,)), ("b", (6,)), ("m", (6,))]
    names += [("w2", (9, 2, 3, 3)), ("w3", (5, 9)), ("b3", (5,))]
    graph = helper.make_graph(
        nodes,
        "cnn",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, 24, 28])],
        [
            helper.make_tensor_value_info("shares", TensorProto.FLOAT, ["n", 5]),
            helper.make_tensor_value_info("best", TensorProto.INT64, ["n"]),
        ],
        [*(weight(name, *shape) for name, shape in names), variance],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_a_small_cnn(compiled: Compile) -> None:
    model = _small_cnn()
    with compiled(model) as plan:
        for batch in (1, 3, 0):
            image = np.random.default_rng(batch).standard_normal((batch, 3, 24, 28))
            inputs = {"image": image.astype(np.float32)}
            found = plan.run(inputs)
            if batch == 0:  # nothing in, nothing out
                assert found["shares"].shape == (0, 5)
                continue
            wanted = _reference(model, inputs)
            np.testing.assert_allclose(found["shares"], wanted["shares"], rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(found["best"], wanted["best"])


def test_integers_are_exact_at_the_level_of_this_machine(compiled: Compile) -> None:
    rng = np.random.default_rng(4)
    weight = rng.integers(-128, 128, (70, 45)).astype(np.int8)
    zero = np.uint8(131)
    rows: list[int | str] = ["rows", 70]
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "weight", "zero"], ["sums"], "product")],
        "integers",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, rows)],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, ["rows", 45])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(zero, "zero")],
    )
    opsets = [helper.make_opsetid("", 17)]
    with compiled(helper.make_model(graph, opset_imports=opsets, ir_version=9)) as plan:
        for count in (1, 7, 500):
            x = rng.integers(0, 256, (count, 70)).astype(np.uint8)
            wanted = (x.astype(np.int64) - int(zero)) @ weight.astype(np.int64)
            assert np.array_equal(plan.run({"x": x})["sums"], wanted)


def _gather_model() -> onnx.ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"], name="look_up"),
            helper.make_node("Add", ["rows", "more"], ["sum"], name="plus"),
        ],
        "gather",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 2]),
            helper.make_tensor_value_info("more", TensorProto.FLOAT, ["m", 2, 4]),
        ],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.arange(40, dtype=np.float32).reshape(10, 4), "table")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture
def gather(compiled: Compile) -> Plan:
    return compiled(_gather_model())


_IDS, _MORE = np.zeros((3, 2), np.int64), np.zeros((3, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"ids": _IDS}, "input more is missing: the model takes ids, more"),
        ({"ids": _IDS, "more": _MORE, "z": _MORE}, "no input is called z: the model takes ids"),
        (
            {"ids": _IDS.astype(np.int32), "more": _MORE},
            "input ids has elements of type int32, exp",
        ),
        ({"ids": _IDS[0], "more": _MORE}, r"input ids has shape \[2\], expected 2 dimensions \[n"),
        ({"ids": _IDS[:, :1], "more": _MORE}, "input ids has size 1 in dimension 1, expected 2"),
        ({"ids": _IDS[:1], "more": _MORE}, "node plus: .* n is 1 and m is 3, .* must be equal"),
        ({"ids": _IDS + 10, "more": _MORE}, "node plus: an index .* is out of range"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(gather: Plan, inputs: Arrays, message: str) -> None:
    with gather, pytest.raises(atsc.UsageError, match=message) as caught:
        gather.run(inputs)
    assert "\n" not in str(caught.value)


def test_after_a_refusal_the_plan_still_runs(gather: Plan) -> None:
    with gather:
        with pytest.raises(atsc.UsageError):
            gather.run({"ids": _IDS - 11, "more": _MORE})
        found = gather.run({"ids": _IDS - 1, "more": _MORE})["sum"]
    np.testing.assert_array_equal(found, np.broadcast_to(np.arange(36.0, 40), (3, 2, 4)))


def test_memory_of_any_alignment(gather: Plan) -> None:
    memory = np.zeros(_MORE.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(_MORE.shape)
    memory[...] = 5
    with gather:
        found = gather.run({"ids": _IDS, "more": memory})["sum"]
    np.testing.assert_array_equal(found, np.broadcast_to(np.arange(5.0, 9), (3, 2, 4)))


def test_only_outputs_asked_for(gather: Plan) -> None:
    with gather:
        assert list(gather.run({"ids": _IDS, "more": _MORE}, ["sum"])) == ["sum"]
        with pytest.raises(atsc.UsageError, match="no output is called z: the model has sum"):
            gather.run({"ids": _IDS, "more": _MORE}, ["z"])


def test_it_is_no_language_model(gather: Plan) -> None:
    with gather, pytest.raises(atsc.UsageError, match=r"no language model: call run\(\)"):
        gather.session()


def test_every_unsupported_node_is_named_at_once(compiled: Compile) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["a"], name="first"),
        helper.make_node("Unknown", ["x"], ["b"], name="second", domain="own"),
    ]
    graph = helper.make_graph(
        nodes,
        "bad",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [onnx.ValueInfoProto(name=name) for name in ("a", "b")],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    )
    with pytest.raises(atsc.ModelError, match=r"first: NonZero [^\n]*\n  second: Unknown \(own, "):
        compiled(model)


def test_outputs_that_share_their_memory(compiled: Compile) -> None:
    """One output is stored, another a view of it, a third the same again, a fourth an input."""
    nodes = [
        helper.make_node("MatMul", ["x", "x"], ["p"]),
        helper.make_node("Transpose", ["p"], ["t"]),
        helper.make_node("Reshape", ["p", "flat"], ["f"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Shape", ["x"], ["sizes"]),
    ]
    graph = helper.make_graph(
        nodes,
        "shared",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "n"])],
        [onnx.ValueInfoProto(name=name) for name in ("p", "t", "f", "same", "sizes")],
        [numpy_helper.from_array(np.array([-1]), "flat")],
    )
    x = np.random.default_rng(5).standard_normal((5, 5)).astype(np.float32)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    with compiled(model) as plan:
        found = plan.run({"x": x})
    np.testing.assert_allclose(found["p"], x @ x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["t"], found["p"].T)
    np.testing.assert_array_equal(found["f"], found["p"].reshape(-1))
    np.testing.assert_array_equal(found["same"], x)
    assert found["sizes"].tolist() == [5, 5]


def test_fixed_sizes_and_a_scalar(compiled: Compile) -> None:
    nodes = [
        helper.make_node("ScatterElements", ["x", "at", "x"], ["y"], axis=1),
        helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "fixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3])],
        [onnx.ValueInfoProto(name=name) for name in ("y", "total")],
        [numpy_helper.from_array(np.array([[2, 0, -2]]), "at")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    with compiled(model) as plan:
        found = plan.run({"x": np.array([[1, 2, 4]], np.float32)})
    np.testing.assert_array_equal(found["y"], [[2, 4, 1]])
    assert found["total"].shape == ()
    assert found["total"] == 7


def _branch(scale: float) -> onnx.GraphProto:
    """Both branches use the same names, and one of the graph around them."""
    return helper.make_graph(
        [
            helper.make_node("Constant", [], ["c"], value_float=scale),
            helper.make_node("Mul", ["x", "c"], ["scaled"], name="scale"),
        ],
        "branch",
        [],
        [helper.make_tensor_value_info("scaled", TensorProto.FLOAT, None)],
    )


def _choosing(condition: list[onnx.NodeProto]) -> onnx.ModelProto:
    choices = [
        helper.make_node(
            "If", [name], [out], then_branch=_branch(first), else_branch=_branch(second), name=out
        )
        for name, out, first, second in (("is_wide", "a", 2, 3), ("is_narrow", "b", 5, 7))
    ]
    graph = helper.make_graph(
        [*condition, *choices],
        "choosing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "b")],
        [numpy_helper.from_array(np.array(4), "four")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_branches_that_sizes_choose(compiled: Compile) -> None:
    condition = [
        helper.make_node("Shape", ["x"], ["width"], start=1),
        helper.make_node("Squeeze", ["width"], ["w"]),
        helper.make_node("Equal", ["w", "four"], ["is_wide"]),
        helper.make_node("Not", ["is_wide"], ["is_narrow"]),
    ]
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with compiled(_choosing(condition)) as plan:
        found = plan.run({"x": x})
    np.testing.assert_array_equal(found["a"], 2 * x)
    np.testing.assert_array_equal(found["b"], 7 * x)


def test_branches_that_data_choose_are_refused(compiled: Compile) -> None:
    condition = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Cast", ["top"], ["is_wide"], to=TensorProto.BOOL),
        helper.make_node("Not", ["is_wide"], ["is_narrow"]),
    ]
    with pytest.raises(atsc.UnsupportedError, match=r"a: If .*its condition depends on data") as e:
        compiled(_choosing(condition))
    assert [node["node"] for node in e.value.nodes] == ["a", "b"]
