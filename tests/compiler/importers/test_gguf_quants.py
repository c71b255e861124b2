from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf_sample import quantized
from k_quants import pack_k, pack_q6_k

from atsc.compiler.errors import ModelError
from atsc.compiler.importers import gguf_quants
from atsc.compiler.importers.gguf_quants import matrix_of, vector_of
from atsc.compiler.importers.onnx.decoder import Matrix
from atsc.compiler.ir import ArraySource, BlockFormat, DType, Weight
from atsc.compiler.weights import dequantize, unpack_codes

FLOATS = (Q.F32, Q.F16, Q.BF16)
BLOCKS = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K)
FORMATS = {
    Q.Q4_0: BlockFormat(4, 32, False),
    Q.Q4_1: BlockFormat(4, 32, True),
    Q.Q5_0: BlockFormat(8, 32, False),
    Q.Q5_1: BlockFormat(8, 32, True),
    Q.Q8_0: BlockFormat(8, 32, False),
    Q.Q4_K: BlockFormat(4, 32, True),
    Q.Q5_K: BlockFormat(8, 32, True),
    Q.Q6_K: BlockFormat(8, 16, False),
}
ROWS, WIDTH, HEADS = 24, 512, 3


def stored(kind: Q, rng: np.random.Generator, rows: int = ROWS, width: int = WIDTH) -> np.ndarray:
    """Random rows as a file of this type holds them; for blocks, what a quantiser makes of them."""
    return quantized(rng.standard_normal((rows, width)).astype(np.float32), kind)


def read_back(tmp_path: Path, data: np.ndarray, kind: Q) -> gguf.ReaderTensor:
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.7.some.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path).tensors[0]


def as_weight(matrix: Matrix) -> Weight:
    parts = {}
    for name, chunks in matrix.parts.items():
        whole = np.concatenate(list(chunks()))
        is_bf16 = name == "data" and whole.dtype == np.uint16
        parts[name] = ArraySource.of(whole, DType.BF16 if is_bf16 else None)
        assert whole.shape == matrix.part_shape(name)
    return Weight("w", matrix.shape, matrix.format, parts)


def assert_lossless(weight: Weight, expected: np.ndarray) -> None:
    """Within one fp32 ulp of the largest magnitude of each block."""
    size = weight.format.block_size if isinstance(weight.format, BlockFormat) else 1
    blocks = expected.reshape(-1, size)
    ulp = np.spacing(np.abs(blocks).max(axis=1, keepdims=True))
    assert (np.abs(dequantize(weight).reshape(-1, size) - blocks) <= ulp).all()


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What a converter to GGUF does to q and k."""
    return (
        rows.reshape(num_heads, 2, len(rows) // num_heads // 2, -1)
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 2000, 4 << 20])
@pytest.mark.parametrize("num_heads", [0, HEADS])
@pytest.mark.parametrize("kind", FLOATS + BLOCKS, ids=lambda kind: kind.name)
def test_is_lossless(
    kind: Q,
    num_heads: int,
    chunk_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf_quants, "_CHUNK_BYTES", chunk_bytes)
    data = stored(kind, np.random.default_rng(1))
    expected = gguf.quants.dequantize(data, kind)
    tensor = read_back(tmp_path, permuted(data, num_heads) if num_heads else data, kind)
    matrix = matrix_of(tensor, num_heads=num_heads)
    assert matrix.shape == (ROWS, WIDTH)
    weight = as_weight(matrix)
    assert weight.format == FORMATS.get(kind, weight.format)
    assert_lossless(weight, expected)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_any_bytes_are_lossless(kind: Q, tmp_path: Path) -> None:
    """Blocks that no quantiser makes: codes of any range, scales of any sign, offsets far away."""
    rng = np.random.default_rng(6)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (2000, num_bytes), np.uint8)
    data[::5, -elements // 4 :] = rng.integers(0, 256, (400, 1), np.uint8)  # Few codes a block.
    halves = {Q.Q6_K: [208], Q.Q4_1: [0, 2], Q.Q5_1: [0, 2], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2]}
    for place in halves.get(kind, [0]):
        values = rng.uniform(-1, 1, 2000) * 10.0 ** rng.integers(-4, 1, 2000)
        data[:, place : place + 2] = values.astype(np.float16)[:, None].view(np.uint8)
    data = data.reshape(2000 // 4, -1)
    weight = as_weight(matrix_of(read_back(tmp_path, data, kind)))
    assert_lossless(weight, gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_K], ids=lambda kind: kind.name)
def test_k_blocks_without_a_scale_hold_their_offset(kind: Q, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    q = rng.integers(0, 16, (8, 256)).astype(np.uint8)
    s, t = rng.integers(1, 64, (2, 8, 8)).astype(np.uint8)
    s[:, ::3] = 0
    t[0, 0] = 0
    d, e = np.full((2, 8, 1), 0.01, np.float32)
    d[5] = 0
    data = pack_k(q, s, t, d, e, kind)
    weight = as_weight(matrix_of(read_back(tmp_path, data, kind)))
    assert_lossless(weight, gguf.quants.dequantize(data, kind))
    assert np.isfinite(weight.parts["zero_points"].read()).all()
    points = weight.parts["zero_points"].read().reshape(8, 8)
    assert (points[5] == 0).all() and (points[:, ::3] == 0).all()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_scales_that_are_no_numbers(kind: Q, number: float, tmp_path: Path) -> None:
    data = stored(kind, np.random.default_rng(9))
    place = 208 if kind is Q.Q6_K else 0
    data[3, place : place + 2] = np.array([number], np.float16).view(np.uint8)
    matrix = matrix_of(read_back(tmp_path, data, kind))
    with pytest.raises(ModelError, match=r"tensor blk\.7\.some\.weight: a scale is infinite"):
        as_weight(matrix)


def test_q6_k_with_scales_of_zero(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    s = rng.integers(-128, 128, (4, 16)).astype(np.int8)
    s[:, 2] = 0
    q = rng.integers(0, 64, (4, 256)).astype(np.uint8)
    data = pack_q6_k(q, s, np.full((4, 1), 0.02, np.float32))
    weight = as_weight(matrix_of(read_back(tmp_path, data, Q.Q6_K)))
    np.testing.assert_array_equal(dequantize(weight), gguf.quants.dequantize(data, Q.Q6_K))


def test_q4_1_keeps_d_and_m_recoverable(tmp_path: Path) -> None:
    data = stored(Q.Q4_1, np.random.default_rng(2), rows=256).reshape(-1, 20)
    halves = data[:, :4].copy().view(np.float16)
    halves[5] = (0.0, -0.75)
    halves[6] = (0.0, 0.0)
    halves[7] = (6e-8, 3.0)
    data[:, :4] = halves.view(np.uint8)
    rows = data.reshape(256, -1)
    weight = as_weight(matrix_of(read_back(tmp_path, rows, Q.Q4_1)))
    scales = weight.parts["scales"].read().reshape(-1)
    points = weight.parts["zero_points"].read().reshape(-1)
    assert points.dtype == np.float32
    d, m = halves.astype(np.float32).T
    has_scale = d != 0
    np.testing.assert_array_equal(scales[has_scale], d[has_scale])
    codes = unpack_codes(weight.parts["codes"].read(), 4).reshape(-1, 32)
    elements = np.concatenate([data[:, 4:] & 15, data[:, 4:] >> 4], axis=1)
    shift = elements.min(axis=1) - codes.min(axis=1).astype(np.float32)
    recovered = (-scales * (points + shift)).astype(np.float16)
    np.testing.assert_array_equal(recovered[has_scale], m[has_scale].astype(np.float16))
    assert_lossless(weight, gguf.quants.dequantize(rows, Q.Q4_1))


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16], ids=lambda kind: kind.name)
def test_vectors(kind: Q, tmp_path: Path) -> None:
    data = stored(kind, np.random.default_rng(4), rows=1)[0]
    expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(vector_of(read_back(tmp_path, data, kind)), expected)
    twisted = permuted(data.reshape(WIDTH, -1), 4).reshape(data.shape)
    tensor = read_back(tmp_path, twisted, kind)
    np.testing.assert_array_equal(vector_of(tensor, num_heads=4), expected)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.IQ4_NL, Q.MXFP4], ids=lambda kind: kind.name)
def test_other_types_are_named(kind: Q, tmp_path: Path) -> None:
    row_bytes = 256 // gguf.GGML_QUANT_SIZES[kind][0] * gguf.GGML_QUANT_SIZES[kind][1]
    tensor = read_back(tmp_path, np.zeros((4, row_bytes), np.uint8), kind)
    with pytest.raises(ModelError, match=rf"blk\.7\.some\.weight is of type {kind.name}"):
        matrix_of(tensor)


def test_shapes_that_make_no_sense(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with pytest.raises(ModelError, match="expected a vector"):
        vector_of(read_back(tmp_path, stored(Q.F32, rng), Q.F32))
    with pytest.raises(ModelError, match="expected a matrix"):
        matrix_of(read_back(tmp_path, stored(Q.F32, rng)[0], Q.F32))
    with pytest.raises(ModelError, match="24 rows are no whole pairs for 5 heads"):
        matrix_of(read_back(tmp_path, stored(Q.F32, rng), Q.F32), num_heads=5)
