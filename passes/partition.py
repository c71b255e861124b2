"""Units, and groups of nodes that need no barrier between them.

A unit is the smallest thing that is placed: one storage range of at least 256 KiB with the nodes
that consume it, or an attention node with its KV cache. Smaller weights, and nodes without weights,
belong to the next unit in execution order (the last ones to the last unit). The embedding is a unit
that stays on the host, which it gathers from. Tables that several nodes share (cos and sin) are no
unit's: they lie in a range of their own that no placement moves. Source: DESIGN section 1;
ATSInfer 4.2.2.

A group is what one CPU round of few rows runs between two barriers: nodes that every thread
computes for itself, then one node whose items the threads share, then nodes that go on with the
very items that a thread just finished.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atsc.compiler.ir import Graph, Node, Weight
from atsc.compiler.ops import op_of

MIN_UNIT_BYTES = 256 << 10
MAX_REPLICATED_WIDTH = 32768


class UnitKind(enum.Enum):
    """What a unit is; the runtime's UnitEntry knows the same kinds."""

    SHARED = "shared"
    """Tables that both backends hold; no nodes."""
    HOST = "host"
    """The embedding: never placed."""
    KV_CACHE = "kv-cache"
    """An attention node and its KV cache: placed, never promoted."""
    WEIGHTS = "weights"
    """A storage range and the nodes that consume it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is stored, moved and placed together, and the nodes that go with it.

    `nodes` are indices into `Graph.nodes`; `weights` names in storage order.
    """

    kind: UnitKind
    name: str
    nodes: tuple[int, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a node needs to know of its neighbours on a CPU, by index into `Graph.nodes`."""

    group: tuple[int, ...]
    replicated: tuple[bool, ...]
    aligned: tuple[bool, ...]


def partition_units(graph: Graph, stored_bytes: Callable[[Weight], int]) -> tuple[Unit, ...]:
    """Cut a graph into units, in execution order; the shared range, if any, comes first."""
    owner = _owners(graph)
    shared = tuple(name for name in graph.weights if name not in owner)
    units = [Unit(UnitKind.SHARED, "shared", (), shared)] if shared else []
    nodes: list[int] = []
    weights: list[str] = []

    def close(kind: UnitKind, name: str) -> None:
        units.append(Unit(kind, name, tuple(nodes), tuple(weights)))
        nodes.clear()
        weights.clear()

    for index, node in enumerate(graph.nodes):
        nodes.append(index)
        weights += [name for name in dict.fromkeys(node.inputs) if owner.get(name) == index]
        sizes = {name: stored_bytes(graph.weights[name]) for name in weights}
        if node.op == "embed":
            close(UnitKind.HOST, node.name)
        elif node.op == "attention":
            close(UnitKind.KV_CACHE, node.name)
        elif sum(sizes.values()) >= MIN_UNIT_BYTES:
            close(UnitKind.WEIGHTS, max(sizes, key=lambda name: sizes[name]))
    if nodes and units and units[-1].kind is UnitKind.WEIGHTS:
        last = units.pop()
        nodes[:0], weights[:0] = last.nodes, last.weights
        close(UnitKind.WEIGHTS, last.name)
    elif nodes:
        close(UnitKind.WEIGHTS, weights[0] if weights else graph.nodes[nodes[0]].name)
    return tuple(units)


def _owners(graph: Graph) -> dict[str, int]:
    """Weight -> the node whose unit stores it; weights that are shared by nature have none.

    A matrix belongs to the linear that reads it (a tied head's table to the head, since the
    embedding gathers from host memory anyway), to its first reader otherwise.
    """
    owner: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for name in dict.fromkeys(node.inputs):
            if name in graph.weights:
                readers.setdefault(name, []).append(index)
    for name, indices in readers.items():
        linears = [index for index in indices if graph.nodes[index].op == "linear"]
        if linears:
            owner[name] = linears[0]
        elif len(indices) == 1:
            owner[name] = indices[0]
    return owner


def schedule_groups(graph: Graph) -> Schedule:
    """Assign every node to a group, and say how it takes part.

    The rule: a replicated node opens a group unless all nodes of the present one are replicated;
    a shared node joins a group of replicated nodes; it also joins after another shared node if
    what it reads of this group's shared nodes it reads only at its own items
    (`OpDef.aligned_slots`) and both have the same items, that is the same outputs.
    """
    group: list[int] = []
    replicated: list[bool] = []
    aligned: list[bool] = []
    current: list[Node] = []
    for node in graph.nodes:
        is_replicated = _is_replicated(graph, node)
        shared_before = [other for other in current if not _is_replicated(graph, other)]
        is_aligned = (
            bool(shared_before) and not is_replicated and _follows(graph, node, shared_before)
        )
        if current and shared_before and not is_aligned:
            current = []
        opens = not current
        current.append(node)
        group.append((group[-1] + 1 if group else 0) if opens else group[-1])
        replicated.append(is_replicated)
        aligned.append(is_aligned)
    return Schedule(tuple(group), tuple(replicated), tuple(aligned))


def _is_replicated(graph: Graph, node: Node) -> bool:
    width = graph.values[next(filter(None, node.outputs))].shape[-1]
    return op_of(node).replicable and isinstance(width, int) and width <= MAX_REPLICATED_WIDTH


def _follows(graph: Graph, node: Node, shared_before: Sequence[Node]) -> bool:
    """Whether a node may go on with the items of the shared nodes before it, without a barrier."""
    if node.op != "linear" or any(other.op != "linear" for other in shared_before):
        return False
    if (
        graph.weights[node.inputs[1]].shape[0]
        != graph.weights[shared_before[-1].inputs[1]].shape[0]
    ):
        return False
    op = op_of(node)
    aligned_inputs = {op.slot(node, slot) for slot in op.aligned_slots}
    written = {output for other in shared_before for output in other.outputs}
    return all(name in aligned_inputs for name in node.inputs if name in written)


def unit_of_nodes(units: Sequence[Unit]) -> Mapping[int, int]:
    """Node index -> unit index."""
    return {node: index for index, unit in enumerate(units) for node in unit.nodes}
