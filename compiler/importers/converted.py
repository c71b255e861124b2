"""Models that are not ONNX files, as ONNX for as long as something reads them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from atsc.compiler.errors import ModelError

if TYPE_CHECKING:
    from atsc.compiler.importers.onnx.graph_writer import Progress

_MAGIC = b"GGUF"


def is_gguf(model: Path) -> bool:
    """By name, or by content: stores of models name files by their hashes."""
    return model.is_file() and (model.suffix.lower() == ".gguf" or begins_with(model, _MAGIC))


def begins_with(file: Path, magic: bytes) -> bool:
    """Whether these are the first bytes of a file."""
    with file.open("rb") as stream:
        return stream.read(len(magic)) == magic


@contextlib.contextmanager
def converted(model: Path, beside: Path, progress: Progress | None = None) -> Iterator[Path]:
    """A GGUF file's conversion, called as the file is, in a folder that is removed afterwards.

    Args:
        model: the GGUF file, or the first part of a split one.
        beside: a folder where there is room for the model once more.
        progress: as of `convert_gguf`.

    Raises:
        ModelError: as of `convert_gguf`, or there is too little room.
    """
    from atsc.compiler.importers.gguf import convert_gguf

    size, free = model.stat().st_size, shutil.disk_usage(beside).free
    if free < size:
        raise ModelError(
            f"{model}: it is converted in {beside}, which takes over {size / 2**30:.2f} GiB, and "
            f"{free / 2**30:.2f} GiB of the disk are free; make room, or choose another -o"
        )
    with tempfile.TemporaryDirectory(prefix=".atsc-convert-", dir=beside) as folder:
        name = model.stem if model.suffix.lower() == ".gguf" else model.name
        target = Path(folder) / name / "model.onnx"
        convert_gguf(model, target, progress=progress)
        yield target
