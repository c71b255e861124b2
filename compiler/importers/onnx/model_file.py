"""Reading an ONNX file: its graph, its tensors as lazy sources, and the files beside it.

Tensors are never copied: external ones and large inline ones (inline_data.py) are views of a
memory-mapped file. The location of external data is checked as text against the folder of the .onnx
file, and symbolic links are followed after that, since model caches keep every file as a link to a
blob elsewhere.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
import onnx_ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.inline_data import detach_large_tensors
from atsc.compiler.ir import ArraySource, DType

CONFIG_NAME = "genai_config.json"
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    CONFIG_NAME,
)
_STORED: Mapping[onnx_ir.DataType, tuple[DType, str]] = {
    onnx_ir.DataType.FLOAT: (DType.F32, "<f4"),
    onnx_ir.DataType.FLOAT16: (DType.F16, "<f2"),
    onnx_ir.DataType.BFLOAT16: (DType.BF16, "<u2"),
    onnx_ir.DataType.INT64: (DType.I64, "<i8"),
    onnx_ir.DataType.INT32: (DType.I32, "<i4"),
    onnx_ir.DataType.INT8: (DType.I8, "i1"),
    onnx_ir.DataType.UINT8: (DType.U8, "u1"),
}
_NIBBLES = (onnx_ir.DataType.INT4, onnx_ir.DataType.UINT4)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An ONNX file and what lies beside it."""

    path: Path
    model: onnx_ir.Model
    config: Mapping[str, Any]
    """genai_config.json's `model` object, or empty."""
    companions: tuple[Path, ...]
    _mapped: dict[Path, NDArray[np.uint8]] = field(default_factory=dict, repr=False)

    def source(self, tensor: onnx_ir.TensorProtocol) -> ArraySource:
        """A tensor as a lazy array; 4-bit integers as bytes [ceil(elements / 2)], low nibble first.

        Raises:
            ModelError: the external data is missing, damaged or outside the model's folder.
        """
        assert is_readable(tensor)
        shape = tuple(tensor.shape.numpy())
        if tensor.dtype in _NIBBLES:
            dtype, code = DType.U8, "u1"
            shape = ((_num_elements(shape) + 1) // 2,)
        else:
            dtype, code = _STORED[tensor.dtype]
        if isinstance(tensor, onnx_ir.ExternalTensor):
            raw = self._external_bytes(tensor, _num_elements(shape) * np.dtype(code).itemsize)
            return ArraySource(dtype, shape, lambda: raw.view(code).reshape(shape))
        return ArraySource(
            dtype, shape, lambda: np.frombuffer(tensor.tobytes(), code).reshape(shape)
        )

    def data_files(self) -> tuple[Path, ...]:
        """The external data files read so far."""
        return tuple(self._mapped)

    def _external_bytes(self, tensor: onnx_ir.ExternalTensor, num_bytes: int) -> NDArray[np.uint8]:
        path = self._contained(str(tensor.location), str(tensor.name))
        data = self._map(path)
        offset = tensor.offset or 0
        length = num_bytes if tensor.length is None else tensor.length
        if length != num_bytes or offset < 0 or offset + num_bytes > len(data):
            raise ModelError(
                f"{path}: tensor {tensor.name} needs {num_bytes} bytes at offset {offset}, "
                f"its entry says {length} and the file has {len(data)} bytes: "
                "the download is incomplete or the file belongs to another model"
            )
        return data[offset : offset + num_bytes]

    def _contained(self, location: str, tensor: str) -> Path:
        """The path of external data, refused if its text leaves the model's folder.

        Where the .onnx file is a link, the data lies beside the link or beside its target.
        """
        parts = PurePosixPath(location.replace("\\", "/")).parts
        absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).drive
        if absolute or ".." in parts or not parts:
            raise ModelError(
                f"{self.path}: tensor {tensor} names external data outside the model's folder: "
                f"{location!r}"
            )
        beside = self.path.parent.joinpath(*parts)
        target = self.path.resolve().parent.joinpath(*parts)
        return target if target.exists() and not beside.exists() else beside

    def _map(self, path: Path) -> NDArray[np.uint8]:
        if path not in self._mapped:
            try:
                self._mapped[path] = np.frombuffer(_map_file(path), np.uint8)
            except OSError as error:
                raise ModelError(
                    f"{self.path}: its external data {path} cannot be read ({error.strerror}): "
                    "keep the .onnx file and its data files together"
                ) from error
        return self._mapped[path]


def _map_file(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def is_readable(tensor: onnx_ir.TensorProtocol) -> bool:
    """Whether the element type has a meaning for weights or sizes."""
    return tensor.dtype in _STORED or tensor.dtype in _NIBBLES


def open_model(path: Path) -> ModelFile:
    """Read an .onnx file, or the one that a model folder's genai_config.json names.

    Raises:
        ModelError: there is no such file, or it is no ONNX model.
    """
    path, config = _locate(path)
    try:
        message = detach_large_tensors(memoryview(_map_file(path)), path.name)
        model = onnx_ir.serde.deserialize_model(onnx.ModelProto.FromString(message))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (DecodeError, ValueError, TypeError, KeyError, onnx_ir.serde.SerdeError) as error:
        raise ModelError(f"{path}: not an ONNX model ({_first_line(error)})") from error
    if not len(model.graph):
        raise ModelError(f"{path}: not an ONNX model (it has no nodes)")
    onnx_ir.external_data.set_base_dir(model.graph, path.parent)
    companions = tuple(p for name in _COMPANIONS if (p := path.parent / name).is_file())
    return ModelFile(path, model, config, companions)


def _locate(path: Path) -> tuple[Path, Mapping[str, Any]]:
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if not path.is_dir():
        config = read_json(path.parent / CONFIG_NAME).get("model", {})
        named = config.get("decoder", {}).get("filename", path.name)
        return path, config if named == path.name else {}
    config = read_json(path / CONFIG_NAME).get("model", {})
    filename = config.get("decoder", {}).get("filename")
    if filename is None:
        found = sorted(path.glob("*.onnx"))
        if len(found) != 1:
            raise ModelError(
                f"{path}: no {CONFIG_NAME} that names the model, and {len(found)} .onnx files: "
                "give the path of the .onnx file itself"
            )
        return found[0], config
    if not (path / filename).is_file():
        raise ModelError(f"{path / CONFIG_NAME}: names {filename}, which is not in the folder")
    return path / filename, config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if there is no such file.

    Raises:
        ModelError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({_first_line(error)})") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def _num_elements(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
