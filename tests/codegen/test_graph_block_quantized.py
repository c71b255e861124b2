"""Constants in blocks in general graphs, against onnxruntime, in all forms that it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from bert import BertShape, bert_model, random_weights
from graph_runner import compile_model
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import atsc
from atsc.compiler.errors import ModelError

pytestmark = pytest.mark.toolchain
MICROSOFT = "com.microsoft"
RANGES = {"int4": (-8, 8), "uint4": (0, 16), "uint8": (0, 256)}
Shape = tuple[int, ...]
BLOCK = 16


def integers(rng: np.random.Generator, name: str, kind: str, shape: Shape) -> onnx.TensorProto:
    element = TensorProto.DataType.Value(kind.upper())
    return helper.make_tensor(name, element, shape, rng.integers(*RANGES[kind], shape).reshape(-1))


def gather_model(
    kind: str,
    bits: int,
    shape: Shape,
    axes: tuple[int, int],
    *,
    zero_points: bool = True,
    floats: type = np.float32,
    block: int = BLOCK,
    index_type: int = TensorProto.INT64,
) -> onnx.ModelProto:
    """One node; `axes` are those that are gathered and quantised, `shape` counts codes."""
    rng = np.random.default_rng(sum(shape) + bits)
    each = 8 // bits if kind == "uint8" else 1

    def stored(sizes: Shape) -> Shape:
        return (*sizes[:-1], -(-sizes[-1] // each))

    along = axes[1] % len(shape)
    parts = tuple(-(-size // block) if k == along else size for k, size in enumerate(shape))
    scales = rng.uniform(-0.1, 0.1, parts).astype(floats)
    tensors = [
        integers(rng, "data", kind, stored(shape)),
        numpy_helper.from_array(scales, "scales"),
    ]
    if zero_points:
        tensors.append(integers(rng, "points", kind, stored(parts)))
    node = helper.make_node(
        "GatherBlockQuantized",
        ["data", "ids", *(tensor.name for tensor in tensors[1:])],
        ["y"],
        domain=MICROSOFT,
        bits=bits,
        block_size=block,
        gather_axis=axes[0],
        quantize_axis=axes[1],
    )
    element = helper.np_dtype_to_tensor_dtype(np.dtype(floats))
    graph = helper.make_graph(
        [node],
        "table",
        [helper.make_tensor_value_info("ids", index_type, ["rows", 3])],
        [helper.make_tensor_value_info("y", element, None)],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def by_onnxruntime(model: onnx.ModelProto, ids: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (y,) = session.run(None, {"ids": ids})
    return np.asarray(y)


def check(model: onnx.ModelProto, ids: np.ndarray) -> None:
    expected = by_onnxruntime(model, ids)
    found = compile_model(model)({"ids": ids})["y"]
    assert found.dtype == expected.dtype
    # fp16 products are rounded once here, and perhaps differently there.
    tolerance = 1e-3 if expected.dtype == np.float16 else 1e-6
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-7)


def some_ids(size: int) -> np.ndarray:
    return np.array([[0, size - 1, -1], [-size, size // 2, 1]], np.int64)


@pytest.mark.parametrize(
    ("kind", "shape", "zero_points"),
    [
        ("int4", (18, 5, 37), True),
        ("int4", (33, 21), False),
        ("uint4", (33, 21), True),
        ("uint4", (21, 33), False),
    ],
)
def test_every_axis_of_4_bit_elements(kind: str, shape: Shape, zero_points: bool) -> None:
    for gathered in range(len(shape)):
        for quantised in range(len(shape)):
            model = gather_model(kind, 4, shape, (gathered, quantised), zero_points=zero_points)
            check(model, some_ids(shape[gathered]))


@pytest.mark.parametrize(
    ("shape", "zero_points"), [((7, 64), False), ((5, 3, 48), True), ((4, 72), True)]
)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes(bits: int, shape: Shape, zero_points: bool) -> None:
    model = gather_model("uint8", bits, shape, (0, len(shape) - 1), zero_points=zero_points)
    check(model, some_ids(shape[0]))


def test_other_types_and_sizes() -> None:
    check(gather_model("int4", 4, (9, 64), (-2, -1), floats=np.float16), some_ids(9))
    check(gather_model("uint8", 4, (9, 256), (0, 1), block=128), some_ids(9))
    narrow = gather_model("uint4", 4, (9, 64), (0, 1), index_type=TensorProto.INT32)
    check(narrow, some_ids(9).astype(np.int32))


def test_an_index_out_of_range_gives_zeros() -> None:
    """Unlike Gather, says the operator's schema."""
    model = gather_model("int4", 4, (9, 64), (0, 1))
    ids = np.array([[9, 0, -10]], np.int64)
    check(model, ids)
    assert not compile_model(model)({"ids": ids})["y"][0, [0, 2]].any()


@pytest.mark.parametrize(
    ("kind", "bits", "axes", "reason"),
    [
        ("uint8", 4, (1, 1), "attributes gather_axis 1 and quantize_axis 1, supported for uint8"),
        ("uint8", 8, (0, 0), "attributes gather_axis 0 and quantize_axis 0, supported for uint8"),
        ("int4", 8, (0, 1), "attribute bits is 8, elements of int4 have 4"),
    ],
)
def test_what_onnxruntime_refuses_is_refused(
    kind: str, bits: int, axes: tuple[int, int], reason: str
) -> None:
    model = gather_model(kind, bits, (32, 32), axes, zero_points=False)
    with pytest.raises(Exception, match=r"GatherBlockQuantized|quantize_axis"):
        by_onnxruntime(model, some_ids(32))
    with pytest.raises(ModelError, match=reason):
        compile_model(model)


def test_parts_that_do_not_fit() -> None:
    model = gather_model("uint4", 4, (9, 64), (0, 1))
    for tensor in model.graph.initializer:
        if tensor.name == "points":
            tensor.CopyFrom(integers(np.random.default_rng(0), "points", "uint4", (9, 3)))
    with pytest.raises(ModelError, match=r"zero points have shape \[9, 3\], expected \[9, 4\]"):
        compile_model(model)


def test_4_bit_elements_never_go_out_wider() -> None:
    """What does more than read them as numbers is refused, and no answer of another type."""
    data = integers(np.random.default_rng(0), "data", "uint4", (4, 6))
    node = helper.make_node("CastLike", ["ids", "data"], ["y"])
    graph = helper.make_graph(
        [node],
        "cast",
        [helper.make_tensor_value_info("ids", TensorProto.FLOAT, [4, 6])],
        [helper.make_tensor_value_info("y", TensorProto.UINT4, [4, 6])],
        [data],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(ModelError, match="elements of type uint4 are not supported"):
        compile_model(model)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_dequantize_linear_of_4_bit_elements(kind: str) -> None:
    """Constants are folded up to a size; here the scale is an input, as if they were too large."""
    rng = np.random.default_rng(0)
    parts = [integers(rng, name, kind, shape) for name, shape in
             (("data", (6, 33)), ("points", (6, 3)))]  # fmt: skip
    node = helper.make_node(
        "DequantizeLinear", ["data", "ids", "points"], ["y"], axis=1, block_size=BLOCK
    )
    graph = helper.make_graph(
        [node],
        "floats",
        [helper.make_tensor_value_info("ids", TensorProto.FLOAT, [6, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 33])],
        parts,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    check(model, rng.uniform(0.1, 0.2, (6, 3)).astype(np.float32))


def test_a_plan_of_a_file_with_external_data(tmp_path: Path) -> None:
    """4-bit elements stay packed from the file to the plan."""
    model = gather_model("int4", 4, (90, 64), (0, 1))
    expected = by_onnxruntime(model, some_ids(90))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    plan = atsc.compile(path)
    assert plan is not None
    with atsc.load(plan, threads=1) as loaded:
        np.testing.assert_allclose(loaded.run({"ids": some_ids(90)})["y"], expected, rtol=1e-6)
    assert (plan / "weights.bin").stat().st_size < 90 * 64


@pytest.mark.parametrize(
    ("bits", "width", "points", "bias"),
    [
        (4, 64, "", False),
        (4, 72, "packed", True),
        (4, 48, "float", False),
        (2, 72, "packed", False),
        (8, 40, "packed", True),
    ],
)
def test_matmul_nbits(bits: int, width: int, points: str, bias: bool) -> None:
    """K that is no multiple of the block, zero points of every kind, and rows of any number."""
    rng = np.random.default_rng(bits)
    outputs, blocks = 9, -(-width // BLOCK)
    arrays = {
        "codes": rng.integers(0, 256, (outputs, blocks, BLOCK * bits // 8), np.uint8),
        "scales": rng.uniform(-0.1, 0.1, outputs * blocks).astype(np.float32),
    }
    if points == "packed":
        arrays["points"] = rng.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)
    elif points:
        arrays["points"] = rng.uniform(0, 15, outputs * blocks).astype(np.float32)
    if bias:
        arrays["bias"] = rng.standard_normal(outputs).astype(np.float32)
    names = ["ids", "codes", "scales", "points" if points else "", "", "bias" if bias else ""]
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain=MICROSOFT,
        K=width, N=outputs, bits=bits, block_size=BLOCK, accuracy_level=1,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("ids", TensorProto.FLOAT, ["batch", "rows", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    x = rng.standard_normal((2, 5, width)).astype(np.float32)
    expected = by_onnxruntime(model, x)
    np.testing.assert_allclose(
        compile_model(model)({"ids": x})["y"], expected, rtol=1e-4, atol=1e-5
    )


def test_an_encoder_as_the_quantizer_writes_it() -> None:
    """Embeddings and every matrix of a BERT in blocks."""
    shape = BertShape()
    quantizer = MatMulNBitsQuantizer(
        bert_model(shape, random_weights(shape)),
        block_size=32,
        is_symmetric=False,
        accuracy_level=1,
        op_types_to_quantize=("MatMul", "Gather"),
        quant_axes=(("MatMul", 0), ("Gather", 1)),
    )
    quantizer.process()
    model = quantizer.model.model
    ops = {node.op_type for node in model.graph.node}
    assert {"MatMulNBits", "GatherBlockQuantized"} <= ops
    rng = np.random.default_rng(0)
    given = {
        "input_ids": rng.integers(0, shape.vocab, (2, 7)),
        "attention_mask": (np.arange(7) < [[7], [4]]).astype(np.int64),
        "token_type_ids": rng.integers(0, 2, (2, 7)),
    }
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    found = compile_model(model)(given)
    for name, expected in zip(names, session.run(names, given), strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-4)
