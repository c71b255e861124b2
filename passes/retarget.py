"""The costs of a finished plan's units: for its own machine, or for any other one.

A plan's manifest holds each unit's work beside its times, so that `atsc simulate` and `inspect`
need no model file. Another machine's times are its roofline; on the plan's own machine at another
depth, a KV cache's times change with its work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from atsc.compiler import plan
from atsc.compiler.errors import UsageError
from atsc.passes.annotate import Load, Rates
from atsc.passes.limit_context import cache_capacity
from atsc.passes.placement import Kind, Link, Objective, Part, Side, Times, UnitCost
from atsc.passes.simulate import Machine, Scenario
from atsc.passes.work import NodeWork


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """Units that placement may choose for, `indices` in the plan's units, and their links."""

    units: tuple[UnitCost, ...]
    indices: tuple[int, ...]
    to_gpu: Link
    to_cpu: Link
    cpu_share: float
    chunk: int

    @property
    def hand_off_ns(self) -> int:
        """Latency from one side to the other, on average; going on after a copy takes as long."""
        return round((self.to_gpu.latency_ns + self.to_cpu.latency_ns) / 2)

    def objective(self, prompt_share: float) -> Objective:
        """What placement maximises."""
        return Objective(self.to_gpu, self.to_cpu, prompt_share, self.chunk)

    def scenario(
        self,
        on_gpu: Sequence[bool],
        slot_bytes: int,
        num_slots: int,
        stream_from_rows: int,
        promoted: Sequence[int] = (),
    ) -> Scenario:
        """A placement of these units; `slot_bytes` of all slots together."""
        slots = num_slots if slot_bytes else 0
        return Scenario(
            units=self.units,
            on_gpu=tuple(on_gpu),
            machine=Machine(
                self.to_gpu, self.to_cpu, slots, self.cpu_share, resume_ns=self.hand_off_ns
            ),
            chunk=self.chunk,
            slot_bytes=slot_bytes // max(slots, 1),
            stream_from_rows=stream_from_rows,
            promoted=tuple(promoted) if slots else (),
        )


def costs_of(
    manifest: plan.Manifest,
    rates: Rates | None = None,
    *,
    context: int | None = None,
    depth: int | None = None,
) -> PlanCosts:
    """A plan's units with their costs.

    Args:
        manifest: of the plan.
        rates: another machine; None takes the times in the plan.
        context: tokens that the KV caches hold; None: as the plan says.
        depth: tokens in the caches before a round; None: half of the context.

    Raises:
        UsageError: the plan has no times, and no rates are given.
    """
    options = manifest.options
    old = Load(options.ctx, options.chunk)
    new = Load(context or options.ctx, options.chunk)
    if rates:
        to_gpu = to_cpu = Link(rates.hand_off_ns, 1e9 / rates.link_bytes_per_s)
        cpu_share = rates.cpu_share
    elif manifest.device:
        link = manifest.device.link
        to_gpu = Link(link.to_gpu_ns, link.to_gpu_ns_per_byte)
        to_cpu = Link(link.to_cpu_ns, link.to_cpu_ns_per_byte)
        cpu_share = link.cpu_share
    else:
        raise UsageError(
            "the plan is for a CPU alone and holds no times; give a machine with --target "
            "(atsc targets lists them)"
        )
    change = _Change(rates, old, new, depth)
    units, indices = [], []
    for index, unit in enumerate(manifest.units):
        if unit.cost:
            units.append(change.unit(unit.name, unit.cost))
            indices.append(index)
    return PlanCosts(tuple(units), tuple(indices), to_gpu, to_cpu, cpu_share, old.rows)


def costs_by_work(manifest: plan.Manifest) -> PlanCosts:
    """The same for a plan without times, where shares of a round are all that is wanted.

    Decode goes by bytes, prefill by operations, both a unit a nanosecond, on the CPU.
    """
    free = Link(0)
    units = [
        _described(
            unit.name,
            unit.cost,
            Times(sum(unit.cost.decode.bytes), 0),
            Times(sum(unit.cost.prefill.flops), 0),
        )
        for unit in manifest.units
        if unit.cost
    ]
    indices = [index for index, unit in enumerate(manifest.units) if unit.cost]
    return PlanCosts(tuple(units), tuple(indices), free, free, 1.0, manifest.options.chunk)


def scenario_of_rung(manifest: plan.Manifest, costs: PlanCosts, number: int = -1) -> Scenario:
    """One of the plan's own placements; by default the one for the whole budget."""
    device = manifest.device
    assert device is not None
    rung = device.rungs[number]
    on_gpu = [rung.on_device[index] == "1" for index in costs.indices]
    promoted: list[int] = []
    if manifest.options.policy == "stream":
        promoted = [n for n, index in enumerate(costs.indices) if rung.promoted[index] == "1"]
    return costs.scenario(
        on_gpu, rung.slot_bytes, rung.num_slots, device.stream_from_rows, promoted
    )


def _described(name: str, cost: plan.Cost, decode: Times, prefill: Times) -> UnitCost:
    return UnitCost(
        name=name,
        kind=Kind(cost.kind),
        part=Part(cost.part),
        layer=cost.layer,
        num_bytes=cost.device_bytes,
        decode=decode,
        prefill=prefill,
        input_bytes=cost.input_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Change:
    """From what a plan was made for to what is asked."""

    rates: Rates | None
    old: Load
    new: Load
    depth: int | None

    def unit(self, name: str, cost: plan.Cost) -> UnitCost:
        """A unit after the change."""
        num_bytes = cost.device_bytes
        if cost.cache:
            window, chunk = cost.cache.window, self.old.chunk
            held = (cache_capacity(load.context, window, chunk) for load in (self.new, self.old))
            num_bytes += cost.cache.bytes_per_token * (next(held) - next(held))
        decode = self._times(cost, cost.decode, cost.decode_times, 1, num_bytes)
        prefill = self._times(cost, cost.prefill, cost.prefill_times, self.old.rows, num_bytes)
        return replace(_described(name, cost, decode, prefill), num_bytes=num_bytes)

    def _times(
        self, cost: plan.Cost, work: plan.Work, times: plan.Times | None, rows: int, num_bytes: int
    ) -> Times:
        position = self.new.position(rows) if self.depth is None else self.depth
        most = cost.cache.window + rows - 1 if cost.cache and cost.cache.window else math.inf
        more = min(position + rows, most) - min(self.old.position(rows) + rows, most)
        after = _nodes(work, int(more))
        if self.rates:
            return Times(
                self.rates.roofline(Side.HOST).time_ns(after),
                self.rates.roofline(Side.GPU).time_ns(after),
                round(num_bytes / self.rates.link_bytes_per_s * 1e9),
            )
        assert times is not None, "plans for a GPU hold times"
        ratio = _amount(after, rows) / max(_amount(_nodes(work, 0), rows), 1)
        return Times(
            round(times.cpu_ns * ratio),
            round(times.gpu_ns * ratio),
            times.transfer_ns * num_bytes // max(cost.device_bytes, 1),
        )


def _nodes(work: plan.Work, more_tokens: int) -> list[NodeWork]:
    """A unit's nodes when the KV cache holds so many tokens more."""
    zeros = (0,) * len(work.flops)
    slopes = zip(work.flops_per_token or zeros, work.bytes_per_token or zeros, strict=True)
    return [
        NodeWork(flops + more_tokens * of_flops, num_bytes + more_tokens * of_bytes)
        for flops, num_bytes, (of_flops, of_bytes) in zip(
            work.flops, work.bytes, slopes, strict=True
        )
    ]


def _amount(nodes: Sequence[NodeWork], rows: int) -> int:
    """What a unit's time goes by: one row reads, many compute."""
    return sum(node.num_bytes if rows == 1 else node.flops for node in nodes)
