"""Several files that appear together or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from atsc.compiler.errors import ModelError


class FileSet:
    """Files under temporary names, in the folder where they will live."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._suffix = f".{secrets.token_hex(4)}.partial"
        self._names: list[str] = []

    def path(self, name: str) -> Path:
        """Where to write the file that will be called `name`."""
        if name not in self._names:
            self._names.append(name)
        return self._folder / f".{name}{self._suffix}"

    def write_text(self, name: str, text: str) -> None:
        """Write a whole UTF-8 file."""
        self.path(name).write_text(text, encoding="utf-8", newline="\n")

    def publish(self, main_name: str) -> None:
        """Give all files their names, the main one last: without it the others mean nothing."""
        for name in self._names:
            _sync(self.path(name))
        (self._folder / main_name).unlink(missing_ok=True)
        published: list[Path] = []
        try:
            for name in sorted(self._names, key=lambda name: name == main_name):
                published.append(self._folder / name)
                self.path(name).replace(published[-1])
        except BaseException:
            for path in published:
                path.unlink(missing_ok=True)
            raise
        _sync(self._folder)

    def discard(self) -> None:
        """Remove what was not published."""
        for name in self._names:
            with contextlib.suppress(OSError):
                self.path(name).unlink()


@contextlib.contextmanager
def new_file_set(folder: Path, main_name: str) -> Iterator[FileSet]:
    """A set that is published when the block ends, and removed if it ends by an exception.

    Folders that had to be made are removed with it.

    Raises:
        ModelError: the folder or a file cannot be written.
    """
    made: list[Path] = []
    files = FileSet(folder)
    try:
        for parent in (*reversed(folder.parents), folder):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        yield files
        files.publish(main_name)
    except BaseException as error:
        files.discard()
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise ModelError(
                f"cannot write {folder / main_name}: {error.strerror or error}"
            ) from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
