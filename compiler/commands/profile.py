"""`atsc profile`: measure this machine, so that others can compile for it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from atsc.compiler.commands.compile import Watcher
from atsc.compiler.commands.console import MOST_THREADS, Console, at_least, format_size, table
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
        "--threads",
        type=at_least(1, MOST_THREADS),
        metavar="N",
        help="of the CPU (default: one a core)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.compiler.machine_profile import profile_machine
    from atsc.targets.target import save

    if args.output:
        folder = args.output.parent
        if not folder.is_dir():
            raise UsageError(f"-o {args.output}: there is no folder {folder}; create it")
        if args.output.is_dir():
            raise UsageError(f"-o {args.output}: a folder; give the name of a file")
        if not os.access(folder, os.W_OK):
            raise UsageError(f"-o {args.output}: {folder} cannot be written; choose another")
    watcher = Watcher(console, None)
    target = profile_machine(Path(tempfile.gettempdir()), args.threads, watcher)
    if args.output:
        save(target, args.output)
    fields = dataclasses.asdict(target)
    rows = [["figure", "value"]]
    known = {key: value for key, value in fields.items() if value not in (None, "", 0, ())}
    rows += [list(_shown(key, value)) for key, value in known.items()]
    written = f"\n\nwritten to {args.output}; use it with --target {args.output}"
    console.result({"target": fields}, table(rows, right=()) + (written if args.output else ""))
    return 0


_RATES = {"_bytes_per_s": "GB/s", "_ops_per_s": "G int8 op/s"}


def _shown(key: str, value: object) -> tuple[str, str]:
    """A figure for people: its name without the unit, its value with it."""
    if isinstance(value, int | float):
        for ending, unit in _RATES.items():
            if key.endswith(ending):
                return key.removesuffix(ending).replace("_", " "), f"{value / 1e9:.1f} {unit}"
        if key.endswith("_bytes"):
            return key.removesuffix("_bytes").replace("_", " "), format_size(value)
        if key.endswith("_ns"):
            return key.removesuffix("_ns").replace("_", " "), f"{value / 1e3:.1f} us"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return key.removeprefix("num_").replace("_", " "), text
