"""The page of `atsc inspect --html`: one file, no network, no script.

A map of the units (layers down, units across, coloured by where they live), the memory tables, the
rungs, and the timeline of a decode and of a prefill round as the simulator predicts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from atsc.compiler.commands.choices import choices_of, planned_scenario
from atsc.compiler.commands.console import format_size
from atsc.compiler.commands.drawing import (
    BAR,
    LABELS,
    LEAST_WIDTH,
    WIDTH,
    Box,
    Drawing,
    Text,
    format_span,
)
from atsc.compiler.commands.memory_table import Region, host_regions, total, vram_regions
from atsc.compiler.commands.timeline import draw_shares, draw_timeline
from atsc.compiler.plan import Device, Manifest, Unit
from atsc.passes.retarget import costs_by_work, costs_of
from atsc.passes.simulate import Round, Track

TEMPLATE = "inspect.html.j2"
ROW, CELL, GAP = 18.0, 15.0, 2.0
_LAYER = re.compile(r"^.*?layers?[ ._/]*\d+[ ._/]*")
_OPERATOR = re.compile(r"[./](MatMul|Gather|Gemm)\w*(\.weight\w*)?$|/GroupQueryAttention$")


@dataclass(frozen=True, slots=True)
class Timeline:
    """A round as drawn, and its figures in words."""

    name: str
    facts: tuple[tuple[str, str], ...]
    drawing: Drawing


def page(manifest: Manifest, path: Path) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    device = manifest.device
    memories = [("Host memory", _memory(host_regions(manifest), None))]
    if device:
        regions = _memory(vram_regions(manifest), device.budget_bytes)
        memories.insert(0, (f"VRAM of {device.model}", regions))
    return environment.get_template(TEMPLATE).render(
        manifest=manifest,
        device=device,
        path=path.name,
        size=format_size,
        cards=list(_cards(manifest)),
        places=[place for place in ("vram", "ram", "disk") if _count(manifest.units, place)],
        count=lambda place: _count(manifest.units, place),
        map=_map(manifest.units),
        memories=memories,
        rungs=list(_rungs(device)) if device else [],
        timelines=list(_timelines(manifest)),
        times=_times,
    )


def _count(units: Iterable[Unit], place: str) -> str:
    sizes = [
        unit.cost.device_bytes if unit.cost else unit.bytes
        for unit in units
        if unit.residency == place
    ]
    return f"{len(sizes)} units, {format_size(sum(sizes))}" if sizes else ""


def _cards(manifest: Manifest) -> Iterator[tuple[str, str]]:
    options, device = manifest.options, manifest.device
    yield "context", f"{options.ctx} tokens"
    yield "policy", options.policy
    if device:
        last = device.rungs[-1]
        yield "VRAM", f"{format_size(last.required_bytes)} of {format_size(device.budget_bytes)}"
        yield "decode, predicted", f"{1e9 / max(last.decode_ns, 1):.1f} tok/s"
        speed = options.chunk * 1e9 / max(last.prefill_ns, 1)
        yield f"prefill {options.chunk}, predicted", f"{speed:.0f} tok/s"
    else:
        yield "memory at the peak", format_size(manifest.memory.peak_bytes)


def _map(units: Sequence[Unit]) -> Drawing:
    """One row a layer, before and after the layers one row more; a cell a unit."""
    rows: list[tuple[str, list[Unit]]] = []
    for unit in units:
        layer = unit.cost.layer if unit.cost else None
        label = f"layer {layer}" if layer is not None else unit.cost.part if unit.cost else "shared"
        if not rows or rows[-1][0] != label:
            rows.append((label, []))
        rows[-1][1].append(unit)
    columns = max(len(row) for _, row in rows) if rows else 1
    width = (WIDTH - LABELS) / columns
    boxes, texts = [], []
    for down, (label, row) in enumerate(rows):
        y = down * ROW
        texts.append(Text(LABELS - 8, y + CELL - 4, label, "end"))
        for across, unit in enumerate(row):
            x, label = LABELS + across * width, short_name(unit.name, width / 6.5)
            place = unit.residency
            boxes.append(Box(x, y, width - GAP, CELL, place, _title(unit), label))
    return Drawing(len(rows) * ROW, tuple(boxes), tuple(texts))


def short_name(name: str, length: float) -> str:
    """A unit's name without its layer and operator, cut to a length."""
    short = _OPERATOR.sub("", _LAYER.sub("", name)).lstrip("/") or name
    short = short.removeprefix("model/")
    return short if len(short) <= length else short[: max(int(length) - 1, 0)] + "…"


def _title(unit: Unit) -> str:
    size = unit.cost.device_bytes if unit.cost else unit.bytes
    lines = [unit.name, f"{unit.format}, {format_size(size)}, lives in {unit.residency}"]
    for name, times in _times(unit):
        lines.append(f"{name}: {times}")
    return "\n".join(lines)


def _times(unit: Unit) -> list[tuple[str, str]]:
    """A unit's times in words, where the plan has them."""
    if unit.cost is None:
        return []
    rounds = (("decode", unit.cost.decode_times), ("prefill", unit.cost.prefill_times))
    shown = []
    for name, times in rounds:
        if times:
            spans = (times.cpu_ns, times.gpu_ns, times.transfer_ns)
            cpu, gpu, copy = map(format_span, spans)
            shown.append((name, f"CPU {cpu}, GPU {gpu}, copy {copy}"))
    return shown


def _memory(regions: list[Region], budget_bytes: int | None) -> dict[str, object]:
    """Rows of a table, and the same as one bar."""
    together = total(regions)
    whole = max(budget_bytes or 0, together.predicted_bytes, 1)
    x, boxes = 0.0, []
    for region in regions:
        width = WIDTH * region.predicted_bytes / whole
        title = f"{region.name}: {format_size(region.predicted_bytes)}"
        if width >= LEAST_WIDTH:
            boxes.append(Box(x, 0, width, BAR, region.key, title))
        x += width
    return {
        "regions": regions,
        "total": together,
        "budget": budget_bytes,
        "bar": Drawing(BAR, tuple(boxes), ()),
        "is_measured": any(region.measured_bytes is not None for region in regions),
    }


def _rungs(device: Device) -> Iterator[tuple[str, ...]]:
    for rung in device.rungs:
        yield (
            format_size(rung.required_bytes),
            str(rung.on_device.count("1")),
            format_size(rung.resident_bytes),
            format_size(rung.slot_bytes),
            format_span(rung.decode_ns),
            format_span(rung.prefill_ns),
        )


def _timelines(manifest: Manifest) -> Iterator[Timeline]:
    """Decode and prefill; none where the plan does not say what its units cost."""
    if not any(unit.cost for unit in manifest.units):
        return
    costs = costs_of(manifest) if manifest.device else costs_by_work(manifest)
    if manifest.device:
        scenario = planned_scenario(manifest, costs)
    else:
        scenario = costs.scenario([False] * len(costs.units), 0, 0, 0)
    names = [manifest.units[index].name for index in costs.indices]
    without = {choice.round: choice.static_ns for choice in choices_of(manifest)}
    for name, kind, found in (
        ("Decode, one token", "decode", scenario.decode()),
        (f"Prefill, a chunk of {costs.chunk} tokens", "prefill", scenario.prefill()),
    ):
        if manifest.device:
            drawing = draw_timeline(found, names, scenario.on_gpu)
            facts = [*_facts(found)]
            if found.copied_bytes:
                copied = sum(1 for _ in found.on(Track.COPY))
                facts.append(("units copied", f"{copied}; without, {format_span(without[kind])}"))
            yield Timeline(name, tuple(facts), drawing)
        else:
            yield Timeline(name, _shares(found), draw_shares(found, names))


def _facts(found: Round) -> Iterator[tuple[str, str]]:
    yield "round", format_span(found.total_ns)
    yield "speed", f"{found.tokens_per_s:.1f} tok/s"
    for track in Track:
        if found.busy_ns(track):
            yield f"{track} busy", f"{found.busy_share(track):.0%}"
    yield "hand-offs", str(sum(1 for _ in found.on(Track.HAND_OFF)))
    if found.copied_bytes:
        copied, rate = format_size(found.copied_bytes), found.h2d_bytes_per_s / 1e9
        yield "weights copied", f"{copied}, {rate:.1f} GB/s"
        yield "waiting for copies", format_span(found.wait_ns)


def _shares(found: Round) -> tuple[tuple[str, str], ...]:
    what = "bytes read and written" if found.rows == 1 else "operations"
    return (("widths", f"shares of the {what}; the plan holds no times"),)
