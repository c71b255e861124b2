"""A round drawn over time: a row for each track, and how busy the GPU and the copy engine are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from atsc.compiler.commands.drawing import (
    BAR,
    LABELS,
    LEAST_WIDTH,
    WIDTH,
    Box,
    Drawing,
    Text,
    format_span,
    row_name,
)
from atsc.passes.simulate import Event, Round, Track

ROW = 26.0
NUM_SLICES = 100
SHARES = {Track.GPU: "GPU share", Track.COPY: "copy share"}


def draw_timeline(found: Round, names: Sequence[str], on_gpu: Sequence[bool]) -> Drawing:
    """A round of which times are known.

    Args:
        found: the round.
        names: of its units.
        on_gpu: which of them live in VRAM.
    """
    boxes: list[Box] = []
    texts: list[Text] = []
    y = 0.0
    shown = [track for track in Track if any(found.on(track))]
    for track in shown:
        texts.append(row_name(y, str(track)))
        boxes.append(Box(LABELS, y, WIDTH - LABELS, BAR, "track", str(track)))
        for event in found.on(track):
            is_promoted = track is Track.GPU and not on_gpu[event.unit]
            kind = "promoted" if is_promoted else track.name.lower()
            span = f"{format_span(event.duration_ns)}, from {format_span(event.begin_ns)}"
            title = f"{names[event.unit]}\n{track}: {span}"
            boxes.append(_box(found, event, y, kind, title))
        if track is Track.GPU:
            boxes += _waits(found, names, y)
        y += ROW
    for track in shown:
        if track in SHARES:
            texts.append(row_name(y, SHARES[track]))
            boxes += _shares(found, track, y)
            y += ROW
    texts += _ticks(y, lambda share: format_span(found.total_ns * share))
    return Drawing(y + 18, tuple(boxes), tuple(texts))


def draw_shares(found: Round, names: Sequence[str]) -> Drawing:
    """A round on the CPU alone, of which no times are known: each unit by its share."""
    boxes = [Box(LABELS, 0, WIDTH - LABELS, BAR, "track", str(Track.CPU))]
    for event in found.on(Track.CPU):
        share = event.duration_ns / max(found.total_ns, 1)
        boxes.append(_box(found, event, 0, "cpu", f"{names[event.unit]}\n{share:.2%}"))
    texts = [row_name(0, str(Track.CPU)), *_ticks(ROW, lambda share: f"{share:.0%}")]
    return Drawing(ROW + 18, tuple(boxes), tuple(texts))


def _box(found: Round, event: Event, y: float, kind: str, title: str) -> Box:
    scale = (WIDTH - LABELS) / max(found.total_ns, 1)
    width = max(event.duration_ns * scale, LEAST_WIDTH)
    return Box(LABELS + event.begin_ns * scale, y, width, BAR, kind, title)


def _waits(found: Round, names: Sequence[str], y: float) -> Iterator[Box]:
    """Where the GPU waits for a copy: before the unit that needs it."""
    begins = {event.unit: event.begin_ns for event in found.on(Track.GPU)}
    for unit, wait_ns in found.exposed_ns:
        event = Event(Track.GPU, unit, begins[unit] - wait_ns, begins[unit])
        title = f"{names[unit]}\nwaits {format_span(wait_ns)} for its weights"
        yield _box(found, event, y, "wait", title)


def _shares(found: Round, track: Track, y: float) -> Iterator[Box]:
    """A track's busy share over time, as columns."""
    width = (WIDTH - LABELS) / NUM_SLICES
    peak = found.copied_bytes / max(found.busy_ns(track), 1)
    for index, share in enumerate(found.busy_over_time(track, NUM_SLICES)):
        if share:
            copied = f", {share * peak:.1f} GB/s to the GPU" if track is Track.COPY else ""
            x, height = LABELS + index * width, BAR * share
            title = f"{share:.0%} busy{copied}"
            yield Box(x, y + BAR - height, width, height, track.name.lower(), title)


def _ticks(y: float, name: Callable[[float], str]) -> Iterator[Text]:
    for fifth in range(6):
        anchor = {0: "start", 5: "end"}.get(fifth, "middle")
        x = LABELS + (WIDTH - LABELS) * fifth / 5
        yield Text(x, y + 12, name(fifth / 5), anchor)
