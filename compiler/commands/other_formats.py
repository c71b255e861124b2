"""What people give in place of an ONNX model or a GGUF file, and the way on from there."""

from __future__ import annotations

from pathlib import Path

from atsc.compiler.errors import ModelError, UsageError

_CHECKPOINTS = (".safetensors", ".bin", ".pt", ".pth")
_GGUF_MAGIC = b"GGUF"
_POINTER_MAGIC = b"version https://git-lfs"
_EXPORT = (
    "export it to ONNX first, as by `python -m onnxruntime_genai.models.builder -i {folder} "
    "-o OUTPUT -p int4 -e cpu`, or take a GGUF of it"
)


def refuse_other_than_onnx(model: Path) -> None:
    """For commands that take an .onnx file or the folder that holds one.

    Whatever is not recognised is left to the importer.

    Raises:
        UsageError: it is a GGUF file, or a folder with nothing but one.
        ModelError: it is a checkpoint of a training framework, a plan, or a Git LFS pointer.
    """
    if model.is_dir():
        _refuse_folder(model)
        return
    _refuse_pointer(model)
    if _is_gguf(model):
        _refuse_gguf(model, "a GGUF file")
    if model.suffix.lower() in _CHECKPOINTS:
        export = _EXPORT.format(folder=model.parent)
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
    if _is_gguf(source):
        return
    if source.suffix.lower() == ".onnx":
        raise UsageError(f"{source}: ONNX already; compile it: atsc compile {source}")
    if source.suffix.lower() in _CHECKPOINTS:
        export = _EXPORT.format(folder=source.parent)
        raise ModelError(f"{source}: a checkpoint, not a GGUF file; {export}")


def _refuse_folder(folder: Path) -> None:
    for file in _files(folder, ".onnx"):
        _refuse_pointer(file)
    if any(folder.glob("*.onnx")) or any(folder.glob("*/*.onnx")):
        return  # the importer takes one, or says which to choose
    if (folder / "plan.json").is_file():
        raise ModelError(f'{folder}: a plan already; run it with: atsc run {folder} -p "Hello"')
    if found := _files(folder, ".gguf"):
        _refuse_gguf(found[0], "the folder holds a GGUF file and no ONNX model")
    if any(_files(folder, suffix) for suffix in _CHECKPOINTS):
        export = _EXPORT.format(folder=folder)
        raise ModelError(f"{folder}: holds a checkpoint and no ONNX model; {export}")


def _refuse_pointer(file: Path) -> None:
    if _begins_with(file, _POINTER_MAGIC):
        raise ModelError(f"{file}: a Git LFS pointer in place of the file; fetch it: git lfs pull")


def _refuse_gguf(file: Path, what: str) -> None:
    # The plan is called as the folder is, so the folder is called as the model.
    is_named = file.suffix.lower() == ".gguf"
    folder = file.with_suffix("") if is_named else file.with_name(f"{file.name}-onnx")
    raise UsageError(
        f"{file}: {what}; convert it first: atsc convert {file} -o {folder}/model.onnx"
    )


def _files(folder: Path, suffix: str) -> list[Path]:
    found = (path for path in folder.iterdir() if path.suffix.lower() == suffix)
    return sorted(path for path in found if path.is_file())


def _is_gguf(file: Path) -> bool:
    """By name, or by content: stores of models name files by their hashes."""
    return file.suffix.lower() == ".gguf" or _begins_with(file, _GGUF_MAGIC)


def _begins_with(file: Path, magic: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(magic)) == magic
