"""What static placement decides over: units with their costs, the objective, and a placement.

The objective is ATSInfer section 4.3.2: the time that the GPU saves, minus the hand-offs,

    sum_i r_i [b_i = gpu]  -  sum_i c_i [b_i != b_(i-1)],        r_i = tc_i - tg_i

in whole nanoseconds a token. Beyond the paper: r and c are decode's with prefill's weighted in, and
c depends on the direction. `placement_value` is this formula and nothing else, so that the solvers
(knapsack.py, place.py) and their tests have a judge that shares no code with them.

A KV cache is a unit like any other, in the place of its attention node in execution order: the node
has no weights of its own and runs where its cache lies, so the unit's times are the attention's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from atsc.compiler.errors import BudgetError


class Side(StrEnum):
    """Where a unit lives, and where its nodes run unless it is promoted."""

    HOST = "host"
    GPU = "gpu"


class Kind(StrEnum):
    """What a unit's bytes are."""

    WEIGHTS = "weights"
    KV_CACHE = "kv cache"
    EXPERT_STACK = "expert stack"


class Part(StrEnum):
    """The part of the model that a unit belongs to; only the coarse policies look at it."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FFN = "ffn"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of one unit in one round: on each side, and of its copy from host to VRAM.

    An expert stack's are those of the experts that one round activates.
    """

    cpu_ns: int
    gpu_ns: int
    transfer_ns: int = 0


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One unit, as placement sees it; units without nodes (shared tables) are left out.

    `num_bytes` is what the unit takes in VRAM: of a KV cache its bytes at the full context, of an
    expert stack all experts. `prefill` is for one whole chunk. `input_bytes` are the activations, a
    token, that cross when the unit before runs on the other side. `layer` is None outside of the
    decoder layers. A unit may be `pinned` to a side; an embedding is always pinned to the host.
    """

    name: str
    kind: Kind
    part: Part
    layer: int | None
    num_bytes: int
    decode: Times
    prefill: Times = Times(0, 0)
    input_bytes: int = 0
    pinned: Side | None = None

    @property
    def side(self) -> Side | None:
        """The only side that the unit may live on; None if it may live on either."""
        return Side.HOST if self.part is Part.EMBEDDING else self.pinned


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between host and GPU, as activations cross it: latency plus ns a byte."""

    latency_ns: float
    ns_per_byte: float = 0.0

    def crossing_ns(self, num_bytes: int) -> float:
        """Time of one hand-off."""
        return self.latency_ns + self.ns_per_byte * num_bytes


@dataclass(frozen=True, slots=True)
class Objective:
    """What a hand-off costs, and how much prefill counts.

    `prompt_share` is the share of all tokens that are prompt; `chunk` the tokens of a prefill
    round, over which its times are spread.
    """

    to_gpu: Link
    to_cpu: Link
    prompt_share: float = 0.0
    chunk: int = 512

    def weigh_ns(self, decode_ns: float, prefill_ns: float) -> int:
        """A decode round's and a prefill round's time as one figure a token."""
        share = self.prompt_share
        return round((1 - share) * decode_ns + share * prefill_ns / self.chunk)

    def gain_ns(self, unit: UnitCost) -> int:
        """r_i: what a token saves when the unit runs on the GPU; may be negative."""
        return self.weigh_ns(
            unit.decode.cpu_ns - unit.decode.gpu_ns, unit.prefill.cpu_ns - unit.prefill.gpu_ns
        )

    def crossing_ns(self, unit: UnitCost, to: Side) -> int:
        """c_i: the cost of handing the unit its inputs from the other side."""
        link = self.to_gpu if to is Side.GPU else self.to_cpu
        return self.weigh_ns(
            link.crossing_ns(unit.input_bytes), link.crossing_ns(unit.input_bytes * self.chunk)
        )

    def cpu_ns(self, units: Sequence[UnitCost]) -> int:
        """Time a token with every unit on the CPU: what the value of a placement is saved from."""
        return sum(self.weigh_ns(unit.decode.cpu_ns, unit.prefill.cpu_ns) for unit in units)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which units live in VRAM, and what that is predicted to be worth, a token.

    `on_gpu` has a bit a unit. `value_ns` is the objective, `time_ns` what remains of the all-CPU
    time. `streamed` units live on the host and are promoted in every round, through
    `slot_bytes` of VRAM beside `resident_bytes` (policy `stream` alone).
    """

    on_gpu: tuple[bool, ...]
    resident_bytes: int
    value_ns: int
    time_ns: int
    num_hand_offs: int
    hand_off_ns: int
    streamed: tuple[int, ...] = ()
    slot_bytes: int = 0

    @property
    def vram_bytes(self) -> int:
        """What the placement takes of the budget."""
        return self.resident_bytes + self.slot_bytes


Policy = Callable[[Sequence[UnitCost], Objective, int], Placement]
"""(units in execution order, objective, VRAM bytes for weights and KV caches) -> placement.

Raises BudgetError if what must lie in VRAM does not fit.
"""


def placement_value(
    units: Sequence[UnitCost], on_gpu: Sequence[bool], objective: Objective
) -> tuple[int, int, int]:
    """The objective of any placement: (value, number of hand-offs, their cost), in ns a token."""
    gain_ns = hand_off_ns = num_hand_offs = 0
    for index, (unit, here) in enumerate(zip(units, on_gpu, strict=True)):
        if here:
            gain_ns += objective.gain_ns(unit)
        if index and here != on_gpu[index - 1]:
            num_hand_offs += 1
            hand_off_ns += objective.crossing_ns(unit, Side.GPU if here else Side.HOST)
    return gain_ns - hand_off_ns, num_hand_offs, hand_off_ns


def describe_placement(
    units: Sequence[UnitCost], on_gpu: Sequence[bool], objective: Objective
) -> Placement:
    """A placement with its figures, from its bits."""
    value_ns, num_hand_offs, hand_off_ns = placement_value(units, on_gpu, objective)
    return Placement(
        on_gpu=tuple(bool(here) for here in on_gpu),
        resident_bytes=bytes_on_gpu(units, on_gpu),
        value_ns=value_ns,
        time_ns=objective.cpu_ns(units) - value_ns,
        num_hand_offs=num_hand_offs,
        hand_off_ns=hand_off_ns,
    )


def bytes_on_gpu(units: Sequence[UnitCost], on_gpu: Sequence[bool]) -> int:
    """Bytes of the units that a placement keeps in VRAM."""
    return sum(unit.num_bytes for unit, here in zip(units, on_gpu, strict=True) if here)


def obey_pins(units: Sequence[UnitCost], wanted: Callable[[UnitCost], bool]) -> tuple[bool, ...]:
    """Bits from a rule, except where a unit is pinned."""
    return tuple(wanted(unit) if unit.side is None else unit.side is Side.GPU for unit in units)


def does_not_fit(what: str, needed_bytes: int, budget_bytes: int, hint: str = "") -> BudgetError:
    """The error for `what` that needs more VRAM than the budget leaves for it."""
    needed, budget = needed_bytes / (1 << 20), budget_bytes / (1 << 20)
    return BudgetError(
        f"placing units: {what} {needed:.1f} MiB of VRAM, {needed - budget:.1f} MiB more than the "
        f"{budget:.1f} MiB that the budget leaves for it; raise --vram, or lower --ctx, --chunk or "
        f"--headroom{hint}"
    )
