"""Rounds against closed forms and hand calculations, and what holds of every round."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atsc.passes.placement import (
    Kind,
    Link,
    Objective,
    Part,
    Times,
    UnitCost,
    describe_placement,
)
from atsc.passes.policies import stream
from atsc.passes.simulate import (
    Event,
    Machine,
    Round,
    Scenario,
    Track,
    simulate_round,
    stretched_ns,
    times_at,
)


def unit(
    cpu: int, gpu: int, copy: int = 0, *, size: int = 100, inputs: int = 0, part: Part = Part.FFN
) -> UnitCost:
    times = Times(cpu, gpu, copy)
    return UnitCost("u", Kind.WEIGHTS, part, 0, size, times, times, inputs)


def decode_times(units: list[UnitCost]) -> list[Times]:
    return [each.decode for each in units]


def run(
    units: list[UnitCost], bits: str, promoted: list[int], machine: Machine, rows: int = 1
) -> Round:
    on_gpu = [bit == "1" for bit in bits]
    return simulate_round(units, decode_times(units), on_gpu, promoted, machine, rows)


FREE = Machine(Link(0), Link(0))


def test_one_side_alone_takes_the_sum() -> None:
    units = [unit(30, 3), unit(50, 5), unit(70, 7)]
    on_cpu, on_gpu = run(units, "000", [], FREE), run(units, "111", [], FREE)
    assert (on_cpu.total_ns, on_cpu.busy_share(Track.CPU)) == (150, 1)
    assert (on_gpu.total_ns, on_gpu.busy_share(Track.GPU)) == (15, 1)
    assert on_gpu.tokens_per_s == pytest.approx(1e9 / 15)


def test_two_units_by_hand() -> None:
    """To the GPU 4 ns and half a ns a byte; back 2 ns."""
    machine = Machine(Link(4, 0.5), Link(2), num_slots=1)
    units = [unit(10, 1, 20, inputs=8), unit(30, 3, 25, inputs=6)]
    assert run(units, "01", [], machine).total_ns == 10 + (4 + 3) + 3
    assert run(units, "10", [], machine).total_ns == 1 + 2 + 30
    assert run(units, "01", [], machine, rows=4).total_ns == 10 + (4 + 12) + 3
    # Promoted: the copy (25) begins with the round, and 25 - 17 of it is exposed.
    hidden = run(units, "00", [1], machine)
    assert (hidden.total_ns, hidden.exposed_ns) == (25 + 3, ((1, 8),))
    # Both through one slot: 20, run 1, then 25, run 3.
    both = run(units, "00", [0, 1], machine)
    assert both.events == (
        Event(Track.GPU, 0, 20, 21),
        Event(Track.COPY, 0, 0, 20),
        Event(Track.GPU, 1, 46, 49),
        Event(Track.COPY, 1, 21, 46),
    )
    # With two slots the second copy follows the first at once.
    two = run(units, "00", [0, 1], replace(machine, num_slots=2))
    assert (two.total_ns, two.wait_ns, two.copied_bytes) == (48, 20 + 24, 200)
    assert two.h2d_bytes_per_s == pytest.approx(200 / 48e-9)
    assert two.busy_over_time(Track.COPY, 4) == pytest.approx([1, 1, 1, 9 / 12])


def test_the_gpu_takes_a_while_to_go_on_after_a_copy() -> None:
    machine = replace(FREE, num_slots=1, resume_ns=6)
    units = [unit(10, 1, 5), unit(30, 3)]
    # The copy has just ended, or has been there for long; a resident never waits.
    assert run(units, "01", [0], machine).total_ns == 5 + (6 + 1) + 3
    assert run([unit(90, 9), unit(10, 1, 5)], "10", [1], machine).total_ns == 9 + (6 + 1)
    # Behind a hand-off of 8 it is hidden, but not behind one of 4.
    for crossing, most in ((8, 8), (4, 6)):
        slow = replace(machine, to_gpu=Link(crossing))
        assert run([unit(9, 1), unit(10, 1, 5)], "00", [1], slow).total_ns == 9 + most + 1


def test_the_worked_example_of_the_documentation() -> None:
    units = [unit(10, 1, 20), unit(30, 3, 25)]
    one, two = replace(FREE, num_slots=1), replace(FREE, num_slots=2)
    assert run(units, "00", [], one).total_ns == 40
    assert run(units, "00", [0, 1], one).total_ns == 49
    both = run(units, "00", [0, 1], two)
    assert (both.total_ns, both.wait_ns) == (48, 44)
    second = run(units, "00", [1], one)
    assert (second.total_ns, second.wait_ns) == (28, 15)


def test_the_cpu_slows_down_beside_a_copy() -> None:
    machine = Machine(Link(0), Link(0), num_slots=1, cpu_share=0.5)
    units = [unit(10, 1), unit(30, 3, 16), unit(10, 1)]
    # 16 ns beside the copy do 8 of 10; the rest takes 2; then 3 on the GPU, and 10 alone.
    assert run(units, "000", [1], machine).total_ns == 18 + 3 + 10
    assert stretched_ns(8, 0, 0.5) == stretched_ns(8, -3, 0.5) == 8
    assert stretched_ns(8, 15, 1) == 8
    assert stretched_ns(8, 15, 0.5) == 15 + 8 - 7.5 + 0.5, "rounded to even"
    assert stretched_ns(7, 15, 0.5) == 14


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[UnitCost], list[bool], list[int], Machine]:
    count = draw(st.integers(1, 10))
    small = st.integers(0, 40)
    units = [
        unit(draw(small), draw(st.integers(0, 8)), draw(small), inputs=draw(st.integers(0, 3)))
        for _ in range(count)
    ]
    on_gpu = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    promoted = [i for i in range(count) if not on_gpu[i] and draw(st.booleans())]
    links = st.builds(Link, st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0]))
    share = draw(st.sampled_from([1.0, 1.0, 0.8, 0.5]))
    machine = Machine(draw(links), draw(links), draw(st.integers(1, 3)), share)
    return units, on_gpu, promoted, machine


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_holds_of_every_round(
    case: tuple[list[UnitCost], list[bool], list[int], Machine],
) -> None:
    units, on_gpu, promoted, machine = case
    found = simulate_round(units, decode_times(units), on_gpu, promoted, machine, rows=2)
    for track in Track:
        events = sorted(found.on(track), key=lambda event: (event.begin_ns, event.end_ns))
        assert all(a.end_ns <= b.begin_ns for a, b in pairwise(events)), "no overlap"
        assert found.busy_ns(track) <= found.total_ns
        shares = found.busy_over_time(track, 7)
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
        assert sum(shares) / 7 == pytest.approx(found.busy_share(track))
    runs = {e.unit: e for e in found.events if e.track in (Track.CPU, Track.GPU)}
    copies = {event.unit: event for event in found.on(Track.COPY)}
    assert sorted(runs) == list(range(len(units)))
    assert sorted(copies) == promoted
    crossings = {event.unit: event for event in found.on(Track.HAND_OFF)}
    for before, after in pairwise(range(len(units))):
        crosses = runs[before].track is not runs[after].track
        assert crosses == (after in crossings)
        ready = runs[before].end_ns
        if crosses:
            assert crossings[after].begin_ns == ready
            ready = crossings[after].end_ns
        wait = runs[after].begin_ns - ready
        assert wait == dict(found.exposed_ns).get(after, 0) >= 0
    for number, index in enumerate(promoted):
        assert runs[index].track is Track.GPU
        assert copies[index].end_ns <= runs[index].begin_ns
        if number >= machine.num_slots:
            last_user = promoted[number - machine.num_slots]
            assert copies[index].begin_ns >= runs[last_user].end_ns, "the slot is free"
    computing = sum(found.busy_ns(track) for track in Track if track is not Track.COPY)
    assert found.total_ns == computing + found.wait_ns


@settings(max_examples=200, deadline=None)
@given(cases())
def test_without_promotions_it_is_the_objective(
    case: tuple[list[UnitCost], list[bool], list[int], Machine],
) -> None:
    units, on_gpu, _, machine = case
    objective = Objective(machine.to_gpu, machine.to_cpu)
    found = simulate_round(units, decode_times(units), on_gpu, (), machine)
    assert found.total_ns == describe_placement(units, on_gpu, objective).time_ns


@settings(max_examples=200, deadline=None)
@given(cases())
def test_streaming_everything_is_what_the_policy_predicts(
    case: tuple[list[UnitCost], list[bool], list[int], Machine],
) -> None:
    units = case[0]
    placement = stream(units, Objective(Link(0), Link(0)), 10**6)
    machine = Machine(Link(0), Link(0), num_slots=2)
    found = simulate_round(
        units, decode_times(units), placement.on_gpu, placement.streamed, machine
    )
    assert found.total_ns == placement.time_ns


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 9))
def test_faster_parts_never_make_a_round_slower(
    case: tuple[list[UnitCost], list[bool], list[int], Machine], index: int
) -> None:
    """Nor do more slots; at equal speeds of the CPU, for a copy that ends sooner may slow it."""
    units, on_gpu, promoted, machine = case
    machine = replace(machine, cpu_share=1.0)
    total = simulate_round(units, decode_times(units), on_gpu, promoted, machine).total_ns
    more = replace(machine, num_slots=machine.num_slots + 1)
    assert simulate_round(units, decode_times(units), on_gpu, promoted, more).total_ns <= total
    at = index % len(units)
    t = units[at].decode
    units[at] = replace(units[at], decode=Times(t.cpu_ns // 2, t.gpu_ns // 2, t.transfer_ns // 2))
    assert simulate_round(units, decode_times(units), on_gpu, promoted, machine).total_ns <= total


def scenario(bits: str = "0100") -> Scenario:
    embedding = replace(unit(2, 2, 9, part=Part.EMBEDDING), name="embedding")
    cache = replace(unit(8, 2, 9), kind=Kind.KV_CACHE, prefill=Times(80, 20, 9))
    weights = replace(unit(40, 4, 9), prefill=Times(4000, 60, 9))
    head = replace(unit(30, 3, 9, part=Part.HEAD), prefill=Times(30, 3, 9))
    on_gpu = tuple(bit == "1" for bit in bits)
    return Scenario(
        units=(embedding, cache, weights, head),
        on_gpu=on_gpu,
        machine=Machine(Link(1), Link(1), num_slots=2),
        chunk=64,
        slot_bytes=100,
        stream_from_rows=16,
    )


def test_long_rounds_stream_and_short_ones_do_not() -> None:
    found = scenario()
    assert found.streamed() == (2,), "no embedding, no cache, no head"
    assert found.decode().total_ns == 2 + 1 + 2 + 1 + 40 + 30
    # The copy hides behind the embedding's 2, the hand-off and the attention's 20.
    assert found.prefill().total_ns == 2 + 1 + 20 + 60 + 1 + 30
    assert found.round_of(15).copied_bytes == 0
    assert found.round_of(16).copied_bytes == 100
    assert replace(found, stream_from_rows=0).prefill().copied_bytes == 0
    assert replace(found, slot_bytes=99).prefill().copied_bytes == 0
    whole, rest = found.prefill().total_ns, found.round_of(20).total_ns
    assert found.prompt_ns(148) == 2 * (whole - 30) + rest, "the last round alone makes logits"
    assert found.prompt_ns(128) == whole - 30 + whole


def test_a_prompts_chunks_are_as_deep_as_they_lie() -> None:
    found = scenario()

    def units_at(tokens: int) -> list[UnitCost]:
        slower = Times(80, 20 + tokens, 9)
        return [
            replace(unit, prefill=slower) if unit.kind is Kind.KV_CACHE else unit
            for unit in found.units
        ]

    assert found.prompt_ns(192, units_at) == found.prompt_ns(192) + 64 + 128


def test_times_between_a_token_and_a_chunk() -> None:
    weights = scenario().units[2]
    assert times_at(weights, 1, 64) == weights.decode
    assert times_at(weights, 64, 64) == weights.prefill
    assert times_at(weights, 2, 64) == Times(125, 4, 9)


def test_promotions_of_decode() -> None:
    found = replace(scenario(), promoted=(2,))
    assert found.decode().total_ns == 2 + 1 + 2 + (9 - 5) + 4 + 1 + 30
