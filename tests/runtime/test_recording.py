"""Records of rounds: what a session keeps, on the CPU alone and with the virtual device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import tiny_model
from tiny_model import CHUNK, GATE_TOKEN, UNIT_NAMES

from atsc.compiler.errors import CancelledError
from atsc.runtime import capi
from atsc.runtime.loader import Plan, load
from atsc.runtime.rounds import Round

pytestmark = pytest.mark.toolchain

LINK_RATE = 25e6


@pytest.fixture(scope="module")
def device_plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """One unit of three on a device with a slow link; chunks stream the others."""
    folder = tiny_model.build_plan(tmp_path_factory.mktemp("record") / "tiny.atsplan", rungs=2)
    device = capi.VirtualDevice(link_bytes_per_s=LINK_RATE)
    with load(folder, threads=2, virtual_device=device) as plan:
        yield plan


def record(plan: Plan) -> list[Round]:
    """Of a prompt of two chunks and a half, and of two tokens after it."""
    with plan.session() as session:
        session.prefill([1, 2, 3])
        assert session.take_rounds() == [], "a session begins without recording"
        session.set_recording(True)
        session.prefill([4] * (2 * CHUNK + 5))
        session.decode(7)
        first = session.take_rounds()
        session.decode(8)
        return [*first, *session.take_rounds()]


def assert_whole(rounds: list[Round]) -> None:
    """Every round that was run, in order; nothing outside of its round, no track over itself."""
    assert [(r.position, r.num_tokens, r.num_logit_rows) for r in rounds] == [
        (3, CHUNK, 0),
        (3 + CHUNK, CHUNK, 0),
        (3 + 2 * CHUNK, 5, 1),
        (8 + 2 * CHUNK, 1, 1),
        (9 + 2 * CHUNK, 1, 1),
    ]
    assert all(one.end_ns <= other.begin_ns for one, other in pairwise(rounds))
    for found in rounds:
        assert 0 < found.end_ns - found.begin_ns < 60e9
        for event in found.events:
            assert found.begin_ns <= event.begin_ns <= event.end_ns <= found.end_ns
        for track in ("cpu", "device", "copy"):
            events = [event for event in found.events if event.track == track]
            assert all(one.end_ns <= other.begin_ns for one, other in pairwise(events))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_cpu_alone_records_its_steps(open_tiny: Callable[..., Plan], threads: int) -> None:
    rounds = record(open_tiny(threads=threads))
    assert_whole(rounds)
    for found in rounds:
        steps = found.events
        assert {step.track for step in steps} == {"cpu"}
        assert [step.number for step in steps] == list(range(len(steps)))
        assert all(one.end_ns == other.begin_ns for one, other in pairwise(steps))
        assert steps[0].first_node == "embed"
    # Few rows: what is cheap joins the step of its group, and one barrier follows.
    decode = [(step.first_node, step.last_node) for step in rounds[-1].events]
    assert decode[:2] == [("embed", "add"), ("attention", "attention")]
    assert decode[-1] == ("select", "head")
    assert rounds[0].events[-1].last_node == "gate", "no rows of logits, no head"


def test_a_device_records_runs_copies_and_waits(device_plan: Plan) -> None:
    rounds = record(device_plan)
    assert_whole(rounds)
    decode, chunk = rounds[-1].events, rounds[0].events
    assert {event.track for event in decode} == {"cpu", "cpu wait", "device"}
    assert [(e.first_node, e.last_node) for e in decode if e.track == "device"] == [
        ("norm2", "attention2")
    ]
    assert [e.first_node for e in decode if e.track == "cpu"] == ["embed", "gate"]
    copies = [event for event in chunk if event.track == "copy"]
    assert [UNIT_NAMES[copy.number] for copy in copies] == ["w1"]
    assert copies[0].end_ns - copies[0].begin_ns > 0.9 * 1024 / LINK_RATE * 1e9
    assert copies[0].first_node is None
    (wait,) = (event for event in chunk if event.track == "device wait")
    assert wait.number == copies[0].number and wait.end_ns >= copies[0].end_ns
    before = [e for e in chunk if e.track == "cpu" and e.begin_ns < wait.end_ns]
    assert before and all(wait.begin_ns >= e.end_ns for e in before), "it waits for the CPU as well"


def test_cancelled_rounds_leave_no_record(open_tiny: Callable[..., Plan]) -> None:
    plan = open_tiny(threads=2)
    gate = ctypes.CDLL(f"/proc/self/fd/{plan._library._file}")  # type: ignore[union-attr]
    with plan.session() as session:
        session.set_recording(True)
        session.prefill([1] * CHUNK)
        gate.tiny_hold_gate(1)

        def cancel() -> None:
            while not gate.tiny_gate_waiting():
                pass
            session.cancel()
            gate.tiny_hold_gate(0)

        helper = threading.Thread(target=cancel)
        helper.start()
        with pytest.raises(CancelledError):
            session.prefill([1] * CHUNK + [GATE_TOKEN] * CHUNK)
        helper.join()
        assert [(r.position, r.num_tokens) for r in session.take_rounds()] == [
            (0, CHUNK),
            (CHUNK, CHUNK),
        ]


def test_switching_off_drops_what_was_kept(open_tiny: Callable[..., Plan]) -> None:
    with open_tiny(threads=1).session() as session:
        session.set_recording(True)
        session.decode(1)
        session.set_recording(True)
        assert len(session.take_rounds()) == 1
        session.decode(1)
        session.set_recording(False)
        session.decode(1)
        assert session.take_rounds() == []
