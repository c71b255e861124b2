"""Split GGUF files: read as one, and every way to have the wrong ones is one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_sample import CONTEXT, HEAD_SIZE, sample

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.gguf import convert_gguf


def test_parts_are_one_model(tmp_path: Path) -> None:
    model = sample()
    convert_gguf(model.write(tmp_path / "whole.gguf"), tmp_path / "a" / "model.onnx")
    parts = model.write_split(tmp_path, "m", 3)
    sizes = convert_gguf(parts[0], tmp_path / "b" / "model.onnx")
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (
        sizes.source_bytes
        == convert_gguf(tmp_path / "whole.gguf", tmp_path / "a" / "model.onnx").source_bytes
    )
    assert sizes.rotary_bytes == 2 * 4 * CONTEXT * HEAD_SIZE // 2
    size = (tmp_path / "b" / "model.onnx.data").stat().st_size
    assert sizes.weight_bytes == size - sizes.rotary_bytes


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        convert_gguf(path, path.parent / "out" / "model.onnx")
    assert "\n" not in str(error.value)
    assert not (path.parent / "out").exists()
    return str(error.value)


def test_another_part_than_the_first(tmp_path: Path) -> None:
    parts = sample().write_split(tmp_path, "m", 3)
    assert "is part 2 of 3; give the first one, m-00001-of-00003.gguf" in refusal(parts[1])


def test_a_missing_part(tmp_path: Path) -> None:
    parts = sample().write_split(tmp_path, "m", 3)
    parts[2].unlink()
    assert "1 of its 3 parts are not in its folder (m-00003-of-00003.gguf)" in refusal(parts[0])


def test_a_renamed_part(tmp_path: Path) -> None:
    parts = sample().write_split(tmp_path, "m", 2)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    assert "part 1 of 2, which its name should say: NAME-00001-of-00002.gguf" in refusal(renamed)


def test_parts_of_another_model(tmp_path: Path) -> None:
    parts = sample().write_split(tmp_path, "m", 2)
    other = sample().write_split(tmp_path, "other", 3)
    other[1].replace(parts[1])
    assert "says that it is part 2 of 3, expected part 2 of 2" in refusal(parts[0])


def test_a_part_twice(tmp_path: Path) -> None:
    model = sample()
    parts = model.write_split(tmp_path, "m", 2)
    twice = dict(model.tensors)
    model.tensors = {"x": np.ones(4, np.float32), **twice}
    model.kinds["x"] = model.kinds["output_norm.weight"]
    model.write_split(tmp_path, "other", 2)[1].replace(parts[1])
    assert "is in an earlier part as well" in refusal(parts[0])


def test_a_wrong_number_of_tensors(tmp_path: Path) -> None:
    parts = sample().write_split(tmp_path, "m", 2, split__tensors__count=99)
    assert "the parts hold 20 tensors, expected 99" in refusal(parts[0])
