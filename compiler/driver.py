"""compile_model(): the pipeline from a model file to a plan folder, top to bottom."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from atsc.codegen.build import Generated, build_library, generate
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.device_build import DeviceCode, generate_device
from atsc.codegen.device_plan import DeviceRequest, plan_device
from atsc.codegen.device_section import device_section, unit_costs
from atsc.codegen.device_tables import DeviceTables
from atsc.codegen.layout import UNIT_ALIGNMENT, align, value_bytes
from atsc.codegen.package import PlanFolder, WeightsFile, check_output
from atsc.codegen.storage import Storage, StoredUnit, lay_out, store_weights
from atsc.codegen.tables import Cache, TableInputs, tables_source
from atsc.compiler import plan
from atsc.compiler.errors import UsageError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.ir import Graph, TensorType
from atsc.compiler.isa import platform_name
from atsc.compiler.version import atsc_version
from atsc.passes import partition
from atsc.passes.allocate import Allocation, RoundLimits, allocate
from atsc.passes.annotate import Annotation, Load, RooflineTimer, annotate, rates_of
from atsc.passes.check_allocation import check_allocation
from atsc.passes.ladder import FixedBytes
from atsc.passes.limit_context import LimitContext, cache_capacity, choose_context
from atsc.passes.optimise import optimise
from atsc.passes.partition import Schedule, UnitKind, partition_units, schedule_groups
from atsc.passes.policies import POLICIES
from atsc.targets.target import Target, resolve

T = TypeVar("T")

FEW_ROWS = 8
LOGITS_BYTES = 16 << 20
LEAST_ISA = "x86-64-v3"
LIBRARY = "libplan.so"
STAGES = (
    "import",
    "optimise",
    "partition",
    "allocate",
    "generate",
    "annotate",
    "place",
    "package",
)
"""In order; plans for a CPU alone skip `annotate` and `place`."""
DEFAULT_HEADROOM = 256 << 20


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
    prompt_share: float = 0.0
    """The share of all tokens that are prompt: how much prefill counts in placement."""
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

    units: tuple[partition.Unit, ...]
    schedule: Schedule
    storage: Storage

    @property
    def unit_of_node(self) -> dict[int, int]:
        """Node index -> unit index."""
        return dict(partition.unit_of_nodes(self.units))


@dataclass(slots=True)
class _Stages:
    """Runs named stages, timed and observed; knows where to stop."""

    observer: Observer | None
    stop_after: str | None
    done: int = 0

    def run(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        artifact = work()
        if self.observer:
            elapsed = time.perf_counter() - start
            self.observer.on_stage(self.done, name, artifact, elapsed)
        self.done += 1
        if name == self.stop_after and name != STAGES[-1]:
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
    target = _target_of(options)
    imported = stages.run(
        "import", lambda: import_onnx(options.model, accuracy_level=options.accuracy_level)
    )
    context = choose_context(imported, options.ctx)
    graph = stages.run("optimise", lambda: LimitContext(context).run(optimise(imported)))
    parts = stages.run("partition", lambda: _partition(graph))
    limits = _round_limits(graph, min(options.chunk, context))
    allocation = stages.run("allocate", lambda: _allocate(graph, parts.schedule, limits))
    generated = stages.run("generate", lambda: _generate(graph, parts, target, stages))
    built = _Built(options, target, graph, context, parts, limits, allocation, generated)
    annotation = device = None
    if target.gpu:
        annotation = stages.run("annotate", lambda: _annotate(built, stages))
        device = stages.run("place", lambda: _place(built, annotation))
    return stages.run("package", lambda: _package(built, annotation, device, output, stages))


def _target_of(options: CompileOptions) -> Target:
    """The target; without its GPU where none is asked for.

    Raises:
        UsageError: VRAM or a policy is asked for that the target has no GPU for.
    """
    target = resolve(options.target)
    wants_gpu = options.policy != "cpu" and (
        options.vram_bytes is not None or options.policy is not None or options.target != "auto"
    )
    if not wants_gpu:
        return dataclasses.replace(target, gpu="")
    if not target.gpu and (options.vram_bytes is not None or options.policy is not None):
        flag = "--vram" if options.vram_bytes is not None else f"--policy {options.policy}"
        raise UsageError(
            f"{flag}: target {target.name} has no GPU that atsc can use; leave it out, or compile "
            "for another machine with --target NAME (atsc targets lists them)"
        )
    return target


def _check_options(options: CompileOptions) -> None:
    if options.stop_after is not None and options.stop_after not in STAGES:
        raise UsageError(f"--stop-after {options.stop_after}: stages are {', '.join(STAGES)}")
    if options.chunk < 1:
        raise UsageError(f"--chunk {options.chunk}: must be at least 1")
    if options.ctx is not None and options.ctx < 1:
        raise UsageError(f"--ctx {options.ctx}: must be at least 1")
    if options.sessions < 1:
        raise UsageError(f"--sessions {options.sessions}: must be at least 1")
    if options.policy is not None and options.policy not in POLICIES:
        raise UsageError(f"--policy {options.policy}: policies are {', '.join(POLICIES)}")
    if not 0 <= options.prompt_share <= 1:
        raise UsageError(f"--prompt-share {options.prompt_share}: must be from 0 to 1")


def _partition(graph: Graph) -> Partition:
    stored = store_weights(graph)
    units = partition_units(graph, lambda weight: stored[weight.name].num_bytes)
    storage = lay_out(graph, units, stored)
    return Partition(units, schedule_groups(graph), storage)


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
class _Code:
    """Kernels of the CPU, and of the GPU where the target has one that needs its own."""

    cpu: Generated
    device: DeviceCode | None


def _generate(graph: Graph, parts: Partition, target: Target, stages: _Stages) -> _Code:
    cpu = generate(graph, parts.storage, stages.progress)
    if target.gpu != "cuda":
        return _Code(cpu, None)
    return _Code(cpu, generate_device(graph, parts.storage, Gpu(target.sm, target.num_sms)))


@dataclass(frozen=True, slots=True)
class _Built:
    """Everything that later stages work from."""

    options: CompileOptions
    target: Target
    graph: Graph
    context: int
    parts: Partition
    limits: RoundLimits
    allocation: Allocation
    code: _Code

    def logits_bytes(self) -> int:
        """Of a round with the most rows."""
        return 4 * self.graph.info.vocab_size * self.limits.logit_rows


def _stored_bytes(b: _Built) -> dict[str, int]:
    return {name: weight.num_bytes for name, weight in b.parts.storage.stored().items()}


def _annotate(b: _Built, stages: _Stages) -> Annotation:
    timer = RooflineTimer(b.graph, b.parts.units, _stored_bytes(b), rates_of(b.target))
    return annotate(
        b.graph,
        b.parts.units,
        _device_bytes(b),
        timer,
        Load(b.context, b.limits.chunk),
        stages.progress,
    )


def _device_bytes(b: _Built) -> list[int]:
    """What each unit takes in VRAM: its range, and its KV cache for all sessions."""
    caches = iter(_caches(b))
    return [
        align(unit.bytes, UNIT_ALIGNMENT)
        + (next(caches).num_bytes * b.options.sessions if unit.kind is UnitKind.KV_CACHE else 0)
        for unit in b.parts.storage.units
    ]


def _fixed_bytes(b: _Built) -> FixedBytes:
    shared = sum(u.bytes for u in b.parts.storage.units if u.kind is UnitKind.SHARED)
    return FixedBytes(
        context=b.target.gpu_context_bytes,
        modules=b.code.device.binary_bytes if b.code.device else 0,
        activations=b.allocation.arena_bytes + b.logits_bytes() + shared,
        headroom=b.options.headroom_bytes if b.target.gpu == "cuda" else 0,
    )


def _place(b: _Built, annotation: Annotation) -> DeviceTables:
    options, fixed = b.options, _fixed_bytes(b)
    request = DeviceRequest(
        kind=b.target.gpu,
        policy=options.policy or "tensor",
        budget_bytes=options.vram_bytes or b.target.vram_bytes,
        headroom_bytes=fixed.headroom,
        prompt_share=options.prompt_share,
        chunk=b.limits.chunk,
    )
    return plan_device(request, annotation, fixed, b.code.device, len(b.parts.units))


def _caches(b: _Built) -> list[Cache]:
    """A window's cache is a ring of the window and one chunk."""
    found = []
    for node in sorted(b.graph.attention_nodes(), key=lambda node: int(str(node.attrs["layer"]))):
        window = int(str(node.attrs.get("window", 0)))
        capacity = cache_capacity(b.context, window, b.limits.chunk)
        kv_heads, size = (int(str(node.attrs[key])) for key in ("kv_heads", "head_size"))
        found.append(Cache(kv_heads, size, window, capacity))
    return found


def _package(
    b: _Built,
    annotation: Annotation | None,
    device: DeviceTables | None,
    output: Path,
    stages: _Stages,
) -> Path:
    info, storage, caches = b.graph.info, b.parts.storage, _caches(b)
    with PlanFolder(output) as folder:
        weights = folder.write_weights(storage.units, info.source_files, stages.progress)
        identity = hashlib.sha256(b.code.cpu.identity().encode())
        facts = (weights.unit_crc32s, b.context, b.limits, caches, device)
        identity.update(repr(facts).encode())
        plan_id = identity.hexdigest()
        tables = tables_source(
            TableInputs(
                graph=b.graph,
                schedule=b.parts.schedule,
                allocation=b.allocation,
                kernels=b.code.cpu.of_nodes,
                storage=storage,
                unit_crc32=weights.unit_crc32s,
                unit_of_node=b.parts.unit_of_node,
                caches=caches,
                plan_id=plan_id,
                context_length=b.context,
                chunk=b.limits.chunk,
                max_logit_rows=b.limits.logit_rows,
                device=device,
            )
        )
        library = build_library(b.code.cpu, tables, folder.path / f"{LIBRARY}.partial")
        folder.add_file(LIBRARY, library)
        library.unlink()
        for module, path in b.code.device.modules if b.code.device else ():
            folder.add_file(module.file, path)
        folder.add_companions(info.companion_files)
        return folder.commit(_manifest(b, annotation, device, plan_id, weights, caches))


def _manifest(
    b: _Built,
    annotation: Annotation | None,
    device: DeviceTables | None,
    plan_id: str,
    weights: WeightsFile,
    caches: list[Cache],
) -> plan.Manifest:
    info, options = b.graph.info, b.options
    kv_bytes = sum(cache.num_bytes for cache in caches)
    section = None
    if device and annotation:
        fixed, load = _fixed_bytes(b), Load(b.context, b.limits.chunk)
        section = device_section(device, annotation, fixed, b.target, load, options.prompt_share)
    return plan.Manifest(
        plan_id=plan_id,
        atsc_version=atsc_version(),
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
            policy=(options.policy or "tensor") if device else "cpu",
        ),
        memory=plan.Memory(
            weights_bytes=b.parts.storage.num_bytes,
            kv_bytes=kv_bytes * options.sessions,
            arena_bytes=b.allocation.arena_bytes
            + b.allocation.private_arena_bytes * (options.threads or 1),
            logits_bytes=b.logits_bytes(),
        ),
        units=tuple(_units(b, annotation, device, weights, caches)),
        files={},
        target=plan_target(b.target),
        weights_key=weights.key,
        device=section,
    )


def _units(
    b: _Built,
    annotation: Annotation | None,
    device: DeviceTables | None,
    weights: WeightsFile,
    caches: list[Cache],
) -> Iterator[plan.Unit]:
    units = b.parts.storage.units
    costs = unit_costs(
        b.graph,
        b.parts.units,
        _stored_bytes(b),
        _device_bytes(b),
        caches,
        b.options.sessions,
        Load(b.context, b.limits.chunk),
        annotation,
    )
    on_device = device.rungs[-1][1] if device else [False] * len(units)
    for unit, crc32, here, cost in zip(units, weights.unit_crc32s, on_device, costs, strict=True):
        yield plan.Unit(
            name=unit.name,
            nodes=unit.nodes,
            format=_format_of(unit),
            bytes=unit.bytes,
            offset=unit.offset,
            residency="vram" if here else "ram",
            crc32=crc32,
            cost=cost,
        )


def plan_target(target: Target) -> dict[str, Any]:
    """A target as plan.json holds it."""
    fields = dataclasses.asdict(target).items()
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields}


def _format_of(unit: StoredUnit) -> str:
    """The format of a unit's largest weight, or what the unit is."""
    if not unit.weights:
        return unit.kind.value
    largest, _ = max(unit.weights, key=lambda placed: placed[0].num_bytes)
    return str(largest.weight.format)
