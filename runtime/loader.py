"""Load a plan and run it: needs numpy and the plan, nothing of the compiler.

    plan = load("model.atsplan")
    for token in plan.generate(ids, max_new_tokens=128): ...

A `Plan` may be used from any thread; a `Session` by one at a time, `cancel` excepted.
"""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from atsc.compiler import plan as manifests
from atsc.compiler.check_plan import check_plan, read_file
from atsc.compiler.errors import PlanError, UsageError
from atsc.runtime import capi, tensors
from atsc.runtime.rounds import Change, Event, change_of, event_of
from atsc.runtime.session import Closing, F32Array, LogitRows, Session, TokenIds
from atsc.runtime.sizes import parse_size

if TYPE_CHECKING:
    from atsc.runtime.tokenizer import Tokenizer

Transfer = Literal["load-aware", "static", "none"]
Rounds = Literal["graph", "launches", "synchronous"]


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
    yield_gpu: bool = False,
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
        yield_gpu: while the GPU waits for the CPU, other programs may always have it. Else it spins
            beside a program that keeps it for long, if that makes load-aware rounds shorter.

    Warns:
        RuntimeWarning: less of the GPU than planned is in use; says why.

    Raises:
        PlanError: the plan is damaged, incomplete, or made for something else.
        UsageError: an option makes no sense for this plan.
        DeviceError: memory or threads are not to be had.
    """
    directory = Path(path)
    manifest = check_plan(directory, expected_sha256=expected_sha256)
    if vram is not None and not manifest.target.get("gpu"):
        raise UsageError(f"{directory} is a plan for the CPU alone; leave --vram (vram=) out")
    for name, number in (("threads", threads), ("sessions", sessions)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}: expected at least 1")
    if transfer not in capi.TRANSFERS:
        raise UsageError(f"transfer is {transfer!r}: expected one of {', '.join(capi.TRANSFERS)}")
    if rounds not in capi.ROUNDS:
        raise UsageError(f"rounds is {rounds!r}: expected one of {', '.join(capi.ROUNDS)}")
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
        yield_gpu=yield_gpu,
    )
    plan = Plan(directory, manifest, options)
    if plan.notice:
        warnings.warn(plan.notice, RuntimeWarning, stacklevel=2)
    return plan


def _vram_bytes(vram: int | str | None) -> int:
    """Bytes of a size; 0 for None."""
    if vram is None:
        return 0
    num_bytes = parse_size(vram)
    if num_bytes < 1:
        raise UsageError(f"vram is {vram}: expected at least 1 byte")
    return num_bytes


class Plan(Closing):
    """An open plan; `load` makes one."""

    def __init__(
        self, directory: Path, manifest: manifests.Manifest, options: capi.PlanOptions
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        name = str(directory / manifest.library)
        content = read_file(directory, manifest, manifest.library)
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


__all__ = [
    "F32Array",
    "LogitRows",
    "Plan",
    "Rounds",
    "Session",
    "TokenIds",
    "Transfer",
    "load",
]
