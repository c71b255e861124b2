"""The dynamic program of static placement: a knapsack whose neighbours pay when they differ.

State: (unit, VRAM cells used at most, side of the last unit). Best value of a state:

    best[host][m] = max(best[host][m],     best[gpu][m] - to_host)
    best[gpu][m]  = max(best[gpu][m - s],  best[host][m - s] - to_gpu) + r

vectorised over m, so that a unit costs a few passes over two arrays. "At most" m cells makes one
table answer every smaller budget as well. VRAM is counted in cells of `cell_bytes`, each size
rounded up.

Ties: a value is scaled by more than the number of boundaries, and every hand-off takes one off, so
that integers compare by (value, fewer hand-offs). Fewer cells come last, by reading the answer at
the least m that reaches the best: a path found there cannot use less.

Cost: O(units x cells) time; for backtracking, two bits a unit and cell; values are not kept.
Source: ATSInfer section 4.3.3, SolveKnapsackDP (given there by name only).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atsc.passes.placement import Objective, Side, UnitCost

_IMPOSSIBLE = -(1 << 61)
_LARGEST_KEY = 1 << 60
_HOST, _GPU = 0, 1


@dataclass(frozen=True, slots=True)
class Keys:
    """Gains and hand-off costs as parts of a key: value x scale - number of hand-offs.

    `to_gpu` and `to_host` are paid before each unit whose neighbour before is on the other side;
    the first unit has none.
    """

    scale: int
    gains: NDArray[np.int64]
    to_gpu: NDArray[np.int64]
    to_host: NDArray[np.int64]

    @staticmethod
    def of(units: Sequence[UnitCost], objective: Objective) -> Keys:
        """The parts of every unit."""
        scale = len(units) + 1
        gains = [objective.gain_ns(unit) * scale for unit in units]
        to_gpu = [objective.crossing_ns(unit, Side.GPU) * scale + 1 for unit in units]
        to_host = [objective.crossing_ns(unit, Side.HOST) * scale + 1 for unit in units]
        assert sum(map(abs, gains)) + sum(to_gpu) + sum(to_host) < _LARGEST_KEY
        parts = (np.array(part, dtype=np.int64) for part in (gains, to_gpu, to_host))
        return Keys(scale, *parts)

    def of_placement(self, on_gpu: Sequence[bool]) -> int:
        """The key of one placement."""
        here = np.array(on_gpu, dtype=np.bool_)
        arrives, leaves = here[1:] & ~here[:-1], here[:-1] & ~here[1:]
        paid = self.to_gpu[1:][arrives].sum() + self.to_host[1:][leaves].sum()
        return int(self.gains[here].sum() - paid)

    def values_ns(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values in keys: there are fewer hand-offs than `scale`."""
        return -(-keys // self.scale)


@dataclass(frozen=True, slots=True)
class Table:
    """Best placements for 0, 1, ... cells of VRAM.

    `keys[m]` is the best key (see `Keys`) of any placement of at most m cells; below
    `feasible_from` the units that are pinned to VRAM do not fit.
    """

    keys: NDArray[np.int64]
    feasible_from: int
    _sizes: tuple[int, ...]
    _from_gpu: NDArray[np.uint8]
    """[units, 2, ceil(cells / 8)]: whether the best way to a state comes from the GPU; packed."""
    _ends_on_gpu: NDArray[np.bool_]

    @property
    def num_bytes(self) -> int:
        """Memory that the table holds."""
        return self.keys.nbytes + self._from_gpu.nbytes + self._ends_on_gpu.nbytes

    def placement(self, cells: int) -> tuple[bool, ...]:
        """The best placement of at most so many cells; of equals the one with the least cells."""
        left = int(np.searchsorted(self.keys, self.keys[cells]))
        side = _GPU if self._ends_on_gpu[left] else _HOST
        bits: list[bool] = []
        for index in range(len(self._sizes) - 1, -1, -1):
            bits.append(side == _GPU)
            came_from = self._from_gpu[index, side, left >> 3] >> (7 - (left & 7)) & 1
            left -= self._sizes[index] if side == _GPU else 0
            side = _GPU if came_from else _HOST
        return tuple(reversed(bits))


def solve(
    units: Sequence[UnitCost],
    sides: Sequence[Side | None],
    costs: Keys,
    cells: int,
    cell_bytes: int,
) -> Table:
    """Fill the table up to `cells`; `sides` pins units (and overrides their own pins)."""
    sizes = tuple(-(-unit.num_bytes // cell_bytes) for unit in units)
    came_from = np.empty((len(units), 2, (cells + 8) // 8), dtype=np.uint8)
    # Before the first unit, both sides are worth nothing, so that it pays no hand-off.
    host = np.zeros(cells + 1, dtype=np.int64)
    gpu = np.zeros(cells + 1, dtype=np.int64)
    for index, (size, side) in enumerate(zip(sizes, sides, strict=True)):
        reach = max(cells + 1 - size, 0)
        via_host, via_gpu = host - costs.to_gpu[index], gpu - costs.to_host[index]
        new_gpu = np.full(cells + 1, _IMPOSSIBLE)
        stays = np.zeros(cells + 1, dtype=np.bool_)
        if side is not Side.HOST and reach:
            np.maximum(gpu[:reach], via_host[:reach], out=new_gpu[size:])
            new_gpu[size:] += costs.gains[index]
            np.greater_equal(gpu[:reach], via_host[:reach], out=stays[size:])
        came_from[index, _GPU] = np.packbits(stays)
        came_from[index, _HOST] = np.packbits(via_gpu > host)
        if side is Side.GPU:
            host.fill(_IMPOSSIBLE)
        else:
            np.maximum(host, via_gpu, out=host)
        gpu = new_gpu
    keys = np.maximum(host, gpu)
    feasible_from = int(np.searchsorted(keys, -_LARGEST_KEY))
    return Table(keys, feasible_from, sizes, came_from, gpu > host)
