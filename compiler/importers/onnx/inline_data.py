"""Large tensors inside an .onnx file, turned into external data of that same file.

Parsing a protobuf message copies everything in it, so a 2 GB file with its weights inside would
cost more than twice its size in memory. Here the wire format is walked over the mapped file, and
every initializer's `raw_data` from a few KiB on is replaced by an external-data entry that names
the file itself and the bytes' place in it. What is left is a few MB and parsed as usual.

Source: protobuf's encoding; onnx.proto3: ModelProto.graph = 7, GraphProto.initializer = 5,
TensorProto.raw_data = 9, external_data = 13, data_location = 14, StringStringEntryProto key = 1,
value = 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1
_LEAST_BYTES = 4096
_MOST_BYTES = (1 << 31) - 1
"""Protobuf's own limit of a message."""


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    wire_type: int
    start: int
    """Of the tag."""
    payload: int
    end: int


def detach_large_tensors(data: memoryview, file_name: str) -> bytes:
    """The model's message without the bytes of its large initializers.

    Raises:
        ValueError: the bytes are no protobuf message, or more than one may have is left.
    """

    def graph(start: int, end: int) -> bytes:
        return _rewrite(data, start, end, {_INITIALIZER: tensor})

    def tensor(start: int, end: int) -> bytes:
        return _detach(data, start, end, file_name)

    return _rewrite(data, 0, len(data), {_GRAPH: graph})


def _rewrite(
    data: memoryview, start: int, end: int, changes: dict[int, Callable[[int, int], bytes]]
) -> bytes:
    """A message with some of its length-delimited fields replaced."""
    out = bytearray()
    for field in _fields(data, start, end):
        change = changes.get(field.number)
        if change is None or field.wire_type != _BYTES:
            _append(out, data[field.start : field.end])
        else:
            _append(out, _bytes_field(field.number, change(field.payload, field.end)))
    return bytes(out)


def _append(out: bytearray, piece: memoryview | bytes) -> None:
    """Copy a piece, unless parsing would refuse the whole anyway."""
    if len(out) + len(piece) > _MOST_BYTES:
        raise ValueError("2 GiB or more in one message; save it with its weights in external data")
    out += piece


def _detach(data: memoryview, start: int, end: int, file_name: str) -> bytes:
    fields = list(_fields(data, start, end))
    raw = [field for field in fields if field.number == _RAW_DATA]
    is_large = len(raw) == 1 and raw[0].end - raw[0].payload >= _LEAST_BYTES
    out = bytearray()
    for field in fields:
        if not (is_large and field is raw[0]):
            _append(out, data[field.start : field.end])
    if not is_large:
        return bytes(out)
    place = {"location": file_name, "offset": raw[0].payload, "length": raw[0].end - raw[0].payload}
    for key, value in place.items():
        entry = _bytes_field(1, key.encode()) + _bytes_field(2, str(value).encode())
        out += _bytes_field(_EXTERNAL_DATA, entry)
    out += _varint(_DATA_LOCATION << 3 | _VARINT) + _varint(_EXTERNAL)
    return bytes(out)


def _fields(data: memoryview, start: int, end: int) -> Iterator[_Field]:
    while start < end:
        tag, payload = _read_varint(data, start, end)
        wire_type = tag & 7
        if not tag >> 3:
            raise ValueError(f"a field without a number at byte {start}")
        if wire_type == _VARINT:
            _, after = _read_varint(data, payload, end)
        elif wire_type == _BYTES:
            length, payload = _read_varint(data, payload, end)
            after = payload + length
        elif wire_type in (_FIXED32, _FIXED64):
            after = payload + (4 if wire_type == _FIXED32 else 8)
        else:
            raise ValueError(f"wire type {wire_type} at byte {start}")
        if after > end:
            raise ValueError(f"the field at byte {start} ends beyond its message: it is cut off")
        yield _Field(tag >> 3, wire_type, start, payload, after)
        start = after


def _read_varint(data: memoryview, start: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(start, min(end, start + 10)):
        value |= (data[position] & 0x7F) << shift
        if data[position] < 0x80:
            return value, position + 1
        shift += 7
    raise ValueError(f"a number at byte {start} has no end")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(payload)) + payload
