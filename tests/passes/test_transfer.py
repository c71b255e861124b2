"""The scheduler of promotions against all subsets, judged by the simulator, and against itself."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atsc.codegen.transfer_library import build_library, load_scheduler
from atsc.passes.placement import Kind, Link, Part, Side, Times, UnitCost
from atsc.passes.simulate import Machine, Scenario, simulate_round
from atsc.passes.transfer import (
    Promotion,
    Scheduler,
    Slots,
    Transferable,
    TransferSchedule,
    transferable,
    with_transfer,
)

pytestmark = pytest.mark.toolchain

ROWS = 2
SLOT_BYTES = 100
MIB_NS = 20_000  # of weights, on the CPU
LAYER = (("qkv", 26), ("kv", 4), ("o", 13), ("gate", 44), ("up", 44), ("down", 44))


@pytest.fixture(scope="module")
def quick() -> Scheduler:
    return load_scheduler()


@pytest.fixture(scope="module")
def exact() -> Scheduler:
    return load_scheduler(exact=True)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[UnitCost], list[bool], Machine]:
    count = draw(st.integers(1, 7))
    small = st.integers(0, 40)
    units = [
        UnitCost(
            name=f"unit {index}",
            kind=draw(st.sampled_from([*[Kind.WEIGHTS] * 5, Kind.KV_CACHE])),
            part=Part.FFN,
            layer=0,
            num_bytes=draw(st.sampled_from([SLOT_BYTES, SLOT_BYTES, 1, 0, SLOT_BYTES + 1])),
            decode=Times(draw(small), draw(st.integers(0, 8)), draw(small)),
            prefill=Times(0, 0),
            input_bytes=draw(st.integers(0, 3)),
            pinned=draw(st.sampled_from([None, None, None, Side.HOST])),
        )
        for index in range(count)
    ]
    on_gpu = [unit.side is None and draw(st.sampled_from([0, 0, 1])) == 1 for unit in units]
    links = st.builds(Link, st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0]))
    share = draw(st.sampled_from([1.0, 1.0, 0.83, 0.7, 0.5]))
    late_ns = draw(st.sampled_from([0, 0, 3, 20]))
    resume_ns = draw(st.sampled_from([0, 2]))
    num_slots = draw(st.integers(0, 4))
    machine = Machine(draw(links), draw(links), num_slots, share, late_ns, resume_ns)
    return units, on_gpu, machine


def promotable(units: list[UnitCost], on_gpu: list[bool], machine: Machine) -> list[int]:
    return [
        index
        for index, unit in enumerate(units)
        if machine.num_slots
        and not on_gpu[index]
        and unit.kind is Kind.WEIGHTS
        and unit.pinned is not Side.HOST
        and unit.num_bytes <= SLOT_BYTES
    ]


def subsets(of: list[int]) -> Iterator[tuple[int, ...]]:
    return (chosen for size in range(len(of) + 1) for chosen in combinations(of, size))


def ask(scheduler: Scheduler, case: tuple[list[UnitCost], list[bool], Machine]) -> TransferSchedule:
    units, on_gpu, machine = case
    times = [unit.decode for unit in units]
    slots = Slots(
        machine.num_slots, SLOT_BYTES, cpu_share=machine.cpu_share, late_ns=machine.late_ns
    )
    return scheduler(transferable(units, times, on_gpu, machine, ROWS), slots)


def plain_unit(cpu_ns: int, gpu_ns: int, transfer_ns: int, input_bytes: int) -> UnitCost:
    times = Times(cpu_ns, gpu_ns, transfer_ns)
    return UnitCost("unit", Kind.WEIGHTS, Part.FFN, 0, SLOT_BYTES, times, Times(0, 0), input_bytes)


ENDS_WITH_A_COPY = (
    [
        plain_unit(0, 0, 1, 0),
        plain_unit(0, 4, 0, 0),
        plain_unit(13, 0, 1, 3),  # ends 0.4 ns after the copy of the next one
        plain_unit(20, 0, 32, 3),
        plain_unit(0, 0, 2, 0),
    ],
    [False, True, False, False, False],
    Machine(Link(2, 0.0), Link(5, 0.5), 2, cpu_share=0.7),
)


@settings(max_examples=600, deadline=None)
@given(case=rounds())
@example(case=ENDS_WITH_A_COPY)
def test_no_subset_is_faster(
    exact: Scheduler, case: tuple[list[UnitCost], list[bool], Machine]
) -> None:
    units, on_gpu, machine = case
    times = [unit.decode for unit in units]

    def judge(promoted: tuple[int, ...]) -> int:
        return simulate_round(units, times, on_gpu, promoted, machine, ROWS).total_ns

    found = ask(exact, case)
    candidates = promotable(units, on_gpu, machine)
    chosen = tuple(promotion.unit for promotion in found.promotions)
    assert set(chosen) <= set(candidates)
    assert found.static_ns == judge(())
    assert found.round_ns == judge(chosen) == min(judge(each) for each in subsets(candidates))


@settings(max_examples=150, deadline=None)
@given(case=rounds())
def test_what_holds_of_every_choice(
    quick: Scheduler, case: tuple[list[UnitCost], list[bool], Machine]
) -> None:
    """Ascending units, slots in turn; the time is the simulator's, and never worse than static."""
    units, on_gpu, machine = case
    found = ask(quick, case)
    chosen = [promotion.unit for promotion in found.promotions]
    assert chosen == sorted(set(chosen))
    slots = [promotion.slot for promotion in found.promotions if units[promotion.unit].num_bytes]
    assert slots == [number % max(machine.num_slots, 1) for number in range(len(slots))]
    for promotion in found.promotions:
        assert (promotion.slot == -1) == (units[promotion.unit].num_bytes == 0)
        assert promotion.not_before == -1
    times = [unit.decode for unit in units]
    judged = simulate_round(units, times, on_gpu, chosen, machine, ROWS)
    assert found.round_ns == judged.total_ns <= found.static_ns
    assert (found.round_ns == found.static_ns) == (not chosen), "copies only where they pay"
    assert ask(quick, case) == found


def long_round(seed: int, count: int) -> tuple[list[UnitCost], list[bool], Machine]:
    """Units whose copies are short and long, so that some are ready long before they are needed."""
    rng = random.Random(seed)
    units = []
    for _ in range(count):
        times = Times(rng.randint(0, 40), rng.randint(0, 12), rng.choice([2, 5, 10, 40]))
        inputs, none = rng.randint(0, 3), Times(0, 0)
        units.append(UnitCost("u", Kind.WEIGHTS, Part.FFN, 0, 1, times, none, inputs))
    on_gpu = [rng.random() < 0.4 for _ in units]
    link = Link(rng.randint(0, 4), 0.5)
    return units, on_gpu, Machine(link, link, rng.randint(1, 4), rng.choice([0.5, 0.7, 0.83]))


def test_long_rounds_take_what_the_simulator_says(quick: Scheduler) -> None:
    for seed in range(60):
        units, on_gpu, machine = case = long_round(seed, 60)
        found = ask(quick, case)
        chosen = [promotion.unit for promotion in found.promotions]
        times = [unit.decode for unit in units]
        judged = simulate_round(units, times, on_gpu, chosen, machine, ROWS)
        assert found.round_ns == judged.total_ns
        assert len(chosen) > 2


@pytest.mark.parametrize("seed", [23, 362, 522, 523])
def test_delays_in_the_past_count_when_labels_are_compared(exact: Scheduler, seed: int) -> None:
    """Rounds in which a label that is ahead loses its lead to copies beside what it computed."""
    units, on_gpu, machine = case = long_round(seed, 12)
    times = [unit.decode for unit in units]
    best = min(
        simulate_round(units, times, on_gpu, chosen, machine, ROWS).total_ns
        for chosen in subsets(promotable(units, on_gpu, machine))
    )
    assert ask(exact, case).round_ns == best


def model(seed: int, layers: int, resident: float, copy_factor: float) -> list[Transferable]:
    """Layers with the sizes of a 14B model in int4, some units resident at random."""
    rng = random.Random(seed)
    units = []
    for name, mib in LAYER * layers:
        jitter = [rng.uniform(0.95, 1.05) for _ in range(3)]
        units.append(
            Transferable(
                cpu_ns=round(mib * MIB_NS * jitter[0]),
                gpu_ns=round(mib * MIB_NS * 0.05 * jitter[1]),
                transfer_ns=round(mib * MIB_NS * copy_factor * jitter[2]),
                to_gpu_ns=11_000,
                to_cpu_ns=11_000,
                num_bytes=mib,
                on_gpu=rng.random() < resident,
                can_be_promoted=name != "kv",
            )
        )
    return units


def unlike(seed: int, count: int) -> list[Transferable]:
    """Units with nothing in common."""
    rng = random.Random(seed)
    return [
        Transferable(
            cpu_ns=rng.randint(0, 100_000),
            gpu_ns=rng.randint(0, 10_000),
            transfer_ns=rng.randint(1, 100_000),
            to_gpu_ns=rng.randint(0, 12_000),
            to_cpu_ns=rng.randint(0, 12_000),
            num_bytes=1,
            on_gpu=rng.random() < 0.3,
            can_be_promoted=rng.random() < 0.85,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_few_labels_come_within_a_percent(
    quick: Scheduler, exact: Scheduler, num_slots: int
) -> None:
    slots = Slots(num_slots, 50)
    cases = [(unlike(seed, 40), slots) for seed in range(5)]
    for copy_factor in (0.5, 1, 2, 4):
        cases.append((model(1, 8, 0.4, copy_factor), slots))
        cases.append((model(2, 3, 0.3, copy_factor), replace(slots, cpu_share=0.7)))
    gains = []
    for units, machine in cases:
        best, found = exact(units, machine), quick(units, machine)
        assert best.round_ns <= found.round_ns <= 1.01 * best.round_ns
        gains.append(1 - best.round_ns / best.static_ns)
    assert max(gains) > 0.3, "the cases are such that promotions pay"


def test_faster_links_never_make_rounds_slower(quick: Scheduler, exact: Scheduler) -> None:
    factors = (8.0, 4.0, 2.0, 1.5, 1.0, 0.75, 0.5, 0.25, 0.1)
    for share in (1.0, 0.7):
        units = model(3, 3, 0.3, 1.0)
        found = [exact(units, Slots(2, 50, factor, share)).round_ns for factor in factors]
        assert found == sorted(found, reverse=True)
        assert found[-1] < 0.6 * found[0]
        units = model(4, 40, 0.4, 1.0)
        many = [quick(units, Slots(2, 50, factor, share)).round_ns for factor in factors]
        assert all(after <= 1.01 * before for before, after in pairwise(many))


def test_the_link_factor_is_a_factor_of_the_copies(exact: Scheduler) -> None:
    units = model(5, 2, 0.3, 1.0)
    slower = [replace(unit, transfer_ns=3 * unit.transfer_ns) for unit in units]
    assert exact(units, Slots(2, 50, link_factor=3.0)) == exact(slower, Slots(2, 50))
    assert exact(units, Slots(2, 50)).round_ns < exact(slower, Slots(2, 50)).round_ns


def plain(cpu: int, gpu: int, copy: int) -> Transferable:
    return Transferable(cpu, gpu, copy, 4, 2, 1, on_gpu=False, can_be_promoted=True)


def test_the_worked_example_of_the_documentation(quick: Scheduler) -> None:
    units = [plain(10, 1, 20), plain(30, 3, 25), plain(12, 2, 15), plain(14, 2, 16)]
    chosen = (Promotion(1, 0), Promotion(3, 0))
    assert quick(units, Slots(1, 1)) == TransferSchedule(chosen, 48, 66)
    half = Slots(1, 1, cpu_share=0.5)
    assert quick(units, half) == TransferSchedule(chosen, 55, 66)
    assert quick(units, Slots(2, 1)) == TransferSchedule((Promotion(1, 0), Promotion(3, 1)), 48, 66)
    assert quick(units, Slots(0, 1)) == TransferSchedule((), 66, 66)


def test_a_scenario_asks_for_every_round(quick: Scheduler) -> None:
    """Decode copies nothing, for copies take too long; a chunk copies what pays, a rest too."""
    weights = UnitCost("w", Kind.WEIGHTS, Part.FFN, 0, 9, Times(40, 4, 90), Times(4000, 60, 90))
    embedding = replace(weights, part=Part.EMBEDDING, decode=Times(2, 2), prefill=Times(2, 2))
    scenario = Scenario(
        units=(embedding, weights, weights),
        on_gpu=(False,) * 3,
        machine=Machine(Link(1), Link(1), num_slots=1),
        chunk=64,
        slot_bytes=9,
    )
    moved = with_transfer(scenario, quick)
    assert moved.decode() == scenario.decode()
    assert scenario.prefill().total_ns == 2 + 4000 + 4000
    assert moved.prefill().total_ns == 90 + 60 + 90 + 60
    assert moved.prompt_ns(65) == moved.prefill().total_ns + moved.decode().total_ns
    assert with_transfer(replace(scenario, slot_bytes=8), quick).prefill() == scenario.prefill()


def test_nothing_to_schedule(quick: Scheduler) -> None:
    assert quick([], Slots(2, 50)) == TransferSchedule((), 0, 0)
    too_large = [replace(unit, num_bytes=51) for unit in model(6, 2, 0.0, 0.1)]
    assert quick(too_large, Slots(2, 50)).promotions == ()


def test_it_takes_about_a_millisecond(quick: Scheduler) -> None:
    """Of 700 units; with the arguments' way through ctypes, on a machine that does other things."""
    units = model(7, 117, 0.4, 1.0)
    assert len(units) > 700
    least = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        quick(units, Slots(2, 50, cpu_share=0.8))
        least = min(least, time.perf_counter() - begin)
    assert least < 0.01


def test_the_library_is_built_once() -> None:
    assert build_library() == build_library()
