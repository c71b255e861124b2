"""`atsc profile`: measure this machine, so that others can compile for it."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from atsc.compiler.commands.compile import Watcher
from atsc.compiler.commands.console import Console, at_least, table
from atsc.compiler.errors import UsageError


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "profile", help="measure this machine", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write a target file (TOML) for `atsc compile --target`",
    )
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="of the CPU (default: one a core)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.compiler.machine_profile import profile_machine
    from atsc.targets.target import save

    if args.output and not args.output.parent.is_dir():
        raise UsageError(f"-o {args.output}: there is no folder {args.output.parent}; create it")
    watcher = Watcher(console, None)
    target = profile_machine(Path(tempfile.gettempdir()), args.threads, watcher)
    if args.output:
        save(target, args.output)
    fields = dataclasses.asdict(target)
    rows = [["figure", "value"]]
    rows += [[key, _shown(value)] for key, value in fields.items() if value not in (None, "", 0)]
    written = f"\n\nwritten to {args.output}; use it with --target {args.output}"
    console.result({"target": fields}, table(rows, right=()) + (written if args.output else ""))
    return 0


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
