from __future__ import annotations

from dataclasses import dataclass

import pytest
from graphs import parse_graph

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import Graph
from atsc.passes.optimise import DEFAULT_PASSES, optimise
from atsc.passes.pipeline import run_passes
from atsc.passes.rewrite import rebuild

TEXT = """
    weight table: f32[7, 8]
    weight gamma: f32[8]
    weight head: f32[7, 8]
    x = embed(ids, table)
    n = rms_norm(x, gamma) {eps=0.1}
    y = linear(n, head)
    out y
"""


@dataclass(frozen=True)
class Nothing:
    name: str = "nothing"

    def run(self, graph: Graph) -> Graph:
        return graph


@dataclass(frozen=True)
class Damage:
    name: str = "damage"

    def run(self, graph: Graph) -> Graph:
        return graph.replace(nodes=graph.nodes[1:])


@dataclass(frozen=True)
class Refuse:
    name: str = "refuse"

    def run(self, graph: Graph) -> Graph:
        raise ModelError("node n: too lovely to change")


def test_the_observer_sees_every_pass() -> None:
    seen: list[tuple[int, str, int]] = []
    graph = optimise(
        parse_graph(TEXT), lambda index, name, made: seen.append((index, name, len(made.nodes)))
    )
    assert [name for _, name, _ in seen] == [step.name for step in DEFAULT_PASSES]
    assert [index for index, _, _ in seen] == list(range(len(DEFAULT_PASSES)))
    assert seen[-1][2] == len(graph.nodes)


def test_passes_have_names_of_their_own() -> None:
    names = [step.name for step in DEFAULT_PASSES]
    assert len(set(names)) == len(names)


def test_an_invalid_result_names_the_pass() -> None:
    with pytest.raises(ModelError, match="pass damage left an invalid graph: node n: reads x"):
        run_passes(parse_graph(TEXT), [Nothing(), Damage()])


def test_a_failure_says_where_it_happened() -> None:
    with pytest.raises(ModelError) as error:
        run_passes(parse_graph(TEXT), [Nothing(), Refuse()])
    assert error.value.__notes__ == [
        "in pass refuse, after nothing",
        "n: f32[M, 8] = rms_norm(x, gamma) {eps=0.1}",
    ]


def test_running_twice_changes_nothing() -> None:
    once = optimise(parse_graph(TEXT))
    assert optimise(once) == once


def test_rebuild_drops_what_no_output_needs() -> None:
    graph = parse_graph(TEXT)
    shorter = rebuild(graph, [*graph.nodes[:1], graph.nodes[2].replace(inputs=("x", "head"))])
    assert list(shorter.weights) == ["table", "head"]
    assert list(shorter.values) == ["ids", "x", "y"]
