"""`atsc inspect`: what a plan holds: where its units live, the memory that it takes, its rungs.

-v lists every unit by itself. --html writes a page with a map of the units, the memory, and the
timeline of a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands.console import Console, counted, existing, format_size, table
from atsc.compiler.commands.general import describe
from atsc.compiler.errors import PlanError, UsageError

if TYPE_CHECKING:
    from atsc.compiler.commands.memory_table import Region
    from atsc.compiler.plan import Device, Manifest, Unit


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "inspect", help="show what a plan holds", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.compiler import plan
    from atsc.compiler.check_plan import check_content
    from atsc.compiler.commands.choices import choices_of
    from atsc.compiler.commands.memory_table import host_regions, vram_regions

    manifest = plan.load(existing(args.plan, "plan folder", PlanError))
    check_content(manifest, args.plan)
    if manifest.graph is not None:
        if args.html:
            raise UsageError(f"--html: {args.plan} is no language model and has no placement map")
        text = describe(manifest, manifest.graph, args.plan)
        console.result(dataclasses.asdict(manifest), text)
        return 0
    document = dataclasses.asdict(manifest)
    document["memory"]["peak_bytes"] = manifest.memory.peak_bytes
    for name, regions in (("vram", vram_regions(manifest)), ("host", host_regions(manifest))):
        document[f"{name}_regions"] = [dataclasses.asdict(region) for region in regions]
    document["choices"] = [dataclasses.asdict(choice) for choice in choices_of(manifest)]
    text = _text(manifest, args.plan, verbose=console.verbose)
    if args.html:
        _write_page(manifest, args.plan, args.html)
        text = str(args.html)
    console.result(document, text)
    return 0


def _write_page(manifest: Manifest, path: Path, output: Path) -> None:
    from atsc.compiler.commands.inspect_page import page

    content = page(manifest, path)
    try:
        output.write_text(content, "utf-8")
    except OSError as error:
        raise UsageError(f"--html {output}: {error.strerror}; choose another file") from None


def _text(manifest: Manifest, path: Path, *, verbose: bool) -> str:
    from atsc.compiler.commands.memory_table import host_regions, vram_regions

    options, model, device = manifest.options, manifest.model, manifest.device
    parts = [
        f"{path}: {model.name}, vocabulary {model.vocab_size}, "
        f"context {options.ctx} of {model.model_context_length}, chunks of {options.chunk}\n"
        f"plan {manifest.plan_id}, atsc {manifest.atsc_version}, "
        f"{manifest.platform}, {manifest.isa} or higher"
    ]
    plain = [f"{k} {v}" for k, v in manifest.measured.items() if not isinstance(v, dict)]
    if plain:
        parts[0] += "\nmeasured: " + ", ".join(plain)
    parts.append(_units(manifest.units, verbose=verbose))
    if any(unit.cost for unit in manifest.units):
        parts.append(_summary(manifest.units))
    if device:
        parts += [_memory("VRAM", vram_regions(manifest), device.budget_bytes), _rungs(device)]
    parts.append(_memory("host memory", host_regions(manifest)))
    if device:
        parts += [_choices(manifest), predicted_speed(device, options.chunk)]
    return "\n\n".join(parts)


def _units(units: Iterable[Unit], *, verbose: bool) -> str:
    """In execution order: a row a unit with its last node if `verbose`, else one for all layers."""
    units = list(units)
    rows = _rows_of_units(units) if verbose else _rows_of_layers(units)
    by_place = sorted(units, key=lambda unit: unit.residency)
    for residency, group in groupby(by_place, key=lambda unit: unit.residency):
        members = list(group)
        size = format_size(sum(map(_bytes, members)))
        rows.append([counted(len(members), "unit"), "", "", size, residency])
    return table(rows, right=(3,))


def _rows_of_units(units: Iterable[Unit]) -> list[list[str]]:
    rows = [["unit", "nodes", "format", "size", "lives in"]]
    for unit in units:
        nodes = f"{len(unit.nodes)}: {unit.nodes[-1]}" if unit.nodes else "shared"
        rows.append([unit.name, nodes, unit.format, format_size(_bytes(unit)), unit.residency])
    return rows


def _rows_of_layers(units: Iterable[Unit]) -> list[list[str]]:
    """Units that differ in their layer alone are one row."""
    rows = [["unit", "layers", "format", "size", "lives in"]]
    alike: dict[tuple[str, str, str], list[Unit]] = {}
    for unit in units:
        layer = unit.cost.layer if unit.cost else None
        number = rf"(?<!\d){layer}(?!\d)"
        name = unit.name if layer is None else re.sub(number, "*", unit.name, count=1)
        alike.setdefault((name, unit.format, unit.residency), []).append(unit)
    for (name, kind, residency), members in alike.items():
        layers = [unit.cost.layer for unit in members if unit.cost and unit.cost.layer is not None]
        size = format_size(sum(map(_bytes, members)))
        rows.append([name, _ranges(layers), kind, size, residency])
    return rows


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _bytes(unit: Unit) -> int:
    """Its weights, or the KV cache of one session at the full context."""
    is_cache = unit.cost is not None and unit.cost.kind == "kv cache"
    return unit.cost.device_bytes if unit.cost and is_cache else unit.bytes


def _summary(units: Iterable[Unit]) -> str:
    """How many units of each kind live where, KV caches with their size in VRAM."""
    sums: dict[str, dict[str, tuple[int, int]]] = {}
    for unit in units:
        if unit.cost:
            role = unit.cost.kind if unit.cost.kind == "kv cache" else unit.cost.part
            count, size = sums.setdefault(role, {}).get(unit.residency, (0, 0))
            sums[role][unit.residency] = (count + 1, size + unit.cost.device_bytes)
    places = [p for p in ("vram", "ram", "disk") if any(p in found for found in sums.values())]
    rows = [["placement", *places]]
    for role, found in sums.items():
        cells = [found.get(place, (0, 0)) for place in places]
        rows.append(
            [
                role,
                *(f"{counted(n, 'unit')}, {format_size(size)}" if n else "-" for n, size in cells),
            ]
        )
    return table(rows)


def _memory(what: str, regions: Sequence[Region], budget_bytes: int | None = None) -> str:
    """Predicted bytes a region, and measured ones where plan.json has them."""
    from atsc.compiler.commands.memory_table import total

    together = total(regions)
    measured = any(region.measured_bytes is not None for region in regions)
    rows = [[what, "predicted", *(["measured"] if measured else [])]]
    for region in (*regions, together):
        row = [region.name, format_size(region.predicted_bytes)]
        if measured:
            found = region.measured_bytes
            row.append("-" if found is None else format_size(found))
        rows.append(row)
    if budget_bytes is not None:
        rows.append(["budget", format_size(budget_bytes), *([""] if measured else [])])
    return table(rows, right=(1, 2))


def _rungs(device: Device) -> str:
    """What the plan does with less VRAM."""
    rows = [["VRAM", "units there", "slots", "decode", "prefill round"]]
    for rung in device.rungs:
        rows.append(
            [
                format_size(rung.required_bytes),
                str(rung.on_device.count("1")),
                format_size(rung.slot_bytes),
                f"{rung.decode_ns / 1e6:.2f} ms",
                f"{rung.prefill_ns / 1e6:.2f} ms",
            ]
        )
    return table(rows, right=range(5))


def _choices(manifest: Manifest) -> str:
    """What each kind of round copies, and its time with and without."""
    from atsc.compiler.commands.choices import choices_of

    rows = [["copied to slots", "units", "size", "round without", "round with"]]
    for choice in choices_of(manifest):
        spans = (f"{ns / 1e6:.2f} ms" for ns in (choice.static_ns, choice.round_ns))
        size = format_size(choice.copied_bytes)
        rows.append([choice.round, str(len(choice.units)), size, *spans])
    return table(rows, right=range(1, 5))


def predicted_speed(device: Device, chunk: int) -> str:
    """A line: tokens a second of the placement for the whole budget."""
    last = device.rungs[-1]
    decode, prefill = 1e9 / max(last.decode_ns, 1), chunk * 1e9 / max(last.prefill_ns, 1)
    streams = (
        f"rounds of {device.stream_from_rows} tokens and more stream weights"
        if device.stream_from_rows and last.slot_bytes
        else "no weights are streamed"
    )
    return (
        f"predicted on {device.model}: decode {decode:.1f} tok/s, prefill {prefill:.1f} tok/s; "
        f"{streams}"
    )
