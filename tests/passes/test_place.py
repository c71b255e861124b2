"""Static placement against brute force over all placements, and its promises as properties."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atsc.compiler.errors import BudgetError
from atsc.passes.coarse import expert, expert_steps, ffn, ffn_steps, layer, layer_steps
from atsc.passes.knapsack import Keys, solve
from atsc.passes.ladder import FixedBytes, choose_rungs, ladder
from atsc.passes.place import algorithm_1, choose_cell_bytes, explore, tensor
from atsc.passes.placement import (
    Kind,
    Link,
    Objective,
    Part,
    Side,
    Times,
    UnitCost,
    bytes_on_gpu,
    describe_placement,
    placement_value,
)

KIB, MIB = 1 << 10, 1 << 20
CELL = 4 * KIB


@st.composite
def unit_lists(
    draw: st.DrawFn, *, moe: bool | None = None, whole_cells: bool = False, pins: bool = True
) -> tuple[UnitCost, ...]:
    """A few units with few distinct costs, so that ties are common; some slower on the GPU."""
    units: list[UnitCost] = []
    for index in range(draw(st.integers(1, 9))):
        part = draw(st.sampled_from(list(Part)))
        kinds = [Kind.WEIGHTS, Kind.KV_CACHE] if part is Part.ATTENTION else [Kind.WEIGHTS]
        if part is Part.FFN and moe is not False:
            kinds.append(Kind.EXPERT_STACK)
        size = draw(st.integers(0, 5)) * CELL
        if not whole_cells:
            size = max(size + draw(st.sampled_from([-1500, -1, 0, 1, 900])), 0)
        has_layer = part in (Part.ATTENTION, Part.FFN)
        units.append(
            UnitCost(
                name=f"u{index}",
                kind=draw(st.sampled_from(kinds)),
                part=part,
                layer=draw(st.integers(0, 2)) if has_layer else None,
                num_bytes=size,
                decode=Times(draw(st.integers(0, 8)), draw(st.integers(0, 4))),
                prefill=Times(draw(st.integers(0, 80)), draw(st.integers(0, 8))),
                input_bytes=draw(st.integers(0, 2)),
                pinned=draw(st.sampled_from([None, None, None, *Side])) if pins else None,
            )
        )
    if moe and not any(unit.kind is Kind.EXPERT_STACK for unit in units):
        units.append(replace(units[0], kind=Kind.EXPERT_STACK, part=Part.FFN, layer=0))
    return tuple(units)


objectives = st.builds(
    Objective,
    to_gpu=st.builds(Link, st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])),
    to_cpu=st.builds(Link, st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])),
    prompt_share=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    chunk=st.just(4),
)
budgets = st.builds(
    lambda cells, more: max(cells * CELL + more, 0),
    st.integers(0, 40),
    st.sampled_from([-1, 0, 1, 1800]),
)


def all_placements(sides: Sequence[Side | None]) -> Iterator[tuple[bool, ...]]:
    allowed = [(False, True) if side is None else (side is Side.GPU,) for side in sides]
    return itertools.product(*allowed)


def brute_force(
    units: Sequence[UnitCost],
    sides: Sequence[Side | None],
    objective: Objective,
    budget_bytes: int,
    cell_bytes: int = 1,
) -> tuple[int, int, int] | None:
    """Best (value, -hand-offs, -cells) of all placements within the budget."""
    results = []
    for bits in all_placements(sides):
        sizes = (-(-unit.num_bytes // cell_bytes) for unit, b in zip(units, bits, strict=True) if b)
        if (cells := sum(sizes)) <= budget_bytes // cell_bytes:
            value, num_hand_offs, _ = placement_value(units, bits, objective)
            results.append((value, -num_hand_offs, -cells))
    return max(results, default=None)


def pins_of(units: Sequence[UnitCost]) -> list[Side | None]:
    return [unit.side for unit in units]


@given(unit_lists(), objectives, st.integers(0, 30), st.sampled_from([1, 3000, CELL]))
@settings(max_examples=150, deadline=None)
def test_the_table_equals_brute_force_at_every_budget(
    units: tuple[UnitCost, ...], objective: Objective, cells: int, cell_bytes: int
) -> None:
    table = solve(units, pins_of(units), Keys.of(units, objective), cells, cell_bytes)
    for m in {0, 1, cells // 3, cells // 2, cells}.intersection(range(cells + 1)):
        best = brute_force(units, pins_of(units), objective, m * cell_bytes, cell_bytes)
        assert (best is not None) == (m >= table.feasible_from)
        if best is not None:
            bits = table.placement(m)
            value, num_hand_offs, _ = placement_value(units, bits, objective)
            used = sum(-(-u.num_bytes // cell_bytes) for u, b in zip(units, bits, strict=True) if b)
            assert (value, -num_hand_offs, -used) == best
            assert bits in all_placements(pins_of(units))


@given(unit_lists(moe=False, whole_cells=True), objectives, budgets)
@settings(max_examples=150, deadline=None)
def test_a_dense_model_gets_the_best_placement(
    units: tuple[UnitCost, ...], objective: Objective, budget_bytes: int
) -> None:
    best = brute_force(units, pins_of(units), objective, budget_bytes, CELL)
    if best is None:
        with pytest.raises(BudgetError, match="more than the"):
            tensor(units, objective, budget_bytes)
        return
    found = tensor(units, objective, budget_bytes)
    assert (found.value_ns, -found.num_hand_offs, -found.resident_bytes // CELL) == best


@given(unit_lists(moe=True, whole_cells=True), objectives, budgets)
@settings(max_examples=150, deadline=None)
def test_a_mixture_gets_the_better_of_both_branches_and_of_the_coarse_placements(
    units: tuple[UnitCost, ...], objective: Objective, budget_bytes: int
) -> None:
    experts = [unit.kind is Kind.EXPERT_STACK for unit in units]
    forced = [u.side or (None if e else Side.GPU) for u, e in zip(units, experts, strict=True)]
    spared = [u.side or (Side.HOST if e else None) for u, e in zip(units, experts, strict=True)]
    candidates = [
        brute_force(units, sides, objective, budget_bytes, CELL) for sides in (forced, spared)
    ]
    for bits in layer_steps(units) + ffn_steps(units) + expert_steps(units):
        fixed = [Side.GPU if bit else Side.HOST for bit in bits]
        candidates.append(brute_force(units, fixed, objective, budget_bytes, CELL))
    feasible = [candidate for candidate in candidates if candidate is not None]
    if not feasible:
        with pytest.raises(BudgetError):
            tensor(units, objective, budget_bytes)
        return
    found = tensor(units, objective, budget_bytes)
    assert (found.value_ns, -found.num_hand_offs) == max(feasible)[:2]


@given(unit_lists(moe=True), objectives, st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_algorithm_1_branches_where_the_others_begin_to_fit(
    units: tuple[UnitCost, ...], objective: Objective, cells: int
) -> None:
    others_fit, experts_on_host = algorithm_1(units, Keys.of(units, objective), cells, CELL)
    must_fit = [
        unit
        for unit in units
        if unit.side is Side.GPU or (unit.side is None and unit.kind is not Kind.EXPERT_STACK)
    ]
    others_cells = sum(-(-unit.num_bytes // CELL) for unit in must_fit)
    assert others_fit.feasible_from == min(others_cells, cells + 1)
    if others_cells <= cells:
        bits = others_fit.placement(cells)
        assert all(b for u, b in zip(units, bits, strict=True) if u in must_fit)
    if experts_on_host.feasible_from <= cells:
        bits = experts_on_host.placement(cells)
        unpinned = [b for u, b in zip(units, bits, strict=True) if u.side is None]
        kinds = [u.kind for u in units if u.side is None]
        assert not any(b for b, k in zip(unpinned, kinds, strict=True) if k is Kind.EXPERT_STACK)


@given(unit_lists(), objectives, budgets)
@settings(max_examples=200, deadline=None)
def test_never_over_budget_and_never_below_a_coarse_policy(
    units: tuple[UnitCost, ...], objective: Objective, budget_bytes: int
) -> None:
    try:
        found = tensor(units, objective, budget_bytes)
    except BudgetError:
        pinned = sum(unit.num_bytes for unit in units if unit.side is Side.GPU)
        assert pinned > budget_bytes
        return
    assert found == describe_placement(units, found.on_gpu, objective)
    assert bytes_on_gpu(units, found.on_gpu) == found.resident_bytes <= budget_bytes
    assert not any(
        bit for unit, bit in zip(units, found.on_gpu, strict=True) if unit.part is Part.EMBEDDING
    )
    for policy in (layer, ffn, expert):
        rival = policy(units, objective, budget_bytes)
        assert rival.resident_bytes <= budget_bytes
        assert found.value_ns >= rival.value_ns


@given(unit_lists(), objectives, st.lists(budgets, min_size=2, max_size=5))
@settings(max_examples=100, deadline=None)
def test_more_budget_is_never_worse(
    units: tuple[UnitCost, ...], objective: Objective, several: list[int]
) -> None:
    least = sum(unit.num_bytes for unit in units if unit.side is Side.GPU)
    values = [tensor(units, objective, least + more).value_ns for more in sorted(several)]
    assert values == sorted(values)


@given(unit_lists(), objectives, budgets, st.sampled_from([0.0, 0.01, 0.2]))
@settings(max_examples=150, deadline=None)
def test_every_rung_is_what_its_budget_gives_and_little_is_lost_between(
    units: tuple[UnitCost, ...], objective: Objective, more: int, tolerance: float
) -> None:
    fixed = FixedBytes(context=1000, modules=200, activations=30, headroom=4)
    least = sum(unit.num_bytes for unit in units if unit.side is Side.GPU)
    budget_bytes = fixed.total + 50 + least + more
    rungs = ladder(units, objective, budget_bytes, fixed, slot_bytes=50, tolerance=tolerance)
    for rung in rungs:
        model_bytes = rung.budget_bytes - fixed.total - 50
        assert rung.placement == tensor(units, objective, model_bytes)
        assert rung.required_bytes == fixed.total + 50 + rung.placement.resident_bytes
        assert rung.required_bytes <= rung.budget_bytes <= budget_bytes
    top = rungs[-1].placement
    assert top.value_ns == tensor(units, objective, least + more).value_ns
    sizes = [rung.budget_bytes for rung in rungs]
    assert sizes == sorted(set(sizes))
    if tolerance:
        assert len(rungs) <= 1 / tolerance + 2
    allowed = tolerance * (top.value_ns - rungs[0].placement.value_ns)
    for lower, upper in itertools.pairwise(rungs):
        cells_below = (upper.budget_bytes - fixed.total - 50 - 1) // CELL
        just_below = tensor(units, objective, cells_below * CELL)
        assert just_below.value_ns - lower.placement.value_ns <= allowed


@given(unit_lists(), objectives)
@settings(max_examples=50, deadline=None)
def test_rungs_without_tolerance_are_all_distinct_values(
    units: tuple[UnitCost, ...], objective: Objective
) -> None:
    frontier = explore(units, objective, 40 * CELL)
    values = {frontier.value_ns(m) for m in range(frontier.first, frontier.last + 1)}
    assert {frontier.value_ns(m) for m in choose_rungs(frontier, 0.0)} == values


def unit(
    name: str, size_mib: float, gain: int, part: Part = Part.FFN, **changes: object
) -> UnitCost:
    made = UnitCost(name, Kind.WEIGHTS, part, 0, int(size_mib * MIB), Times(gain + 5, 5))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_worked_example_of_the_documentation() -> None:
    units = (
        unit("embed", 4, 0, Part.EMBEDDING, layer=None),
        unit("qkv", 1, 3, Part.ATTENTION),
        unit("kv", 1, 2, Part.ATTENTION, kind=Kind.KV_CACHE),
        unit("gate", 3, 9),
        unit("down", 2, 5),
        unit("head", 2, 7, Part.HEAD, layer=None),
    )
    objective = Objective(Link(2), Link(2))
    keys = Keys.of(units, objective)
    table = solve(units, pins_of(units), keys, 9, MIB)
    assert keys.values_ns(table.keys).tolist() == [0, 0, 5, 5, 10, 10, 12, 19, 21, 24]
    assert table.placement(4) == (False, False, False, False, True, True)
    assert table.placement(6) == (False, False, True, True, True, False)
    by_density = (False, True, True, False, False, True)
    assert placement_value(units, by_density, objective) == (6, 3, 6)
    nothing_fixed = FixedBytes(0, 0, 0, 0)
    rungs = ladder(units, objective, 9 * MIB, nothing_fixed, tolerance=0.25)
    assert [rung.budget_bytes // MIB for rung in rungs] == [0, 4, 7, 9]


def test_a_gain_below_its_hand_offs_does_not_fragment() -> None:
    units = [unit(f"u{i}", 1, 100 if i < 4 else 19) for i in range(8)]
    cheap = Objective(Link(10), Link(10))
    pins = [Side.HOST if i == 5 else None for i in range(8)]
    held = [replace(u, pinned=pin) for u, pin in zip(units, pins, strict=True)]
    assert tensor(held, cheap, 8 * MIB).on_gpu == (True,) * 5 + (False,) + (True,) * 2
    alone = [replace(u, pinned=Side.HOST) if i in (5, 7) else u for i, u in enumerate(units)]
    assert tensor(alone, cheap, 8 * MIB).on_gpu == (True,) * 5 + (False,) * 3


def test_equal_values_prefer_fewer_hand_offs_then_fewer_bytes() -> None:
    free = Objective(Link(0), Link(0))
    scattered = [unit("a", 1, 5), unit("b", 1, 4), unit("c", 1, 5), unit("d", 2, 9)]
    assert tensor(scattered, free, 2 * MIB).on_gpu == (True, False, True, False)
    joined = [unit("a", 1, 5), unit("b", 1, 5), unit("c", 1, 5), unit("d", 1, 5)]
    assert tensor(joined, free, 2 * MIB).num_hand_offs == 1
    useless = [unit("a", 1, 5), unit("b", 1, 0)]
    assert tensor(useless, Objective(Link(0), Link(0)), 2 * MIB).num_hand_offs == 0
    apart = [unit("a", 1, 0), unit("b", 1, 0, pinned=Side.HOST)]
    assert tensor(apart, free, 2 * MIB).resident_bytes == 0
    larger = [unit("big", 2, 5), unit("host", 1, 0, pinned=Side.HOST), unit("small", 1, 5)]
    assert tensor(larger, free, 2 * MIB).on_gpu == (False, False, True)


def test_directions_cost_what_they_cost() -> None:
    units = [unit("host", 1, 0, pinned=Side.HOST), unit("a", 1, 8), unit("b", 1, -20)]
    assert tensor(units, Objective(Link(7), Link(0)), MIB).value_ns == 1
    assert tensor(units, Objective(Link(0), Link(7)), MIB).value_ns == 1
    assert tensor(units, Objective(Link(7), Link(7)), MIB).value_ns == 0
    wide = [units[0], replace(units[1], input_bytes=3), units[2]]
    assert tensor(wide, Objective(Link(0, 2.0), Link(0)), MIB).hand_off_ns == 6


def test_prefill_counts_by_its_share_of_the_tokens() -> None:
    decoder = replace(unit("d", 1, 30), prefill=Times(0, 0))
    reader = replace(unit("p", 1, 10), prefill=Times(64_000, 0))
    units = (decoder, reader)
    for share, expected in ((0.0, (True, False)), (0.5, (False, True)), (1.0, (False, True))):
        objective = Objective(Link(0), Link(0), prompt_share=share, chunk=64)
        assert tensor(units, objective, MIB).on_gpu == expected
    assert Objective(Link(0), Link(0), 0.5, 64).gain_ns(reader) == 505


def test_cells_are_fine_for_small_models_and_never_above_a_mebibyte() -> None:
    assert choose_cell_bytes([unit("a", 0.3, 1)] * 200) == 4 * KIB
    assert choose_cell_bytes([unit("a", 30, 1)] * 240) == 56 * KIB
    assert choose_cell_bytes([unit("a", 100, 1)] * 900) == MIB
    assert choose_cell_bytes([]) == 4 * KIB


def test_no_units_and_no_budget() -> None:
    objective = Objective(Link(1), Link(1))
    assert tensor([], objective, MIB).on_gpu == ()
    assert tensor([unit("a", 1, 5)], objective, 0).on_gpu == (False,)
    assert tensor([unit("a", 1, 5)], objective, -5).on_gpu == (False,)


def many_units(count: int) -> list[UnitCost]:
    """Layers of seven uneven units, 40 GiB in all."""
    sizes = (58.3, 29.1, 40.7, 40.2, 91.6, 93.9, 62.5)
    gains = (1100, 500, 760, 790, 1750, 1800, 1210)
    return [
        unit(
            f"u{i}",
            sizes[i % 7] + (i * 37 % 11) / 10,
            (gains[i % 7] + i * 53 % 97) * 1000,
            Part.ATTENTION if i % 7 < 4 else Part.FFN,
            layer=i // 7,
        )
        for i in range(count)
    ]


def test_700_units_and_24_gib_take_about_a_second() -> None:
    # Measured: 0.1 s to 0.5 s each, by how busy the machine is.
    units, objective = many_units(700), Objective(Link(10_600), Link(10_600))
    keys = Keys.of(units, objective)
    spent = []
    for _ in range(3):
        start = time.process_time()
        table = solve(units, pins_of(units), keys, 24 << 10, MIB)
        table.placement(24 << 10)
        middle = time.process_time()
        tensor(units, objective, 24 << 30)
        spent.append((middle - start, time.process_time() - middle))
    assert min(first for first, _ in spent) < 2
    assert min(second for _, second in spent) < 2


def test_backtracking_keeps_two_bits_a_state() -> None:
    units = many_units(70)
    table = solve(units, pins_of(units), Keys.of(units, Objective(Link(9), Link(9))), 4096, MIB)
    assert table.num_bytes < 70 * 4096 * 2 / 8 * 1.05 + 4097 * 8 * 2


def test_a_ladder_of_a_large_model_is_short_and_close() -> None:
    units, objective = many_units(70), Objective(Link(10_600), Link(10_600))
    fixed = FixedBytes(300 * MIB, 40 * MIB, 200 * MIB, 256 * MIB)
    rungs = ladder(units, objective, 4 << 30, fixed, slot_bytes=190 * MIB)
    assert 40 < len(rungs) <= 102
    assert len(ladder(units, objective, 4 << 30, fixed, tolerance=0.04)) <= 27
    assert rungs[0].placement.resident_bytes == 0
    assert rungs[-1].required_bytes > (4 << 30) - 4 * MIB


def test_a_ladder_without_room_for_the_fixed_part_says_how_much_is_missing() -> None:
    fixed = FixedBytes(300 * MIB, 0, 200 * MIB, 256 * MIB)
    with pytest.raises(BudgetError, match=r"756\.0 MiB .* 256\.0 MiB more than the 500\.0 MiB"):
        ladder([unit("a", 1, 5)], Objective(Link(1), Link(1)), 500 * MIB, fixed)
