"""What streaming needs: slots for the largest streamed unit, and enough rows to pay."""

from __future__ import annotations

from atsc.codegen.device_plan import NUM_SLOTS, slot_bytes, stream_from_rows
from atsc.passes.placement import Kind, Part, Times, UnitCost


def unit(part: Part, size: int, kind: Kind = Kind.WEIGHTS, cpu: int = 100) -> UnitCost:
    return UnitCost("u", kind, part, 0, size, Times(cpu, 10, 160), Times(64 * cpu, 64, 160))


def test_slots_hold_what_is_streamed() -> None:
    units = [
        unit(Part.EMBEDDING, 900),
        unit(Part.ATTENTION, 500, Kind.KV_CACHE),
        unit(Part.ATTENTION, 30),
        unit(Part.FFN, 40),
        unit(Part.HEAD, 800),
    ]
    assert slot_bytes(units) == NUM_SLOTS * 40
    assert slot_bytes(units[:2]) == 0


def test_streaming_begins_where_a_copy_beats_the_cpu() -> None:
    """A copy takes 160; the CPU 100 a row, for 64 rows or more in proportion."""
    assert stream_from_rows([unit(Part.FFN, 40)], 64) == 9, "more than a GEMV's rows"
    slow = [unit(Part.FFN, 40, cpu=8)]
    assert stream_from_rows(slow, 64) == 21, "8 x 20 is no more than 160"
    idle_embedding = [*slow, unit(Part.EMBEDDING, 40, cpu=10**6)]
    assert stream_from_rows(idle_embedding, 64) == 21
    assert stream_from_rows([unit(Part.FFN, 40, cpu=1)], 64) == 0
