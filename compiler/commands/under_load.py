"""`atsc bench --load`: the time per output token (TPOT) while other work presses the machine.

For each policy and load, tokens are written for some seconds on the quiet machine, and then for as
long under pressure; so both are compared with the machine as it just was. A policy that adapts
takes its time to find its choice: the second half under pressure is also shown by itself.

Source: ATSInfer section 5.3, Figure 13.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands import run as running
from atsc.compiler.commands.bench import WARM_UP_TOKENS, Test, restart
from atsc.compiler.commands.console import Console, table
from atsc.compiler.commands.load import Load, Pressure, check_loads
from atsc.compiler.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atsc.runtime.loader import Plan, Session

SLICE_SECONDS = 0.5
POLICIES = ("static", "load-aware")
ALONE = ("none",)
"""Of a plan that runs on the CPU alone: there is nothing to transfer."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Tokens that were written one after the other; times in seconds."""

    ends: list[float]
    """Of each token, since the phase began."""
    tpot: list[float]
    changes: list[dict[str, Any]]
    """New choices of promotions (runtime/rounds.py Change), with `at_seconds` of this phase."""

    def series_ms(self) -> list[float | None]:
        """Mean TPOT of each half second; None where no token ended."""
        slices: list[list[float]] = [[] for _ in range(int(self.ends[-1] / SLICE_SECONDS) + 1)]
        for end, seconds in zip(self.ends, self.tpot, strict=True):
            slices[int(end / SLICE_SECONDS)].append(1e3 * seconds)
        return [statistics.mean(found) if found else None for found in slices]

    def median_ms(self, since: float = 0.0) -> float:
        """Median TPOT of tokens that ended after this share of the time."""
        begin = since * self.ends[-1]
        found = [took for end, took in zip(self.ends, self.tpot, strict=True) if end > begin]
        return 1e3 * statistics.median(found)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "tokens": len(self.tpot),
            "tpot_median_ms": self.median_ms(),
            "tpot_second_half_ms": self.median_ms(since=0.5),
            "tpot_mean_ms": 1e3 * statistics.mean(self.tpot),
            "series_ms": self.series_ms(),
            "changes": self.changes,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One policy under one load."""

    policy: str
    load: Load
    share_achieved: float
    """Of the time, on average over the load's processes."""
    quiet: Phase
    loaded: Phase

    def increase_percent(self, since: float = 0.0) -> float:
        """Of the median TPOT, after this share of the time under pressure."""
        return 100 * (self.loaded.median_ms(since) / self.quiet.median_ms() - 1)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "policy": self.policy,
            "load": str(self.load),
            "load_achieved_percent": 100 * self.share_achieved,
            "without": self.quiet.document(),
            "with": self.loaded.document(),
            "increase_percent": self.increase_percent(),
            "increase_second_half_percent": self.increase_percent(since=0.5),
            "changes": len(self.quiet.changes) + len(self.loaded.changes),
        }


def run(args: argparse.Namespace, console: Console, directory: Path) -> int:
    """Do it."""
    test = _checked(args)
    check_loads(args.load)
    from atsc.runtime import loader

    options = {
        "threads": args.threads,
        "rounds": args.rounds,
        **running.gpu_options(args),
        **running.transfer_options(args),
    }
    policies: Sequence[str] = POLICIES
    pressures = [Pressure(load) for load in args.load]
    rows: list[Row] = []
    while len(rows) < len(policies) * len(args.load):
        policy = policies[len(rows) // len(args.load)]
        options["transfer"] = policy
        with loader.load(directory, **options) as plan:
            if test.depth + test.num_tokens > plan.context_length:
                raise UsageError(
                    f"{test.name} needs {test.depth + test.num_tokens} tokens, and the plan's "
                    f"context is {plan.context_length}; choose fewer, or compile with more --ctx"
                )
            if plan.device_name is None:
                policies, policy = ALONE, ALONE[0]
            rows += _measure(plan, policy, test, pressures, args.seconds, console)
            document = {
                "plan": str(directory),
                "model": plan.model_name,
                "threads": plan.num_threads,
                "isa": plan.isa,
                "device": plan.device_name,
                "rounds": args.rounds,
                "test": test.name,
                "seconds": args.seconds,
                "slice_seconds": SLICE_SECONDS,
                "rows": [row.document() for row in rows],
            }
            title = f"TPOT of {test.name}, {plan.model_name}, {plan.num_threads} threads"
    console.result(document, f"{title}, {args.seconds:g} s each\n\n{_text(rows)}")
    return 0


def _checked(args: argparse.Namespace) -> Test:
    """What is written; refuses flags that mean something else here."""
    if len(args.n) != 1 or len(args.d) != 1 or not args.n[0]:
        raise UsageError("--load measures one test: give -n one number above 0, and -d one number")
    if args.transfer != "load-aware":
        raise UsageError("--load compares the policies of --transfer; leave --transfer out")
    if args.trace:
        raise UsageError("--load writes no trace; leave --trace out")
    return Test(0, args.n[0], args.d[0])


def _measure(
    plan: Plan,
    policy: str,
    test: Test,
    pressures: Sequence[Pressure],
    seconds: float,
    console: Console,
) -> list[Row]:
    import numpy as np

    ids = np.random.default_rng(0).integers(0, plan.vocab_size, test.depth + test.num_tokens)
    rows = []
    with plan.session() as session:
        if test.depth:
            session.prefill(ids[: test.depth], logits="none")
        for token in ids[test.depth :][:WARM_UP_TOKENS].tolist():
            session.decode(token, copy=False)
        for done, pressure in enumerate(pressures):
            console.progress(f"{policy}, {pressure.load}", done, len(pressures))
            plan.take_changes()
            quiet = _write(plan, session, ids, test, seconds)
            with pressure.applied():
                loaded = _write(plan, session, ids, test, seconds)
            rows.append(Row(policy, pressure.load, pressure.achieved, quiet, loaded))
    console.clear()
    return rows


def _write(
    plan: Plan, session: Session, ids: NDArray[np.int64], test: Test, seconds: float
) -> Phase:
    """Write tokens, from the test's depth again after each `-n` of them."""
    phase = Phase([], [], [])
    begin = time.perf_counter()
    while not phase.ends or phase.ends[-1] < seconds:
        if session.position >= test.depth + test.num_tokens:
            restart(session, ids, test.depth)
        start = time.perf_counter()
        session.decode(int(ids[session.position]), copy=False)
        end = time.perf_counter()
        phase.ends.append(end - begin)
        phase.tpot.append(end - start)
        phase.changes.extend(
            {"at_seconds": end - begin, **dataclasses.asdict(change)}
            for change in plan.take_changes()
            if change.kind == "decode"
        )
    return phase


def _text(rows: Sequence[Row]) -> str:
    times = ("without, ms", "with, ms", "increase", "2nd half, ms", "increase")
    lines = [["policy", "load", "achieved", *times, "changes"]]
    series = []
    for row in rows:
        found = row.document()
        lines.append(
            [
                row.policy,
                str(row.load),
                f"{found['load_achieved_percent']:.0f} %",
                f"{found['without']['tpot_median_ms']:.2f}",
                f"{found['with']['tpot_median_ms']:.2f}",
                f"{found['increase_percent']:+.1f} %",
                f"{found['with']['tpot_second_half_ms']:.2f}",
                f"{found['increase_second_half_percent']:+.1f} %",
                str(found["changes"]),
            ]
        )
        parts = (_numbers(phase.series_ms()) for phase in (row.quiet, row.loaded))
        series.append(f"{row.policy}, {row.load}: {' | '.join(parts)}")
    head = f"Means of each {SLICE_SECONDS} s in ms; | the load begins"
    return "\n".join([table(lines, right=range(2, 9)), "", head, *series])


def _numbers(series: Sequence[float | None]) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in series)
