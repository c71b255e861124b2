"""What a compilation knows: the facts that the stages after `generate` work from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atsc.codegen.build import Generated
from atsc.codegen.device_build import DeviceCode
from atsc.codegen.layout import UNIT_ALIGNMENT, align
from atsc.codegen.storage import Storage
from atsc.codegen.tables import Cache
from atsc.compiler.ir import Graph
from atsc.passes import partition
from atsc.passes.allocate import Allocation, RoundLimits
from atsc.passes.annotate import Annotation, Load
from atsc.passes.ladder import FixedBytes
from atsc.passes.limit_context import cache_capacity
from atsc.targets.target import Target

DEFAULT_HEADROOM = 256 << 20
DEFAULT_PROMPT_SHARE = 0.9
"""Nine tokens of prompt for each one generated: chats and documents (docs/decisions.md)."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What the user asks for; None where the compiler decides."""

    model: Path
    output: Path | None = None
    ctx: int | None = None
    chunk: int = 512
    threads: int | None = None
    accuracy_level: int | None = None
    target: str = "auto"
    policy: str | None = None
    """Of atsc.passes.policies; by default `tensor` where a GPU is asked for, else `cpu`."""
    vram_bytes: int | None = None
    """All that the process may hold of the GPU's memory."""
    headroom_bytes: int = DEFAULT_HEADROOM
    """Kept free of it."""
    prompt_share: float = DEFAULT_PROMPT_SHARE
    """The share of all tokens that are prompt: how much prefill counts in placement."""
    sessions: int = 1
    toolchain: str | None = None
    """`system` or `zig`; by default the system's compiler, or zig where there is none."""
    stop_after: str | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """How the graph is cut, and where its weights will lie."""

    units: tuple[partition.Unit, ...]
    schedule: partition.Schedule
    storage: Storage

    @property
    def unit_of_node(self) -> dict[int, int]:
        """Node index -> unit index."""
        return dict(partition.unit_of_nodes(self.units))


@dataclass(frozen=True, slots=True)
class Code:
    """Kernels of the CPU, and of the GPU where the target has one that needs its own."""

    cpu: Generated
    device: DeviceCode | None


@dataclass(frozen=True, slots=True)
class Compilation:
    """A graph with everything that was decided and built for it."""

    options: CompileOptions
    target: Target
    graph: Graph
    context: int
    parts: Partition
    limits: RoundLimits
    allocation: Allocation
    code: Code

    @property
    def load(self) -> Load:
        """The rounds that are timed."""
        return Load(self.context, self.limits.chunk)

    @property
    def logits_bytes(self) -> int:
        """Of a round with the most rows."""
        return 4 * self.graph.info.vocab_size * self.limits.logit_rows

    def stored_bytes(self) -> Mapping[str, int]:
        """Weight name -> bytes as weights.bin holds it."""
        return {name: w.num_bytes for name, w in self.parts.storage.stored().items()}

    def caches(self) -> list[Cache]:
        """KV caches in execution order; a window's is a ring of the window and one chunk."""
        found = []
        by_layer = sorted(self.graph.attention_nodes(), key=lambda n: int(str(n.attrs["layer"])))
        for node in by_layer:
            window = int(str(node.attrs.get("window", 0)))
            capacity = cache_capacity(self.context, window, self.limits.chunk)
            kv_heads, size = (int(str(node.attrs[key])) for key in ("kv_heads", "head_size"))
            found.append(Cache(kv_heads, size, window, capacity))
        return found

    def device_bytes(self) -> list[int]:
        """What each unit takes in VRAM: its range, and its KV cache for all sessions."""
        caches = iter(self.caches())
        kv_cache = partition.UnitKind.KV_CACHE
        return [
            align(unit.bytes, UNIT_ALIGNMENT)
            + (next(caches).num_bytes * self.options.sessions if unit.kind is kv_cache else 0)
            for unit in self.parts.storage.units
        ]

    def scratch_bytes(self) -> int:
        """Of the GPU's kernels in the largest rounds."""
        if self.code.device is None:
            return 0
        caches = self.caches()
        capacities = [
            caches[int(str(node.attrs["layer"]))].capacity if node.op == "attention" else 0
            for node in self.graph.nodes
        ]
        most_rows = max(self.limits.few_rows, self.limits.chunk, self.limits.logit_rows)
        return self.code.device.scratch_bytes(capacities, most_rows, self.target.num_sms)

    def fixed_bytes(self, annotation: Annotation) -> FixedBytes:
        """VRAM that is taken whatever is resident; as measured where it was."""
        shared = partition.UnitKind.SHARED
        tables = sum(u.bytes for u in self.parts.storage.units if u.kind is shared)
        modules = self.code.device.binary_bytes if self.code.device else 0
        activations = (
            self.allocation.arena_bytes + self.logits_bytes + tables + self.scratch_bytes()
        )
        context = self.target.gpu_context_bytes
        if annotation.fixed_device_bytes is not None:
            context = max(annotation.fixed_device_bytes - modules - activations, 0)
        return FixedBytes(
            context=context,
            modules=modules,
            activations=activations,
            headroom=self.options.headroom_bytes if self.target.gpu == "cuda" else 0,
        )
