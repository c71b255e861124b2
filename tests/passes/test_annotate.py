"""What annotate asks a timer, and what it keeps of the answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphs import parse_graph

from atsc.compiler.ir import Graph
from atsc.passes.annotate import Load, annotate, cpu_share_of, locate
from atsc.passes.partition import UnitKind, partition_units
from atsc.passes.placement import Kind, Link, Part, Side, Times

LOAD = Load(context=100, chunk=16)


def decoder() -> Graph:
    """One layer, a head that reads the last row alone."""
    return parse_graph(
        """
        weight table: f32[700, 512]
        weight wq: int4b32[1024, 512]
        weight wo: int4b32[1024, 512]
        weight wd: int4b32[512, 1024]
        weight head: f32[700, 512]
        x = embed(ids, table)
        p = linear(x, wq)
        a = attention(p) {layer=0, num_heads=8, kv_heads=4, head_size=64, scale=0.125}
        o = linear(a, wo)
        d = linear(o, wd)
        s = select_rows(d)
        y = linear(s, head)
        out y
        """
    )


@dataclass
class Recorder:
    """A timer whose answers say what was asked."""

    asked: list[tuple[int, Side, int, int]] = field(default_factory=list)

    def unit_ns(self, unit: int, side: Side, rows: int, position: int) -> int:
        self.asked.append((unit, side, rows, position))
        return 1000 * unit + 10 * rows + (1 if side is Side.GPU else 0)

    def transfer_ns(self, num_bytes: int) -> int:
        return 2 * num_bytes

    def link(self, to: Side) -> Link:
        return Link(7 if to is Side.GPU else 8, 0.5)

    def cpu_share(self) -> float:
        return 0.75


def test_units_are_timed_as_rounds_will_run_them() -> None:
    graph = decoder()
    units = partition_units(graph, lambda weight: weight.num_bytes)
    sizes = [100 + index for index in range(len(units))]
    timer, told = Recorder(), []
    found = annotate(
        graph, units, sizes, timer, LOAD, lambda what, done, of: told.append((done, of))
    )
    assert (found.to_gpu, found.to_cpu) == (Link(7, 0.5), Link(8, 0.5))
    assert found.cpu_share == 0.75
    assert told == [(index, len(units)) for index in range(len(units))]
    indices = [i for i, unit in enumerate(units) if unit.kind is not UnitKind.SHARED]
    assert list(found.indices) == indices
    for index, cost in zip(found.indices, found.costs, strict=True):
        is_head = cost.part is Part.HEAD
        rows = 1 if is_head else 16
        assert cost.num_bytes == sizes[index]
        assert cost.decode == Times(1000 * index + 10, 1000 * index + 11, 2 * sizes[index])
        filled = 1000 * index + 10 * rows
        assert cost.prefill == Times(filled, filled + 1, 2 * sizes[index])
        # One row after half the context, a chunk so that its end is there.
        for side in (Side.HOST, Side.GPU):
            assert (index, side, 1, 49) in timer.asked
            assert (index, side, rows, 50 - rows) in timer.asked
    assert sum(cost.kind is Kind.KV_CACHE for cost in found.costs) == 1
    by_name = {cost.name: cost for cost in found.costs}
    assert by_name["wd"].input_bytes == 4 * 1024
    assert by_name["wd"].part is Part.FFN and by_name["wo"].part is Part.ATTENTION


def test_layers_and_parts_follow_from_the_graph() -> None:
    graph = decoder()
    units = partition_units(graph, lambda weight: weight.num_bytes)
    layers, parts = locate(graph, units)
    found = {unit.name: (layers[i], parts[i]) for i, unit in enumerate(units)}
    assert found["wq"] == (0, Part.ATTENTION)
    assert found["wd"] == (0, Part.FFN)
    assert found["head"] == (None, Part.HEAD)


def test_a_short_context_leaves_no_place_before_a_chunk() -> None:
    assert Load(context=20, chunk=16).position(16) == 0
    assert Load(context=8, chunk=16).rows == 8


def test_the_cpu_beside_copies() -> None:
    assert cpu_share_of(60e9, 45e9) == 0.75
    assert cpu_share_of(60e9, 61e9) == 1
    assert cpu_share_of(60e9, None) == cpu_share_of(None, 45e9) == 1
