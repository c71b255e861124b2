"""`atsc bench`: speed by llama-bench's conventions: pp512 reads 512 tokens, tg128 writes 128.

Every test is warmed up, and repeated on random tokens; `-d` fills the context first, untimed.
With --load other work presses the machine, and only the time per output token (TPOT) is measured,
without and with the load, for both policies of --transfer.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands import load as loads
from atsc.compiler.commands import run as running
from atsc.compiler.commands import trace as traces
from atsc.compiler.commands.console import (
    MOST_THREADS,
    Console,
    at_least,
    between,
    existing,
    format_size,
    parse_size,
)
from atsc.compiler.commands.general import refuse_general
from atsc.compiler.errors import PlanError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atsc.compiler.commands.trace import Trace
    from atsc.runtime.loader import Plan, Session

WARM_UP_TOKENS = 8


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "bench", help="measure speed", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan folder")
    counts = _list_of(at_least(0))
    parser.add_argument(
        "-p", type=counts, default=[512], metavar="N,...", help="tokens to read (512); 0: none"
    )
    parser.add_argument(
        "-n", type=counts, default=[128], metavar="N,...", help="tokens to write (128); 0: none"
    )
    parser.add_argument(
        "-d", type=counts, default=[0], metavar="N,...", help="tokens in the context before (0)"
    )
    parser.add_argument("-r", type=at_least(1), default=5, metavar="N", help="repetitions (5)")
    parser.add_argument(
        "--threads",
        type=at_least(1, MOST_THREADS),
        metavar="N",
        help="of the CPU (default: one a core)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--vram",
        type=parse_size,
        metavar="SIZE",
        help="GPU memory to use, as 6G or 800M; 0: the CPU alone (default: as compiled)",
    )
    running.add_transfer_flags(parser)
    parser.add_argument(
        "--rounds",
        choices=("graph", "launches", "synchronous"),
        default="graph",
        help="how rounds run on the GPU (graph); synchronous: on one stream, with a wait at each "
        "hand-off, as a plain engine does",
    )
    parser.add_argument(
        "--load",
        type=loads.parse_load,
        action="append",
        metavar="cpu=60|gpu=60",
        help="TPOT under external work on all CPUs, or on the GPU and its link, for this per cent "
        "of the time; give it again for another load",
    )
    parser.add_argument(
        "--seconds",
        type=between(0.05, 3600),
        default=5.0,
        metavar="S",
        help="with --load: seconds without and with each load (5)",
    )
    traces.add_flag(parser)
    return parser


@dataclass(frozen=True, slots=True)
class Test:
    """One row of the table; one of `num_prompt` and `num_generated` is 0."""

    num_prompt: int
    num_generated: int
    depth: int

    @property
    def name(self) -> str:
        """As llama-bench writes it."""
        kind = f"pp{self.num_prompt}" if self.num_prompt else f"tg{self.num_generated}"
        return f"{kind} @ d{self.depth}" if self.depth else kind

    @property
    def num_tokens(self) -> int:
        """Tokens that are timed."""
        return self.num_prompt or self.num_generated


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    directory = existing(args.plan, "plan folder", PlanError)
    refuse_general(directory, "bench")
    if args.load:
        from atsc.compiler.commands import under_load

        return under_load.run(args, console, directory)
    tests = list(_tests(args.p, args.n, args.d))
    if not tests:
        raise UsageError("nothing to measure; give -p or -n a number above 0")
    from atsc.runtime import loader

    with (
        traces.tracing(args.trace) as trace,
        loader.load(
            directory,
            threads=args.threads,
            **running.gpu_options(args),
            rounds=args.rounds,
            **running.transfer_options(args),
        ) as plan,
    ):
        for test in tests:
            if test.depth + test.num_tokens > plan.context_length:
                raise UsageError(
                    f"{test.name} needs {test.depth + test.num_tokens} tokens, and the plan's "
                    f"context is {plan.context_length}; choose fewer, or compile with more --ctx"
                )
        samples = {test: _measure(plan, test, args.r, console, trace) for test in tests}
        document = {
            "plan": str(directory),
            "model": plan.model_name,
            "threads": plan.num_threads,
            "isa": plan.isa,
            "transfer": args.transfer,
            "rounds": args.rounds,
            "device_bytes": plan.device_bytes,
            "changes": [dataclasses.asdict(change) for change in plan.take_changes()],
            "rows": [_row(test, rates) for test, rates in samples.items()],
        }
        console.result(document, _table(plan, samples))
    return 0


def _tests(prompts: list[int], generated: list[int], depths: list[int]) -> Iterator[Test]:
    for depth in depths:
        yield from (Test(count, 0, depth) for count in prompts if count)
        yield from (Test(0, count, depth) for count in generated if count)


def _measure(
    plan: Plan, test: Test, repetitions: int, console: Console, trace: Trace | None
) -> list[float]:
    """Tokens per second of each repetition."""
    import numpy as np

    ids = np.random.default_rng(0).integers(0, plan.vocab_size, test.depth + test.num_tokens)
    rates = []
    with plan.session() as session:
        if trace:
            trace.watch(plan, session)
        if test.depth:
            session.prefill(ids[: test.depth], logits="none")
        timed = ids[test.depth :]
        warm_up = timed if test.num_prompt else timed[:WARM_UP_TOKENS]
        _work(session, test, warm_up)
        for done in range(repetitions):
            console.progress(test.name, done, repetitions)
            restart(session, ids, test.depth)
            if trace:
                trace.collect(session, "warm-up")
            begin = time.perf_counter()
            _work(session, test, timed)
            rates.append(len(timed) / (time.perf_counter() - begin))
            if trace:
                trace.collect(session, f"{test.name}, {done + 1} of {repetitions}")
        console.clear()
    return rates


def _work(session: Session, test: Test, ids: NDArray[np.int64]) -> None:
    if test.num_prompt:
        session.prefill(ids)
    else:
        for token in ids.tolist():
            session.decode(token, copy=False)


def restart(session: Session, ids: NDArray[np.int64], depth: int) -> None:
    """Back to the depth; fill the context again where a window has forgotten too much."""
    try:
        session.rewind(depth)
    except UsageError:
        session.rewind(0)
        session.prefill(ids[:depth], logits="none")


def _row(test: Test, rates: list[float]) -> dict[str, Any]:
    return {
        "test": test.name,
        "n_prompt": test.num_prompt,
        "n_gen": test.num_generated,
        "n_depth": test.depth,
        "avg_ts": statistics.mean(rates),
        "stddev_ts": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "samples_ts": rates,
    }


def _table(plan: Plan, samples: dict[Test, list[float]]) -> str:
    size, held = format_size(plan.manifest.memory.weights_bytes), plan.device_bytes
    vram = [format_size(held)] if held else []
    rows = [["model", "size", *(["VRAM"] if held else []), "threads", "test", "t/s"]]
    for test, rates in samples.items():
        row = _row(test, rates)
        speed = f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
        rows.append([plan.model_name, size, *vram, str(plan.num_threads), test.name, speed])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    rule = [
        "-" * width if name in ("model", "test") else f"{'-' * (width - 1)}:"
        for name, width in zip(rows[0], widths, strict=True)
    ]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    return "\n".join(lines)


def _list_of(item: Callable[[str], int]) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        return [item(piece) for piece in text.split(",")]

    return parse
