"""compile_model(): the pipeline from a model file to a plan folder, top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from atsc.codegen.build import generate
from atsc.codegen.cpu import FEW_ROWS
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.device_build import generate_device
from atsc.codegen.device_plan import DeviceRequest, plan_device
from atsc.codegen.device_tables import DeviceTables
from atsc.codegen.graph.build import generate_graph, has_rule
from atsc.codegen.layout import value_bytes
from atsc.codegen.package import check_output
from atsc.codegen.storage import lay_out, store_weights
from atsc.codegen.toolchain import find_compiler
from atsc.codegen.transfer_library import load_scheduler
from atsc.compiler.compilation import Code, Compilation, CompileOptions, Partition
from atsc.compiler.errors import UsageError
from atsc.compiler.importers.converted import converted, is_gguf
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.importers.onnx.general import import_general, looks_like_decoder
from atsc.compiler.ir import Graph, TensorType
from atsc.compiler.profiling import measuring
from atsc.compiler.write_graph import write_graph
from atsc.compiler.write_plan import write_compiled
from atsc.passes.allocate import Allocation, RoundLimits, allocate
from atsc.passes.annotate import Annotation, RooflineTimer, Timer, annotate, rates_of
from atsc.passes.check_allocation import check_allocation
from atsc.passes.limit_context import LimitContext, choose_context
from atsc.passes.optimise import optimise
from atsc.passes.partition import Schedule, partition_units, schedule_groups
from atsc.passes.policies import POLICIES
from atsc.targets.target import Target, resolve

T = TypeVar("T")

LOGITS_BYTES = 16 << 20
__all__ = ["STAGES", "CompileOptions", "Observer", "compile_model", "default_output"]

STAGES = (
    "convert",
    "import",
    "optimise",
    "partition",
    "allocate",
    "generate",
    "annotate",
    "place",
    "package",
)
"""In order; ONNX models skip `convert`, plans for a CPU alone `annotate` and `place`."""


class Observer(Protocol):
    """Watches a compilation; serves `-v`, `--dump` and progress bars."""

    def on_stage(self, index: int, name: str, artifact: object, seconds: float) -> None:
        """A stage is done."""

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Part of a long stage is done."""


@dataclass(slots=True)
class Stages:
    """Runs named stages, timed and observed; knows where to stop."""

    observer: Observer | None
    stop_after: str | None = None
    done: int = 0

    def run(self, name: str, work: Callable[[], T]) -> T:
        """One stage's artefact.

        Raises:
            UsageError: the stage to stop after did not come, and this one would write the plan.
        """
        if name == STAGES[-1] and self.stop_after not in (None, name):
            raise UsageError(
                f"--stop-after {self.stop_after}: compiling this model for this target has no such "
                "stage; -v lists those that it has"
            )
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
        """Part of the present stage is done."""
        if self.observer:
            self.observer.on_progress(what, done, total)


class _StopError(Exception):
    """`stop_after` was reached."""


def compile_model(options: CompileOptions, observer: Observer | None = None) -> Path | None:
    """Compile a model, ONNX or GGUF, to a plan folder.

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
    stages = Stages(observer, options.stop_after)
    try:
        with contextlib.ExitStack() as stack:
            if is_gguf(options.model):
                beside = converted(options.model, output.parent, stages.progress)
                model = stages.run("convert", lambda: stack.enter_context(beside))
                options = dataclasses.replace(options, model=model)
            return _compile(options, output, stages)
    except _StopError:
        return None


def default_output(model: Path) -> Path:
    """`model.atsplan` beside a model file, `folder.atsplan` beside a model folder."""
    return model.parent / f"{model.stem if model.is_file() else model.name}.atsplan"


def _compile(options: CompileOptions, output: Path, stages: Stages) -> Path:
    target = _target_of(options)
    if not looks_like_decoder(options.model):
        return _compile_graph(options, target, output, stages)
    imported = stages.run(
        "import",
        lambda: import_onnx(
            options.model, accuracy_level=options.accuracy_level, context=options.ctx
        ),
    )
    context = choose_context(imported, options.ctx)
    graph = stages.run("optimise", lambda: LimitContext(context).run(optimise(imported)))
    built = build(options, target, graph, context, stages)
    if not target.gpu:
        return stages.run(
            "package", lambda: write_compiled(built, None, None, output, stages.progress)
        )
    with tempfile.TemporaryDirectory(prefix=".atsc-profile-", dir=output.parent) as folder:
        profile = Path(folder) / "profile.atsplan"
        annotation = stages.run("annotate", lambda: _annotate(built, profile, stages))
        device = stages.run("place", lambda: _place(built, annotation))
        return stages.run(
            "package",
            lambda: write_compiled(built, annotation, device, output, stages.progress, profile),
        )


def _compile_graph(options: CompileOptions, target: Target, output: Path, stages: Stages) -> Path:
    """A model that is no language model: its graph as it is, on the CPU."""
    if target.gpu:
        raise UsageError(
            f"{options.model}: no language model (it has no KV cache), and such models run on the "
            "CPU for now: leave --vram, --policy and a --target with a GPU out"
        )
    graph = stages.run("import", lambda: import_general(options.model, has_rule))
    code = stages.run("generate", lambda: generate_graph(graph, stages.progress, options.toolchain))
    return stages.run("package", lambda: write_graph(graph, code, options, target, output))


def build(
    options: CompileOptions, target: Target, graph: Graph, context: int, stages: Stages
) -> Compilation:
    """From a graph ready for code generation to its kernels: partition, allocate, generate."""
    parts = stages.run("partition", lambda: _partition(graph))
    limits = _round_limits(graph, min(options.chunk, context))
    allocation = stages.run("allocate", lambda: _allocate(graph, parts.schedule, limits))
    code = stages.run("generate", lambda: _generate(options, graph, parts, target, stages))
    return Compilation(options, target, graph, context, parts, limits, allocation, code)


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
        is_here = options.target == "auto"
        machine = "this machine" if is_here else f"target {target.name}"
        why = " (atsc doctor says what is missing)" if is_here else ""
        raise UsageError(
            f"{flag}: {machine} has no GPU that atsc can use{why}; leave it out, or compile for "
            "another machine with --target NAME (atsc targets lists them)"
        )
    return target


def _check_options(options: CompileOptions) -> None:
    if options.stop_after is not None and options.stop_after not in STAGES:
        raise UsageError(f"--stop-after {options.stop_after}: stages are {', '.join(STAGES)}")
    if options.stop_after not in STAGES[: STAGES.index("generate")]:
        find_compiler(options.toolchain)  # before any long work
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


def _generate(
    options: CompileOptions, graph: Graph, parts: Partition, target: Target, stages: Stages
) -> Code:
    cpu = generate(graph, parts.storage, stages.progress, options.toolchain)
    if target.gpu != "cuda":
        return Code(cpu, None)
    return Code(cpu, generate_device(graph, parts.storage, Gpu(target.sm, target.num_sms)))


def _annotate(b: Compilation, profile: Path, stages: Stages) -> Annotation:
    """Measured times where the target is this machine, else its file's roofline."""

    def annotate_with(timer: Timer) -> Annotation:
        units, num_bytes = b.parts.units, b.device_bytes()
        return annotate(b.graph, units, num_bytes, timer, b.load, stages.progress)

    if b.target.source == "detected":
        with measuring(b, profile, stages.progress) as timer:
            found = annotate_with(timer)
            return dataclasses.replace(found, fixed_device_bytes=timer.fixed_device_bytes())
    return annotate_with(
        RooflineTimer(b.graph, b.parts.units, b.stored_bytes(), rates_of(b.target))
    )


def _place(b: Compilation, annotation: Annotation) -> DeviceTables:
    options, fixed = b.options, b.fixed_bytes(annotation)
    request = DeviceRequest(
        kind=b.target.gpu,
        policy=options.policy or "tensor",
        budget_bytes=options.vram_bytes or b.target.vram_bytes,
        headroom_bytes=fixed.headroom,
        prompt_share=options.prompt_share,
        chunk=b.limits.chunk,
    )
    scheduler = load_scheduler(toolchain=options.toolchain)
    return plan_device(request, annotation, fixed, b.code.device, len(b.parts.units), scheduler)
