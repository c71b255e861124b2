"""Rounds beside another program that has the GPU in turn: cases that can be followed by hand.

Both have it for a slice while both have work, and the other one always has. Who leaves it gets it
back when a slice of the other is over. Results are means over slices from 0.75 to 1.25 of the given
one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from atsc.codegen.transfer_library import predict_in_turns
from atsc.passes.transfer import Slots, Transferable

pytestmark = pytest.mark.toolchain
MS = 1_000_000
SLICE = 2.0


def on_cpu(ms: float, gpu_ms: float = 0.1, copy_ms: float = 1.0) -> Transferable:
    times = (round(each * MS) for each in (ms, gpu_ms, copy_ms))
    return Transferable(*times, 0, 0, 1, on_gpu=False, can_be_promoted=True)


def on_gpu(ms: float) -> Transferable:
    return Transferable(10 * MS, round(ms * MS), 0, 0, 0, 1, on_gpu=True, can_be_promoted=False)


def round_ms(
    units: Sequence[Transferable],
    promoted: Collection[int] = (),
    slots: int = 2,
    slice_ms: float = SLICE,
    spins: bool = False,
    cpu_share: float = 1.0,
) -> float:
    machine = Slots(slots, 1, cpu_share=cpu_share)
    return predict_in_turns(units, machine, promoted, round(slice_ms * MS), spins) / MS


def test_what_the_cpu_does_is_its_own() -> None:
    assert round_ms([on_cpu(3), on_cpu(4)]) == pytest.approx(7)


def test_work_of_the_gpu_takes_twice_as_long() -> None:
    assert round_ms([on_gpu(100)]) == pytest.approx(200, rel=0.03)


@pytest.mark.parametrize("cpu_ms", [0.5, 2.6, 5.05])
def test_hand_offs_wait_for_the_end_of_a_slice(cpu_ms: float) -> None:
    """Of one that began when the GPU was left, or of a later one: after 0.5 ms for another 1.5."""
    units = [on_cpu(cpu_ms), on_gpu(0.1)] * 8
    slices = [SLICE * share for share in (0.75, 0.85, 0.95, 1.05, 1.15, 1.25)]
    wait_ms = sum(-cpu_ms % slice_ms for slice_ms in slices) / len(slices)
    assert round_ms(units) == pytest.approx(8 * (cpu_ms + wait_ms + 0.1))


def test_a_gpu_that_spins_has_its_half_of_the_time() -> None:
    """Hand-offs do not wait within its slices, and wait for the rest of another one."""
    units = [on_cpu(0.5), on_gpu(0.1)] * 40
    alone = 40 * 0.6
    assert alone * 1.2 < round_ms(units, spins=True) < 0.75 * round_ms(units)


def test_copies_beside_long_work_are_hidden_although_they_are_interrupted() -> None:
    """Two copies of 1 ms and an interruption fit into 8 ms: only hand-offs wait."""
    units = [on_cpu(8.0), on_cpu(3.0), on_cpu(3.0)] * 6
    promoted = [index for index in range(len(units)) if index % 3]
    assert 6 * 8.2 < round_ms(units, promoted) < 6 * (8.2 + SLICE)
    alone = [on_cpu(8.0), on_gpu(0.2)] * 6
    assert round_ms(units, promoted) == pytest.approx(round_ms(alone), rel=0.1)


def test_copies_one_after_the_other_take_twice_as_long() -> None:
    units = [on_cpu(0.1, copy_ms=1.0)] * 60
    assert round_ms(units, range(60)) == pytest.approx(120, rel=0.06)


def test_the_cpu_is_slower_beside_copies() -> None:
    """Of 12 ms the GPU has work for 4 of copies and 2 of interruptions; only copies count."""
    units = [on_cpu(12.0), on_cpu(3.0), on_cpu(3.0)] * 4
    promoted = [index for index in range(len(units)) if index % 3]
    found = round_ms(units, promoted, cpu_share=0.8, slice_ms=0.01)
    alone = round_ms(units, promoted, slice_ms=0.01)
    assert found - alone == pytest.approx(4 * 2 * (1 - 0.8), rel=0.05)


def test_slots_hold_copies_up() -> None:
    """With one slot the second copy of a pair begins when the first one has been used."""
    units = [on_cpu(6.0), on_cpu(3.0), on_cpu(3.0)] * 4
    promoted = [index for index in range(len(units)) if index % 3]
    assert round_ms(units, promoted, slots=1) > round_ms(units, promoted) + 4 * 0.9
