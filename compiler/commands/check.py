"""`atsc check`: whether a plan folder is whole and fits this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from atsc.compiler.commands.console import Console, existing, format_size
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
    parser.add_argument("--sha256", metavar="HEX", help="the hash that plan.json must have")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.compiler.check_plan import check_plan

    directory = existing(args.plan, "plan folder", PlanError)
    manifest = check_plan(
        directory, full=args.full, expected_sha256=args.sha256, progress=console.progress
    )
    size = sum(file.bytes for file in manifest.files.values())
    scope = "all weights" if args.full else "everything but the content of weights.bin"
    console.result(
        {"ok": True, "plan": str(directory), "plan_id": manifest.plan_id, "full": args.full},
        f"{directory}: ok, {manifest.model.name}, {len(manifest.files)} files, "
        f"{format_size(size)}; checked {scope}",
    )
    return 0
