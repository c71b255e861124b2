"""Costs from a manifest are those that annotate gives for the model itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from graphs import parse_graph
from small_plan import write_plan

from atsc.codegen.device_section import unit_costs
from atsc.codegen.tables import Cache
from atsc.compiler import plan
from atsc.compiler.errors import UsageError
from atsc.compiler.ir import Graph
from atsc.passes.annotate import Annotation, Load, Rates, RooflineTimer, annotate, rates_of
from atsc.passes.limit_context import cache_capacity
from atsc.passes.partition import Unit, UnitKind, partition_units
from atsc.passes.retarget import costs_by_work, costs_of
from atsc.targets.target import resolve

LOAD = Load(context=96, chunk=16)
WINDOW = 24
SLOW = Rates(10e9, 0.2e12, 100e9, 2e12, 5e9, 9000.0, 700.0)
HEADS = "num_heads=8, kv_heads=4, head_size=64, scale=0.125"


def decoder() -> Graph:
    """Two layers, the second with a window."""
    layers = []
    x = "x0"
    for i in range(2):
        window = f", window={WINDOW}" if i else ""
        layers.append(
            f"""
            weight wq{i}: int4b32[1024, 512]
            weight wo{i}: int4b32[512, 512]
            weight wg{i}: int4b32[1024, 512]
            weight wd{i}: int4b32[512, 1024]
            p{i} = linear({x}, wq{i})
            a{i} = attention(p{i}) {{layer={i}, {HEADS}{window}}}
            o{i} = linear(a{i}, wo{i})
            g{i} = linear(o{i}, wg{i})
            d{i} = linear(g{i}, wd{i})
            """
        )
        x = f"d{i}"
    return parse_graph(
        f"""
        weight table: f32[700, 512]
        weight head: f32[700, 512]
        x0 = embed(ids, table)
        {"".join(layers)}
        y = linear({x}, head)
        out y
        """
    )


def facts(graph: Graph) -> tuple[tuple[Unit, ...], dict[str, int]]:
    stored = {name: weight.num_bytes - 13 for name, weight in graph.weights.items()}
    units = partition_units(graph, lambda weight: stored[weight.name])
    return units, stored


def caches(load: Load) -> list[Cache]:
    windows = (0, WINDOW)
    return [Cache(4, 64, w, cache_capacity(load.context, w, load.chunk)) for w in windows]


def device_bytes(graph: Graph, units: Sequence[Unit], load: Load) -> list[int]:
    held = iter(caches(load))
    return [
        2 * next(held).num_bytes if unit.kind is UnitKind.KV_CACHE else 1000 + 8 * index
        for index, unit in enumerate(units)
    ]


def annotated(graph: Graph, load: Load, rates: Rates) -> Annotation:
    units, stored = facts(graph)
    timer = RooflineTimer(graph, units, stored, rates)
    return annotate(graph, units, device_bytes(graph, units, load), timer, load)


def manifest_of(graph: Graph, directory: Path, rates: Rates | None) -> plan.Manifest:
    """What the driver puts into a plan, as it comes back from the file."""
    units, stored = facts(graph)
    annotation = annotated(graph, LOAD, rates) if rates else None
    sizes = device_bytes(graph, units, LOAD)
    costs = unit_costs(graph, units, stored, sizes, caches(LOAD), 2, LOAD, annotation)
    entries = [
        plan.Unit(unit.name, (), "", 0, 0, "ram", 0, cost)
        for unit, cost in zip(units, costs, strict=True)
    ]
    device = None
    if annotation:
        link = plan.Link(5e9, 9000.0, 0.2, 9000.0, 0.2)
        rung = plan.Rung(0, 0, 0, 0, "0" * len(units), "0" * len(units), 0, 0, 0, 0)
        device = plan.Device("cuda", "test", 86, *[0] * 5, link, 0, 0.0, (rung,))
    made = dataclasses.replace(
        write_plan(directory),
        units=tuple(entries),
        options=plan.Options(LOAD.context, LOAD.chunk, 4, 2, sessions=2),
        device=device,
    )
    plan.save(made, directory)
    return plan.load(directory)


@pytest.mark.parametrize("name", ["laptop-rtx3060-6g", "desktop-rtx4090-24g", "virtual"])
def test_another_target_is_as_if_compiled_for_it(name: str, tmp_path: Path) -> None:
    graph, rates = decoder(), rates_of(resolve(name))
    for given in (None, SLOW):
        found = costs_of(manifest_of(graph, tmp_path / f"p{given is None}", given), rates)
        expected = annotated(graph, LOAD, rates)
        assert found.units == expected.costs
        assert found.indices == expected.indices
        assert (found.to_gpu, found.to_cpu) == (expected.to_gpu, expected.to_cpu)


def test_the_plan_gives_back_its_own_times(tmp_path: Path) -> None:
    graph = decoder()
    found = costs_of(manifest_of(graph, tmp_path / "p", SLOW))
    assert found.units == annotated(graph, LOAD, SLOW).costs
    assert (found.chunk, found.to_gpu.latency_ns) == (16, 9000)


@pytest.mark.parametrize("context", [16, 40, 96, 200, 4096])
def test_another_context_is_as_if_compiled_for_it(context: int, tmp_path: Path) -> None:
    graph, load = decoder(), Load(context, LOAD.chunk)
    found = costs_of(manifest_of(graph, tmp_path / "p", None), SLOW, context=context)
    assert found.units == annotated(graph, load, SLOW).costs


def test_another_depth_moves_attention_alone(tmp_path: Path) -> None:
    graph = decoder()
    manifest = manifest_of(graph, tmp_path / "p", SLOW)
    middle, deep = costs_of(manifest), costs_of(manifest, depth=80)
    assert costs_of(manifest, SLOW, depth=32).units[2].prefill == middle.units[2].prefill
    changed = [
        (a.name, b.decode.cpu_ns / a.decode.cpu_ns)
        for a, b in zip(middle.units, deep.units, strict=True)
        if a != b
    ]
    # 81 tokens after 80, 48 in the middle; the other attention looks back 24 in both.
    assert [name for name, _ in changed][:1] == ["a0"]
    assert changed[0][1] == pytest.approx(81 / 48, rel=0.1)
    assert all(
        a.decode == b.decode
        for a, b in zip(middle.units, deep.units, strict=True)
        if a.name == "a1"
    )


def test_a_plan_without_times(tmp_path: Path) -> None:
    manifest = manifest_of(decoder(), tmp_path / "p", None)
    with pytest.raises(UsageError, match="holds no times; give a machine with --target"):
        costs_of(manifest)
    by_work = costs_by_work(manifest)
    assert len(by_work.units) == len(manifest.units)
    for unit, cost in zip(manifest.units, by_work.units, strict=True):
        assert unit.cost is not None
        assert cost.decode.cpu_ns == sum(unit.cost.decode.bytes)
