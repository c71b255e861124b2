"""Writing the plan of a compilation: tables, library, manifest and folder."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atsc.codegen.build import build_library
from atsc.codegen.device_section import device_section, unit_costs
from atsc.codegen.device_tables import DeviceTables
from atsc.codegen.package import PlanFolder, WeightsFile
from atsc.codegen.storage import StoredUnit
from atsc.codegen.tables import Cache, TableInputs, tables_source
from atsc.compiler import plan
from atsc.compiler.check_plan import Progress
from atsc.compiler.compilation import Compilation
from atsc.compiler.isa import platform_name
from atsc.compiler.version import atsc_version
from atsc.passes.annotate import Annotation
from atsc.targets.target import Target

LEAST_ISA = "x86-64-v3"
LIBRARY = "libplan.so"


def write_compiled(
    b: Compilation,
    annotation: Annotation | None,
    device: DeviceTables | None,
    output: Path,
    progress: Progress | None = None,
    weights_of: Path | None = None,
) -> Path:
    """Write the plan folder.

    Args:
        b: what was compiled.
        annotation: costs of the units, where the target has a GPU.
        device: its tables, where it has one.
        output: the plan's folder.
        progress: told how many bytes of weights are written.
        weights_of: another plan whose weights.bin is linked if it is the same.

    Raises:
        CodegenError: the tables do not compile or link.
        PlanError: the folder cannot be written.
    """
    info, storage, caches = b.graph.info, b.parts.storage, b.caches()
    with PlanFolder(output) as folder:
        weights = folder.write_weights(storage.units, info.source_files, progress, weights_of)
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
    b: Compilation,
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
        fixed, load = b.fixed_bytes(annotation), b.load
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
            logits_bytes=b.logits_bytes,
        ),
        units=tuple(_units(b, annotation, device, weights, caches)),
        files={},
        target=plan_target(b.target),
        weights_key=weights.key,
        device=section,
    )


def _units(
    b: Compilation,
    annotation: Annotation | None,
    device: DeviceTables | None,
    weights: WeightsFile,
    caches: list[Cache],
) -> Iterator[plan.Unit]:
    units = b.parts.storage.units
    costs = unit_costs(
        b.graph,
        b.parts.units,
        b.stored_bytes(),
        b.device_bytes(),
        caches,
        b.options.sessions,
        b.load,
        annotation,
    )
    on_device = device.rungs[-1][1] if device and device.rungs else [False] * len(units)
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
