"""Scheduling of nodes, and what a session can do, on the hand-written plan."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_model import (
    CHUNK,
    CONTEXT,
    EOS,
    GATE_TOKEN,
    MAX_LOGIT_ROWS,
    RING,
    VOCAB,
    WINDOW,
    make_weights,
    reference,
)

from atsc.compiler.errors import CancelledError, PlanError, UsageError
from atsc.runtime import capi
from atsc.runtime.loader import Plan, Session, load

pytestmark = pytest.mark.toolchain

OpenTiny = Callable[..., Plan]
IDS = [int(token) for token in np.random.default_rng(0).integers(0, EOS, CONTEXT)]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_logits_equal_the_reference(open_tiny: OpenTiny, threads: int) -> None:
    """Eight threads are more than CI has cores."""
    plan = open_tiny(threads=threads)
    assert plan.num_threads == threads
    expected = reference(IDS, make_weights())
    np.testing.assert_allclose(plan.forward(IDS), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_cut_into_rounds_gives_the_same_bits(open_tiny: OpenTiny, threads: int) -> None:
    """Few rows and many, private values and shared: chunks of 1, 8 (few), 9, 12 and 12 + 1."""
    plan = open_tiny(threads=threads)
    expected = plan.forward(IDS)
    with plan.session() as session:
        decoded = np.stack([session.decode(token) for token in IDS])
        np.testing.assert_array_equal(decoded, expected)
        for cut in (8, 9, CHUNK, CHUNK + 1):
            session.rewind(0)
            parts = [
                session.prefill(IDS[at : at + cut], logits="all") for at in range(0, CONTEXT, cut)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_logits_of_chosen_rows(open_tiny: OpenTiny) -> None:
    """Rows of logits are few or many apart from the round's tokens."""
    plan = open_tiny(threads=2)
    expected = plan.forward(IDS)
    with plan.session() as session:
        for rows in ([0], [3, 40, 95], list(range(10, 50)), []):
            session.rewind(0)
            np.testing.assert_array_equal(session.prefill(IDS, logits=rows), expected[rows])
        session.rewind(0)
        np.testing.assert_array_equal(session.prefill(IDS, logits="last"), expected[-1])
        session.rewind(0)
        assert session.prefill(IDS, logits="none").shape == (0, VOCAB)
        session.rewind(90)
        np.testing.assert_array_equal(session.decode(IDS[90]), expected[90])


def test_more_rows_than_a_round_may_have_split_it(open_tiny: OpenTiny) -> None:
    assert CHUNK > MAX_LOGIT_ROWS
    plan = open_tiny(threads=2)
    expected = plan.forward(IDS[:CHUNK])
    assert expected.shape == (CHUNK, VOCAB)
    with plan.session() as session:
        rows = list(range(1, CHUNK))
        got = session.prefill(IDS[:CHUNK], logits=rows)
        np.testing.assert_array_equal(got, expected[rows])
        assert session.position == CHUNK


def test_rewind_to_a_prefix(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=2)
    other = [*IDS[:20], 5, 6, 7]
    expected = plan.forward(other)
    with plan.session() as session:
        session.prefill(IDS[:24])
        session.rewind(20)
        assert session.position == 20
        np.testing.assert_array_equal(session.prefill(other[20:], logits="all"), expected[20:])


def test_rewind_further_than_a_ring_holds_is_refused(open_tiny: OpenTiny) -> None:
    """After `RING + 25` tokens the ring holds those from 25 on; a window needs 3 before its row."""
    plan = open_tiny(threads=1)
    written = RING + 25
    with plan.session() as session:
        session.prefill(IDS[:written])
        with pytest.raises(UsageError, match=r"window of 4 .* from 25 on; rewind to 0"):
            session.rewind(25 + WINDOW - 2)
        session.rewind(25 + WINDOW - 1)
        at = session.position
        expected = reference(IDS, make_weights())
        np.testing.assert_allclose(session.decode(IDS[at]), expected[at], rtol=1e-4, atol=1e-3)
        with pytest.raises(UsageError, match="rewind to 0"):
            session.rewind(25 + WINDOW - 2)
        session.rewind(0)
        np.testing.assert_allclose(session.decode(IDS[0]), expected[0], rtol=1e-4, atol=1e-3)
        session.prefill(IDS[1:10])
        session.rewind(5)
        np.testing.assert_allclose(session.decode(IDS[5]), expected[5], rtol=1e-4, atol=1e-3)


def test_the_context_ends_before_any_work(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=1)
    with plan.session() as session:
        with pytest.raises(UsageError, match=f"97 tokens more .* holds {CONTEXT} and 0"):
            session.prefill([1] * (CONTEXT + 1))
        assert session.position == 0
        session.prefill(IDS)
        with pytest.raises(UsageError, match="1 tokens more do not fit"):
            session.decode(1)
        assert session.position == CONTEXT


def test_bad_arguments_are_named(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=1)
    with plan.session() as session:
        for ids, logits, message in (
            ([], "last", "num_tokens must be at least 1"),
            ([1, VOCAB], "last", "token 32 is not in the vocabulary of 32"),
            ([-1], "last", "token -1 is not"),
            ([1 << 40], "last", "ids: a number is beyond 32 bits"),
            ([1.5], "last", "ids: expected whole numbers"),
            ([1, 2], [1, 1], "must ascend within the 2 tokens; entry 1 is 1"),
            ([1, 2], [2], "entry 0 is 2"),
            ([1], "some", "logits is 'some': expected \"last\""),
        ):
            with pytest.raises(UsageError, match=message):
                session.prefill(ids, logits=logits)  # type: ignore[arg-type]
        assert session.position == 0
        with pytest.raises(UsageError, match="no logits to choose from"):
            session._call("session_next", ctypes.byref(capi.Next()))
        with pytest.raises(UsageError, match="rewind to 1: the session holds 0"):
            session.rewind(1)
        call = capi.Prefill(batch=2)
        with pytest.raises(UsageError, match=r"prefill\.batch is 2: .* batch 1 alone"):
            session._call("session_prefill", ctypes.byref(call))
        call.struct_size = 0
        with pytest.raises(UsageError, match=r"prefill\.struct_size is 0"):
            session._call("session_prefill", ctypes.byref(call))


def test_a_shorter_struct_means_defaults(open_tiny: OpenTiny) -> None:
    """What an application built against an older header passes."""
    plan = open_tiny(threads=1)
    tokens = (ctypes.c_int32 * 3)(1, 2, 3)
    call = capi.Prefill(tokens=tokens, num_tokens=3, batch=7, logits=99)
    call.struct_size = capi.Prefill.batch.offset
    with plan.session() as session:
        session._call("session_prefill", ctypes.byref(call))
        assert session.position == 3


def test_logits_can_be_borrowed(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=1)
    expected = plan.forward(IDS[:5])
    rows, logits = ctypes.c_int64(), capi.FloatPointer()
    with plan.session() as session:
        session.prefill(IDS[:5], logits=[1, 4])
        session._call("session_logits", ctypes.byref(logits), ctypes.byref(rows))
        borrowed = np.ctypeslib.as_array(logits, (rows.value, VOCAB))
        np.testing.assert_array_equal(borrowed, expected[[1, 4]])


def test_logits_that_are_not_copied_stay_in_the_runtime(open_tiny: OpenTiny) -> None:
    plan = open_tiny()
    expected = plan.forward([1, 2, 3])[-1]
    with plan.session() as session:
        session.prefill([1, 2])
        assert session.decode(3, copy=False).size == 0
        rows, logits = ctypes.c_int64(), capi.FloatPointer()
        session._call("session_logits", ctypes.byref(logits), ctypes.byref(rows))
        assert rows.value == 1
        assert np.array_equal(np.ctypeslib.as_array(logits, expected.shape), expected)


def test_sessions_are_counted_and_apart(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=2, sessions=2)
    expected = plan.forward(IDS[:30])
    with plan.session() as one, plan.session() as two:
        with pytest.raises(UsageError, match="the plan's 2 sessions exist already"):
            plan.session()
        for at in range(30):
            np.testing.assert_array_equal(one.decode(IDS[at]), expected[at])
            two.decode(IDS[50 + at])
    plan.session().close()


def test_sessions_in_parallel_threads(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=2, sessions=3)
    expected = plan.forward(IDS[:40])
    results: dict[int, np.ndarray] = {}

    def work(index: int, session: Session) -> None:
        results[index] = np.stack([session.decode(token) for token in IDS[:40]])

    sessions = [plan.session() for _ in range(3)]
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results.values():
        np.testing.assert_array_equal(result, expected)


def test_cancel_ends_a_round_at_the_next_node(open_tiny: OpenTiny) -> None:
    """The gate node waits until cancel is called; the head after it must not run."""
    plan = open_tiny(threads=2)
    assert plan._library is not None
    hooks = plan._library._library
    expected = plan.forward(IDS[:20])
    caught: list[BaseException] = []
    with plan.session() as session:
        session.prefill(IDS[:18])
        heads_before = hooks.tiny_heads_run()
        waiting_before = hooks.tiny_gate_waiting()
        hooks.tiny_hold_gate(1)

        def work() -> None:
            try:
                session.decode(GATE_TOKEN)
            except CancelledError as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        deadline = time.monotonic() + 20
        while hooks.tiny_gate_waiting() == waiting_before and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(UsageError, match="another thread is using this session"):
            session.decode(1)
        session.cancel()
        hooks.tiny_hold_gate(0)
        thread.join()
        assert len(caught) == 1 and "cancelled at token 18" in str(caught[0])
        assert hooks.tiny_heads_run() == heads_before
        assert session.position == 18
        np.testing.assert_array_equal(session.decode(IDS[18]), expected[18])


def test_cancel_before_a_call_ends_that_call_alone(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=1)
    with plan.session() as session:
        session.cancel()
        with pytest.raises(CancelledError):
            session.prefill(IDS)
        assert session.position == 0
        session.prefill(IDS[:5])
        session.cancel()
        session.rewind(5)
        session.decode(1)
        assert session.position == 6


def test_ctrl_c_ends_a_long_prefill(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round waits at the gate until the interrupt has become a cancel.

    Without logits the gate is its last node: that round is complete, the third never begins.
    """
    plan = open_tiny(threads=2)
    assert plan._library is not None
    hooks = plan._library._library
    tokens = [*IDS[:CHUNK], GATE_TOKEN, *IDS[: 2 * CHUNK]]
    expected = plan.forward(tokens)
    waiting_before = hooks.tiny_gate_waiting()

    def interrupt() -> None:
        while hooks.tiny_gate_waiting() == waiting_before:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        cancelled.wait(20)
        hooks.tiny_hold_gate(0)

    cancelled = threading.Event()
    with plan.session() as session:
        cancel = session.cancel
        monkeypatch.setattr(session, "cancel", lambda: (cancel(), cancelled.set()))
        hooks.tiny_hold_gate(1)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            session.prefill(tokens)
        thread.join()
        assert session.position == 2 * CHUNK
        np.testing.assert_array_equal(session.decode(tokens[2 * CHUNK]), expected[2 * CHUNK])


@pytest.mark.parametrize("has_begun", [False, True])
def test_ctrl_c_while_a_long_prefill_begins(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """On a busy machine its thread takes a while to start. No call is left behind."""
    plan = open_tiny(threads=2)
    assert plan._library is not None
    hooks = plan._library._library
    tokens = [*IDS[:CHUNK], GATE_TOKEN, *IDS[: 2 * CHUNK]]
    expected = plan.forward(tokens)
    waiting_before = hooks.tiny_gate_waiting()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if has_begun:
            start(thread)
            while hooks.tiny_gate_waiting() == waiting_before:
                time.sleep(0.001)
        raise KeyboardInterrupt

    with plan.session() as session:
        cancel = session.cancel
        monkeypatch.setattr(session, "cancel", lambda: (cancel(), hooks.tiny_hold_gate(0)))
        hooks.tiny_hold_gate(1)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    session.prefill(tokens)
            assert session.position in ((CHUNK, 2 * CHUNK) if has_begun else (0,))
        finally:
            hooks.tiny_hold_gate(0)
        session.rewind(0)
        np.testing.assert_array_equal(session.prefill(tokens), expected[-1])


@pytest.mark.parametrize("tokens", [10, 60])
def test_saved_and_restored(open_tiny: OpenTiny, tmp_path: Path, tokens: int) -> None:
    """With a ring that is partly filled, and one that has gone round."""
    plan = open_tiny(threads=2, sessions=2)
    expected = plan.forward(IDS)
    path = tmp_path / "säved session"
    with plan.session() as session:
        session.prefill(IDS[:tokens])
        session.save(path)
        with plan.session() as other:
            other.prefill([1, 2, 3])
            other.restore(path)
            assert other.position == tokens
            got = [other.decode(token) for token in IDS[tokens:]]
            np.testing.assert_array_equal(np.stack(got), expected[tokens:])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_generation_goes_on_after_restoring(open_tiny: OpenTiny, tmp_path: Path) -> None:
    plan = open_tiny(threads=1, sessions=2)
    sampling = capi.Sampling(temperature=5.0, has_seed=1, seed=3, ignore_eos=1)

    def take(session: Session, count: int) -> list[int]:
        chosen = capi.Next()
        tokens = []
        for _ in range(count):
            session._call("session_next", ctypes.byref(chosen))
            tokens.append(int(chosen.token))
        return tokens

    with plan.session() as session, plan.session() as other:
        session.prefill(IDS[:5])
        session._call("session_set_sampling", ctypes.byref(sampling))
        take(session, 4)
        session.save(tmp_path / "state")
        other.restore(tmp_path / "state")
        assert take(other, 20) == take(session, 20)


def test_damaged_saved_sessions_are_refused(open_tiny: OpenTiny, tmp_path: Path) -> None:
    plan = open_tiny(threads=1)
    path = tmp_path / "state"
    with plan.session() as session:
        session.prefill(IDS[:20])
        session.save(path)
        whole = path.read_bytes()
        for content, message in (
            (whole[:-1], "damaged"),
            (whole[:50], "cut short"),
            (b"x" * len(whole), "no saved session"),
            (whole[:300] + bytes([whole[300] ^ 1]) + whole[301:], "damaged"),
            (whole[:16] + b"other" + whole[21:], "saved from another plan"),
        ):
            path.write_bytes(content)
            with pytest.raises(PlanError, match=message):
                session.restore(path)
        assert session.position == 20
        expected = reference(IDS, make_weights())
        np.testing.assert_allclose(session.decode(IDS[20]), expected[20], rtol=1e-4, atol=1e-3)
        with pytest.raises(Exception, match="No such file"):
            session.save(tmp_path / "no folder" / "state")


def test_closing(tiny_folder: Path) -> None:
    plan = load(tiny_folder, threads=2)
    session = plan.session()
    plan.close()
    plan.close()
    with pytest.raises(UsageError, match="closed"):
        session.decode(1)
    with pytest.raises(UsageError, match="closed"):
        plan.session()
