"""What people give in place of an ONNX model or a GGUF file, and the way on from there."""

from __future__ import annotations

import shlex
from pathlib import Path

from atsc.compiler.errors import ModelError, UsageError
from atsc.compiler.importers.converted import begins_with, is_gguf

_CHECKPOINTS = (".safetensors", ".bin", ".pt", ".pth")
_POINTER_MAGIC = b"version https://git-lfs"


def refuse_other_formats(model: Path) -> None:
    """For commands that take a GGUF file, an .onnx file or the folder that holds one.

    Whatever is not recognised is left to the importers.

    Raises:
        UsageError: it is a folder with nothing but GGUF files.
        ModelError: it is a checkpoint of a training framework, a plan, or a Git LFS pointer.
    """
    if model.is_dir():
        _refuse_folder(model)
        return
    _refuse_pointer(model)
    if model.suffix.lower() in _CHECKPOINTS:
        export = _export(model.parent)
        raise ModelError(f"{model}: a checkpoint, not an ONNX model; {export}")


def refuse_other_than_gguf(source: Path) -> None:
    """For `atsc convert`.

    Raises:
        UsageError: it is a folder, or ONNX already.
        ModelError: it is a checkpoint of a training framework, or a Git LFS pointer.
    """
    if source.is_dir():
        found = _files(source, ".gguf")
        hint = f"as {found[0]}" if found else "there is none in it"
        raise UsageError(f"{source}: a folder; give the .gguf file itself ({hint})")
    _refuse_pointer(source)
    if is_gguf(source):
        return
    if source.suffix.lower() == ".onnx":
        raise UsageError(f"{source}: ONNX already; compile it: atsc compile {_quoted(source)}")
    if source.suffix.lower() in _CHECKPOINTS:
        export = _export(source.parent)
        raise ModelError(f"{source}: a checkpoint, not a GGUF file; {export}")


def _refuse_folder(folder: Path) -> None:
    for file in _files(folder, ".onnx"):
        _refuse_pointer(file)
    if any(folder.glob("*.onnx")) or any(folder.glob("*/*.onnx")):
        return  # the importer takes one, or says which to choose
    if (folder / "plan.json").is_file():
        raise ModelError(
            f'{folder}: a plan already; run it with: atsc run {_quoted(folder)} -p "Hello"'
        )
    if found := _files(folder, ".gguf"):
        raise UsageError(f"{folder}: a folder without ONNX; give the GGUF itself: {found[0]}")
    if any(_files(folder, suffix) for suffix in _CHECKPOINTS):
        export = _export(folder)
        raise ModelError(f"{folder}: holds a checkpoint and no ONNX model; {export}")


def _refuse_pointer(file: Path) -> None:
    if begins_with(file, _POINTER_MAGIC):
        raise ModelError(f"{file}: a Git LFS pointer in place of the file; fetch it: git lfs pull")


def _files(folder: Path, suffix: str) -> list[Path]:
    found = (path for path in folder.iterdir() if path.suffix.lower() == suffix)
    return sorted(path for path in found if path.is_file())


def _export(folder: Path) -> str:
    return (
        "export it to ONNX first, as by `python -m onnxruntime_genai.models.builder "
        f"-i {_quoted(folder)} -o OUTPUT -p int4 -e cpu`, or take a GGUF of it"
    )


def _quoted(path: Path) -> str:
    """As a shell takes it."""
    return shlex.quote(str(path))
