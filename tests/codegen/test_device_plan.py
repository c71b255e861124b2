"""Rungs as the tables hold them, and from how many rows on streaming pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from atsc.codegen.cuda import Launch
from atsc.codegen.device_build import DeviceCode
from atsc.codegen.device_plan import DeviceRequest, plan_device
from atsc.codegen.device_tables import DeviceTables
from atsc.compiler.compilation import DEFAULT_PROMPT_SHARE
from atsc.compiler.errors import BudgetError
from atsc.passes.annotate import Annotation
from atsc.passes.ladder import FixedBytes
from atsc.passes.placement import Kind, Link, Part, Times, UnitCost
from atsc.passes.policies import NUM_STREAM_SLOTS
from atsc.passes.rungs import stream_from_rows


def unit(part: Part, size: int, kind: Kind = Kind.WEIGHTS, cpu: int = 100) -> UnitCost:
    return UnitCost("u", kind, part, 0, size, Times(cpu, 10, 160), Times(64 * cpu, 64, 160))


def test_streaming_begins_where_a_copy_beats_the_cpu() -> None:
    """A copy takes 160; the CPU 100 a row, for 64 rows or more in proportion."""
    assert stream_from_rows([unit(Part.FFN, 40)], 64, 8) == 9, "more than a GEMV's rows"
    slow = [unit(Part.FFN, 40, cpu=8)]
    assert stream_from_rows(slow, 64, 8) == 21, "8 x 20 is no more than 160"
    idle_embedding = [*slow, unit(Part.EMBEDDING, 40, cpu=10**6)]
    assert stream_from_rows(idle_embedding, 64, 8) == 21
    assert stream_from_rows([unit(Part.FFN, 40, cpu=1)], 64, 8) == 0


def layered(budget_bytes: int, policy: str, prompt_share: float = 0.0) -> DeviceTables:
    """Four layers of a cache and two weights; hand-offs cost next to nothing."""
    costs = [unit(Part.EMBEDDING, 900)]
    for _ in range(4):
        costs += [unit(Part.ATTENTION, 10, Kind.KV_CACHE), unit(Part.ATTENTION, 30)]
        costs += [unit(Part.FFN, 40)]
    link = Link(1, 0)
    annotation = Annotation(tuple(costs), tuple(range(len(costs))), link, link)
    request = DeviceRequest("virtual", policy, budget_bytes, 0, prompt_share, 64)
    return plan_device(request, annotation, FixedBytes(0, 0, 100, 0), None, len(costs))


def test_a_rung_that_costs_more_than_a_better_one_is_dropped() -> None:
    rungs = [rung for rung, _ in layered(400, "tensor").rungs]
    assert [r.required_bytes for r in rungs] == sorted({r.required_bytes for r in rungs})
    assert [r.placement.value_ns for r in rungs] == sorted(r.placement.value_ns for r in rungs)
    assert all(r.required_bytes <= 400 for r in rungs)


def test_everything_resident_needs_no_slots() -> None:
    *lower, (top, on_device) = layered(1000, "tensor", 0.9).rungs
    assert any(rung.slot_bytes for rung, _ in lower)
    assert (top.slot_bytes, top.required_bytes) == (0, 100 + 4 * 80)
    assert not on_device[0]
    assert all(on_device[1:])


def test_policy_stream_brings_its_own_slots() -> None:
    ((rung, _),) = layered(400, "stream").rungs
    assert rung.slot_bytes == rung.placement.slot_bytes == NUM_STREAM_SLOTS * 40
    assert rung.required_bytes == 100 + 4 * 10 + NUM_STREAM_SLOTS * 40


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(BudgetError, match="policy gpu"):
        layered(300, "gpu")


def test_prompts_bring_kv_caches_to_the_gpu() -> None:
    """A 14B model in 6 GiB beside an H200, as it was measured: ns a layer, for a token and a chunk.

    For decode alone, 10 MB of weights are worth more VRAM than a cache of 10 MB; but weights stream
    in prefill, and attention of a chunk on the CPU takes 6 to 30 ms a layer.
    """
    mb = 1_000_000
    costs = [unit(Part.EMBEDDING, 437 * mb)]
    for layer in range(40):
        attention = Times(70_000, 8_000, 0), Times(12 * mb, 100_000, 0)
        costs.append(
            UnitCost("kv", Kind.KV_CACHE, Part.ATTENTION, layer, 10 * mb, *attention, 28_672)
        )
        for size in (20, 15, 50, 50, 50):
            cpu, gpu, copy = size * 12_500, size * 400, size * 18_500
            times = Times(cpu, gpu, copy), Times(1_100_000 * size, 7_000 * size, copy)
            costs.append(UnitCost("w", Kind.WEIGHTS, Part.FFN, layer, size * mb, *times, 20_480))
    link = Link(5_000, 1 / 50)
    annotation = Annotation(tuple(costs), tuple(range(len(costs))), link, link)
    fixed = FixedBytes(550 * mb, 1 * mb, 150 * mb, 268 * mb)

    def caches_on_gpu(prompt_share: float) -> int:
        request = DeviceRequest("cuda", "tensor", 6442 * mb, 268 * mb, prompt_share, 512)
        tables = plan_device(request, annotation, fixed, None, len(costs))
        top, _ = tables.rungs[-1]
        return sum(
            here
            for cost, here in zip(costs, top.placement.on_gpu, strict=True)
            if cost.kind is Kind.KV_CACHE
        )

    assert caches_on_gpu(0.0) == 0
    assert caches_on_gpu(DEFAULT_PROMPT_SHARE) == 40


@dataclass(frozen=True)
class FakeKernel:
    symbol: str
    scratch: str

    def launch(self) -> Launch:
        return Launch(block=32, shared_bytes=0, grid=("1",), scratch_bytes=self.scratch)


def test_scratch_of_equal_kernels_is_shared_where_their_caches_are_equal() -> None:
    both = FakeKernel("both", "100 * rows")
    many, few = FakeKernel("many", "64 * kv_capacity * num_sms"), FakeKernel("few", "1000 * rows")
    kernels: Any = ((both, both), (few, many), (few, many), (few, many), (None, None))
    scratch = DeviceCode(kernels, ()).scratch_bytes((0, 64, 64, 128, 0), most_rows=512, num_sms=3)
    pages = 13 + 3 + 6 + 2 * 2  # 51200 bytes; 12288 and 24576; 8000 for each capacity
    assert scratch == 4096 * pages
