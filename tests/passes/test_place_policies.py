"""The policies: what each puts where, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atsc.compiler.errors import BudgetError
from atsc.passes.placement import Kind, Link, Objective, Part, Side, Times, UnitCost
from atsc.passes.policies import POLICIES

MIB = 1 << 20
OBJECTIVE = Objective(Link(10), Link(20))


def unit(name: str, part: Part, layer: int | None, kind: Kind = Kind.WEIGHTS) -> UnitCost:
    return UnitCost(name, kind, part, layer, MIB, Times(100, 10, 50), Times(5000, 100, 50))


def model(ffn_kind: Kind = Kind.WEIGHTS) -> tuple[UnitCost, ...]:
    """Three layers of qkv, KV cache, router or gate, and FFN, 1 MiB each; embedding and head."""
    units = [unit("embed", Part.EMBEDDING, None)]
    for layer in range(3):
        units += [
            unit(f"{layer}.qkv", Part.ATTENTION, layer),
            unit(f"{layer}.kv", Part.ATTENTION, layer, Kind.KV_CACHE),
            unit(f"{layer}.gate", Part.FFN, layer),
            unit(f"{layer}.ffn", Part.FFN, layer, ffn_kind),
        ]
    return (*units, unit("head", Part.HEAD, None))


def resident(policy: str, units: Sequence[UnitCost], budget_mib: int) -> list[str]:
    placement = POLICIES[policy](units, OBJECTIVE, budget_mib * MIB)
    return [u.name for u, here in zip(units, placement.on_gpu, strict=True) if here]


def test_layer_takes_the_head_and_then_the_last_whole_layers() -> None:
    last = ["2.qkv", "2.kv", "2.gate", "2.ffn"]
    assert resident("layer", model(), 0) == []
    assert resident("layer", model(), 4) == ["head"]
    assert resident("layer", model(), 5) == [*last, "head"]
    assert resident("layer", model(), 8) == [*last, "head"]
    assert resident("layer", model(), 13) == [u.name for u in model()[1:]]


def test_ffn_keeps_the_first_layers_ffn_on_the_host() -> None:
    attention = [f"{layer}.{name}" for layer in range(3) for name in ("qkv", "kv")]
    assert resident("ffn", model(), 7) == [*attention, "head"]
    assert resident("ffn", model(), 9) == [*attention, "2.gate", "2.ffn", "head"]
    assert resident("ffn", model(), 6) == ["1.qkv", "1.kv", "2.qkv", "2.kv", "head"]


def test_expert_keeps_the_first_layers_experts_on_the_host() -> None:
    units = model(Kind.EXPERT_STACK)
    all_but_experts = [u.name for u in units[1:] if u.kind is not Kind.EXPERT_STACK]
    assert resident("expert", units, 10) == all_but_experts
    assert set(resident("expert", units, 12)) == {*all_but_experts, "1.ffn", "2.ffn"}
    assert resident("expert", units, 9) == [
        name for name in all_but_experts if not name.startswith("0.")
    ]


def test_cpu_and_gpu_take_nothing_and_everything() -> None:
    assert resident("cpu", model(), 100) == []
    assert resident("gpu", model(), 13) == [u.name for u in model()[1:]]
    assert POLICIES["gpu"](model(), OBJECTIVE, 13 * MIB).value_ns == 13 * 90 - 10


def test_gpu_says_how_much_is_missing() -> None:
    with pytest.raises(BudgetError, match=r"policy gpu needs 13\.0 MiB .* 3\.5 MiB more than the"):
        POLICIES["gpu"](model(), OBJECTIVE, int(9.5 * MIB))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_pins_hold_and_pinned_units_must_fit(policy: str) -> None:
    units = [
        replace(u, pinned={"0.gate": Side.GPU, "2.ffn": Side.HOST}.get(u.name)) for u in model()
    ]
    placed = resident(policy, units, 12)
    assert "0.gate" in placed
    assert not {"2.ffn", "embed"}.intersection(placed)
    with pytest.raises(BudgetError, match=r"needs? .*MiB more than the 0\.5 MiB"):
        POLICIES[policy](units, OBJECTIVE, MIB // 2)


def test_stream_keeps_caches_in_vram_and_promotes_every_weight() -> None:
    placement = POLICIES["stream"](model(), OBJECTIVE, 5 * MIB)
    names = [u.name for u in model()]
    assert [names[i] for i in range(14) if placement.on_gpu[i]] == ["0.kv", "1.kv", "2.kv"]
    assert [names[i] for i in placement.streamed] == [
        name for name in names if name != "embed" and not name.endswith(".kv")
    ]
    assert placement.vram_bytes == 5 * MIB
    with pytest.raises(BudgetError, match=r"policy stream needs .* 1\.0 MiB more"):
        POLICIES["stream"](model(), OBJECTIVE, 4 * MIB)


def streamed_ns(gpu_ns: Sequence[int], transfer_ns: Sequence[int]) -> int:
    units = [
        UnitCost(f"u{i}", Kind.WEIGHTS, Part.FFN, i, MIB, Times(1000, g, w))
        for i, (g, w) in enumerate(zip(gpu_ns, transfer_ns, strict=True))
    ]
    return POLICIES["stream"](units, OBJECTIVE, 2 * MIB).time_ns


def test_streaming_overlaps_copies_with_computation_as_far_as_two_slots_allow() -> None:
    assert streamed_ns([10, 10, 10], [50, 50, 50]) == 50 * 3 + 10
    assert streamed_ns([80, 80, 80], [50, 50, 50]) == 50 + 80 * 3
    # The third copy waits for the first slot, although the engine is idle from 40 on.
    assert streamed_ns([100, 10, 10], [20, 20, 200]) == 120 + 200 + 10


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=8),
    st.integers(0, 49),
)
@settings(max_examples=100, deadline=None)
def test_streaming_is_bounded_by_its_links(times: list[tuple[int, int]], faster: int) -> None:
    gpu_ns, transfer_ns = [g for g, _ in times], [w for _, w in times]
    total = streamed_ns(gpu_ns, transfer_ns)
    assert max(sum(gpu_ns) + transfer_ns[0], sum(transfer_ns) + gpu_ns[-1]) <= total
    assert total <= sum(gpu_ns) + sum(transfer_ns)
    assert streamed_ns(gpu_ns, [max(w - faster, 0) for w in transfer_ns]) <= total


def test_policies_agree_on_what_a_placement_is_worth() -> None:
    for budget_mib in range(6, 14):
        values = {
            name: POLICIES[name](model(), OBJECTIVE, budget_mib * MIB).value_ns
            for name in ("tensor", "layer", "ffn", "expert", "cpu")
        }
        assert max(values.values()) == values["tensor"] > values["cpu"] == 0
