"""`atsc inspect`: what a plan holds: its units, and the memory that it will take."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands.console import Console, NotYet, existing, format_size, table
from atsc.compiler.errors import PlanError

if TYPE_CHECKING:
    from atsc.compiler.plan import Manifest, Unit


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "inspect", help="show what a plan holds", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--html", action=NotYet, instead="use --json")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.compiler import plan

    manifest = plan.load(existing(args.plan, "plan folder", PlanError))
    document = dataclasses.asdict(manifest)
    document["memory"]["peak_bytes"] = manifest.memory.peak_bytes
    console.result(document, _text(manifest, args.plan))
    return 0


def _text(manifest: Manifest, path: Path) -> str:
    options, model = manifest.options, manifest.model
    head = [
        f"{path}: {model.name}, vocabulary {model.vocab_size}, "
        f"context {options.ctx} of {model.model_context_length}, chunks of {options.chunk}",
        f"plan {manifest.plan_id}, atsc {manifest.atsc_version}, "
        f"{manifest.platform}, {manifest.isa} or higher",
    ]
    if manifest.measured:
        head.append("measured: " + ", ".join(f"{k} {v}" for k, v in manifest.measured.items()))
    return "\n".join([*head, "", _units(manifest.units), "", _memory(manifest)])


def _units(units: Iterable[Unit]) -> str:
    """One row a unit, in execution order; a run of nodes is named by its first and last."""
    rows = [["unit", "nodes", "format", "size", "lives in"]]
    units = list(units)
    for unit in units:
        nodes = f"{len(unit.nodes)}: {unit.nodes[-1]}" if unit.nodes else "shared"
        rows.append([unit.name, nodes, unit.format, format_size(unit.bytes), unit.residency])
    by_place = sorted(units, key=lambda unit: unit.residency)
    for residency, group in groupby(by_place, key=lambda unit: unit.residency):
        members = list(group)
        total = format_size(sum(unit.bytes for unit in members))
        rows.append([f"{len(members)} units", "", "", total, residency])
    return table(rows, right=(3,))


def _memory(manifest: Manifest) -> str:
    memory = manifest.memory
    sessions = manifest.options.sessions
    rows = [
        ["memory, predicted", "size"],
        ["weights", format_size(memory.weights_bytes)],
        [f"KV cache, {sessions} x {manifest.options.ctx} tokens", format_size(memory.kv_bytes)],
        ["activations", format_size(memory.arena_bytes)],
        ["logits", format_size(memory.logits_bytes)],
        ["peak", format_size(memory.peak_bytes)],
    ]
    return table(rows, right=(1,))
