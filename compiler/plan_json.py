"""Dataclasses to JSON and back, strictly: no unknown, missing, doubled or mistyped field passes."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from atsc.compiler.errors import PlanError

Json = Any
"""None, bool, int, float, str, or lists and string-keyed mappings of these."""

T = TypeVar("T")


class _Mismatch(Exception):
    """A field that does not have its type; the message names it."""


def encode_manifest(manifest: object) -> bytes:
    """A dataclass as JSON text in UTF-8, fields as they are declared."""
    return (_text(_plain(manifest), "\n") + "\n").encode("utf-8")


def parse_object(text: bytes, path: Path) -> dict[str, Json]:
    """The JSON object in a file.

    Raises:
        PlanError: not UTF-8, not JSON, a key that occurs twice, or no object.
    """
    try:
        data = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_doubles,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError, _Mismatch) as error:
        reason = str(error).splitlines()[0][:120]
        raise PlanError(
            f"{path}: damaged ({reason}); copy the plan again, or compile the model again"
        ) from None
    if not isinstance(data, dict):
        raise PlanError(f"{path}: no plan manifest (no JSON object); compile the model again")
    return data


def decode_manifest(cls: type[T], data: Json, path: Path) -> T:
    """An instance of a dataclass from plain data.

    Raises:
        PlanError: an unknown, missing or mistyped field, named by its place.
    """
    try:
        decoded: T = _decode(cls, data, "")
    except _Mismatch as error:
        raise PlanError(
            f"{path}: {error}; copy the plan again, or compile the model with this atsc"
        ) from None
    return decoded


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _text(value: Any, line: str) -> str:
    """JSON with a line for each field and item, but for lists and objects of numbers alone."""
    inner = line + " "
    if isinstance(value, list | dict) and value and not _is_plain(value):
        if isinstance(value, list):
            body = [_text(item, inner) for item in value]
            return f"[{inner}{f',{inner}'.join(body)}{line}]"
        body = [f"{_scalar(key)}: {_text(item, inner)}" for key, item in value.items()]
        return f"{{{inner}{f',{inner}'.join(body)}{line}}}"
    return _scalar(value)


def _is_plain(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return all(item is None or isinstance(item, int | float) for item in items)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _without_doubles(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise _Mismatch("a key occurs twice in one object")
    return data


def _refuse_constant(name: str) -> Json:
    raise _Mismatch(f"{name} is no number")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(expected: Any, value: Json, where: str) -> Any:
    if expected is Any:
        return value
    if dataclasses.is_dataclass(expected):
        return _decode_dataclass(typing.cast(type, expected), value, where)
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        items = _typed(list, value, where)
        return tuple(_decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(items))
    if origin is Mapping:
        entries = _typed(dict, value, where)
        return {k: _decode(arguments[1], v, f"{where}[{k!r}]") for k, v in entries.items()}
    return _typed(expected, value, where)


def _typed(expected: type, value: Json, where: str) -> Any:
    if type(value) is not expected:
        names = {list: "a list", dict: "an object", str: "a string", int: "a whole number"}
        raise _Mismatch(f"{where or 'the manifest'} is not {names.get(expected, expected)}")
    return value


def _decode_dataclass(cls: type, value: Json, where: str) -> Any:
    data = _typed(dict, value, where)
    hints, prefix = _hints(cls), f"{where}." if where else ""
    for name in data.keys() - hints.keys():
        raise _Mismatch(f"unknown field {prefix}{name}")
    for field in dataclasses.fields(cls):
        optional = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if field.name not in data and not optional:
            raise _Mismatch(f"field {prefix}{field.name} is missing")
    return cls(**{name: _decode(hints[name], v, prefix + name) for name, v in data.items()})
