"""Operators with big weights, each as a tiny decoder in onnxruntime and here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto, helper

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import BlockFormat, DType, FloatFormat

BLOCK_SIZES = (16, 32, 64, 128, 256)
FEW = settings(max_examples=25, deadline=None, derandomize=True)


def floats(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def signed_scales(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (rng.uniform(0.01, 0.1, shape) * rng.choice([-1, 1], shape)).astype(dtype)


def block_constants(
    decoder: MiniDecoder,
    rng: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    block_size: int,
    zero_points: str,
    *,
    flat: bool = False,
    scales: Any = np.float32,
) -> list[str]:
    """Random codes, scales and zero points as MatMulNBits reads them."""
    rows, width = shape
    blocks = -(-width // block_size)
    codes = rng.integers(0, 256, (rows, blocks, block_size * bits // 8), np.uint8)
    scale = signed_scales(rng, rows, blocks, dtype=scales)
    names = [decoder.constant("codes", codes)]
    names.append(decoder.constant("scales", scale.reshape(-1) if flat else scale))
    if zero_points == "packed":
        points = rng.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
        names.append(decoder.constant("points", points.reshape(-1) if flat else points))
    elif zero_points == "float":
        points = rng.uniform(0, 2**bits - 1, (rows, blocks)).astype(scales)
        names.append(decoder.constant("points", points.reshape(-1) if flat else points))
    return names


@FEW
@given(
    bits=st.sampled_from([2, 4, 8]),
    block_size=st.sampled_from(BLOCK_SIZES),
    width=st.integers(1, 300),
    outputs=st.integers(1, 9),
    rows=st.sampled_from([1, 2, 5]),
    zero_points=st.sampled_from(["none", "packed", "float"]),
    bias=st.booleans(),
    flat=st.booleans(),
    level=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 99),
)
@example(4, 32, 96, 7, 3, "packed", True, False, 1, 0)  # an odd number of blocks
@example(4, 256, 32, 3, 1, "packed", False, True, 0, 0)  # one block, mostly beyond K
def test_matmul_nbits(
    bits: int,
    block_size: int,
    width: int,
    outputs: int,
    rows: int,
    zero_points: str,
    bias: bool,
    flat: bool,
    level: int | None,
    seed: int,
) -> None:
    if bits == 8 and zero_points == "float":
        zero_points = "packed"  # onnxruntime has no kernel for the other
    rng = np.random.default_rng(seed)
    decoder = MiniDecoder(floats(rng, rows, width))
    names = block_constants(
        decoder, rng, (outputs, width), bits, block_size, zero_points, flat=flat
    )
    if bias:
        names += [""] * (4 - len(names)) + [decoder.constant("bias", floats(rng, outputs))]
    decoder.node(
        "MatMulNBits", ["x", *names], ["logits"], MICROSOFT,
        N=outputs, K=width, bits=bits, block_size=block_size, accuracy_level=level,
    )  # fmt: skip
    decoder.assert_agrees(tolerance=2e-5)


def test_matmul_nbits_with_fp16_scales() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(floats(rng, 3, 64, dtype=np.float16))
    names = block_constants(decoder, rng, (5, 64), 4, 32, "float", scales=np.float16)
    decoder.node("MatMulNBits", ["x", *names], ["logits"], MICROSOFT, N=5, K=64, block_size=32)
    decoder.assert_agrees(tolerance=1e-3)
    (weight,) = (w for w in decoder.imported().weights.values() if w.name == "codes")
    assert weight.format == BlockFormat(4, 32, True)
    assert weight.parts["scales"].dtype is weight.parts["zero_points"].dtype is DType.F16


def test_float_zero_points_of_8_bits_are_read_as_they_are() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(np.eye(32, dtype=np.float32))
    names = block_constants(decoder, rng, (2, 32), 8, 16, "float")
    decoder.node(
        "MatMulNBits", ["x", *names], ["logits"], MICROSOFT, N=2, K=32, bits=8, block_size=16
    )
    codes, scales, points = (
        np.frombuffer(t.raw_data, dtype).reshape(shape)
        for t, dtype, shape in zip(
            decoder.initializers[1:],
            (np.uint8, np.float32, np.float32),
            ((2, 2, 16), (2, 2, 1), (2, 2, 1)),
            strict=True,
        )
    )
    expected = ((codes - points) * scales).reshape(2, 32).T
    np.testing.assert_allclose(decoder.ours([np.arange(32)]), expected, rtol=1e-6)


@pytest.mark.parametrize(("override", "level"), [(None, 4), (1, 1), (4, 4), (0, 0)])
def test_accuracy_level_can_be_overridden(override: int | None, level: int) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(floats(rng, 3, 64))
    names = block_constants(decoder, rng, (5, 64), 4, 32, "none")
    decoder.node(
        "MatMulNBits", ["x", *names], ["logits"], MICROSOFT,
        N=5, K=64, block_size=32, accuracy_level=4,
    )  # fmt: skip
    (node,) = (n for n in decoder.imported(override).nodes if n.op == "linear")
    assert node.attrs == {"accuracy_level": level}


TABLES = {
    "u8x2": (2, None),
    "u8x4": (4, None),
    "u8x8": (8, None),
    "uint4": (4, TensorProto.UINT4),
    "int4": (4, TensorProto.INT4),
}
"""Bits of a code, and the element type where it is not bytes."""


def packed_codes(
    decoder: MiniDecoder, rng: np.random.Generator, name: str, kind: str, shape: tuple[int, int]
) -> str:
    """Random codes: bytes have whole rows, 4-bit elements are packed across rows."""
    bits, element = TABLES[kind]
    if element is None:
        codes = rng.integers(0, 256, (shape[0], -(-shape[1] * bits // 8)), np.uint8)
        return decoder.constant(name, codes)
    codes = rng.integers(0, 256, -(-shape[0] * shape[1] // 2), np.uint8)
    return decoder.constant(name, codes, element, shape)


def block_table(
    kind: str,
    block_size: int,
    shape: tuple[int, int],
    quantize_axis: int,
    zero_points: bool,
    seed: int = 0,
) -> MiniDecoder:
    """A decoder that gathers rows of a table in blocks, and no more."""
    rng = np.random.default_rng(seed)
    decoder = MiniDecoder(np.zeros((shape[0], 1), np.float32), opset=21)
    decoder.nodes.clear()
    parts = list(shape)
    parts[quantize_axis] = -(-parts[quantize_axis] // block_size)
    names = [packed_codes(decoder, rng, "codes", kind, shape), "input_ids"]
    names.append(decoder.constant("scales", signed_scales(rng, *parts)))
    if zero_points:
        names.append(packed_codes(decoder, rng, "points", kind, (parts[0], parts[1])))
    decoder.node(
        "GatherBlockQuantized", names, ["logits"], MICROSOFT,
        bits=TABLES[kind][0], block_size=block_size, gather_axis=0, quantize_axis=quantize_axis,
    )  # fmt: skip
    return decoder


@FEW
@given(
    kind=st.sampled_from(list(TABLES)),
    block_size=st.sampled_from(BLOCK_SIZES),
    fours=st.integers(4, 80),
    rows=st.integers(1, 40),
    by_columns=st.booleans(),
    zero_points=st.booleans(),
    seed=st.integers(0, 99),
)
@example("int4", 32, 24, 5, False, True, 0)  # 4-bit zero points packed across rows
@example("uint4", 16, 4, 3, False, False, 0)  # the default zero point is 0
@example("u8x2", 16, 4, 3, False, False, 0)  # the default zero point is 2
@example("u8x4", 16, 4, 3, False, False, 0)  # the default zero point is 8
@example("u8x8", 16, 4, 3, False, False, 0)  # the default zero point is 128
@example("u8x4", 64, 20, 3, False, True, 0)  # the last block is not whole
@example("int4", 16, 11, 40, True, True, 0)  # blocks along the axis that is gathered
def test_gather_block_quantized(
    kind: str,
    block_size: int,
    fours: int,
    rows: int,
    by_columns: bool,
    zero_points: bool,
    seed: int,
) -> None:
    axis = 0 if by_columns and TABLES[kind][1] else 1  # bytes have blocks along rows alone
    decoder = block_table(kind, block_size, (rows, 4 * fours), axis, zero_points, seed)
    decoder.assert_agrees(tolerance=1e-7)


def test_blocks_across_rows_are_multiplied_out() -> None:
    """No block format has a scale for each column of several rows."""
    decoder = block_table("int4", 16, (40, 32), 0, True)
    assert decoder.imported().weights["codes"].format == FloatFormat(DType.F32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"gather_axis": 1},
            "rows of a table along axis 1: no Transpose behind it makes rows of 5",
        ),
        ({"bits": 8}, "attribute bits is 8, elements of INT4 have 4"),
        ({"block_size": 24}, "attribute block_size is 24, supported: 16 or 32 or"),
        ({"block_size": 64}, r"scales scales have shape \[5, 2\], expected \[5, 1\]"),
    ],
)
def test_tables_that_are_refused(change: dict[str, int], reason: str) -> None:
    decoder = block_table("int4", 32, (5, 64), 1, False)
    for attr in decoder.nodes[-1].attribute:
        attr.i = change.get(attr.name, attr.i)
    with pytest.raises(ModelError, match=reason):
        decoder.imported()


def test_bytes_in_blocks_across_rows_are_refused() -> None:
    decoder = block_table("u8x4", 16, (32, 32), 0, False)
    with pytest.raises(ModelError, match="quantize_axis is 0, supported for data of bytes: 1"):
        decoder.imported()


@pytest.mark.parametrize("axes", [(0, -1), (-2, 1), (-2, -1)])
@pytest.mark.parametrize("kind", ["u8x4", "int4"])
def test_axes_counted_from_the_end(kind: str, axes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(np.zeros((5, 1), np.float32))
    decoder.nodes.clear()
    shape = (5, 32) if kind == "int4" else None
    element = TensorProto.INT4 if kind == "int4" else None
    decoder.constant("codes", rng.integers(0, 256, (5, 16), np.uint8), element, shape)
    decoder.constant("scales", signed_scales(rng, 5, 2))
    decoder.node(
        "GatherBlockQuantized", ["codes", "input_ids", "scales"], ["logits"], MICROSOFT,
        bits=4, block_size=16, gather_axis=axes[0], quantize_axis=axes[1],
    )  # fmt: skip
    decoder.assert_agrees(tolerance=1e-7)


def test_a_matrix_of_two_nodes_is_one_weight() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(floats(rng, 3, 32))
    names = block_constants(decoder, rng, (32, 32), 4, 16, "packed")
    for source, result in (("x", "y"), ("y", "logits")):
        decoder.node(
            "MatMulNBits", [source, *names], [result], MICROSOFT, result, N=32, K=32, block_size=16
        )
    decoder.assert_agrees(tolerance=1e-5)
    assert list(decoder.imported().weights) == ["table", "codes"]


def offset_decoder(
    rng: np.random.Generator, bits: int, size: int, shape: tuple[int, int]
) -> MiniDecoder:
    """Rows of a table without zero points, seen as blocks, plus a float a block."""
    rows, blocks = shape
    decoder = MiniDecoder(np.zeros((rows, 1), np.float32))
    decoder.nodes.clear()
    names = block_constants(decoder, rng, (rows, blocks * size), bits, size, "none")
    decoder.constant("flat", np.array([rows, blocks * size * bits // 8], np.int64))
    decoder.constant("offsets", floats(rng, rows, blocks, 1))
    decoder.constant("blocks", np.array([0, 0, blocks, size], np.int64))
    decoder.constant("whole", np.array([0, 0, blocks * size], np.int64))
    decoder.node("Reshape", [names[0], "flat"], ["table_codes"], name="flatten")
    decoder.node(
        "GatherBlockQuantized", ["table_codes", "input_ids", names[1]], ["rows"], MICROSOFT,
        bits=bits, block_size=size,
    )  # fmt: skip
    decoder.node("Gather", ["offsets", "input_ids"], ["offset"], name="gather_offsets")
    decoder.node("Reshape", ["rows", "blocks"], ["grouped"], name="to_blocks")
    decoder.node("Add", ["grouped", "offset"], ["sum"], name="add_offsets")
    decoder.node("Reshape", ["sum", "whole"], ["logits"], name="to_rows")
    return decoder


@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, 32), (8, 32)])
def test_offsets_of_a_table_are_its_zero_points(bits: int, size: int) -> None:
    decoder = offset_decoder(np.random.default_rng(0), bits, size, (7, 3))
    decoder.assert_agrees(tolerance=1e-6)
    last = decoder.imported().nodes[-1]
    assert last.op == "embed"
    assert decoder.imported().weights[last.inputs[1]].format == BlockFormat(bits, size, True)


def test_offsets_that_fit_no_table_are_refused() -> None:
    decoder = offset_decoder(np.random.default_rng(0), 4, 32, (7, 2))
    decoder.initializers[-2].CopyFrom(
        helper.make_tensor("blocks", TensorProto.INT64, [4], [0, 0, 4, 16])
    )
    decoder.initializers[-3].CopyFrom(
        helper.make_tensor("offsets", TensorProto.FLOAT, [7, 4, 1], [0.5] * 28)
    )
    with pytest.raises(ModelError, match="offsets holds no offsets for the blocks of a table"):
        decoder.imported()


def test_offsets_of_blocks_without_a_scale_are_refused() -> None:
    decoder = offset_decoder(np.random.default_rng(0), 4, 32, (7, 2))
    scales = next(t for t in decoder.initializers if t.name == "scales")
    scales.raw_data = bytes(len(scales.raw_data))
    with pytest.raises(ModelError, match="offsets for blocks whose scale is 0"):
        decoder.ours([np.arange(7)])


def test_a_tied_int4_head_is_one_weight() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(np.zeros((7, 1), np.float32))
    decoder.nodes.clear()
    names = block_constants(decoder, rng, (7, 64), 4, 16, "none")
    decoder.constant("flat", np.array([7, 32], np.int64))
    decoder.node("Reshape", [names[0], "flat"], ["table_codes"])
    decoder.node(
        "GatherBlockQuantized", ["table_codes", "input_ids", names[1]], ["rows"], MICROSOFT,
        bits=4, block_size=16,
    )  # fmt: skip
    decoder.node("MatMulNBits", ["rows", *names], ["logits"], MICROSOFT, N=7, K=64, block_size=16)
    decoder.assert_agrees(tolerance=1e-5)
    assert list(decoder.imported().weights) == ["codes"]


@pytest.mark.parametrize("embedding_first", [False, True])
def test_a_tied_float_head_is_one_weight(embedding_first: bool) -> None:
    """The table is stored as the head reads it and transposed for Gather, or the reverse."""
    table = floats(np.random.default_rng(0), 7, 16)
    decoder = MiniDecoder(table if embedding_first else table.T)
    decoder.nodes.clear()
    decoder.node("Transpose", ["table"], ["turned"], perm=[1, 0])
    as_table, as_head = ("table", "turned") if embedding_first else ("turned", "table")
    decoder.node("Gather", [as_table, "input_ids"], ["rows"])
    decoder.node("MatMul", ["rows", as_head], ["logits"])
    decoder.num_rows = 7
    decoder.assert_agrees(tolerance=1e-6)
    graph = decoder.imported()
    assert {name: w.shape for name, w in graph.weights.items()} == {"table": (7, 16)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_float_matrices(op: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(floats(rng, 5, 24, dtype=dtype))
    decoder.constant("w", floats(rng, 24, 9, dtype=dtype))
    if op == "MatMul":
        decoder.node("MatMul", ["x", "w"], ["logits"])
    else:
        decoder.constant("two", np.array([-1, 24], np.int64))
        decoder.constant("three", np.array([1, -1, 9], np.int64))
        decoder.constant("b", floats(rng, 9, dtype=dtype))
        decoder.node("Reshape", ["x", "two"], ["flat"])
        decoder.node("Gemm", ["flat", "w", "b"], ["y"])
        decoder.node("Reshape", ["y", "three"], ["logits"], name="back")
    decoder.assert_agrees(tolerance=1e-6 if dtype is np.float32 else 2e-3)
    assert decoder.imported().weights["w"].shape == (9, 24)


def test_bf16_weights_stay_bf16() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(floats(rng, 5, 24))
    w = floats(rng, 24, 9)
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    decoder.constant("w", bits, TensorProto.BFLOAT16)
    decoder.node("MatMul", ["x", "w"], ["logits"])
    graph = decoder.imported()
    assert graph.weights["w"].format == FloatFormat(DType.BF16)
    table = graph.weights["table"].parts["data"].read()
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(decoder.ours([np.arange(5)]), table @ exact, rtol=1e-4, atol=1e-5)


def test_parts_of_the_wrong_size_are_refused() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(floats(rng, 3, 64))
    names = block_constants(decoder, rng, (5, 64), 4, 32, "none")
    decoder.node("MatMulNBits", ["x", *names], ["logits"], MICROSOFT, N=6, K=64, block_size=32)
    with pytest.raises(ModelError, match=r"codes has shape \[5, 2, 16\], expected \[6, 2, 16\]"):
        decoder.imported()
