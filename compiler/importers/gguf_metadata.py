"""The key-value part of a GGUF file, read with checked types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from atsc.compiler.errors import ModelError

T = TypeVar("T")


class Metadata:
    """Typed look-ups; every failure names the file and the key.

    `fields` maps keys to objects with a `contents()` method, as gguf-py's reader has them.
    """

    def __init__(self, source: str, fields: Mapping[str, Any]) -> None:
        self.source = source
        self._fields = fields
        self._decoded: dict[str, Any] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._read(key, str, "a string", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        return self._read(key, int, "an integer", default)

    def real(self, key: str, default: float | None = None) -> float:
        """A floating-point number."""
        value: float | int = self._read(key, (float, int), "a number", default)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        return self._read(key, bool, "a boolean", default)

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        return self._list(key, str, "strings")

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return self._list(key, int, "integers")

    def reals(self, key: str) -> list[float]:
        """A list of floating-point numbers."""
        return self._list(key, float, "numbers")

    def flags(self, key: str) -> list[bool]:
        """A list of booleans."""
        return self._list(key, bool, "booleans")

    def is_list(self, key: str) -> bool:
        """Whether a key holds a list."""
        return key in self and isinstance(self._contents(key), list)

    def is_set(self, key: str) -> bool:
        """Whether a key is there and neither 0, false nor empty."""
        return key in self and bool(self._contents(key))

    def _read(
        self, key: str, kind: type[T] | tuple[type[T], ...], described: str, default: T | None
    ) -> T:
        if key not in self._fields:
            if default is not None:
                return default
            raise ModelError(f"{self.source}: the key {key} is missing; the file is incomplete")
        value = self._contents(key)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise ModelError(
            f"{self.source}: the key {key} should hold {described}, found {str(value)[:40]!r}"
        )

    def _list(self, key: str, kind: type[T], described: str) -> list[T]:
        value = self._contents(key) if key in self._fields else None
        if isinstance(value, list) and all(isinstance(item, kind) for item in value):
            return value
        raise ModelError(f"{self.source}: the key {key} should hold a list of {described}")

    def _contents(self, key: str) -> Any:
        """A value, decoded once: vocabularies take a while."""
        try:
            if key not in self._decoded:
                self._decoded[key] = self._fields[key].contents()
            return self._decoded[key]
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.source}: the key {key} holds no valid UTF-8") from error
