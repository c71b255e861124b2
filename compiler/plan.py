"""The plan's manifest, plan.json: what it holds, saving and loading it, and checking a plan folder.

Standard library only: an application that loads a plan needs nothing else of the compiler. `check`
comes before any native code is loaded. It reads every file but weights.bin, and takes milliseconds.
Hashes find damage; against an attacker, pin plan.json itself with `expected_sha256`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from atsc.compiler.errors import PlanError
from atsc.compiler.isa import ISA_FLAGS, cpu_flags, missing_flags, platform_name
from atsc.compiler.plan_json import Json, decode_manifest, encode_manifest, parse_object

SCHEMA = 2
"""Of plan.json: raised with every change of its fields."""
API_VERSION, API_OLDEST = 3, 2
"""Of the C interface, ATSC_API_VERSION and ATSC_API_OLDEST of runtime/include/atsc.h."""
MANIFEST = "plan.json"
WEIGHTS_ALIGNMENT = 4096
_MAX_MANIFEST_BYTES = 256 << 20
_CHUNK_BYTES = 4 << 20

Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)"""


@dataclass(frozen=True, slots=True)
class Model:
    """What the plan was compiled from."""

    name: str
    vocab_size: int
    model_context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    source: tuple[str, ...]
    """Names of the model's files, without their folders."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose, or the compiler for them."""

    ctx: int
    chunk: int
    accuracy_level: int | None
    threads: int | None
    sessions: int = 1
    policy: str = "cpu"


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted bytes of host memory that a process holds while it runs the plan."""

    weights_bytes: int
    kv_bytes: int
    """Of all sessions at the full context."""
    arena_bytes: int
    """Activations at the largest chunk, private arenas and scratch of all threads."""
    logits_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Everything at once."""
        return self.weights_bytes + self.kv_bytes + self.arena_bytes + self.logits_bytes


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of one unit in one round: on each side, and of its copy from host to VRAM."""

    cpu_ns: int
    gpu_ns: int
    transfer_ns: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the nodes of one unit do in one round: an entry a node; a roofline makes times of it.

    A token more in the KV cache adds what the last two say, up to an attention's window; both are
    empty where the context does not matter.
    """

    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    """Read and written, weights included."""
    flops_per_token: tuple[int, ...] = ()
    bytes_per_token: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cache:
    """How the KV cache of a unit grows with the context."""

    bytes_per_token: int
    """Of all sessions."""
    window: int
    """Tokens that attention looks back; 0: all."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What scheduling knows of one unit."""

    kind: str
    """`weights`, `kv cache` or `expert stack`."""
    part: str
    """`embedding`, `attention`, `ffn` or `head`."""
    layer: int | None
    device_bytes: int
    """What it takes in VRAM; of a KV cache at the full context."""
    input_bytes: int
    """Activations a token that cross if the unit before runs on the other side."""
    decode: Work
    """Of one token, the context half full."""
    prefill: Work
    """Of one whole chunk, the context half full."""
    cache: Cache | None = None
    decode_times: Times | None = None
    prefill_times: Times | None = None
    """On the machine that the plan is for; None in plans for a CPU alone."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One range of weights.bin and the nodes that consume it."""

    name: str
    nodes: tuple[str, ...]
    format: str
    bytes: int
    offset: int
    residency: str
    """`vram`, `ram` or `disk`."""
    crc32: int
    cost: Cost | None = None
    """None for tables that several nodes share: they are on both sides and cost nothing."""


@dataclass(frozen=True, slots=True)
class Link:
    """What crosses between host and GPU, and how fast."""

    h2d_bytes_per_s: float
    """Of weights from pinned memory, beside the CPU's computation."""
    to_gpu_ns: float
    """Latency of a hand-off of activations to the GPU, and what each byte adds."""
    to_gpu_ns_per_byte: float
    to_cpu_ns: float
    to_cpu_ns_per_byte: float
    cpu_share: float = 1.0
    """The CPU's speed while weights are copied, as a share of its speed alone."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A placement for one amount of VRAM, and what it is predicted to be worth."""

    required_bytes: int
    """All that a process holds, head-room included."""
    resident_bytes: int
    slot_bytes: int
    """Of all slots together."""
    num_slots: int
    on_device: str
    """A character a unit, in the order of `units`: 1 lives in VRAM, 0 does not."""
    promoted: str
    """The same: 1 is copied to a slot in a decode step, while the load is as measured."""
    decode_ns: int
    prefill_ns: int
    """One round of one token, and of a whole chunk, as simulated."""
    static_decode_ns: int
    static_prefill_ns: int
    """The same if no weights were copied."""


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU that a plan is for, what it takes of its memory, and its placements."""

    kind: str
    """`cuda`, or `virtual`."""
    model: str
    sm: int
    budget_bytes: int
    """All that the process may hold of the GPU's memory; the following are parts of it."""
    headroom_bytes: int
    context_bytes: int
    modules_bytes: int
    activations_bytes: int
    link: Link
    stream_from_rows: int
    """Rows of a round from which host weights are streamed through slots; 0: never."""
    prompt_share: float
    rungs: tuple[Rung, ...]
    """Each is better than the one before; the last is for the whole budget."""

    @property
    def fixed_bytes(self) -> int:
        """What is taken whatever is resident."""
        taken = self.context_bytes + self.modules_bytes + self.activations_bytes
        return taken + self.headroom_bytes


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a general graph."""

    name: str
    dtype: str
    """As numpy spells it, or bfloat16."""
    shape: tuple[str, ...]
    """A number, a symbol, or an expression of symbols, a dimension."""


@dataclass(frozen=True, slots=True)
class GraphModel:
    """What a plan takes and makes whose model is no language model."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    num_kernels: int
    """Different ones."""
    num_calls: int


@dataclass(frozen=True, slots=True)
class File:
    """Size and hash of one file of the plan."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of plan.json."""

    schema: int = field(default=SCHEMA, kw_only=True)
    interface: int = field(default=API_VERSION, kw_only=True)
    """The version of the C interface that the library has."""
    oldest_interface: int = field(default=API_OLDEST, kw_only=True)
    """The library also serves callers of the versions from here on."""
    plan_id: str
    """Identifies the build: what sessions saved from this plan are tied to."""
    atsc_version: str
    platform: str
    isa: str
    """The least CPU level that the library needs."""
    library: str
    weights: str
    model: Model
    options: Options
    memory: Memory
    units: tuple[Unit, ...]
    files: Mapping[str, File]
    """Path relative to the plan, with `/` -> size and hash; every file but plan.json."""
    target: Mapping[str, Json] = field(default_factory=dict)
    measured: Mapping[str, Json] = field(default_factory=dict)
    device: Device | None = None
    """None in plans for a CPU alone."""
    graph: GraphModel | None = None
    """None in plans of language models."""
    weights_key: str = ""
    """Identifies what weights.bin was made from, so that re-planning need not write it again."""


def identify(manifest: Manifest) -> str:
    """The plan id that a manifest's content gives: all but its files and measured speed."""
    content = dataclasses.replace(manifest, plan_id="", files={}, measured={})
    return hashlib.sha256(encode_manifest(content)).hexdigest()[:32]


def save(manifest: Manifest, directory: Path) -> None:
    """Write plan.json into a folder."""
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))


def load(directory: Path) -> Manifest:
    """Read plan.json and check its form, not the files that it names.

    Raises:
        PlanError: no plan, another schema or C interface, an unknown or malformed field.
    """
    return _parse(_read_manifest(directory), directory)


def check(
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
    text = _read_manifest(directory)
    if expected_sha256 and hashlib.sha256(text).hexdigest() != expected_sha256.strip().lower():
        raise PlanError(
            f"{directory / MANIFEST}: not the file that expected_sha256 pins; "
            "get the plan again, or pin the hash of the new one"
        )
    manifest = _parse(text, directory)
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
        raise _damaged(directory / name, "its content is not what was compiled (sha256 differs)")
    return data


def _read_manifest(directory: Path) -> bytes:
    path = directory / MANIFEST
    if not directory.is_dir():
        what = "a file, not a plan folder" if directory.exists() else "no such plan folder"
        raise PlanError(f"{directory}: {what}; `atsc compile MODEL -o PLAN` makes one")
    try:
        if path.is_symlink() or not path.is_file():
            raise PlanError(
                f"{directory}: no plan (it has no {MANIFEST}); `atsc compile MODEL -o PLAN` "
                "makes one"
            )
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise _damaged(path, "far larger than any manifest")
        return path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); check permissions") from None


def _parse(text: bytes, directory: Path) -> Manifest:
    path = directory / MANIFEST
    data = parse_object(text, path)
    if data.get("schema") != SCHEMA:
        raise PlanError(
            f"{path}: plan schema {str(data.get('schema'))[:20]}, this atsc reads schema {SCHEMA}; "
            "compile the model again, or install the atsc that made it"
        )
    _check_interface(data, path)
    return decode_manifest(Manifest, data, path)


def _check_interface(data: Json, path: Path) -> None:
    """Whether this loader may call the library, before anything else is asked of the plan."""
    made, oldest = data.get("interface"), data.get("oldest_interface")
    if type(made) is not int or type(oldest) is not int:
        raise _damaged(path, "it does not say which C interface its library has")
    if not oldest <= API_VERSION <= made:
        raise PlanError(
            f"{path}: this plan was made by another version of atsc (C interface {made}, this one "
            f"has {API_VERSION}); compile the model again, or install the atsc that made it"
        )


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
            raise _damaged(path, f"files: {name} has a malformed size or hash")
    for role in (manifest.library, manifest.weights):
        if role not in manifest.files:
            raise _damaged(path, f"files: no entry for {role}")
    end = 0
    for unit in manifest.units:
        if unit.offset < end or unit.offset % WEIGHTS_ALIGNMENT or unit.bytes < 0:
            raise _damaged(path, f"units: {unit.name} is misaligned or overlaps the one before")
        end = unit.offset + unit.bytes
    if end > manifest.files[manifest.weights].bytes:
        raise _damaged(path, f"units: {manifest.units[-1].name} ends beyond {manifest.weights}")
    for number, rung in enumerate(manifest.device.rungs if manifest.device else ()):
        for bits in (rung.on_device, rung.promoted):
            if len(bits) != len(manifest.units) or set(bits) - {"0", "1"}:
                raise _damaged(path, f"device: rung {number} does not say where each unit lives")
    if manifest.device and not manifest.device.rungs:
        raise _damaged(path, "device: no rungs")


def _check_relative(name: str, manifest_path: Path) -> None:
    plain = name.isprintable() and "\\" not in name and name != MANIFEST
    if not plain or {"", ".", ".."} & set(name.split("/")):
        raise _damaged(manifest_path, f"files: {name!r} is no path inside the plan")


def _open(directory: Path, manifest: Manifest, name: str) -> BinaryIO:
    """Open a file of the plan: a regular one, reached through no link, of the size expected.

    The folder itself may be reached through a link, and hard links are files like any other.
    """
    path = directory / name
    expected = manifest.files[name].bytes
    folders = list(PurePosixPath(name).parents)[:-1]
    if any((directory / folder).is_symlink() for folder in folders):
        raise _damaged(path, "reached through a symbolic link")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _damaged(path, "missing") from None
    except OSError as error:
        if path.is_symlink():
            raise _damaged(path, "a symbolic link, not a file") from None
        raise PlanError(f"{path}: cannot be read ({error.strerror}); check permissions") from None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size == expected:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(path, "no regular file")
    state = "truncated" if found.st_size < expected else "too long"
    raise _damaged(path, f"{state}: {found.st_size} bytes instead of {expected}")


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
                raise _damaged(path, "truncated while it was read")
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
                raise _damaged(path, f"unit {unit.name} is damaged (crc32 differs)")
        advance(file, total - done)
    if whole.hexdigest() != manifest.files[manifest.weights].sha256:
        raise _damaged(path, "damaged outside of every unit (sha256 differs)")


def _damaged(path: Path, what: str) -> PlanError:
    return PlanError(f"{path}: {what}; copy the plan again, or compile the model again")
