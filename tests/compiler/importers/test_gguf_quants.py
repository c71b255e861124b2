from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from atsc.compiler.errors import ModelError
from atsc.compiler.importers import gguf_quants
from atsc.compiler.importers.gguf_quants import dequantized, matrix_of, vector_of
from atsc.compiler.importers.onnx.decoder import Matrix
from atsc.compiler.ir import ArraySource, DType, Weight
from atsc.compiler.weights import dequantize

SUPPORTED = (Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q8_0)
ROWS, WIDTH, HEADS = 24, 128, 3


def stored(kind: Q, rng: np.random.Generator, rows: int = ROWS, width: int = WIDTH) -> np.ndarray:
    """Random rows as a file of this type holds them; for blocks, what a quantiser makes of them."""
    values = rng.standard_normal((rows, width)).astype(np.float32)
    if kind is Q.F32:
        return values
    return gguf.quants.quantize(values, kind)


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


def assert_lossless(actual: np.ndarray, expected: np.ndarray) -> None:
    """Within one fp32 ulp of the largest magnitude of each block of 32."""
    blocks = expected.reshape(-1, 32)
    ulp = np.spacing(np.abs(blocks).max(axis=1, keepdims=True))
    assert (np.abs(actual.reshape(-1, 32) - blocks) <= ulp).all()


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What a converter to GGUF does to q and k."""
    return (
        rows.reshape(num_heads, 2, len(rows) // num_heads // 2, -1)
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 2000, 4 << 20])
@pytest.mark.parametrize("num_heads", [0, HEADS])
@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
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
    assert_lossless(dequantize(as_weight(matrix)), expected)


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
    recovered = (-scales * points).astype(np.float16)
    np.testing.assert_array_equal(recovered[has_scale], m[has_scale].astype(np.float16))
    assert_lossless(dequantize(weight), gguf.quants.dequantize(rows, Q.Q4_1))


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_dequantized_is_what_gguf_says(kind: Q, tmp_path: Path) -> None:
    data = stored(kind, np.random.default_rng(3))
    weight = as_weight(dequantized(read_back(tmp_path, data, kind)))
    np.testing.assert_array_equal(dequantize(weight), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16], ids=lambda kind: kind.name)
def test_vectors(kind: Q, tmp_path: Path) -> None:
    data = stored(kind, np.random.default_rng(4), rows=1)[0]
    expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(vector_of(read_back(tmp_path, data, kind)), expected)
    twisted = permuted(data.reshape(WIDTH, -1), 4).reshape(data.shape)
    tensor = read_back(tmp_path, twisted, kind)
    np.testing.assert_array_equal(vector_of(tensor, num_heads=4), expected)


@pytest.mark.parametrize("kind", [Q.Q5_0, Q.Q4_K, Q.Q6_K], ids=lambda kind: kind.name)
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
