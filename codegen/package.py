"""Write a plan folder: whole or absent, and never in the place of something that is no plan.

The plan grows in a hidden folder beside its destination, on the same file system. `commit` flushes
it to the disk and exchanges it with what lies at the destination in one step; leaving the `with`
block in any other way removes it. A hidden folder that a killed process left behind is unlocked,
and the next compilation into the same parent removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

import atsc.codegen
import atsc.compiler
import atsc.passes
from atsc.codegen import layout
from atsc.codegen.storage import StoredUnit
from atsc.compiler import plan
from atsc.compiler.check_plan import Progress, check_content, check_weights
from atsc.compiler.errors import CodegenError, PlanError

WEIGHTS = "weights.bin"
TOKENIZER = "tokenizer"
_PARTIAL = ".atsc-partial-"
_CHUNK_BYTES = 4 << 20
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsFile:
    """What was written, or linked, as weights.bin."""

    bytes: int
    unit_crc32s: tuple[int, ...]
    key: str
    """Manifest.weights_key."""
    linked: bool
    """It is the file of the plan that this one replaces."""


def check_output(output: Path) -> Path:
    """The real path where a plan may be written; call it before any long work.

    Raises:
        PlanError: its parent is missing, or something is there that is no plan.
    """
    output = Path(os.path.realpath(output))
    if not output.parent.is_dir():
        raise PlanError(f"cannot write {output}: there is no folder {output.parent}; create it")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise PlanError(f"cannot write {output}: no permission in its folder; choose another -o")
    if output.exists() and not _is_replaceable(output):
        raise PlanError(
            f"{output}: exists and is no plan, so it is not replaced; choose another -o, "
            "or remove it"
        )
    return output


class PlanFolder:
    """A plan while it is written; a context manager.

    Raises, from every method:
        PlanError: the disk is full, a file cannot be read or written.
    """

    def __init__(self, output: Path) -> None:
        self.output = check_output(output)
        self.path = Path()
        self._lock = -1
        self._files: dict[str, plan.File] = {}

    def __enter__(self) -> Self:
        parent = self.output.parent
        remove_abandoned(parent)
        token = secrets.token_hex(6)
        fresh = parent / f".atsc-new-{token}"
        with _writing(self.output):
            fresh.mkdir()
            self.path = parent / f"{_PARTIAL}{token}"
            try:
                # Locked before it gets the name that others look for.
                self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                # A file system that cannot lock folders cannot find them unlocked either.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fresh.rename(self.path)
            except BaseException:
                self._leave(fresh)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After `commit` the old plan lies here, or nothing.
        self._leave(self.path)

    def _leave(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write_weights(
        self,
        units: Sequence[StoredUnit],
        source_files: Iterable[str | Path] = (),
        progress: Progress | None = None,
        other: Path | None = None,
    ) -> WeightsFile:
        """Write weights.bin unit by unit, or link that of the plan that is replaced or of another.

        It is linked if it was made from the same units of the same, unchanged source files (path,
        size, time of change) and its checksums prove that it is undamaged.

        Args:
            units: what goes where; the file ends with the last one.
            source_files: the model's files; without any, nothing is linked.
            progress: told how many bytes are done.
            other: a plan that may have the same weights.
        """
        key = _weights_key(units, [Path(file) for file in source_files])
        for source in (other, self.output) if key else ():
            if source and (linked := self._link_weights(source, key, progress)):
                return linked
        return self._stream_weights(units, key, progress)

    def add_file(self, name: str, content: bytes | Path) -> None:
        """Write or copy one more file; `name` is relative, with `/`."""
        target = self.path / name
        if name in self._files:
            raise PlanError(f"cannot write {self.output}: two files named {name}; rename one")
        digest, size = hashlib.sha256(), 0
        with _writing(self.output):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                for chunk in _chunks(content):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
        self._files[name] = plan.File(size, digest.hexdigest())

    def add_companions(self, files: Iterable[str | Path]) -> None:
        """Copy tokenizer and configuration files into `tokenizer/`."""
        for file in files:
            self.add_file(f"{TOKENIZER}/{Path(file).name}", Path(file))

    def commit(self, manifest: plan.Manifest) -> Path:
        """Put the plan in its place, at once; `manifest.files` is filled in here.

        Returns:
            The plan's folder.
        """
        manifest = dataclasses.replace(manifest, files=dict(sorted(self._files.items())))
        with _writing(self.output):
            plan.save(manifest, self.path)
            check_content(plan.load(self.path), self.path)
            _flush(self.path)
            check_output(self.output)
            _put(self.path, self.output)
            _flush_one(self.output.parent)
        return self.output

    def _link_weights(
        self, source: Path, key: str, progress: Progress | None
    ) -> WeightsFile | None:
        """Another plan's weights.bin, if it is what would be written."""
        try:
            old = plan.load(source)
            if old.weights_key != key or old.weights != WEIGHTS:
                return None
            check_content(old, source)
            check_weights(old, source, progress)
            os.link(source / WEIGHTS, self.path / WEIGHTS)
        except (PlanError, OSError):
            return None
        self._files[WEIGHTS] = file = old.files[WEIGHTS]
        return WeightsFile(file.bytes, tuple(unit.crc32 for unit in old.units), key, True)

    def _stream_weights(
        self, units: Sequence[StoredUnit], key: str, progress: Progress | None
    ) -> WeightsFile:
        total = units[-1].offset + units[-1].bytes if units else 0
        free = shutil.disk_usage(self.path).free
        if free < total:
            raise PlanError(
                f"cannot write {self.output}: its weights take {total / 2**30:.2f} GiB, and "
                f"{free / 2**30:.2f} GiB of the disk are free; make room, or choose another -o"
            )
        digest, crc32s, position = hashlib.sha256(), [], 0
        with _writing(self.output), (self.path / WEIGHTS).open("xb") as file:

            def append(data: bytes | memoryview) -> None:
                nonlocal position
                file.write(data)
                digest.update(data)
                position += len(data)

            for unit in units:
                append(bytes(unit.offset - position))
                crc32 = 0
                for data in _unit_bytes(unit):
                    append(data)
                    crc32 = zlib.crc32(data, crc32)
                    if progress:
                        progress("writing weights", position, total)
                crc32s.append(crc32)
        self._files[WEIGHTS] = plan.File(position, digest.hexdigest())
        return WeightsFile(position, tuple(crc32s), key, False)


def remove_abandoned(parent: Path) -> None:
    """Remove what killed processes left half-written in a folder; what is locked is alive."""
    for path in parent.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _is_replaceable(output: Path) -> bool:
    """Whether it is an empty folder, or a plan of whatever schema, even a damaged one."""
    if not output.is_dir():
        return False
    if not any(output.iterdir()):
        return True
    try:
        data = json.loads((output / plan.MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"schema", "plan_id"} <= data.keys()


def _weights_key(units: Sequence[StoredUnit], source_files: Sequence[Path]) -> str:
    """A hash of all that weights.bin depends on; empty if the sources are not files.

    Our own source counts too: what an importer or a pass does to weights changes with it.
    """
    described: list[object] = [_code_hash()]
    try:
        for path in source_files:
            found = path.stat()
            described.append([str(path.resolve()), found.st_size, found.st_mtime_ns])
    except OSError:
        return ""
    if not source_files:
        return ""
    for unit in units:
        for stored, offset in unit.weights:
            parts = [(part.name, part.num_bytes) for part in stored.parts]
            kinds = [str(stored.scale_dtype), stored.zero_kind, stored.tiled]
            weight = stored.weight
            described.append(
                [unit.offset, offset, weight.name, weight.shape, str(weight.format), kinds, parts]
            )
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _code_hash() -> str:
    digest = hashlib.sha256()
    for package in (atsc.compiler, atsc.passes, atsc.codegen):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _unit_bytes(unit: StoredUnit) -> Iterator[bytes | memoryview]:
    """A unit's range from its first byte to its last, gaps as zeros."""
    position = unit.offset
    for stored, offset in unit.weights:
        for part in stored.parts:
            if offset < position:
                raise CodegenError(
                    f"unit {unit.name}: {stored.weight.name} is laid out at {offset}, "
                    f"which is before {position}, where the weight before it ends"
                )
            yield bytes(offset - position)
            written = 0
            for chunk in layout.part_chunks(stored, part):
                flat = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
                written += flat.nbytes
                yield flat.data
            if written != part.num_bytes:
                raise CodegenError(
                    f"unit {unit.name}: {part.name} of {stored.weight.name} has {written} bytes, "
                    f"and its layout says {part.num_bytes}"
                )
            position = offset + written
            offset = layout.align(position, layout.PART_ALIGNMENT)
    if position > unit.offset + unit.bytes:
        raise CodegenError(f"unit {unit.name}: its weights end beyond its {unit.bytes} bytes")
    yield bytes(unit.offset + unit.bytes - position)


def _chunks(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Foreign errors of this module's work, in one place."""
    try:
        yield
    except OSError as error:
        hint = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check permissions"
        where = f" at {error.filename}" if error.filename else ""
        raise PlanError(f"cannot write {output}{where}: {error.strerror}; {hint}") from error


def _flush(folder: Path) -> None:
    """fsync everything below a folder, files before the folders that hold them."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            _flush_one(Path(parent) / name)
        _flush_one(Path(parent))


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems, network ones above all, cannot flush a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _put(fresh: Path, output: Path) -> None:
    """Put a folder in the place of another, which then lies where it was, or of nothing."""
    if _rename(fresh, output, _RENAME_EXCHANGE if output.exists() else _RENAME_NOREPLACE):
        return
    if not output.exists():
        fresh.rename(output)
        return
    # A file system without the exchange: for a moment there is no plan, but never half of one.
    aside = output.with_name(f"{output.name}.old-{secrets.token_hex(6)}")
    output.rename(aside)
    try:
        fresh.rename(output)
    except BaseException:
        aside.rename(output)
        raise
    aside.rename(fresh)


def _rename(source: Path, target: Path, flags: int) -> bool:
    """renameat2; False where the C library, the kernel or the file system has none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(source), os.fsencode(target)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))
