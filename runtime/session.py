"""A conversation on an open plan: its KV caches, its position, its sampler.

One thread at a time may use a `Session`, `cancel` excepted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.errors import AtscError, UsageError
from atsc.runtime import capi
from atsc.runtime.rounds import Round, round_of

if TYPE_CHECKING:
    from atsc.runtime.loader import Plan

F32Array = NDArray[np.float32]
TokenIds = Sequence[int] | NDArray[np.integer[Any]]
LogitRows = Literal["last", "all", "none"] | Sequence[int] | NDArray[np.integer[Any]]

_NAMED_ROWS = {
    "last": capi.LOGITS_LAST,
    "none": capi.LOGITS_NONE,
    "all": capi.LOGITS_ALL,
}


class Closing:
    """A context manager that closes itself, at the latest when it is collected."""

    def close(self) -> None:
        """Free what is held. Closing twice is fine."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AtscError, AttributeError):
            self.close()


class Session(Closing):
    """One conversation: the KV caches and how many tokens they hold; `Plan.session` makes one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._handle = capi.Handle()
        plan.call("session_create", plan._handle, ctypes.byref(self._handle))

    def _call(self, function: str, *arguments: Any) -> None:
        if not self._handle:
            raise UsageError("the session is closed")
        self.plan.call(function, self._handle, *arguments)

    @property
    def position(self) -> int:
        """Tokens that the session holds."""
        position = ctypes.c_int64()
        self._call("session_get_position", ctypes.byref(position))
        return position.value

    def prefill(self, ids: TokenIds, logits: LogitRows = "last") -> F32Array:
        """Append tokens.

        Args:
            ids: at least one token.
            logits: the rows wanted: "last", "all", "none", or ascending indices into `ids`.

        Returns:
            float32: "last" [vocab_size], otherwise [rows, vocab_size].

        Raises:
            UsageError: a token, row or length that does not fit; nothing was done.
            CancelledError: `cancel` was called; the rounds before it are kept. Ctrl-C does the
                same, and raises KeyboardInterrupt.
        """
        tokens = _int_array(ids, np.int32, "ids")
        rows = _int_array(() if isinstance(logits, str) else logits, np.int64, "logits")
        if isinstance(logits, str) and logits not in _NAMED_ROWS:
            raise UsageError(f'logits is {logits!r}: expected "last", "all", "none" or row numbers')
        counts = {"last": 1, "none": 0, "all": len(tokens)}
        count = counts[logits] if isinstance(logits, str) else len(rows)
        out = np.empty((count, self.plan.vocab_size), np.float32)
        call = capi.Prefill(
            tokens=tokens.ctypes.data_as(capi.Int32Pointer),
            num_tokens=len(tokens),
            logits=_NAMED_ROWS[logits] if isinstance(logits, str) else capi.LOGITS_ROWS,
            rows=rows.ctypes.data_as(capi.Int64Pointer),
            num_rows=len(rows),
            out=out.ctypes.data_as(capi.FloatPointer),
            out_floats=out.size,
        )
        self._prefill(call)
        return out[0] if isinstance(logits, str) and logits == "last" else out

    def _prefill(self, call: capi.Prefill) -> None:
        """Native calls hold up Ctrl-C: those of many rounds get a thread of their own."""
        if call.num_tokens <= self.plan.chunk:
            self._call("session_prefill", ctypes.byref(call))
            return
        failures: list[BaseException] = []

        def work() -> None:
            if not begins.acquire(blocking=False):
                return
            try:
                self._call("session_prefill", ctypes.byref(call))
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        begins = threading.Lock()  # for the first to take it: the thread, or a Ctrl-C before it
        done = threading.Event()  # an interrupted Thread.join gives the thread up
        try:
            threading.Thread(target=work, name="atsc prefill").start()
            done.wait()
        except BaseException:
            if not begins.acquire(blocking=False):
                self.cancel()
                done.wait()
                self.rewind(self.position)  # takes the cancel back if it came too late
            raise
        if failures:
            raise failures[0]

    def decode(self, token: int, *, copy: bool = True) -> F32Array:
        """Append one token; the logits after it, float32 [vocab_size]. Raises as `prefill`.

        Without `copy` they stay in the runtime, where `generate` would sample from them, and an
        empty array is returned: 0.6 MB less to write for 152,000 tokens.
        """
        out = np.empty(self.plan.vocab_size if copy else 0, np.float32)
        (checked,) = _int_array((token,), np.int32, "token")
        target = out.ctypes.data_as(capi.FloatPointer) if copy else None
        self._call("session_decode", int(checked), target)
        return out

    def generate(
        self,
        ids: TokenIds,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Iterator[int]:
        """Append `ids`, then choose tokens one by one; sampling as in src/sampler.h.

        Ends after `max_new_tokens`, at a full context, or at an end-of-text or stop token, which
        is not yielded. The last token chosen is not in the session yet.

        Args:
            ids: the tokens to append; at least one.
            max_new_tokens: most tokens to yield.
            temperature: 0 takes the most likely token.
            top_k: choose among the `top_k` most likely tokens; 0: all.
            top_p: choose among the fewest tokens that have this probability together.
            min_p: drop tokens less likely than this times the most likely one.
            seed: the same seed gives the same tokens; None: unpredictable.
            stop_token_ids: tokens that end the text besides the model's own.
        """
        stops = _int_array(stop_token_ids, np.int32, "stop_token_ids")
        sampling = capi.Sampling(
            temperature=temperature,
            top_k=_int_array((top_k,), np.int32, "top_k")[0],
            top_p=top_p,
            min_p=min_p,
            has_seed=seed is not None,
            seed=(seed or 0) & (2**64 - 1),
            stop_token_ids=stops.ctypes.data_as(capi.Int32Pointer),
            num_stop_token_ids=len(stops),
        )
        self._call("session_set_sampling", ctypes.byref(sampling))
        tokens = _int_array(ids, np.int32, "ids")
        call = capi.Prefill(tokens=tokens.ctypes.data_as(capi.Int32Pointer), num_tokens=len(tokens))
        self._prefill(call)
        chosen = capi.Next()
        for _ in range(max_new_tokens):
            self._call("session_next", ctypes.byref(chosen))
            if chosen.finish == capi.FINISH_STOP:
                return
            yield int(chosen.token)
            if chosen.finish == capi.FINISH_CONTEXT:
                return

    def rewind(self, position: int) -> None:
        """Keep the first `position` tokens.

        Raises:
            UsageError: further back than a layer with an attention window remembers.
        """
        self._call("session_rewind", int(position))

    def cancel(self) -> None:
        """End the present call, or else the next one, with CancelledError. Any thread."""
        self._call("session_cancel")

    def set_recording(self, on: bool) -> None:
        """Keep a record of every round from now on, for `take_rounds`; off drops all of them."""
        self._call("session_set_recording", int(on))

    def take_rounds(self) -> list[Round]:
        """The records since the last call, oldest first; of rounds that ended, not cancelled ones.

        They take memory until they are taken: some kilobytes a round.
        """
        rounds: list[Round] = []
        found = capi.Round()
        while True:
            self._call("session_take_round", ctypes.byref(found))
            if not found.num_tokens:
                return rounds
            rounds.append(round_of(found))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session's state to a file, which appears whole or not at all."""
        self._call("session_save", os.fsencode(path))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Replace the session's state by a saved one.

        Raises:
            PlanError: damaged, or saved from another plan; the session is unchanged.
        """
        self._call("session_restore", os.fsencode(path))

    def close(self) -> None:
        """Free the caches. Closing twice is fine."""
        if self._handle and self.plan._library is not None:
            self._call("session_destroy")
        self._handle = capi.Handle()


def _int_array(values: TokenIds, dtype: type, name: str) -> NDArray[Any]:
    """A contiguous one-dimensional array of integers that fit `dtype`."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{name}: expected whole numbers in one dimension")
    limits = np.iinfo(dtype)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise UsageError(f"{name}: a number is beyond {limits.bits} bits")
    return np.ascontiguousarray(array, dtype)
