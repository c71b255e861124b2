"""What rounds did and when, and what they promote: the records that plans keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atsc.runtime import capi


class Event(NamedTuple):
    """A part of a round; times in ns of a clock that starts anywhere."""

    track: str
    """`cpu`, `cpu wait` (for the GPU), `device`, `device wait` (for weights) or `copy`."""
    number: int
    """Of `copy` and `device wait` the plan's unit, else its place in the round."""
    begin_ns: int
    end_ns: int
    first_node: str | None
    """The nodes that it ran, in order of execution; None for waits and copies."""
    last_node: str | None


@dataclass(frozen=True, slots=True)
class Round:
    """One prefill chunk or decode step."""

    position: int
    """Tokens before it."""
    num_tokens: int
    num_logit_rows: int
    begin_ns: int
    end_ns: int
    events: tuple[Event, ...]
    """All between its begin and its end; those of a track in order."""


@dataclass(frozen=True, slots=True)
class Change:
    """A new choice of the units that rounds run on the other side than where they live."""

    when_ns: int
    """On the clock of events."""
    kind: str
    """Of the rounds: `decode` or `prefill`."""
    reason: str
    num_promoted: int
    """Units that the GPU computes although they live on the CPU."""
    promoted_bytes: int
    """That each round copies."""
    before_ns: int
    """A round with the choice before, as predicted; as measured after trials and comparisons."""
    after_ns: int
    """With this one."""
    adoption_ns: int
    """That the swap held up the rounds."""
    build_ns: int
    """That choosing and making the round ready took beside the rounds."""
    num_retreated: int
    """Units that the CPU computes although they live on the GPU."""
    host_bytes: int
    """Of the CPU's memory that their weights took for the first time."""

    def __str__(self) -> str:
        retreats = f", {self.num_retreated} units retreat" if self.num_retreated else ""
        memory = f" ({self.host_bytes / 2**20:.1f} MiB of memory)" if self.host_bytes else ""
        return (
            f"{self.kind} promotes {self.num_promoted} units, "
            f"{self.promoted_bytes / 2**20:.1f} MiB{retreats}{memory} ({self.reason}); expected: "
            f"{self.after_ns / 1e6:.2f} ms instead of {self.before_ns / 1e6:.2f}"
        )


def change_of(found: capi.Change) -> Change:
    """From the C interface."""
    return Change(
        when_ns=found.when_ns,
        kind=capi.ROUND_KINDS[found.kind],
        reason=found.reason.decode("utf-8", "replace"),
        num_promoted=found.num_promoted,
        promoted_bytes=found.promoted_bytes,
        before_ns=found.before_ns,
        after_ns=found.after_ns,
        adoption_ns=found.adoption_ns,
        build_ns=found.build_ns,
        num_retreated=found.num_retreated,
        host_bytes=found.host_bytes,
    )


def event_of(found: capi.Event) -> Event:
    """From the C interface, while its strings live."""
    return Event(
        capi.TRACKS[found.track],
        found.index,
        found.begin_ns,
        found.end_ns,
        _text(found.first_node),
        _text(found.last_node),
    )


def round_of(found: capi.Round) -> Round:
    """From the C interface, while its events live."""
    return Round(
        position=found.position,
        num_tokens=found.num_tokens,
        num_logit_rows=found.num_logit_rows,
        begin_ns=found.begin_ns,
        end_ns=found.end_ns,
        events=tuple(event_of(event) for event in found.events[: found.num_events]),
    )


def _text(name: bytes | None) -> str | None:
    return None if name is None else name.decode("utf-8", "replace")
