"""Slots and residents chosen together: no candidate, simulated, beats the rung that is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atsc.codegen.transfer_library import load_scheduler
from atsc.compiler.errors import BudgetError
from atsc.passes.ladder import FixedBytes
from atsc.passes.place import tensor
from atsc.passes.placement import Kind, Link, Part, Times, UnitCost
from atsc.passes.retarget import PlanCosts
from atsc.passes.rungs import (
    RungRequest,
    plan_rungs,
    predicted_ns,
    with_promotions,
    with_streaming,
)
from atsc.passes.simulate import simulate_round
from atsc.passes.transfer import Scheduler

CHUNK = 64
MIB = 1 << 20


def unit(part: Part, size: int, kind: Kind = Kind.WEIGHTS, layer: int | None = 0) -> UnitCost:
    """1 MiB: 100 us on the CPU, 4 on the GPU, 160 to copy; a chunk 40 times as long on the CPU."""
    decode = Times(100_000 * size, 4_000 * size, 160_000 * size)
    prefill = Times(4_000_000 * size, 20_000 * size, 160_000 * size)
    return UnitCost("u", kind, part, layer, size * MIB, decode, prefill, 4096)


def costs_of(num_layers: int = 10) -> PlanCosts:
    units = [unit(Part.EMBEDDING, 9, layer=None)]
    for layer in range(num_layers):
        units.append(unit(Part.ATTENTION, 3, layer=layer))
        units.append(unit(Part.ATTENTION, 1, Kind.KV_CACHE, layer))
        units += [unit(Part.FFN, size, layer=layer) for size in (5, 5, 6)]
    units.append(unit(Part.HEAD, 9, layer=None))
    link = Link(9_000, 0.02)
    return PlanCosts(tuple(units), tuple(range(len(units))), link, link, 0.8, CHUNK)


def request(
    budget: int, share: float, scheduler: Scheduler | None = None, policy: str = "tensor"
) -> RungRequest:
    fixed = FixedBytes(2 * MIB, 0, MIB, 0)
    return RungRequest(costs_of(), policy, budget * MIB, fixed, share, 8, scheduler)


@pytest.mark.toolchain
@pytest.mark.parametrize("budget", [40, 150])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_no_fixed_slot_size_beats_the_chosen(budget: int, share: float) -> None:
    wanted = request(budget, share, load_scheduler())
    chosen = plan_rungs(wanted)[-1]
    costs = wanted.costs
    for size, count in ((0, 0), (3, 2), (5, 2), (6, 2), (6, 4)):
        left = wanted.for_units_bytes - size * count * MIB
        units = with_streaming(costs.units, size * MIB) if count else list(costs.units)
        placement = tensor(units, wanted.objective, left)
        rival = replace(chosen, slot_bytes=size * count * MIB, num_slots=count, placement=placement)
        assert predicted_ns(wanted, chosen) <= predicted_ns(wanted, rival)


@pytest.mark.toolchain
def test_every_rung_is_faster_than_what_takes_less() -> None:
    wanted = request(150, 0.5, load_scheduler())
    rungs = plan_rungs(wanted)
    assert len(rungs) > 4
    assert {rung.num_slots for rung in rungs} > {0}, "some with slots, the least without"
    needs = [rung.required_bytes for rung in rungs]
    speeds = [predicted_ns(wanted, rung) for rung in rungs]
    assert needs == sorted(set(needs)) and needs[-1] <= wanted.budget_bytes
    assert speeds == sorted(set(speeds), reverse=True)
    for rung in rungs:
        assert rung.required_bytes == (
            wanted.fixed.total + rung.slot_bytes + rung.placement.resident_bytes
        )
        assert bool(rung.slot_bytes) == bool(rung.num_slots)


@pytest.mark.toolchain
def test_promotions_pay_for_slots_that_decode_alone_would_not_have() -> None:
    scheduler = load_scheduler()
    static, dynamic = request(90, 0.0), request(90, 0.0, scheduler)
    assert plan_rungs(static)[-1].num_slots == 0
    top = plan_rungs(dynamic)[-1]
    assert top.num_slots >= 2
    promoted = dynamic.promoted(top)
    assert promoted and not any(top.placement.on_gpu[unit] for unit in promoted)
    scenario = dynamic.scenario(top)
    moved = simulate_round(
        scenario.units, scenario.times_at(1), scenario.on_gpu, promoted, scenario.machine
    )
    assert (
        predicted_ns(dynamic, top) == moved.total_ns < predicted_ns(static, plan_rungs(static)[-1])
    )


def test_whole_models_and_some_policies_have_no_slots() -> None:
    whole = plan_rungs(request(250, 0.9))[-1]
    assert (whole.num_slots, whole.slot_bytes) == (0, 0)
    for policy in ("gpu", "cpu"):
        (rung,) = plan_rungs(request(250, 0.9, policy=policy))
        assert (rung.num_slots, rung.slot_bytes) == (0, 0)
    needed = whole.required_bytes
    exact = replace(request(0, 0.9, policy="gpu"), budget_bytes=needed)
    assert plan_rungs(exact)[0].required_bytes == needed, "what fits exactly is not refused"
    with pytest.raises(BudgetError, match="policy gpu needs"):
        plan_rungs(replace(exact, budget_bytes=needed - 1))


def test_coarse_policies_get_slots_where_prompts_count() -> None:
    (without,) = plan_rungs(request(90, 0.0, policy="layer"))
    (found,) = plan_rungs(request(90, 0.9, policy="layer"))
    assert (without.num_slots, found.slot_bytes // found.num_slots) == (0, 6 * MIB)


def test_the_fixed_part_does_not_fit() -> None:
    with pytest.raises(BudgetError, match=r"head-room alone need 3\.0 MiB"):
        plan_rungs(request(2, 0.9))


def test_what_host_units_cost_where_they_are_moved() -> None:
    """CPU 100 beside copies at 0.5: 200; with a link of 300 both do 1 in 120."""
    weights = replace(unit(Part.FFN, 1), num_bytes=7, decode=Times(100, 4, 300))
    cache = replace(weights, kind=Kind.KV_CACHE)
    large = replace(weights, num_bytes=8)
    fast_link = replace(weights, decode=Times(100, 4, 50))
    found = with_promotions([weights, cache, large, fast_link], 7, 0.5)
    assert [each.decode.cpu_ns for each in found] == [100, 100, 100, 40]
    found = with_promotions([weights, cache, large], 8, 1.0)
    assert [each.decode.cpu_ns for each in found] == [75, 100, 75]
    streamed = with_streaming([replace(weights, prefill=Times(4000, 60, 300)), cache, large], 7)
    assert streamed[0].prefill.cpu_ns == 300
    assert [each.prefill for each in streamed[1:]] == [cache.prefill, large.prefill]
