"""The ladder: good placements for every VRAM size up to the budget, so that a plan can step down.

When a plan is loaded, another program may hold part of the VRAM. The plan therefore stores several
placements, its rungs, and the loader takes the largest that fits. All come from one run of the
dynamic program, since its table answers every smaller budget too. Activations are reserved for the
all-GPU case, so that what is fixed does not depend on the rung. Source: DESIGN section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atsc.passes.place import Frontier, explore
from atsc.passes.placement import Objective, Placement, UnitCost, does_not_fit


@dataclass(frozen=True, slots=True)
class FixedBytes:
    """VRAM that a process holds whatever is resident."""

    context: int
    modules: int
    activations: int
    """Of the largest chunk, all of it on the GPU."""
    headroom: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.context + self.modules + self.activations + self.headroom


@dataclass(frozen=True, slots=True)
class Rung:
    """A placement, and the smallest VRAM budget (in whole cells) whose best placement it is.

    `required_bytes` (fixed + slots + resident) is what it really takes, at most `budget_bytes`;
    `slot_bytes` are those of all slots together.
    """

    budget_bytes: int
    required_bytes: int
    slot_bytes: int
    placement: Placement
    num_slots: int = 0


def ladder(
    units: Sequence[UnitCost],
    objective: Objective,
    budget_bytes: int,
    fixed: FixedBytes,
    slot_bytes: int = 0,
    tolerance: float = 0.01,
) -> tuple[Rung, ...]:
    """The rungs from the least VRAM to the whole budget.

    Args:
        units: in execution order.
        objective: hand-off costs and the weight of prefill.
        budget_bytes: all that the process may hold.
        fixed: what it holds in any case.
        slot_bytes: what promotions share.
        tolerance: how much less than the best placement for its budget a rung may be worth at any
            budget (in whole cells) below the next rung, as a share of what the ladder gains in
            all. At most 1 / tolerance + 2 rungs come out.

    Raises:
        BudgetError: the fixed part, or what is pinned to VRAM, exceeds the budget.
    """
    taken = fixed.total + slot_bytes
    if taken > budget_bytes:
        what = "context, modules, activations, head-room and slots alone need"
        raise does_not_fit(what, taken, budget_bytes)
    frontier = explore(units, objective, budget_bytes - taken)
    rungs = []
    for column in choose_rungs(frontier, tolerance):
        placement = frontier.placement(column)
        budget = taken + frontier.column_bytes(column)
        rungs.append(Rung(budget, taken + placement.resident_bytes, slot_bytes, placement))
    return tuple(rungs)


def choose_rungs(frontier: Frontier, tolerance: float) -> list[int]:
    """The fewest columns that keep the promise of `ladder`; with both ends.

    From each rung, the next is the first budget worth more than the tolerance allows: any later
    one would break the promise just below it, so no other choice needs fewer.
    """
    first, last = frontier.first, frontier.last
    worth = frontier.costs.values_ns(frontier.keys)
    allowed = tolerance * float(worth[last] - worth[first])
    chosen = [first]
    while True:
        better = worth[chosen[-1] :] > worth[chosen[-1]] + allowed
        if not better.any():
            break
        chosen.append(chosen[-1] + int(better.argmax()))
    top = int(np.searchsorted(frontier.keys, frontier.keys[last]))
    return chosen if top == chosen[-1] else [*chosen, top]
