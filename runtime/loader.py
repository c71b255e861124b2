"""Load a plan and run it: needs numpy and the plan, nothing of the compiler.

    plan = load("model.atsplan")
    for token in plan.generate(ids, max_new_tokens=128): ...

A `Plan` may be used from any thread; a `Session` by one at a time, `cancel` excepted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from atsc.compiler import plan as manifests
from atsc.compiler.errors import AtscError, PlanError, UsageError
from atsc.runtime import capi, tensors
from atsc.runtime.rounds import Change, Event, Round, change_of, event_of, round_of

if TYPE_CHECKING:
    from atsc.runtime.tokenizer import Tokenizer

F32Array = NDArray[np.float32]
TokenIds = Sequence[int] | NDArray[np.integer[Any]]
LogitRows = Literal["last", "all", "none"] | Sequence[int] | NDArray[np.integer[Any]]
Transfer = Literal["load-aware", "static", "none"]
Rounds = Literal["graph", "launches", "synchronous"]
Waits = Literal["load-aware", "yield", "hold"]

_NAMED_ROWS = {
    "last": capi.LOGITS_LAST,
    "none": capi.LOGITS_NONE,
    "all": capi.LOGITS_ALL,
}


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    vram: int | str | None = None,
    verify: bool = False,
    mmap: bool = True,
    expected_sha256: str | None = None,
    sessions: int | None = None,
    strict: bool = False,
    device: bool | int = True,
    on_device: Sequence[bool] | None = None,
    virtual_device: capi.VirtualDevice | None = None,
    transfer: Transfer = "load-aware",
    drift_threshold: float = 0.15,
    reschedule_interval: float = 5.0,
    rounds: Rounds = "graph",
    waits: Waits = "load-aware",
) -> Plan:
    """Check a plan folder and open it. This runs native code from the folder.

    Args:
        path: the plan folder.
        threads: CPU threads; None takes one for each physical core that this process may use.
        vram: all that the plan may hold of the GPU's memory, in bytes or as "6G" (GiB; 6GB = 6e9);
            None takes what the plan was compiled for.
        verify: compare every unit of the weights with its checksum (reads all of them).
        mmap: map the weights; False reads them into memory, which always verifies them.
        expected_sha256: the hash that plan.json must have.
        sessions: sessions that may exist at once; None takes what the plan was compiled for.
        strict: fail where less of the GPU than planned is to be had, instead of warning.
        device: False runs everything on the CPU; a number chooses among several GPUs.
        on_device: for each unit of the plan whether it lives on the GPU, instead of the plan's own
            placement.
        virtual_device: how the virtual device behaves, for plans compiled for it.
        transfer: which of the CPU's weights a round copies to the GPU to run there: "load-aware"
            follows the speeds that rounds show, "static" chooses once from those that the plan was
            compiled with, "none" copies in long prefill rounds alone.
        drift_threshold: choose again when speeds are off by more than this share.
        reschedule_interval: but not sooner than after the time of so many recent rounds.
        rounds: how a round runs on the GPU: short ones as one graph, "launches", or, to compare
            with, "synchronous": all on one stream, with a wait at each hand-off.
        waits: whether other programs may have the GPU while a decode round waits for the CPU:
            "yield" always, "hold" never (it saves some microseconds a wait, too), "load-aware"
            until they keep it for so long that rounds get slower (with that transfer alone).

    Warns:
        RuntimeWarning: less of the GPU than planned is in use; says why.

    Raises:
        PlanError: the plan is damaged, incomplete, or made for something else.
        UsageError: an option makes no sense for this plan.
        DeviceError: memory or threads are not to be had.
    """
    directory = Path(path)
    manifest = manifests.check(directory, expected_sha256=expected_sha256)
    if vram is not None and not manifest.target.get("gpu"):
        raise UsageError(f"vram: {directory} is a plan for the CPU alone; leave vram out")
    for name, number in (("threads", threads), ("sessions", sessions)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}: expected at least 1")
    if transfer not in capi.TRANSFERS:
        raise UsageError(f"transfer is {transfer!r}: expected one of {', '.join(capi.TRANSFERS)}")
    if rounds not in capi.ROUNDS:
        raise UsageError(f"rounds is {rounds!r}: expected one of {', '.join(capi.ROUNDS)}")
    if waits not in capi.WAITS:
        raise UsageError(f"waits is {waits!r}: expected one of {', '.join(capi.WAITS)}")
    for name, amount in (
        ("drift_threshold", drift_threshold),
        ("reschedule_interval", reschedule_interval),
    ):
        if not 0 < amount < float("inf"):
            raise UsageError(f"{name} is {amount}: expected a number above 0")
    options = capi.PlanOptions(
        weights_path=os.fsencode(directory / manifest.weights),
        num_threads=threads or 0,
        weights_mode=capi.WEIGHTS_MAP if mmap else capi.WEIGHTS_READ,
        verify=verify,
        max_sessions=sessions or manifest.options.sessions,
        vram_bytes=_vram_bytes(vram),
        no_device=device is False,
        device_ordinal=int(device) if device is not True else 0,
        strict=strict,
        num_units=len(on_device) if on_device is not None else 0,
        on_device=bytes(map(int, on_device)) if on_device is not None else None,
        virtual_device=ctypes.pointer(virtual_device) if virtual_device is not None else None,
        transfer=capi.TRANSFERS.index(transfer),
        drift_threshold=drift_threshold,
        reschedule_interval=reschedule_interval,
        rounds=capi.ROUNDS.index(rounds),
        waits=capi.WAITS.index(waits),
    )
    plan = Plan(directory, manifest, options)
    if plan.notice:
        warnings.warn(plan.notice, RuntimeWarning, stacklevel=2)
    return plan


def _vram_bytes(vram: int | str | None) -> int:
    """Bytes of a size; 0 for None."""
    if vram is None:
        return 0
    if isinstance(vram, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(i?B|)", vram.strip(), re.IGNORECASE)
        if found is None:
            raise UsageError(f"vram is {vram!r}: expected a size, as 6G, 6GB or 800M")
        number, prefix, suffix = found.groups()
        base = 1000 if suffix.upper() == "B" and prefix else 1024
        vram = int(float(number) * base ** " KMGT".index(prefix.upper() or " "))
    if vram < 1:
        raise UsageError(f"vram is {vram}: expected at least 1 byte")
    return vram


class _Closing:
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


class Plan(_Closing):
    """An open plan; `load` makes one."""

    def __init__(
        self, directory: Path, manifest: manifests.Manifest, options: capi.PlanOptions
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        name = str(directory / manifest.library)
        content = manifests.read_file(directory, manifest, manifest.library)
        self._library: capi.Library | None = capi.Library(content, name)
        self._handle = capi.Handle()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._tokenizer: Tokenizer | None = None
        try:
            self.call("plan_open", ctypes.byref(options), ctypes.byref(self._handle))
            info = capi.PlanInfo()
            self.call("plan_get_info", self._handle, ctypes.byref(info))
            if info.plan_id.decode() != manifest.plan_id:
                raise PlanError(f"{name}: belongs to another plan; copy the plan again")
        except BaseException:
            self.close()
            raise
        self.model_name: str = info.model_name.decode("utf-8", "replace")
        self.vocab_size: int = info.vocab_size
        self.context_length: int = info.context_length
        """Most tokens of a session."""
        self.chunk: int = info.chunk
        """Tokens of a prefill round."""
        self.bos_token_id: int | None = info.bos_token_id if info.bos_token_id >= 0 else None
        self.eos_token_ids: tuple[int, ...] = tuple(info.eos_token_ids[: info.num_eos_token_ids])
        self.num_threads: int = info.num_threads
        self.isa: str = info.isa.decode()
        """Level of the kernels in use."""
        self.cache_bytes: int = info.cache_bytes
        """KV caches of one session at the full context."""
        self.device_name: str | None = (info.device_name or b"").decode("utf-8", "replace") or None
        """The GPU in use; None: everything runs on the CPU."""
        self.num_units: int = info.num_units
        self.num_placements: int = info.num_placements
        self.placement: int | None = info.placement if info.placement >= 0 else None
        """Which of the plan's placements is in use, from the one that needs least memory."""
        self.predicted_device_bytes: int = info.predicted_device_bytes
        """GPU memory that the placement needs, head-room included."""
        self.notice: str = info.notice.decode("utf-8", "replace")
        """One line where less of the GPU than planned is in use, else empty."""

    @property
    def device_bytes(self) -> int:
        """GPU memory that the plan holds now."""
        info = capi.PlanInfo()
        self.call("plan_get_info", self._handle, ctypes.byref(info))
        return int(info.device_bytes)

    def profile_unit(self, unit: int, on_device: bool, rows: int, position: int) -> int:
        """Nanoseconds of a unit's nodes on one side, with cold weights.

        Args:
            unit: index of the plan's unit.
            on_device: there, else on the CPU.
            rows: tokens of the round.
            position: tokens before it.

        Raises:
            UsageError: no such unit or round, or the plan uses its device already.
        """
        profile = capi.UnitProfile(unit=unit, on_device=on_device, rows=rows, position=position)
        self.call("plan_profile_unit", self._handle, ctypes.byref(profile))
        return int(profile.ns)

    def profile_link(self) -> dict[str, float]:
        """Rates and latencies between CPU and GPU: the fields of atsc_link_profile.

        Raises:
            UsageError: the plan has no device, or uses it already.
        """
        profile = capi.LinkProfile()
        self.call("plan_profile_link", self._handle, ctypes.byref(profile))
        names = (name for name, *_ in profile._fields_ if name != "struct_size")
        return {name: getattr(profile, name) for name in names}

    def events(self) -> list[Event]:
        """What the latest round did and when, if a GPU took part in it; else nothing."""
        count = ctypes.c_int64()
        self.call("plan_get_events", self._handle, None, 0, ctypes.byref(count))
        found = (capi.Event * count.value)()
        self.call("plan_get_events", self._handle, found, len(found), ctypes.byref(count))
        return [event_of(event) for event in found]

    def take_changes(self) -> list[Change]:
        """New choices of promotions since the last call, oldest first; any thread."""
        changes: list[Change] = []
        found = capi.Change()
        while True:
            self.call("plan_take_change", self._handle, ctypes.byref(found))
            if not found.when_ns:
                return changes
            changes.append(change_of(found))

    def script_device(self, what: str, value: float = 0) -> None:
        """Change how the virtual device behaves (atsc_api.plan_script_device); any thread."""
        self.call("plan_script_device", self._handle, what.encode(), float(value))

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the C interface by name (include/atsc.h)."""
        if self._library is None:
            raise UsageError("the plan is closed")
        self._library.call(function, *arguments)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; needs the package `tokenizers` (pip install "atsc[run]").

        Raises:
            PlanError: the plan has no tokenizer.
        """
        if self._tokenizer is None:
            from atsc.runtime.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self.directory, self.manifest)
        return self._tokenizer

    def session(self) -> Session:
        """An empty session.

        Raises:
            UsageError: as many exist as the plan was opened for, or it is no language model.
        """
        if self.manifest.graph is not None:
            raise UsageError(
                f"{self.model_name} is no language model: call run() with its inputs, "
                f"{', '.join(tensor.name for tensor in self.manifest.graph.inputs)}"
            )
        session = Session(self)
        self._sessions.add(session)
        return session

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Run a model that is no language model: named arrays in, named arrays out.

        Args:
            inputs: an array for each input, of the very element type that the model has.
            outputs: the names wanted; None takes all.

        Raises:
            UsageError: a name, type, rank or size that does not fit; or a language model.
        """
        if self.manifest.graph is None:
            raise UsageError(f"{self.model_name} is a language model: use generate() or session()")
        return tensors.run(self.call, self._handle, self.manifest.graph, inputs, outputs)

    def forward(self, ids: TokenIds) -> F32Array:
        """Logits float32 [len(ids), vocab_size] after each of the tokens, in a new session."""
        with self.session() as session:
            return session.prefill(ids, logits="all")

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
        """Tokens that follow `ids`, in a new session; see `Session.generate`."""
        with self.session() as session:
            yield from session.generate(
                ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                stop_token_ids=stop_token_ids,
            )

    def close(self) -> None:
        """Free everything, sessions too. Closing twice is fine."""
        if self._library is None:
            return
        for session in list(self._sessions):
            session.close()
        if self._handle:
            self.call("plan_close", self._handle)
            self._handle = capi.Handle()
        library, self._library = self._library, None
        library.close()


class Session(_Closing):
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
            try:
                self._call("session_prefill", ctypes.byref(call))
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        done = threading.Event()  # an interrupted Thread.join gives the thread up
        threading.Thread(target=work, name="atsc prefill").start()
        try:
            done.wait()
        except BaseException:
            self.cancel()
            done.wait()
            self.rewind(self.position)  # takes the cancel back if it came too late
            raise
        if failures:
            raise failures[0]

    def decode(self, token: int) -> F32Array:
        """Append one token; the logits after it, float32 [vocab_size]. Raises as `prefill`."""
        out = np.empty(self.plan.vocab_size, np.float32)
        (checked,) = _int_array((token,), np.int32, "token")
        self._call("session_decode", int(checked), out.ctypes.data_as(capi.FloatPointer))
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
