"""Drawings of `atsc inspect --html`: boxes and words, which the page's template writes."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 1000.0
"""Of all drawings, in their own units; the page scales them."""
LABELS = 90.0
"""Of it, the names of rows."""
BAR = 18.0
LEAST_WIDTH = 0.4


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a drawing, with what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A word of a drawing."""

    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes and words, in a frame WIDTH wide."""

    height: float
    boxes: tuple[Box, ...]
    texts: tuple[Text, ...]
    width: float = WIDTH


def row_name(y: float, name: str) -> Text:
    """The name of a row of bars."""
    return Text(LABELS - 8, y + BAR - 5, name, "end")


def format_span(ns: float) -> str:
    """Nanoseconds for people."""
    if ns >= 1e6:
        return f"{ns / 1e6:.2f} ms"
    return f"{ns / 1e3:.1f} us" if ns >= 1e3 else f"{ns:.0f} ns"
