"""Rounds that change while other work presses the GPU give the tokens of the CPU alone.

    python tests/gpu/load_on_gpu.py --plan PLAN [--load gpu=60] [--tokens 400] [--threads 8]

Logits of a plan are compared with the CPU's, teacher-forced: some tokens are read, and the others
written under the load, one in a round. So they come from rounds of every choice that is made
meanwhile (promotions, units that retreat or change places, a GPU that spins or not), and are shown
choice by choice. Top tokens must be the same as placements_on_gpu.py wants them, and errors within
what `atsc verify` allows. A choice that never changes shows nothing, and counts as a failure. Needs
no pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from placements_on_gpu import STATED_ERRORS, compare, expected_of, is_right, summary

PROMPT = 32


def stretches(
    plan: Any, ids: list[int], pressure: AbstractContextManager[Any]
) -> Iterator[tuple[str, list[int], np.ndarray]]:
    """Of each choice why it was made, the positions written, their logits [tokens, vocabulary]."""
    reason, positions, rows = "as planned", list[int](), list[np.ndarray]()
    with plan.session() as session, pressure:
        session.prefill(ids[:PROMPT], logits="none")
        plan.take_changes()
        for position in range(PROMPT, len(ids)):
            rows.append(session.decode(ids[position]))
            positions.append(position)
            changes = [change for change in plan.take_changes() if change.kind == "decode"]
            if changes and len(rows) > 1:
                yield reason, positions, np.stack(rows)
                reason, positions, rows = str(changes[-1]), [], []
    if len(rows) > 1:
        yield reason, positions, np.stack(rows)


def check(
    plan_path: Path, tokens: int, pressure: AbstractContextManager[Any], **options: Any
) -> list[dict[str, Any]]:
    """Compare each stretch of so many random tokens; `options` are those of loader.load."""
    from atsc.runtime import loader

    with loader.load(plan_path, **options, device=False) as plan, plan.session() as session:
        ids = np.random.default_rng(0).integers(0, plan.vocab_size, tokens).tolist()
        session.prefill(ids[:PROMPT], logits="none")
        logits = np.stack([session.decode(token) for token in ids[PROMPT:]])
        stated_error = STATED_ERRORS[plan.manifest.options.accuracy_level or 4]
    results = []
    with loader.load(plan_path, **options) as plan:
        for reason, positions, rows in stretches(plan, ids, pressure):
            written = [ids[position] for position in positions]
            steps = np.array(positions) - PROMPT
            expected = expected_of(logits[steps], written, stated_error)
            found = {"choice": reason, **summary([compare(rows, expected)], [expected])}
            found["right"] = (
                is_right(found, is_text=False, level=4) and found["relative_l2"] <= stated_error
            )
            print(json.dumps(found), flush=True)
            results.append(found)
    return results


def main() -> int:
    """Run it; exit code 1 if a choice is wrong, or none was made."""
    from atsc.compiler.commands.load import Pressure, parse_load

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--load", type=parse_load, default="gpu=60", metavar="cpu=60|gpu=60")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    results = check(args.plan, args.tokens, Pressure(args.load).applied(), threads=args.threads)
    wrong = sum(not result["right"] for result in results)
    print(f"{len(results)} choices, {wrong} of them wrong")
    return 1 if wrong or len(results) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())
