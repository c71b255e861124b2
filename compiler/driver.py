"""compile_model(): the pipeline from a model file to a plan folder, top to bottom."""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from atsc.codegen.build import Generated, build_library, generate
from atsc.codegen.layout import align, value_bytes
from atsc.codegen.package import PlanFolder, WeightsFile, check_output
from atsc.codegen.storage import Storage, StoredUnit, lay_out, store_weights
from atsc.codegen.tables import Cache, TableInputs, tables_source
from atsc.compiler import plan
from atsc.compiler.errors import UsageError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.ir import Graph, TensorType
from atsc.compiler.isa import platform_name
from atsc.passes.allocate import Allocation, RoundLimits, allocate
from atsc.passes.check_allocation import check_allocation
from atsc.passes.limit_context import LimitContext, choose_context
from atsc.passes.optimise import optimise
from atsc.passes.partition import Schedule, partition_units, schedule_groups, unit_of_nodes

T = TypeVar("T")

FEW_ROWS = 8
LOGITS_BYTES = 16 << 20
CACHE_ALIGNMENT = 64
LEAST_ISA = "x86-64-v3"
LIBRARY = "libplan.so"
STAGES = ("import", "optimise", "partition", "allocate", "generate", "package")


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
    policy: str = "cpu"
    sessions: int = 1
    stop_after: str | None = None


class Observer(Protocol):
    """Watches a compilation; serves `-v`, `--dump` and progress bars."""

    def on_stage(self, index: int, name: str, artifact: object, seconds: float) -> None:
        """A stage is done."""

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Part of a long stage is done."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How the graph is cut, and where its weights will lie."""

    schedule: Schedule
    storage: Storage
    unit_of_node: dict[int, int]


@dataclass(slots=True)
class _Stages:
    """Runs the stages in order, timed and observed; knows where to stop."""

    observer: Observer | None
    stop_after: str | None
    done: int = 0

    def run(self, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        artifact = work()
        if self.observer:
            elapsed = time.perf_counter() - start
            self.observer.on_stage(self.done, STAGES[self.done], artifact, elapsed)
        self.done += 1
        if STAGES[self.done - 1] == self.stop_after and self.done < len(STAGES):
            raise _StopError
        return artifact

    def progress(self, what: str, done: int, total: int) -> None:
        if self.observer:
            self.observer.on_progress(what, done, total)


class _StopError(Exception):
    """`stop_after` was reached."""


def compile_model(options: CompileOptions, observer: Observer | None = None) -> Path | None:
    """Compile a model to a plan folder.

    Returns:
        The plan's folder; None if `stop_after` ended the compilation before it was written.

    Raises:
        UsageError: an option makes no sense for this model.
        ModelError: the model cannot be read, or holds something unsupported.
        CodegenError: a kernel cannot be built.
        PlanError: the plan cannot be written.
    """
    _check_options(options)
    output = check_output(options.output or default_output(options.model))
    try:
        return _compile(options, output, _Stages(observer, options.stop_after))
    except _StopError:
        return None


def default_output(model: Path) -> Path:
    """`model.atsplan` beside a model file, `folder.atsplan` beside a model folder."""
    return model.parent / f"{model.stem if model.is_file() else model.name}.atsplan"


def _compile(options: CompileOptions, output: Path, stages: _Stages) -> Path:
    imported = stages.run(lambda: import_onnx(options.model, accuracy_level=options.accuracy_level))
    context = choose_context(imported, options.ctx)
    graph = stages.run(lambda: LimitContext(context).run(optimise(imported)))
    partition = stages.run(lambda: _partition(graph))
    limits = _round_limits(graph, min(options.chunk, context))
    allocation = stages.run(lambda: _allocate(graph, partition.schedule, limits))
    generated = stages.run(lambda: generate(graph, partition.storage, stages.progress))
    built = _Built(options, graph, context, partition, limits, allocation, generated)
    return stages.run(lambda: _package(built, output, stages))


def _check_options(options: CompileOptions) -> None:
    if options.stop_after is not None and options.stop_after not in STAGES:
        raise UsageError(f"--stop-after {options.stop_after}: stages are {', '.join(STAGES)}")
    if options.chunk < 1:
        raise UsageError(f"--chunk {options.chunk}: must be at least 1")
    if options.ctx is not None and options.ctx < 1:
        raise UsageError(f"--ctx {options.ctx}: must be at least 1")
    if options.sessions < 1:
        raise UsageError(f"--sessions {options.sessions}: must be at least 1")
    if options.policy != "cpu":
        raise UsageError(f"--policy {options.policy}: only cpu is supported so far")


def _partition(graph: Graph) -> Partition:
    stored = store_weights(graph)
    units = partition_units(graph, lambda weight: stored[weight.name].num_bytes)
    storage = lay_out(graph, units, stored)
    return Partition(schedule_groups(graph), storage, dict(unit_of_nodes(units)))


def _round_limits(graph: Graph, chunk: int) -> RoundLimits:
    """Logits of a round take at most LOGITS_BYTES, and at least a round of few rows fits."""
    rows = LOGITS_BYTES // (4 * graph.info.vocab_size)
    return RoundLimits(chunk, logit_rows=min(chunk, max(FEW_ROWS, rows)), few_rows=FEW_ROWS)


def _allocate(graph: Graph, schedule: Schedule, limits: RoundLimits) -> Allocation:
    def size_of(kind: TensorType, rows: int) -> int:
        width = kind.shape[-1]
        assert isinstance(width, int)
        return value_bytes(kind.dtype, rows, width)

    allocation = allocate(graph, schedule, limits, size_of)
    check_allocation(graph, schedule, allocation)
    return allocation


@dataclass(frozen=True, slots=True)
class _Built:
    """Everything that the plan is packaged from."""

    options: CompileOptions
    graph: Graph
    context: int
    partition: Partition
    limits: RoundLimits
    allocation: Allocation
    generated: Generated


def _caches(b: _Built) -> list[Cache]:
    """A window's cache is a ring of the window and one chunk."""
    found = []
    for node in sorted(b.graph.attention_nodes(), key=lambda node: int(str(node.attrs["layer"]))):
        window = int(str(node.attrs.get("window", 0)))
        ring = align(window + b.limits.chunk, CACHE_ALIGNMENT)
        capacity = min(b.context, ring) if window else b.context
        kv_heads, size = (int(str(node.attrs[key])) for key in ("kv_heads", "head_size"))
        found.append(Cache(kv_heads, size, window, capacity))
    return found


def _package(b: _Built, output: Path, stages: _Stages) -> Path:
    info, storage, caches = b.graph.info, b.partition.storage, _caches(b)
    with PlanFolder(output) as folder:
        weights = folder.write_weights(storage.units, info.source_files, stages.progress)
        identity = hashlib.sha256(b.generated.identity().encode())
        identity.update(repr((weights.unit_crc32s, b.context, b.limits, caches)).encode())
        plan_id = identity.hexdigest()
        tables = tables_source(
            TableInputs(
                graph=b.graph,
                schedule=b.partition.schedule,
                allocation=b.allocation,
                kernels=b.generated.of_nodes,
                storage=storage,
                unit_crc32=weights.unit_crc32s,
                unit_of_node=b.partition.unit_of_node,
                caches=caches,
                plan_id=plan_id,
                context_length=b.context,
                chunk=b.limits.chunk,
                max_logit_rows=b.limits.logit_rows,
            )
        )
        library = build_library(b.generated, tables, folder.path / f"{LIBRARY}.partial")
        folder.add_file(LIBRARY, library)
        library.unlink()
        folder.add_companions(info.companion_files)
        return folder.commit(_manifest(b, plan_id, weights, caches))


def _manifest(b: _Built, plan_id: str, weights: WeightsFile, caches: list[Cache]) -> plan.Manifest:
    info, options = b.graph.info, b.options
    kv_bytes = sum(4 * c.kv_heads * c.head_size * c.capacity for c in caches)
    return plan.Manifest(
        plan_id=plan_id,
        atsc_version=importlib.metadata.version("atsc"),
        platform=platform_name(),
        isa=LEAST_ISA,
        library=LIBRARY,
        weights="weights.bin",
        model=plan.Model(
            name=info.name,
            vocab_size=info.vocab_size,
            model_context_length=info.context_length,
            bos_token_id=info.bos_token_id,
            eos_token_ids=info.eos_token_ids,
            source=tuple(Path(file).name for file in info.source_files),
        ),
        options=plan.Options(
            ctx=b.context,
            chunk=b.limits.chunk,
            accuracy_level=options.accuracy_level,
            threads=options.threads,
            sessions=options.sessions,
            policy=options.policy,
        ),
        memory=plan.Memory(
            weights_bytes=b.partition.storage.num_bytes,
            kv_bytes=kv_bytes * options.sessions,
            arena_bytes=b.allocation.arena_bytes
            + b.allocation.private_arena_bytes * (options.threads or 1),
            logits_bytes=4 * info.vocab_size * b.limits.logit_rows,
        ),
        units=tuple(
            plan.Unit(
                name=unit.name,
                nodes=unit.nodes,
                format=_format_of(unit),
                bytes=unit.bytes,
                offset=unit.offset,
                residency="ram",
                crc32=crc32,
            )
            for unit, crc32 in zip(b.partition.storage.units, weights.unit_crc32s, strict=True)
        ),
        files={},
        weights_key=weights.key,
    )


def _format_of(unit: StoredUnit) -> str:
    """The format of a unit's largest weight, or what the unit is."""
    if not unit.weights:
        return unit.kind.value
    largest, _ = max(unit.weights, key=lambda placed: placed[0].num_bytes)
    return str(largest.weight.format)
