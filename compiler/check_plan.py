"""Checking a plan folder: whether it is whole and fits this machine.

Standard library only. It comes before any native code is loaded: it reads every file but
weights.bin, and takes milliseconds. Hashes find damage; against an attacker, pin plan.json itself
with `expected_sha256`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from atsc.compiler import plan
from atsc.compiler.errors import PlanError
from atsc.compiler.isa import ISA_FLAGS, cpu_flags, missing_flags, platform_name
from atsc.compiler.plan import MANIFEST, WEIGHTS_ALIGNMENT, Manifest, damaged

_CHUNK_BYTES = 4 << 20

Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)"""


def check_plan(
    directory: Path,
    *,
    full: bool = False,
    expected_sha256: str | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Whether a plan folder is whole and fits this machine.

    Args:
        directory: the plan folder.
        full: also read weights.bin and compare the checksum of every unit and of the whole.
        expected_sha256: the hash that plan.json must have.
        progress: told how much of weights.bin is read.

    Raises:
        PlanError: what is wrong, and what to do about it.
    """
    directory = Path(directory)
    text = plan.read_text(directory)
    # An empty hash is one, too: of a variable that nobody set, say.
    if expected_sha256 is not None:
        found = hashlib.sha256(text).hexdigest()
        if found != expected_sha256.strip().lower():
            raise PlanError(
                f"{directory / MANIFEST}: not the file that expected_sha256 pins; "
                "get the plan again, or pin the hash of the new one"
            )
    manifest = plan.parse(text, directory)
    _check_machine(manifest, directory)
    check_content(manifest, directory)
    for name in manifest.files:
        if name != manifest.weights:
            read_file(directory, manifest, name)
        else:
            _open(directory, manifest, name).close()
    if full:
        check_weights(manifest, directory, progress)
    return manifest


def read_file(directory: Path, manifest: Manifest, name: str) -> bytes:
    """The bytes of one of the plan's files, compared with its hash: use these, do not read again.

    Raises:
        PlanError: the file is missing, truncated, altered, or lies outside the plan.
    """
    with _open(directory, manifest, name) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != manifest.files[name].sha256:
        raise damaged(directory / name, "its content is not what was compiled (sha256 differs)")
    return data


def _check_machine(manifest: Manifest, directory: Path) -> None:
    here = platform_name()
    if manifest.platform != here:
        raise PlanError(
            f"{directory}: compiled for {manifest.platform}, this machine is {here}; "
            "compile the model on such a machine"
        )
    if manifest.isa not in ISA_FLAGS:
        raise PlanError(
            f"{directory}: needs a CPU of level {manifest.isa}, which this atsc does not know; "
            "update atsc, or compile the model again"
        )
    missing = missing_flags(manifest.isa, cpu_flags())
    if missing:
        raise PlanError(
            f"{directory}: needs a CPU of level {manifest.isa}, this one lacks "
            f"{', '.join(missing)}; run the plan on a newer CPU"
        )


def check_content(manifest: Manifest, directory: Path) -> None:
    """Whether the fields agree with each other: paths, hashes, unit ranges.

    Raises:
        PlanError: what does not.
    """
    path = directory / MANIFEST
    for name, file in manifest.files.items():
        _check_relative(name, path)
        if file.bytes < 0 or len(file.sha256) != 64 or set(file.sha256) - set("0123456789abcdef"):
            raise damaged(path, f"files: {name} has a malformed size or hash")
    for role in (manifest.library, manifest.weights):
        if role not in manifest.files:
            raise damaged(path, f"files: no entry for {role}")
    end = 0
    for unit in manifest.units:
        if unit.offset < end or unit.offset % WEIGHTS_ALIGNMENT or unit.bytes < 0:
            raise damaged(path, f"units: {unit.name} is misaligned or overlaps the one before")
        end = unit.offset + unit.bytes
    if end > manifest.files[manifest.weights].bytes:
        raise damaged(path, f"units: {manifest.units[-1].name} ends beyond {manifest.weights}")
    for number, rung in enumerate(manifest.device.rungs if manifest.device else ()):
        for bits in (rung.on_device, rung.promoted):
            if len(bits) != len(manifest.units) or set(bits) - {"0", "1"}:
                raise damaged(path, f"device: rung {number} does not say where each unit lives")
    if manifest.device and not manifest.device.rungs:
        raise damaged(path, "device: no rungs")


def _check_relative(name: str, manifest_path: Path) -> None:
    plain = name.isprintable() and "\\" not in name and name != MANIFEST
    if not plain or {"", ".", ".."} & set(name.split("/")):
        raise damaged(manifest_path, f"files: {name!r} is no path inside the plan")


def _open(directory: Path, manifest: Manifest, name: str) -> BinaryIO:
    """Open a file of the plan: a regular one, reached through no link, of the size expected.

    The folder itself may be reached through a link, and hard links are files like any other.
    """
    path = directory / name
    expected = manifest.files[name].bytes
    folders = list(PurePosixPath(name).parents)[:-1]
    if any((directory / folder).is_symlink() for folder in folders):
        raise damaged(path, "reached through a symbolic link")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise damaged(path, "missing") from None
    except OSError as error:
        if path.is_symlink():
            raise damaged(path, "a symbolic link, not a file") from None
        raise PlanError(f"{path}: cannot be read ({error.strerror}); check permissions") from None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size == expected:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise damaged(path, "no regular file")
    state = "truncated" if found.st_size < expected else "too long"
    raise damaged(path, f"{state}: {found.st_size} bytes instead of {expected}")


def check_weights(manifest: Manifest, directory: Path, progress: Progress | None = None) -> None:
    """Compare weights.bin with the crc32 of every unit and its own sha256, reading it once.

    Raises:
        PlanError: which unit is damaged, or what else is wrong with the file.
    """
    path = directory / manifest.weights
    total = manifest.files[manifest.weights].bytes
    whole = hashlib.sha256()
    done = 0

    def advance(file: BinaryIO, count: int) -> int:
        nonlocal done
        crc = 0
        while count > 0:
            data = file.read(min(count, _CHUNK_BYTES))
            if not data:
                raise damaged(path, "truncated while it was read")
            crc = zlib.crc32(data, crc)
            whole.update(data)
            count -= len(data)
            done += len(data)
            if progress:
                progress("checking weights", done, total)
        return crc

    with _open(directory, manifest, manifest.weights) as file:
        for unit in manifest.units:
            advance(file, unit.offset - done)
            if advance(file, unit.bytes) != unit.crc32:
                raise damaged(path, f"unit {unit.name} is damaged (crc32 differs)")
        advance(file, total - done)
    if whole.hexdigest() != manifest.files[manifest.weights].sha256:
        raise damaged(path, "damaged outside of every unit (sha256 differs)")
