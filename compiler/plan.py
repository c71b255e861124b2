"""The plan's manifest, plan.json: what it holds, saving and loading it.

Standard library only, as check_plan.py: an application that loads a plan needs nothing else of the
compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atsc.compiler.errors import PlanError
from atsc.compiler.plan_json import Json, decode_manifest, encode_manifest, parse_object

SCHEMA = 2
"""Of plan.json: raised with every change of its fields."""
API_VERSION, API_OLDEST = 4, 2
"""Of the C interface, ATSC_API_VERSION and ATSC_API_OLDEST of runtime/include/atsc.h."""
MANIFEST = "plan.json"
WEIGHTS_ALIGNMENT = 4096
_MAX_MANIFEST_BYTES = 256 << 20


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
    return parse(read_text(directory), directory)


def read_text(directory: Path) -> bytes:
    """The bytes of a folder's plan.json.

    Raises:
        PlanError: no plan there, or it cannot be read.
    """
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
            raise damaged(path, "far larger than any manifest")
        return path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); check permissions") from None


def parse(text: bytes, directory: Path) -> Manifest:
    """The manifest that the bytes of a plan.json hold; `load` reads them first.

    Raises:
        PlanError: another schema or C interface, an unknown or malformed field.
    """
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
        raise damaged(path, "it does not say which C interface its library has")
    if not oldest <= API_VERSION <= made:
        raise PlanError(
            f"{path}: this plan was made by another version of atsc (C interface {made}, this one "
            f"has {API_VERSION}); compile the model again, or install the atsc that made it"
        )


def damaged(path: Path, what: str) -> PlanError:
    """What is wrong with a file of a plan, and what helps: for the caller to raise."""
    return PlanError(f"{path}: {what}; copy the plan again, or compile the model again")
