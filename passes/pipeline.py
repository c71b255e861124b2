"""Running passes: each maps a valid Graph to a valid Graph, which is verified after every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from atsc.compiler.errors import AtscError, ModelError
from atsc.compiler.invariants import check_graph
from atsc.compiler.ir import Graph
from atsc.compiler.text import print_node

Observer = Callable[[int, str, Graph], None]
"""`on_stage(index, name, graph)` after each pass; serves dumps and `--stop-after`."""


class Pass(Protocol):
    """A rewrite with a name; it never mutates its input."""

    @property
    def name(self) -> str:
        """Short and unique, as `--stop-after` and dumps show it."""

    def run(self, graph: Graph) -> Graph:
        """The rewritten graph."""


def run_passes(graph: Graph, passes: Sequence[Pass], observer: Observer | None = None) -> Graph:
    """Run passes in order, verifying the graph after each.

    Raises:
        AtscError: as a pass raised it, or ModelError where a pass left an invalid graph; notes name
            the pass, those before it, and the node at fault if the message names one.
    """
    done: list[str] = []
    for index, step in enumerate(passes):
        before = graph
        try:
            graph = step.run(before)
            _check(step, graph)
        except AtscError as error:
            error.add_note(f"in pass {step.name}, after {', '.join(done) or 'none'}")
            for node in before.nodes:
                if f"node {node.name}:" in str(error):
                    error.add_note(print_node(node, before.values))
            raise
        done.append(step.name)
        if observer is not None:
            observer(index, step.name, graph)
    return graph


def _check(step: Pass, graph: Graph) -> None:
    try:
        check_graph(graph)
    except ModelError as error:
        raise ModelError(f"pass {step.name} left an invalid graph: {error}") from error
