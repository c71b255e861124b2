"""What commands share on the terminal: output, progress bars, sizes, and paths that must exist."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from atsc.compiler.errors import AtscError, UsageError
from atsc.runtime import sizes

QUIET_SECONDS = 1.0
REDRAW_SECONDS = 0.1
MOST_THREADS = 512
"""That the runtime takes."""


class Console:
    """Where a command writes: results to stdout, everything else to stderr."""

    def __init__(self, *, json: bool = False, verbose: bool = False) -> None:
        self.json = json
        self.verbose = verbose
        self._bar = ProgressBar(sys.stderr)

    def result(self, document: Any, text: str) -> None:
        """The command's result: the document with `--json`, else the text."""
        self.clear()
        if self.json:
            text = json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)
        print(text, flush=True)

    def note(self, text: str) -> None:
        """A line about what goes on."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Part of something that may take long is done."""
        self._bar.update(what, done, total)

    def clear(self) -> None:
        """Take the progress bar off the terminal."""
        self._bar.clear()


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; null stands for both."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ProgressBar:
    """One line on a terminal for work that has taken longer than a second."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._enabled = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._what = ""
        self._begin = self._drawn = 0.0
        self._shown = False

    def update(self, what: str, done: int, total: int) -> None:
        """Redraw, at most ten times a second; `done == total` takes the bar away."""
        if not self._enabled:
            return
        now = self._clock()
        if what != self._what:
            self.clear()
            self._what, self._begin, self._drawn = what, now, now
        if done >= total:
            self.clear()
        elif now - self._begin >= QUIET_SECONDS and now - self._drawn >= REDRAW_SECONDS:
            self._draw(done / total, now)

    def clear(self) -> None:
        """Remove the bar, if it is there."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = False
        self._what = ""

    def _draw(self, share: float, now: float) -> None:
        left = (now - self._begin) * (1 - share) / share if share > 0 else None
        tail = f" {share:4.0%}" + (f"  {left:.0f} s left" if left is not None else "")
        width = shutil.get_terminal_size().columns - len(self._what) - len(tail) - 4
        bar = ""
        if width >= 10:
            width = min(width, 40)
            bar = " " + "#" * round(width * share) + "." * (width - round(width * share))
        self._stream.write(f"\r{self._what}{bar}{tail}\x1b[K")
        self._stream.flush()
        self._drawn, self._shown = now, True


def parse_size(text: str) -> int:
    """The type of a flag that takes a size; as `sizes.parse_size`.

    Raises:
        argparse.ArgumentTypeError: not a size.
    """
    try:
        return sizes.parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_size(num_bytes: float) -> str:
    """Bytes for people: `1.25 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def counted(number: int, noun: str) -> str:
    """`1 unit`, `2 units`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of a flag that takes a whole number from `least` up, or to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            limits = f"from {least} up" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {limits}")
        return number

    return parse


def between(least: float, most: float) -> Callable[[str], float]:
    """The type of a flag that takes a number within limits."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
        return number

    return parse


class NotYet(argparse.Action):
    """A flag of the design whose feature is not there yet: refused with what to do instead."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        self._instead = kwargs.pop("instead")
        super().__init__(
            option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Refuse."""
        parser.error(f"{self.option_strings[0]} is not supported yet; {self._instead}")


def existing(path: Path, what: str, error: type[AtscError]) -> Path:
    """A path that must exist, or else an error that suggests its most similar neighbour."""
    if path.exists():
        return path
    hint = "check the path"
    if path.parent.is_dir():
        names = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else hint
    else:
        hint = f"there is no folder {path.parent} either"
    raise error(f"{path}: no such {what}; {hint}")


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows as aligned columns, the first row underlined; columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
