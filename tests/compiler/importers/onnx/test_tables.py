"""Embeddings whose rows lie along another axis than the first, against onnxruntime."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import BlockFormat, DType, FloatFormat

ELEMENTS = {"int4": TensorProto.INT4, "uint4": TensorProto.UINT4, "uint8": TensorProto.UINT8}
BLOCK = 16
Shape = tuple[int, ...]


def stored(
    decoder: MiniDecoder, name: str, kind: str, bits: int, shape: Shape, rng: np.random.Generator
) -> str:
    """Random codes of a shape; bytes hold several along the last axis, 4-bit elements anywhere."""
    if kind == "uint8":
        in_bytes = (*shape[:-1], -(-shape[-1] * bits // 8))
        return decoder.constant(name, rng.integers(0, 256, in_bytes, np.uint8))
    packed = rng.integers(0, 256, -(-math.prod(shape) // 2), np.uint8)
    return decoder.constant(name, packed, ELEMENTS[kind], shape)


def empty_decoder(rows: int) -> MiniDecoder:
    decoder = MiniDecoder(np.zeros((rows, 1), np.float32), opset=21)
    decoder.nodes.clear()
    return decoder


def block_table(
    kind: str,
    shape: Shape,
    axes: tuple[int, int],
    *,
    zero_points: bool = True,
    bits: int = 4,
    floats: type = np.float32,
) -> MiniDecoder:
    """GatherBlockQuantized along `axes` (gathered, quantised), and what makes rows of it."""
    rng = np.random.default_rng(sum(shape) + bits)
    axis, along = (a % len(shape) for a in axes)
    decoder = empty_decoder(shape[axis])
    parts = tuple(-(-n // BLOCK) if k == along else n for k, n in enumerate(shape))
    names = [stored(decoder, "codes", kind, bits, shape, rng), "input_ids"]
    scales = rng.uniform(-0.1, 0.1, parts).astype(floats)
    names.append(decoder.constant("scales", scales))
    if zero_points:
        names.append(stored(decoder, "points", kind, bits, parts, rng))
    decoder.node(
        "GatherBlockQuantized", names, ["gathered"], MICROSOFT,
        bits=bits, block_size=BLOCK, gather_axis=axes[0], quantize_axis=axes[1],
    )  # fmt: skip
    side_by_side(decoder, shape, axis)
    return decoder


def side_by_side(decoder: MiniDecoder, shape: Shape, axis: int, last: str = "logits") -> None:
    """Put the elements of each token side by side."""
    outside, inside = range(axis), range(axis + 2, len(shape) + 1)
    order = [axis, axis + 1, *outside, *inside]
    decoder.node("Transpose", ["gathered"], ["turned"], perm=order)
    width = math.prod(shape) // shape[axis]
    decoder.constant("width", np.array([1, -1, width], np.int64))
    decoder.node("Reshape", ["turned", "width"], [last])


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("shape", [(32, 21), (33, 20), (1, 21, 32), (3, 19, 18), (19, 2, 32)])
def test_every_axis_of_4_bit_elements(shape: Shape, kind: str, zero_points: bool) -> None:
    for axis in range(len(shape)):
        for along in range(len(shape)):
            decoder = block_table(kind, shape, (axis, along), zero_points=zero_points)
            decoder.assert_agrees(tolerance=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "zero_points"), [((7, 3, 32), False), ((7, 3, 48), True), ((7, 1, 72), True)]
)
def test_bytes_of_several_axes(bits: int, shape: Shape, zero_points: bool) -> None:
    decoder = block_table("uint8", shape, (0, -1), zero_points=zero_points, bits=bits)
    decoder.assert_agrees(tolerance=1e-6)


def test_what_onnxruntime_takes_no_bytes_for_is_refused() -> None:
    decoder = block_table("uint8", (32, 32), (1, 0), zero_points=False)
    with pytest.raises(Exception, match=r"GatherBlockQuantized|quantize_axis"):
        decoder.onnxruntime([np.arange(3)])
    with pytest.raises(ModelError, match=r"gather_axis 1 and quantize_axis 0, supported for codes"):
        decoder.imported()


def test_columns_with_blocks_along_them_stay_in_blocks() -> None:
    """[W, V] with blocks along W is what a head reads too; [1, V, W] is a matrix."""
    for shape, axes in (((32, 21), (1, 0)), ((1, 21, 32), (1, 2)), ((21, 2, 32), (0, 2))):
        graph = block_table("int4", shape, axes).imported()
        assert graph.weights["codes"].format == BlockFormat(4, BLOCK, True)
    graph = block_table("int4", (32, 21), (1, 1)).imported()
    assert graph.weights["codes"].format == FloatFormat(DType.F32)


def test_a_head_shares_the_table_that_is_stored_its_way() -> None:
    rng = np.random.default_rng(0)
    decoder = empty_decoder(21)
    stored(decoder, "codes", "int4", 4, (32, 21), rng)
    decoder.constant("scales", rng.uniform(-0.1, 0.1, (2, 21)).astype(np.float32))
    decoder.node(
        "GatherBlockQuantized", ["codes", "input_ids", "scales"], ["gathered"], MICROSOFT,
        bits=4, block_size=BLOCK, gather_axis=1, quantize_axis=0,
    )  # fmt: skip
    side_by_side(decoder, (32, 21), 1, "x")
    decoder.node("DequantizeLinear", ["codes", "scales"], ["w"], axis=0, block_size=BLOCK)
    decoder.node("MatMul", ["x", "w"], ["logits"])
    decoder.assert_agrees(tolerance=1e-5)
    assert list(decoder.imported().weights) == ["codes"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(24, 21), (1, 21, 24), (2, 21, 12)])
def test_columns_of_floats(shape: Shape, dtype: type) -> None:
    rng = np.random.default_rng(0)
    decoder = empty_decoder(21)
    decoder.constant("columns", rng.standard_normal(shape).astype(dtype))
    decoder.node("Gather", ["columns", "input_ids"], ["gathered"], axis=1)
    side_by_side(decoder, shape, 1, "narrow")
    decoder.node("Cast", ["narrow"], ["logits"], to=TensorProto.FLOAT)
    decoder.assert_agrees(tolerance=1e-7)


def test_flat_ids_and_half_floats() -> None:
    decoder = block_table("int4", (300, 21), (1, 0), floats=np.float16)
    decoder.constant("all", np.array([-1], np.int64))
    decoder.node("Reshape", ["input_ids", "all"], ["flat"], name="flatten")
    decoder.nodes[0].input[1] = "flat"
    del decoder.nodes[1:3]
    decoder.node("Transpose", ["gathered"], ["rows"], name="turn", perm=[1, 0])
    decoder.node("Reshape", ["rows", "width"], ["narrow"], name="to_rows")
    decoder.node("Cast", ["narrow"], ["logits"], to=TensorProto.FLOAT)
    decoder.nodes.insert(0, decoder.nodes.pop(1))
    decoder.assert_agrees(tolerance=1e-3)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 1, 2]])
def test_columns_that_are_not_put_side_by_side_are_refused(order: list[int]) -> None:
    decoder = block_table("int4", (32, 21), (1, 0))
    turn = next(node for node in decoder.nodes if node.op_type == "Transpose")
    turn.attribute[0].ints[:] = order
    with pytest.raises(ModelError, match=r"the_GatherBlockQuantized: .* along axis 1: "):
        decoder.imported()
