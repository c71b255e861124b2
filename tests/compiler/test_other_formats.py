"""What people give in place of an ONNX model or a GGUF file is named, with the way on."""

from __future__ import annotations

from pathlib import Path

import pytest

from atsc.compiler import cli

POINTER = b"version https://git-lfs.example/spec/v1\noid sha256:00\nsize 9\n"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.main([str(argument) for argument in arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["config.json", "model.safetensors"], "holds a checkpoint and no ONNX model; export it"),
        (["pytorch_model.bin"], "models.builder -i {folder} -o OUTPUT"),
        (["b-00002-of-2.gguf", "a-00001-of-2.gguf"], "the GGUF itself: {folder}/a-00001-of-2.gguf"),
        (["plan.json", "weights.bin"], "a plan already; run it with: atsc run {folder}"),
        (["README.md"], "0 .onnx files"),
    ],
)
def test_compile_of_a_folder_without_onnx(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, names: list[str], expected: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert expected.format(folder=tmp_path) in refusal(capsys, "compile", tmp_path)


def test_an_onnx_model_further_down_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").touch()
    assert "give the path of the .onnx file itself" in refusal(capsys, "compile", tmp_path)


def test_checkpoint_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x08")
    assert "a checkpoint, not an ONNX model; export it" in refusal(capsys, "compile", file)
    outcome = refusal(capsys, "convert", file, "-o", tmp_path / "m.onnx")
    assert "a checkpoint, not a GGUF file; export it" in outcome


def test_pointers_in_place_of_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("m.onnx", "m.gguf"):
        (tmp_path / name).write_bytes(POINTER)
    asked = "a Git LFS pointer in place of the file; fetch it: git lfs pull"
    assert asked in refusal(capsys, "compile", tmp_path / "m.onnx")
    assert f"{tmp_path}/m.onnx: {asked}" in refusal(capsys, "compile", tmp_path)
    assert asked in refusal(capsys, "convert", tmp_path / "m.gguf", "-o", tmp_path / "x.onnx")


def test_convert_does_not_write_over_its_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, link = tmp_path / "m.onnx", tmp_path / "link.onnx"
    source.write_bytes(b"GGUF")
    link.symlink_to(source)
    for output in (source, link):
        assert "the GGUF file itself" in refusal(capsys, "convert", source, "-o", output)
    assert source.read_bytes() == b"GGUF"


def test_convert_of_something_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, output = tmp_path / "m.onnx", tmp_path / "x.onnx"
    model.touch()
    assert f"compile it: atsc compile {model}" in refusal(capsys, "convert", model, "-o", output)
    assert "there is none in it" in refusal(capsys, "convert", tmp_path, "-o", output)
    (tmp_path / "m.gguf").touch()
    outcome = refusal(capsys, "convert", tmp_path, "-o", output)
    assert f"give the .gguf file itself (as {tmp_path}/m.gguf)" in outcome
