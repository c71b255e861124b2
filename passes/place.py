"""Static placement, tensor by tensor: ATSInfer's Algorithm 1.

Dense models: one dynamic program over all units. Mixtures of experts (lines 11 to 22): if all other
units fit, they go to VRAM and the program shares out the experts; else the experts stay on the host
and the program shares out the others.

Differences from the paper, and why (docs/scheduling.md has a worked example):
  - Hand-offs are counted between true neighbours. The text solves T_exp and T_nonexp apart, where
    two experts would seem adjacent; we run the program over all units, the other class pinned.
  - The experts' branch forces every other unit into VRAM, so the answer could get worse as the
    budget grows past s_nonexp, and worse than a whole-layer placement. `tensor` takes the best of
    both branches and of the placements of coarse.py, at no more than the given budget.
  - Cells are finer than 1 MiB where the model is small, since every size is rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atsc.passes.coarse import Bits, expert_steps, ffn_steps, layer_steps
from atsc.passes.knapsack import Keys, Table, solve
from atsc.passes.placement import (
    Kind,
    Objective,
    Placement,
    Side,
    UnitCost,
    bytes_on_gpu,
    describe_placement,
    does_not_fit,
)

SMALLEST_CELL_BYTES = 4 << 10
LARGEST_CELL_BYTES = 1 << 20
MAX_TABLE_STATES = 1 << 25


def tensor(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Placement:
    """Policy `tensor`: the best placement of single units within the budget.

    Raises:
        BudgetError: units pinned to VRAM do not fit.
    """
    frontier = explore(units, objective, budget_bytes)
    return frontier.placement(frontier.last)


@dataclass(frozen=True, slots=True)
class _Step:
    """A coarse placement as a rival of the tables, from the first column that holds it."""

    column: int
    key: int
    bits: Bits


@dataclass(frozen=True, slots=True)
class Frontier:
    """The best placement for every budget of 0, 1, ... whole cells, and for the whole budget.

    `keys` has a column for each, growing: the last one is the whole budget, with the part of a cell
    that the tables cannot use. Below `first`, what is pinned to VRAM does not fit.
    """

    units: tuple[UnitCost, ...]
    objective: Objective
    costs: Keys
    cell_bytes: int
    budget_bytes: int
    first: int
    keys: NDArray[np.int64]
    tables: tuple[Table, ...]
    steps: tuple[_Step, ...]

    @property
    def last(self) -> int:
        """The column of the whole budget."""
        return len(self.keys) - 1

    def column_bytes(self, column: int) -> int:
        """The budget that a column stands for."""
        return min(column * self.cell_bytes, self.budget_bytes)

    def value_ns(self, column: int) -> int:
        """Value of the best placement within a column's budget."""
        return int(self.costs.values_ns(self.keys[column : column + 1])[0])

    def placement(self, column: int) -> Placement:
        """The best placement within a column's budget; a table's, unless a coarse one is better."""
        best = int(self.keys[column])
        cells = min(column, self.last - 1)
        bits = next((t.placement(cells) for t in self.tables if t.keys[cells] == best), None)
        if bits is None:
            bits = next(s.bits for s in self.steps if s.column <= column and s.key == best)
        found = describe_placement(self.units, bits, self.objective)
        assert found.value_ns == self.value_ns(column)
        return found


def explore(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Frontier:
    """Solve for a budget and all smaller ones.

    Raises:
        BudgetError: units pinned to VRAM do not fit.
    """
    cell_bytes = choose_cell_bytes(units)
    eligible = [unit for unit in units if unit.side is not Side.HOST]
    useful = sum(-(-unit.num_bytes // cell_bytes) for unit in eligible)
    budget_bytes = max(budget_bytes, 0)
    cells = min(budget_bytes // cell_bytes, useful)
    costs = Keys.of(units, objective)
    tables = algorithm_1(units, costs, cells, cell_bytes)
    steps = _coarse_steps(units, costs, budget_bytes, cell_bytes)
    keys = np.maximum.reduce([table.keys for table in tables])
    keys = np.append(keys, keys[-1])
    for step in steps:
        np.maximum(keys[step.column :], step.key, out=keys[step.column :])
    first = min([table.feasible_from for table in tables] + [step.column for step in steps])
    if not steps:
        pinned = bytes_on_gpu(units, [unit.side is Side.GPU for unit in units])
        raise does_not_fit("units that run on the GPU only need", pinned, budget_bytes)
    return Frontier(
        tuple(units), objective, costs, cell_bytes, budget_bytes, first, keys, tables, steps
    )


def algorithm_1(
    units: Sequence[UnitCost], costs: Keys, cells: int, cell_bytes: int
) -> tuple[Table, ...]:
    """The tables of Algorithm 1: one for a dense model, one a branch for a mixture of experts.

    Of a mixture's two, the first (line 16: all but the experts in VRAM) is the paper's answer
    wherever it is feasible, the second (line 19: the experts on the host) below that.
    """
    sides = [unit.side for unit in units]
    if not any(unit.kind is Kind.EXPERT_STACK for unit in units):
        return (solve(units, sides, costs, cells, cell_bytes),)
    others_in_vram = [
        side or (None if unit.kind is Kind.EXPERT_STACK else Side.GPU)
        for unit, side in zip(units, sides, strict=True)
    ]
    experts_on_host = [
        side or (Side.HOST if unit.kind is Kind.EXPERT_STACK else None)
        for unit, side in zip(units, sides, strict=True)
    ]
    return (
        solve(units, others_in_vram, costs, cells, cell_bytes),
        solve(units, experts_on_host, costs, cells, cell_bytes),
    )


def choose_cell_bytes(units: Sequence[UnitCost]) -> int:
    """The memory step of the tables: as fine as the model's size lets about a second's work be.

    Every size is rounded up to cells, so that a placement may leave up to a cell a unit unused: at
    1 MiB, 0.9 % of an int4 model of 14B parameters, but 14 % of one of 0.6B. The step depends on
    the model alone, so that a larger budget is never solved more coarsely than a smaller one.
    """
    total = sum(unit.num_bytes for unit in units if unit.side is not Side.HOST)
    steps = -(-len(units) * total // (MAX_TABLE_STATES * SMALLEST_CELL_BYTES))
    return min(max(steps, 1) * SMALLEST_CELL_BYTES, LARGEST_CELL_BYTES)


def _coarse_steps(
    units: Sequence[UnitCost], costs: Keys, budget_bytes: int, cell_bytes: int
) -> tuple[_Step, ...]:
    """The coarse placements within the budget, by size, which is rounded up once, not a unit.

    The first of each chain holds pinned units alone: if it does not fit, nothing does.
    """
    steps: list[_Step] = []
    chains = (layer_steps(units), ffn_steps(units), expert_steps(units))
    for bits in dict.fromkeys(bits for chain in chains for bits in chain):
        num_bytes = bytes_on_gpu(units, bits)
        if num_bytes <= budget_bytes:
            steps.append(_Step(-(-num_bytes // cell_bytes), costs.of_placement(bits), bits))
    return tuple(sorted(steps, key=lambda step: step.column))
