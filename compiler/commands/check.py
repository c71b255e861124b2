"""`atsc check`: whether a plan folder is whole and fits this machine."""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path
from typing import Any

from atsc.compiler.commands.console import Console, counted, existing, format_size
from atsc.compiler.errors import PlanError


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "check", help="check a plan folder", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan folder")
    parser.add_argument(
        "--full", action="store_true", help="read and check all weights, too, which takes a while"
    )
    parser.add_argument(
        "--sha256",
        type=_sha256,
        metavar="HEX",
        help="the hash that plan.json must have, as another check printed it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.compiler.check_plan import check_plan
    from atsc.compiler.plan import MANIFEST

    directory = existing(args.plan, "plan folder", PlanError)
    manifest = check_plan(
        directory, full=args.full, expected_sha256=args.sha256, progress=console.progress
    )
    sha256 = hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
    size = sum(file.bytes for file in manifest.files.values())
    scope = "all weights" if args.full else "everything but the content of weights.bin"
    console.result(
        {
            "ok": True,
            "plan": str(directory),
            "plan_id": manifest.plan_id,
            "sha256": sha256,
            "full": args.full,
        },
        f"{directory}: ok, {manifest.model.name}, {counted(len(manifest.files), 'file')}, "
        f"{format_size(size)}; checked {scope}\n"
        f"sha256 of {MANIFEST}, which pins them all: {sha256}",
    )
    return 0


def _sha256(text: str) -> str:
    """A hash: anything else pins nothing, least of all an empty variable of a script."""
    if not re.fullmatch("[0-9a-fA-F]{64}", text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is no sha256; it has 64 hexadecimal digits")
    return text.strip().lower()
