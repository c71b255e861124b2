"""Activation buffers: one arena, shared by lifetime.

A value lives from the group that writes it to the last group that reads it; whole groups, since the
nodes of a group run without barriers between them. Offsets are planned for the largest round and
stay constant. Values that threads compute for themselves in rounds of few rows have a second place,
in each thread's private arena. Largest first, first fit: optimal plans differ by a few percent.
Source: ATSInfer 4.2.1 (temporary buffers); the same idea as any interval-graph memory planner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atsc.compiler.ir import LOGIT_ROWS, Graph, TensorType
from atsc.passes.partition import Schedule

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Range:
    """A value's bytes in an arena, and the first and last group that needs them."""

    offset: int
    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where every value lies; `private` holds those that threads also compute for themselves."""

    shared: Mapping[str, Range]
    private: Mapping[str, Range]
    arena_bytes: int
    private_arena_bytes: int


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The largest round that buffers are planned for."""

    chunk: int
    logit_rows: int
    few_rows: int

    def rows(self, kind: TensorType) -> int:
        """Most rows of a value."""
        return self.logit_rows if kind.shape[0] == LOGIT_ROWS else self.chunk


SizeOf = Callable[[TensorType, int], int]
"""Bytes of a value of some type with so many rows."""


def allocate(graph: Graph, schedule: Schedule, limits: RoundLimits, size_of: SizeOf) -> Allocation:
    """Plan the arenas. Graph inputs and outputs lie outside: the caller owns them."""
    lifetimes = _lifetimes(graph, schedule)
    producer = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
    shared = {
        name: (size_of(graph.values[name], limits.rows(graph.values[name])), *span)
        for name, span in lifetimes.items()
    }
    private = {
        name: (size_of(graph.values[name], limits.few_rows), *span)
        for name, span in lifetimes.items()
        if schedule.replicated[producer[name]]
    }
    shared_ranges, private_ranges = _first_fit(shared), _first_fit(private)
    return Allocation(shared_ranges, private_ranges, _end(shared_ranges), _end(private_ranges))


def _lifetimes(graph: Graph, schedule: Schedule) -> dict[str, tuple[int, int]]:
    outside = {value.name for value in (*graph.inputs, *graph.outputs)}
    spans: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(graph.nodes):
        group = schedule.group[index]
        for name in filter(None, node.outputs):
            if name not in outside:
                spans[name] = (group, group)
        for name in node.inputs:
            if name in spans:
                spans[name] = (spans[name][0], group)
    return spans


def _first_fit(wanted: Mapping[str, tuple[int, int, int]]) -> dict[str, Range]:
    """Name -> (bytes, first, last) to ranges that do not overlap while both live."""
    placed: dict[str, Range] = {}
    for name, (num_bytes, first, last) in sorted(wanted.items(), key=lambda item: -item[1][0]):
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        neighbours = sorted(
            (r.offset, r.offset + r.num_bytes)
            for r in placed.values()
            if r.first <= last and first <= r.last
        )
        offset = 0
        for begin, end in neighbours:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        placed[name] = Range(offset, size, first, last)
    return placed


def _end(ranges: Mapping[str, Range]) -> int:
    return max((r.offset + r.num_bytes for r in ranges.values()), default=0)
