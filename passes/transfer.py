"""Dynamic transfer as the passes see it: what a scheduler of promotions takes and finds.

The scheduler itself is C++, the same code in a plan's runtime and here
(runtime/src/transfer_schedule.h); the driver hands it in (codegen/transfer_library.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atsc.passes.placement import Kind, Side, Times, UnitCost
from atsc.passes.simulate import Machine, Scenario


@dataclass(frozen=True, slots=True)
class Transferable:
    """One unit in this round; times in nanoseconds.

    `to_gpu_ns` and `to_cpu_ns` are what its inputs take to cross if the unit before runs on the
    other side.
    """

    cpu_ns: int
    gpu_ns: int
    transfer_ns: int
    to_gpu_ns: int
    to_cpu_ns: int
    num_bytes: int
    on_gpu: bool
    can_be_promoted: bool


@dataclass(frozen=True, slots=True)
class Slots:
    """What promotions have to share, and how fast it is at present.

    `link_factor` multiplies every copy's time; `cpu_share` and `late_ns` are as in `Machine`.
    """

    num_slots: int
    slot_bytes: int
    link_factor: float = 1.0
    cpu_share: float = 1.0
    late_ns: int = 0


@dataclass(frozen=True, slots=True)
class Promotion:
    """A unit that is copied to a slot; -1: it has no bytes.

    `not_before` is the node of the GPU before which the copy must not begin, -1: as early as its
    slot allows.
    """

    unit: int
    slot: int
    not_before: int = -1


@dataclass(frozen=True, slots=True)
class TransferSchedule:
    """The promotions of a round, in order, its predicted time, and the time without them."""

    promotions: tuple[Promotion, ...]
    round_ns: int
    static_ns: int


Scheduler = Callable[[Sequence[Transferable], Slots], TransferSchedule]


def transferable(
    units: Sequence[UnitCost],
    times: Sequence[Times],
    on_gpu: Sequence[bool],
    machine: Machine,
    rows: int,
) -> list[Transferable]:
    """A round of `rows` tokens as a scheduler takes it; arguments as of `simulate_round`."""
    return [
        Transferable(
            cpu_ns=each.cpu_ns,
            gpu_ns=each.gpu_ns + (0 if here else machine.resume_ns),
            transfer_ns=each.transfer_ns,
            to_gpu_ns=machine.to_gpu_ns(unit.input_bytes * rows, is_copied=not here),
            to_cpu_ns=machine.to_cpu_ns(unit.input_bytes * rows),
            num_bytes=unit.num_bytes,
            on_gpu=here,
            can_be_promoted=unit.kind is Kind.WEIGHTS and unit.side is not Side.HOST,
        )
        for unit, each, here in zip(units, times, on_gpu, strict=True)
    ]


def scheduled(scenario: Scenario, scheduler: Scheduler, rows: int) -> tuple[int, ...]:
    """What a scheduler promotes in a round of `rows` tokens."""
    machine = scenario.machine
    units = transferable(scenario.units, scenario.times_at(rows), scenario.on_gpu, machine, rows)
    slots = Slots(
        machine.num_slots,
        scenario.slot_bytes,
        cpu_share=machine.cpu_share,
        late_ns=machine.late_ns,
    )
    return tuple(promotion.unit for promotion in scheduler(units, slots).promotions)


def with_transfer(scenario: Scenario, scheduler: Scheduler) -> Scenario:
    """The same rung, but the scheduler says for every round what is promoted."""
    return replace(scenario, choose=lambda scenario, rows: scheduled(scenario, scheduler, rows))
