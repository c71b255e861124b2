"""Traces of what rounds did: `--trace FILE` of `atsc run` and `atsc bench`.

The file has the Chrome trace format, JSON that Perfetto (and chrome://tracing) opens. Its tracks
are the rounds, CPU, GPU and copy engine; times are microseconds since the first round began. It is
written beside its final name and moved there at the end, so it is whole or absent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from atsc.compiler.errors import UsageError

if TYPE_CHECKING:
    from atsc.runtime.loader import Plan, Session
    from atsc.runtime.rounds import Event, Round

TRACKS = ("rounds", "CPU", "GPU", "copy engine")
_TRACK_OF = {"cpu": 1, "cpu wait": 1, "device": 2, "device wait": 2, "copy": 3}
LEAST_WAIT_NS = 1000
"""Shorter waits are the time that it takes to see that there is none."""

Row = dict[str, Any]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Declare `--trace`."""
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what every round did and when, for Perfetto (Chrome trace format)",
    )


@contextlib.contextmanager
def tracing(path: Path | None) -> Iterator[Trace | None]:
    """The trace to write, if any; a failure of what is traced leaves no file, Ctrl-C what there is.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    if path.is_dir():
        raise UsageError(f"--trace {path}: a folder; give the name of a file")
    with _failures_of(path):
        descriptor, name = tempfile.mkstemp(".part", f".{path.name}.", path.parent)
    temporary = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            trace = Trace(file, path)
            interrupt = None
            try:
                yield trace
            except KeyboardInterrupt as error:
                interrupt = error
            trace.end()
        with _failures_of(path):
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # such files begin as the user's alone
            temporary.replace(path)
        if interrupt:
            raise interrupt
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _failures_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--trace {path}: cannot be written ({error.strerror}); choose a folder that exists, "
            "may be written to and has room"
        ) from None


class Trace:
    """A trace that grows round by round."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._plan: Plan | None = None
        self._units: dict[str, str] = {}
        """Of each node."""
        self._origin_ns: int | None = None
        self._before = '{"displayTimeUnit": "ms", "traceEvents": [\n'

    def watch(self, plan: Plan, session: Session) -> None:
        """Record the session's rounds from now on."""
        if self._plan is None:
            self._plan = plan
            self._units = {node: unit.name for unit in plan.manifest.units for node in unit.nodes}
            self._write(_header(plan))
        session.set_recording(True)

    def collect(self, session: Session, call: str | None = None) -> None:
        """Write the rounds since the last time; `call` says what they were for."""
        for found in session.take_rounds():
            if self._origin_ns is None:
                self._origin_ns = found.begin_ns
            self._write(self._rows(found, call))

    def end(self) -> None:
        """Nothing comes after this."""
        with _failures_of(self._path):
            self._file.write("\n]}\n")
            self._file.flush()

    def _write(self, rows: list[Row]) -> None:
        lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
        with _failures_of(self._path):
            self._file.write(self._before + ",\n".join(lines))
        self._before = ",\n"

    def _rows(self, found: Round, call: str | None) -> list[Row]:
        name = "decode" if found.num_tokens == 1 else f"prefill {found.num_tokens} tokens"
        arguments: Row = {
            "rows": found.num_tokens,
            "position": found.position,
            "logit_rows": found.num_logit_rows,
        }
        if call:
            arguments["call"] = call
        exposed = {
            event.number: (event.end_ns - event.begin_ns) / 1e3
            for event in found.events
            if event.track == "device wait"
        }
        rows = [self._row(name, 0, "round", found.begin_ns, found.end_ns, arguments)]
        for event in found.events:
            is_wait = event.track in ("cpu wait", "device wait")
            if is_wait and event.end_ns - event.begin_ns < LEAST_WAIT_NS:
                continue
            title, details = self._describe(event, exposed)
            track = _TRACK_OF[event.track]
            rows.append(self._row(title, track, event.track, event.begin_ns, event.end_ns, details))
        return rows

    def _describe(self, event: Event, exposed: dict[int, float]) -> tuple[str, Row]:
        """Its name and arguments."""
        assert self._plan is not None
        if event.track == "cpu wait":
            return "waits for the GPU", {}
        if event.track in ("copy", "device wait"):
            unit = self._plan.manifest.units[event.number]
            if event.track == "device wait":
                return f"waits for {unit.name}", {"unit": unit.name}
            details = {"bytes": unit.bytes, "exposed_wait_us": exposed.get(event.number, 0.0)}
            return unit.name, details
        first, last = event.first_node or "", event.last_node or ""
        units = [self._units.get(node, node) for node in (first, last)]
        title = units[0] if units[0] == units[1] else f"{units[0]} … {units[1]}"
        return title, {"first_node": first, "last_node": last}

    def _row(
        self, name: str, track: int, kind: str, begin_ns: int, end_ns: int, arguments: Row
    ) -> Row:
        assert self._origin_ns is not None
        return {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": 1,
            "tid": track,
            "ts": (begin_ns - self._origin_ns) / 1e3,
            "dur": (end_ns - begin_ns) / 1e3,
            "args": arguments,
        }


def _header(plan: Plan) -> list[Row]:
    """Names of the process and of its tracks, in the order in which they are shown."""
    where = plan.device_name or f"{plan.num_threads} CPU threads"
    rows: list[Row] = [_metadata("process_name", 0, {"name": f"{plan.model_name}, {where}"})]
    for track, name in enumerate(TRACKS if plan.device_name else TRACKS[:2]):
        rows.append(_metadata("thread_name", track, {"name": name}))
        rows.append(_metadata("thread_sort_index", track, {"sort_index": track}))
    return rows


def _metadata(kind: str, track: int, arguments: Row) -> Row:
    return {"name": kind, "ph": "M", "pid": 1, "tid": track, "args": arguments}
