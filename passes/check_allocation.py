"""An independent check of an Allocation: replays a round and follows every byte's owner.

It knows nothing of how the ranges were found. It runs the groups in order; within a group, where
threads are not ordered, it demands that nothing which is read or written there is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping

from atsc.compiler.errors import AtscError
from atsc.compiler.ir import Graph
from atsc.passes.allocate import Allocation, Range
from atsc.passes.partition import Schedule


class AllocationError(AtscError):
    """Two live values share bytes: a bug of atsc."""


def check_allocation(graph: Graph, schedule: Schedule, allocation: Allocation) -> None:
    """Replay a round over the arenas.

    Raises:
        AllocationError: a value would be overwritten before its last reader is done.
    """
    for ranges in (allocation.shared, allocation.private):
        _replay(graph, schedule, ranges)


def _replay(graph: Graph, schedule: Schedule, ranges: Mapping[str, Range]) -> None:
    contents: list[tuple[int, int, str]] = []
    for group in sorted(set(schedule.group)):
        members = [node for node, g in zip(graph.nodes, schedule.group, strict=True) if g == group]
        read = {name for node in members for name in node.inputs if name in ranges}
        written = {name for node in members for name in node.outputs if name in ranges}
        for name in read - written:
            own = ranges[name]
            if (own.offset, own.offset + own.num_bytes, name) not in contents:
                raise AllocationError(f"group {group} reads {name}, which was overwritten before")
        for name in written:
            own = ranges[name]
            begin, end = own.offset, own.offset + own.num_bytes
            for other in read | written:
                mine = ranges[other]
                if other != name and mine.offset < end and begin < mine.offset + mine.num_bytes:
                    raise AllocationError(f"group {group} writes {name} over {other}")
            contents = [c for c in contents if c[1] <= begin or end <= c[0]]
            contents.append((begin, end, name))
