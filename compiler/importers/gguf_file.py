"""Opening GGUF files: one, or the first part of a split model with all that belong to it.

Parts are named NAME-00001-of-00003.gguf and so on. The first holds all the keys; each says which
part it is (`split.no`, from 0), of how many, and how many tensors the whole model has.
Source: llama.cpp's gguf-split.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, ReaderTensor
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.gguf_metadata import Metadata

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The keys of a model, and its mapped tensors by name."""

    metadata: Metadata
    tensors: dict[str, ReaderTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(int(tensor.n_bytes) for tensor in self.tensors.values())


def open_gguf(source: Path) -> GgufFile:
    """Map a model, which may be split.

    Raises:
        ModelError: a file is missing or damaged, or a part belongs to another model.
    """
    reader = _read(source)
    metadata = Metadata(str(source), reader.fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if metadata.integer(_COUNT, 0) <= 1:
        return GgufFile(metadata, tensors)
    for path in _other_parts(source, metadata):
        part = _read(path)
        _check_part(Metadata(str(path), part.fields), metadata, path)
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise ModelError(f"{path}: the tensor {tensor.name} is in an earlier part as well")
            tensors[tensor.name] = tensor
    expected = metadata.integer(_TENSORS, len(tensors))
    if len(tensors) != expected:
        raise ModelError(
            f"{source}: the parts hold {len(tensors)} tensors, expected {expected}; download them"
            " again"
        )
    return GgufFile(metadata, tensors)


def _other_parts(source: Path, metadata: Metadata) -> list[Path]:
    """The files of parts 2 and on."""
    count = metadata.integer(_COUNT)
    number = metadata.integer(_NUMBER, 0) + 1
    match = _PART_NAME.fullmatch(source.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number, count):
        raise ModelError(
            f"{source}: is part {number} of {count}, which its name should say:"
            f" NAME-{number:05}-of-{count:05}.gguf; keep the parts' own names"
        )
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    if number != 1:
        raise ModelError(f"{source}: is part {number} of {count}; give the first one, {names[0]}")
    missing = [name for name in names[1:] if not source.with_name(name).is_file()]
    if missing:
        raise ModelError(
            f"{source}: {len(missing)} of its {count} parts are not in its folder"
            f" ({missing[0]}); download them all"
        )
    return [source.with_name(name) for name in names[1:]]


def _check_part(part: Metadata, first: Metadata, path: Path) -> None:
    number = int(path.name[-len("00001-of-00001.gguf") :][:5])
    found = part.integer(_NUMBER, -1) + 1, part.integer(_COUNT, 0)
    expected = number, first.integer(_COUNT)
    if found != expected:
        raise ModelError(
            f"{path}: says that it is part {found[0]} of {found[1]}, expected part {number} of"
            f" {expected[1]}; it belongs to another model"
        )


class _Reader(GGUFReader):  # type: ignore[misc]  # gguf-py has no types
    """Slices a plain array: a slice of the map itself costs microseconds, and a vocabulary takes a
    million (Gemma 3: 11 s, and 3 so).
    """

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> NDArray[Any]:
        if "_plain" not in self.__dict__:
            self._plain = np.asarray(self.data)
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        found: NDArray[Any] = self._plain[offset:end].view(dtype)
        return found.view(found.dtype.newbyteorder(override_order or self.byte_order))


def _read(source: Path) -> GGUFReader:
    """Map one file; gguf-py's many exceptions for damaged files become one line."""
    try:
        reader = _Reader(source)
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except OSError as error:
        raise ModelError(f"cannot read {source}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        if GGMLQuantizationType.__name__ in str(error):
            number = re.findall(r"\d+", str(error))[-1]
            raise ModelError(
                f"{source}: a tensor is of type {number}, which is not known; requantise the file"
                " to Q4_K, Q6_K or Q8_0"
            ) from error
        size = source.stat().st_size
        raise ModelError(
            f"{source}: no GGUF file, or one that is damaged or cut short (it has {size} bytes);"
            " download it again"
        ) from error
    if reader.endianess is not GGUFEndian.LITTLE:
        raise ModelError(f"{source} is a big-endian GGUF file; only little-endian ones are read")
    return reader
