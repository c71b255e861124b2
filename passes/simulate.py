"""A round as discrete events on the CPU, the GPU and the copy engine.

Units run in execution order, each where it is assigned. Where two neighbours run on different
sides, activations cross first. A host-resident unit that is promoted runs on the GPU, once its copy
is there; copies go one after the other in execution order, each into the slot that gets free first,
and start as early as that slot allows (slots are empty when a round begins). While a copy runs, the
CPU computes at `cpu_share` of its speed, since both read the same memory.

Without promotions a round takes the time that the objective of placement.py gives it; with them,
what the engine and the slots leave exposed is added. Source: ATSInfer sections 4.2.2 and 4.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from atsc.passes.placement import Kind, Link, Part, Side, Times, UnitCost


class Track(StrEnum):
    """What an event occupies; no two events of a track overlap."""

    CPU = "CPU"
    GPU = "GPU"
    COPY = "copy engine"
    HAND_OFF = "hand-off"


@dataclass(frozen=True, slots=True)
class Event:
    """One unit's computation, copy or hand-off, in nanoseconds from the round's begin."""

    track: Track
    unit: int
    begin_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it takes."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class Machine:
    """What a round depends on besides its units."""

    to_gpu: Link
    to_cpu: Link
    num_slots: int = 0
    cpu_share: float = 1.0
    """The CPU's speed while weights are copied, as a share of its speed alone; above 0."""
    late_ns: int = 0
    """The GPU sees so long after its end that a copy is there: another program has it meanwhile."""
    resume_ns: int = 0
    """What it takes the GPU to go on with a copied unit, even one that has been there for long;
    behind inputs that cross (for longer) it is hidden."""

    def to_gpu_ns(self, num_bytes: int, is_copied: bool) -> int:
        """A unit's inputs cross to the GPU; what of it hides `resume_ns` is left out."""
        crossing_ns = round(self.to_gpu.crossing_ns(num_bytes))
        return max(crossing_ns - self.resume_ns, 0) if is_copied else crossing_ns

    def to_cpu_ns(self, num_bytes: int) -> int:
        """A unit's inputs cross to the CPU."""
        return round(self.to_cpu.crossing_ns(num_bytes))


@dataclass(frozen=True, slots=True)
class Round:
    """What happened in a round; events in the order of their units."""

    rows: int
    events: tuple[Event, ...]
    exposed_ns: tuple[tuple[int, int], ...]
    """(unit, how long the GPU waited for its weights), where it did."""
    copied_bytes: int
    total_ns: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the round by its time."""
        return self.rows / self.total_ns * 1e9 if self.total_ns else math.inf

    @property
    def wait_ns(self) -> int:
        """All exposed waits."""
        return sum(ns for _, ns in self.exposed_ns)

    @property
    def h2d_bytes_per_s(self) -> float:
        """Weights copied, averaged over the round."""
        return self.copied_bytes / self.total_ns * 1e9 if self.total_ns else 0.0

    def on(self, track: Track) -> Iterator[Event]:
        """A track's events."""
        return (event for event in self.events if event.track is track)

    def busy_ns(self, track: Track) -> int:
        """How long a track is in use."""
        return sum(event.duration_ns for event in self.on(track))

    def busy_share(self, track: Track) -> float:
        """The same as a share of the round."""
        return self.busy_ns(track) / self.total_ns if self.total_ns else 0.0

    def busy_over_time(self, track: Track, num_slices: int) -> list[float]:
        """The share of each of so many equal slices of the round that a track is in use."""
        busy = [0.0] * num_slices
        width = self.total_ns / num_slices
        if not width:
            return busy
        for event in self.on(track):
            first, last = int(event.begin_ns / width), int(event.end_ns / width)
            for index in range(first, min(last + 1, num_slices)):
                begin, end = max(event.begin_ns, index * width), (index + 1) * width
                busy[index] += max(min(event.end_ns, end) - begin, 0.0) / width
        return busy


def simulate_round(
    units: Sequence[UnitCost],
    times: Sequence[Times],
    on_gpu: Sequence[bool],
    promoted: Iterable[int],
    machine: Machine,
    rows: int = 1,
) -> Round:
    """Run one round.

    Args:
        units: in execution order.
        times: of each unit in a round of `rows` tokens.
        on_gpu: where each unit lives.
        promoted: units on the host that are copied to a slot and run on the GPU.
        machine: links and slots.
        rows: tokens of the round, whose activations cross.
    """
    simulation = _Simulation(units, times, machine, sorted(set(promoted)))
    assert not simulation.promoted or machine.num_slots > 0, "promotions need slots"
    assert not any(on_gpu[unit] for unit in simulation.promoted), "residents are not promoted"
    waiting = set(simulation.promoted)
    side = None
    for index in range(len(units)):
        here = Side.GPU if on_gpu[index] or index in waiting else Side.HOST
        if side is not None and here is not side:
            simulation.hand_off(index, here, rows)
        side = here
        if here is Side.HOST:
            simulation.run_on_cpu(index)
        else:
            simulation.run_on_gpu(index)
    return simulation.result(rows)


class _Simulation:
    """The state of a round while it runs."""

    def __init__(
        self,
        units: Sequence[UnitCost],
        times: Sequence[Times],
        machine: Machine,
        promoted: Sequence[int],
    ) -> None:
        self.promoted = promoted
        self._units = units
        self._times = times
        self._machine = machine
        self._events: list[Event] = []
        self._exposed: list[tuple[int, int]] = []
        self._copies: list[Event] = []
        self._copied: dict[int, Event] = {}
        self._now_ns = 0
        for _ in range(machine.num_slots):
            self._copy_next(0)

    def _copy_next(self, slot_free_ns: int) -> None:
        """A slot is free: the next copy goes there, once the engine is free too."""
        if len(self._copies) == len(self.promoted):
            return
        unit = self.promoted[len(self._copies)]
        engine_free_ns = self._copies[-1].end_ns if self._copies else 0
        begin = max(slot_free_ns, engine_free_ns)
        copy = Event(Track.COPY, unit, begin, begin + self._times[unit].transfer_ns)
        self._copies.append(copy)
        self._copied[unit] = copy

    def hand_off(self, unit: int, to: Side, rows: int) -> None:
        """A unit's inputs cross."""
        num_bytes = self._units[unit].input_bytes * rows
        if to is Side.GPU:
            crossing_ns = self._machine.to_gpu_ns(num_bytes, unit in self._copied)
        else:
            crossing_ns = self._machine.to_cpu_ns(num_bytes)
        self._occupy(Track.HAND_OFF, unit, crossing_ns)

    def run_on_cpu(self, unit: int) -> None:
        """Slower while copies run. All copies that may run beside are known, for any later one
        waits for the slot of a unit that comes after this one; so the engine is busy without a gap
        until the last of them ends."""
        busy_ns = self._copies[-1].end_ns - self._now_ns if self._copies else 0
        work_ns = self._times[unit].cpu_ns
        self._occupy(Track.CPU, unit, stretched_ns(work_ns, busy_ns, self._machine.cpu_share))

    def run_on_gpu(self, unit: int) -> None:
        """Where it lives, or after its copy; then its slot is free."""
        copy = self._copied.get(unit)
        ready_ns = copy.end_ns + self._machine.late_ns if copy else 0
        if ready_ns > self._now_ns:
            self._exposed.append((unit, ready_ns - self._now_ns))
            self._now_ns = ready_ns
        resume_ns = self._machine.resume_ns if copy else 0
        self._occupy(Track.GPU, unit, self._times[unit].gpu_ns + resume_ns)
        if copy:
            self._copy_next(self._now_ns)

    def _occupy(self, track: Track, unit: int, duration_ns: int) -> None:
        begin, self._now_ns = self._now_ns, self._now_ns + duration_ns
        self._events.append(Event(track, unit, begin, self._now_ns))

    def result(self, rows: int) -> Round:
        """All of it."""
        events = sorted([*self._events, *self._copies], key=lambda event: event.unit)
        copied_bytes = sum(self._units[unit].num_bytes for unit in self.promoted)
        return Round(rows, tuple(events), tuple(self._exposed), copied_bytes, self._now_ns)


def stretched_ns(work_ns: int, beside_ns: int, cpu_share: float) -> int:
    """How long work takes on the CPU, if copies run beside it for so long from its begin on."""
    if beside_ns <= 0 or cpu_share == 1:
        return work_ns
    done = beside_ns * cpu_share
    return round(work_ns / cpu_share if work_ns <= done else beside_ns + (work_ns - done))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A rung on a machine: all that decides how its rounds go."""

    units: tuple[UnitCost, ...]
    on_gpu: tuple[bool, ...]
    machine: Machine
    chunk: int
    """Tokens of a whole prefill round, which the units' prefill times are for."""
    slot_bytes: int = 0
    """Of one slot."""
    stream_from_rows: int = 0
    promoted: tuple[int, ...] = ()
    """In rounds too short for streaming."""
    choose: Choose | None = None
    """Says instead what a round of so many tokens promotes (transfer.py)."""

    def decode(self) -> Round:
        """One token."""
        return self.round_of(1)

    def prefill(self) -> Round:
        """A whole chunk."""
        return self.round_of(self.chunk)

    def round_of(self, rows: int) -> Round:
        """A round of 1 to `chunk` tokens; from `stream_from_rows` on, host weights are streamed."""
        streams = 0 < self.stream_from_rows <= rows and self.slot_bytes > 0
        promoted = self.streamed() if streams else self.promoted
        if self.choose:
            promoted = self.choose(self, rows)
        return simulate_round(
            self.units, self.times_at(rows), self.on_gpu, promoted, self.machine, rows
        )

    def times_at(self, rows: int) -> list[Times]:
        """The units' times in a round of so many tokens."""
        return [times_at(unit, rows, self.chunk) for unit in self.units]

    def streamed(self) -> tuple[int, ...]:
        """Units on the host that a streaming round copies: weights that a slot can hold.

        The head runs for the wanted rows of logits alone, so that it never pays to stream it.
        """
        return tuple(
            index
            for index, (unit, here) in enumerate(zip(self.units, self.on_gpu, strict=True))
            if not here
            and unit.side is not Side.HOST
            and unit.kind is Kind.WEIGHTS
            and unit.part is not Part.HEAD
            and unit.num_bytes <= self.slot_bytes
        )

    def prompt_ns(
        self, num_tokens: int, units_at: Callable[[int], Sequence[UnitCost]] | None = None
    ) -> int:
        """A prompt in whole chunks and a rest, of which the last alone makes logits.

        `units_at` gives the units after so many tokens of it, whose caches are that much longer;
        None: the same for all chunks.
        """
        total = 0
        for done in range(0, num_tokens, self.chunk):
            rows = min(self.chunk, num_tokens - done)
            units = tuple(units_at(done)) if units_at else self.units
            if done + rows < num_tokens:
                units = tuple(map(_without_logits, units))
            total += replace(self, units=units).round_of(rows).total_ns
        return total


Choose = Callable[[Scenario, int], tuple[int, ...]]


def _without_logits(unit: UnitCost) -> UnitCost:
    """The unit in a round of which no row of logits is wanted."""
    return replace(unit, prefill=Times(0, 0)) if unit.part is Part.HEAD else unit


def times_at(unit: UnitCost, rows: int, chunk: int) -> Times:
    """A unit's times in a round of some tokens.

    One token takes decode's, a chunk prefill's; in between, a unit reads its weights once, however
    few the rows, and computes in proportion to them.
    """
    if rows in (1, chunk):
        return unit.decode if rows == 1 else unit.prefill
    share = rows / chunk
    return Times(
        max(unit.decode.cpu_ns, round(unit.prefill.cpu_ns * share)),
        max(unit.decode.gpu_ns, round(unit.prefill.gpu_ns * share)),
        unit.prefill.transfer_ns,
    )
