"""The activation planner against an independent replay, and the replay against broken plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atsc.codegen.layout import value_bytes
from atsc.compiler.ir import DType, Graph, ModelInfo, Node, TensorType, Value
from atsc.passes.allocate import Allocation, RoundLimits, allocate
from atsc.passes.check_allocation import AllocationError, check_allocation
from atsc.passes.partition import Schedule

LIMITS = RoundLimits(chunk=16, logit_rows=4, few_rows=8)


def size_of(kind: TensorType, rows: int) -> int:
    return value_bytes(kind.dtype, rows, int(kind.shape[-1]))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """Random chains of pointwise nodes that read any earlier value, in random groups."""
    count = draw(st.integers(2, 20))
    values = {"x": TensorType(DType.F32, ("M", 64))}
    nodes = [Node("embed", "n0", ("ids", "t"), ("x",))]
    for index in range(1, count):
        reads = draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=2))
        width = draw(st.sampled_from([32, 64, 320]))
        values[f"v{index}"] = TensorType(DType.F32, ("M", width))
        nodes.append(Node("add", f"n{index}", tuple(reads), (f"v{index}",)))
    values["logits"] = TensorType(DType.F32, ("R", 100))
    nodes.append(Node("add", "last", (f"v{count - 1}",), ("logits",)))
    steps = [0, *draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))]
    group = tuple(sum(steps[: index + 1]) for index in range(len(nodes)))
    replicated = tuple(draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes))))
    graph = Graph(
        ModelInfo("random", 100, 64),
        (Value("ids", TensorType(DType.I32, ("M",))),),
        (Value("logits", values["logits"]),),
        tuple(nodes),
        values,
        {},
    )
    return graph, Schedule(group, replicated, (False,) * len(nodes))


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_no_live_value_is_overwritten(case: tuple[Graph, Schedule]) -> None:
    graph, schedule = case
    allocation = allocate(graph, schedule, LIMITS, size_of)
    check_allocation(graph, schedule, allocation)
    assert set(allocation.shared) == set(graph.values) - {"logits"}
    sizes = [size_of(graph.values[name], 16) for name in allocation.shared]
    assert max(sizes) <= allocation.arena_bytes <= sum(sizes)


def chain(length: int) -> tuple[Graph, Schedule]:
    values = {f"v{i}": TensorType(DType.F32, ("M", 64)) for i in range(length)}
    nodes = [Node("embed", "n0", ("ids", "t"), ("v0",))]
    nodes += [Node("add", f"n{i}", (f"v{i - 1}",), (f"v{i}",)) for i in range(1, length)]
    graph = Graph(
        ModelInfo("chain", 100, 64),
        (Value("ids", TensorType(DType.I32, ("M",))),),
        (Value("none", TensorType(DType.F32, ("R", 1))),),
        tuple(nodes),
        values,
        {},
    )
    return graph, Schedule(tuple(range(length)), (False,) * length, (False,) * length)


def test_a_chain_needs_two_buffers() -> None:
    graph, schedule = chain(30)
    assert allocate(graph, schedule, LIMITS, size_of).arena_bytes == 2 * 16 * 64 * 4


def test_the_replay_finds_an_overwritten_value() -> None:
    graph, schedule = chain(3)
    allocation = allocate(graph, schedule, LIMITS, size_of)
    clash = replace(allocation.shared["v1"], offset=allocation.shared["v0"].offset)
    broken = replace(allocation, shared={**allocation.shared, "v1": clash})
    assert isinstance(broken, Allocation)
    with pytest.raises(AllocationError, match="group 1 writes v1 over v0"):
        check_allocation(graph, schedule, broken)
