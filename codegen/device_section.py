"""What plan.json says of units and of the GPU: costs, links, and rungs with their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from atsc.codegen.device_tables import DeviceTables
from atsc.codegen.tables import Cache
from atsc.compiler import plan
from atsc.compiler.ir import Graph
from atsc.passes.annotate import Annotation, Load, input_bytes, locate, prefill_rows
from atsc.passes.ladder import FixedBytes
from atsc.passes.partition import Unit, UnitKind
from atsc.passes.placement import Kind, Times
from atsc.passes.retarget import PlanCosts
from atsc.passes.work import NodeWork, node_work
from atsc.targets.target import Target


def unit_costs(
    graph: Graph,
    units: Sequence[Unit],
    stored_bytes: Mapping[str, int],
    device_bytes: Sequence[int],
    caches: Sequence[Cache],
    sessions: int,
    load: Load,
    annotation: Annotation | None,
) -> list[plan.Cost | None]:
    """Each unit's entry; with times where there is an annotation.

    Args:
        graph: the graph that `units` cut.
        units: all units of the plan.
        stored_bytes: weight name -> bytes as the plan stores it.
        device_bytes: of each unit, in VRAM.
        caches: KV caches in execution order, of one session.
        sessions: how many may exist at once.
        load: context and chunk.
        annotation: times on the target.
    """
    layers, parts = locate(graph, units)
    times: dict[int, tuple[plan.Times, plan.Times]] = {}
    if annotation:
        for index, cost in zip(annotation.indices, annotation.costs, strict=True):
            times[index] = (_times(cost.decode), _times(cost.prefill))
    own_cache = iter(caches)
    found: list[plan.Cost | None] = []
    for index, unit in enumerate(units):
        is_cache = unit.kind is UnitKind.KV_CACHE
        cache = _cache(next(own_cache), sessions) if is_cache else None
        if unit.kind is UnitKind.SHARED:
            found.append(None)
            continue
        decode_times, prefill_times = times.get(index, (None, None))
        decode, prefill = (
            _work(graph, unit, stored_bytes, rows, load.position(rows))
            for rows in (1, prefill_rows(parts[index], load))
        )
        found.append(
            plan.Cost(
                kind=str(Kind.KV_CACHE if is_cache else Kind.WEIGHTS),
                part=str(parts[index]),
                layer=layers[index],
                device_bytes=device_bytes[index],
                input_bytes=input_bytes(graph, unit),
                decode=decode,
                prefill=prefill,
                cache=cache,
                decode_times=decode_times,
                prefill_times=prefill_times,
            )
        )
    return found


def device_section(
    tables: DeviceTables,
    annotation: Annotation,
    fixed: FixedBytes,
    target: Target,
    load: Load,
    prompt_share: float,
) -> plan.Device:
    """The section `device`, each rung with a simulated round of one token and of a chunk."""
    to_gpu, to_cpu = annotation.to_gpu, annotation.to_cpu
    link = plan.Link(
        h2d_bytes_per_s=tables.link_bytes_per_s,
        to_gpu_ns=float(to_gpu.latency_ns),
        to_gpu_ns_per_byte=float(to_gpu.ns_per_byte),
        to_cpu_ns=float(to_cpu.latency_ns),
        to_cpu_ns_per_byte=float(to_cpu.ns_per_byte),
        cpu_share=annotation.cpu_share,
    )
    costs = PlanCosts(
        annotation.costs, annotation.indices, to_gpu, to_cpu, annotation.cpu_share, load.rows
    )
    return plan.Device(
        kind=tables.kind,
        model=target.gpu_model,
        sm=target.sm,
        budget_bytes=tables.budget_bytes,
        headroom_bytes=fixed.headroom,
        context_bytes=fixed.context,
        modules_bytes=fixed.modules,
        activations_bytes=fixed.activations,
        link=link,
        stream_from_rows=tables.stream_from_rows,
        prompt_share=float(prompt_share),
        rungs=tuple(_rungs(tables, costs)),
    )


def _rungs(tables: DeviceTables, costs: PlanCosts) -> Iterator[plan.Rung]:
    for (rung, on_device), promoted in zip(tables.rungs, tables.promoted, strict=True):
        scenario = costs.scenario(
            rung.placement.on_gpu,
            rung.slot_bytes,
            rung.num_slots,
            tables.stream_from_rows,
            promoted,
        )
        static = replace(scenario, promoted=(), stream_from_rows=0)
        copied = {costs.indices[unit] for unit in promoted}
        yield plan.Rung(
            required_bytes=rung.required_bytes,
            resident_bytes=rung.placement.resident_bytes,
            slot_bytes=rung.slot_bytes,
            num_slots=rung.num_slots,
            on_device="".join(str(int(here)) for here in on_device),
            promoted="".join(str(int(unit in copied)) for unit in range(len(on_device))),
            decode_ns=scenario.decode().total_ns,
            prefill_ns=scenario.prefill().total_ns,
            static_decode_ns=static.decode().total_ns,
            static_prefill_ns=static.prefill().total_ns,
        )


def _times(times: Times) -> plan.Times:
    return plan.Times(times.cpu_ns, times.gpu_ns, times.transfer_ns)


def _cache(cache: Cache, sessions: int) -> plan.Cache:
    return plan.Cache(cache.num_bytes * sessions // cache.capacity, cache.window)


def _work(
    graph: Graph, unit: Unit, stored_bytes: Mapping[str, int], rows: int, position: int
) -> plan.Work:
    def nodes(context: int) -> list[NodeWork]:
        return [node_work(graph, index, stored_bytes, rows, context) for index in unit.nodes]

    now, first, second = nodes(position + rows), nodes(rows), nodes(rows + 1)
    flops = [after.flops - before.flops for before, after in zip(first, second, strict=True)]
    more = [after.num_bytes - before.num_bytes for before, after in zip(first, second, strict=True)]
    grows = any(flops) or any(more)
    return plan.Work(
        flops=tuple(node.flops for node in now),
        bytes=tuple(node.num_bytes for node in now),
        flops_per_token=tuple(flops) if grows else (),
        bytes_per_token=tuple(more) if grows else (),
    )
