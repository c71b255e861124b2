"""Limits of general graphs: what cannot run is refused, when it is compiled or before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_runner import compile_model
from onnx import TensorProto, helper, numpy_helper

import atsc

pytestmark = pytest.mark.toolchain
Array = np.ndarray[Any, Any]
Shape = Sequence[int | str | None]


def _model(
    op: str,
    inputs: Mapping[str, Shape],
    constants: Mapping[str, Any] | None = None,
    types: Mapping[str, int] | None = None,
    opset: int = 19,
    **attributes: Any,
) -> onnx.ModelProto:
    constants, types = constants or {}, types or {}
    names = [*inputs, *constants]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], name="the_node", **attributes)],
        "limits",
        [
            helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), shape)
            for name, shape in inputs.items()
        ],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def _floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_model("Neg", {"x": [2] * 9}), "x: input of the model: it has 9 dimensions; .* at most 8"),
        (
            _model("Unsqueeze", {"x": [1] * 8}, {"a": [0]}),
            r"the_node: Unsqueeze .*its output y: it has 9 dimensions",
        ),
        (
            _model("Identity", {"x": ["n"]}, types={"x": TensorProto.STRING}),
            "x: input of the model: elements of type string are not supported",
        ),
        (
            _model("Identity", {"x": ["n"]}, types={"x": TensorProto.INT4}, opset=21),
            "x: input of the model: elements of type int4",
        ),
        (_model("Tile", {"x": ["n", 4]}, {"r": [1, -1]}), "the_node: Tile .*result is -4"),
        (_model("Gather", {"x": [4]}, {"i": 4}), "the_node: Gather .* index beyond the 4"),
    ],
)
def test_refused_when_compiled(model: onnx.ModelProto, message: str) -> None:
    with pytest.raises(atsc.UnsupportedError, match=message):
        compile_model(model)


def test_all_that_is_refused_is_listed(tmp_path: Path) -> None:
    """Inputs and nodes in one message, and nothing that only follows from another."""
    nodes = [
        helper.make_node("Neg", ["many"], ["a"], name="follows"),
        helper.make_node("NonZero", ["x"], ["b"], name="depends"),
    ]
    kinds = {"many": [1] * 9, "x": ["n"]}
    graph = helper.make_graph(
        nodes,
        "all",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, shape) for k, shape in kinds.items()],
        [onnx.ValueInfoProto(name=name) for name in ("a", "b")],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(atsc.UnsupportedError) as caught:
        atsc.compile(tmp_path / "m.onnx")
    assert [node["node"] for node in caught.value.nodes] == ["many", "depends"]


INT64 = {"i": TensorProto.INT64}
ZERO = np.zeros((1, 4), np.int64)
# Of each: what runs, with its shape, and what does not, with the reason.
SIZES: dict[str, tuple[onnx.ModelProto, dict[str, Array], tuple[int, ...], dict[str, Array], str]]
SIZES = {
    "search": (
        _model("ArgMax", {"x": ["n", 4]}, axis=0),
        {"x": _floats(2, 4)}, (1, 4),
        {"x": _floats(0, 4)}, "the axis that it searches",
    ),
    "window": (
        _model("MaxPool", {"x": ["n", 1, "h"]}, kernel_shape=[3], strides=[2]),
        {"x": _floats(0, 1, 3)}, (0, 1, 1),
        {"x": _floats(1, 1, 2)}, "windows that the padded image holds",
    ),
    "cut off": (
        _model("Pad", {"x": ["n", 4]}, {"p": [-2, 0, 1, 0]}),
        {"x": _floats(1, 4)}, (0, 4),
        {"x": _floats(0, 4)}, "a size of its result",
    ),
    "reflected": (
        _model("Pad", {"x": ["n", 4]}, {"p": [2, 0, 1, 0]}, mode="reflect"),
        {"x": _floats(3, 4)}, (6, 4),
        {"x": _floats(2, 4)}, "reflect pads: n is 2, not 3",
    ),
    "wrapped": (
        _model("Pad", {"x": ["n", 4]}, {"p": [2, 0, 1, 0]}, mode="wrap"),
        {"x": _floats(1, 4)}, (4, 4),
        {"x": _floats(0, 4)}, "wrap pads",
    ),
    "squeezed": (
        _model("Squeeze", {"x": ["n", 1]}),
        {"x": _floats(2, 1)}, (2,),
        {"x": _floats(1, 1)}, "an open size that Squeeze without axes keeps",
    ),
    "blocks": (
        _model("SpaceToDepth", {"x": [1, 1, "h", 2]}, blocksize=2),
        {"x": _floats(1, 1, 4, 2)}, (1, 4, 2, 1),
        {"x": _floats(1, 1, 3, 2)}, "the image and whole blocks",
    ),
    "fixed index": (
        _model("Gather", {"x": ["n", 4]}, {"i": 5}),
        {"x": _floats(6, 4)}, (4,),
        {"x": _floats(5, 4)}, "takes elements of: n is 5, not 6",
    ),
    "nothing to gather from": (
        _model("Gather", {"x": ["n", 4], "i": ["m"]}, types=INT64),
        {"x": _floats(0, 4), "i": ZERO[0, :0]}, (0, 4),
        {"x": _floats(0, 4), "i": ZERO[0, :1]}, "takes elements of",
    ),
    "wide indices": (
        _model("GatherElements", {"x": ["n", "c"], "i": ["m", "d"]}, types=INT64),
        {"x": _floats(2, 4), "i": ZERO[:, :3]}, (1, 3),
        {"x": _floats(2, 3), "i": ZERO}, "the data along axis 1",
    ),
    "more updates than indices": (
        _model("ScatterND", {"x": ["n", 4], "i": ["m", 1], "u": ["k", 4]}, types=INT64),
        {"x": _floats(2, 4), "i": ZERO[:, :1], "u": _floats(1, 4)}, (2, 4),
        {"x": _floats(2, 4), "i": ZERO[:, :1], "u": _floats(2, 4)}, "updates and what is indexed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_only_run_time_tells(case: str) -> None:
    model, fits, shape, fails, message = SIZES[case]
    run = compile_model(model)
    assert run(fits)["y"].shape == shape
    with pytest.raises(atsc.UsageError, match=f"the_node: .*{message}"):
        run(fails)


@pytest.mark.parametrize(
    ("model", "name", "fits", "fails"),
    [
        (
            _model(
                "ReverseSequence", {"x": [3, 2], "i": [2]}, types=INT64, time_axis=0, batch_axis=1
            ),
            "i", [3, 1], [4, 1],
        ),
        (
            _model(
                "TensorScatter", {"x": [1, 3, 2], "u": [1, 2, 2], "i": [1]}, types=INT64, opset=24
            ),
            "i", [1], [2],
        ),
    ],
)  # fmt: skip
def test_indices_that_only_data_tell(
    model: onnx.ModelProto, name: str, fits: list[int], fails: list[int]
) -> None:
    run = compile_model(model)
    shapes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    inputs = {key: _floats(*shape) for key, shape in shapes.items() if key != name}
    run({**inputs, name: np.array(fits)})
    for wrong in (fails, [-1] * len(fits)):
        with pytest.raises(RuntimeError, match="the_node: an index is out of range"):
            run({**inputs, name: np.array(wrong)})


@pytest.fixture
def run_plan(tmp_path: Path) -> Callable[[onnx.ModelProto, Mapping[str, Array]], Array]:
    def run(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Array:
        onnx.save(model, tmp_path / "m.onnx")
        folder = atsc.compile(tmp_path / "m.onnx")
        assert folder is not None
        with atsc.load(folder, threads=2) as plan:
            return plan.run(inputs)["y"]

    return run


def test_a_plan_says_which_size_is_too_small(
    run_plan: Callable[[onnx.ModelProto, Mapping[str, Array]], Array],
) -> None:
    """The runtime's own check, and the largest rank that its interface has."""
    with pytest.raises(
        atsc.UsageError,
        match=r"^node the_node: the axis that it searches \(n\) is 0, and must be at least 1$",
    ):
        run_plan(_model("ArgMax", {"x": ["n", 4]}, axis=0), {"x": _floats(0, 4)})
    x = _floats(*[2] * 8)
    np.testing.assert_array_equal(run_plan(_model("Neg", {"x": [-1] + [2] * 7}), {"x": x}), -x)
