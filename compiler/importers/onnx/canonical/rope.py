"""Rotary embeddings, measured: what a part of the graph does to each head, as tables of angles.

Between the rows of a projection and the heads that attention reads stand only linear operators:
reshapes, transposes, products with cos and sin, sums. So unit vectors tell everything: which
elements turn together (halves or pairs), how many do (partial rotation), by which angles at every
position, and by what factor the whole is scaled. How cos and sin are computed (llama3, YaRN, plain
tables) does not matter, as long as they depend on the position alone; that is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor, Refusal, relative_error
from atsc.compiler.importers.onnx.canonical.rounds import (
    SMALL,
    Array,
    NotEvaluable,
    Round,
    Value,
)
from atsc.compiler.ops.rope import rotate

DEFAULT_POSITIONS = 4096
"""Rows of tables of angles where no configuration file tells the context length."""
_CHUNK = 1024
_PROBE = Round(3, 2)


@dataclass(frozen=True, slots=True)
class Turn:
    """y = scale * rope(x) for every head; no tables: y = scale * x."""

    scale: float
    interleaved: bool = False
    tables: tuple[Value, Value] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The part of the graph from rows of a projection, or heads after a norm, to heads."""

    source: Value
    output: Value
    heads: int
    size: int
    width: int
    """Columns of the source: heads * size, or more where it is packed q, k and v."""
    head_major: tuple[bool, bool]
    """Whether source and output have their heads before their tokens."""
    start: int = 0
    """The first column of the source that belongs to these heads."""

    @property
    def selected(self) -> slice:
        """The columns of the source that belong to these heads."""
        return slice(self.start, self.start + self.heads * self.size)


class Angles:
    """The tables of a graph, one for all layers that turn alike."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._known: list[tuple[Array, tuple[Value, Value], bool]] = []

    def measure(self, span: Span) -> Turn:
        """What the span does.

        Raises:
            Refusal: it is no rotation by position, or cannot be evaluated.
        """
        try:
            turn = self._measured(span)
            self._check(span, turn)
        except NotEvaluable as error:
            raise Refusal(f"{span.output.name} cannot be evaluated: {error}") from error
        return turn

    def _measured(self, span: Span) -> Turn:
        units = np.eye(span.size, dtype=np.float32)
        seen = self._apply(span, _PROBE, units[0])[0, 0]
        partners = [i for i in range(1, span.size) if abs(seen[:, i]).max() > 1e-6]
        if not partners:
            return Turn(float(seen[0, 0]))
        if len(partners) > 1:
            raise Refusal(f"{span.output.name} mixes more than two elements of a head")
        interleaved = partners[0] == 1 and span.size > 2
        half = self._num_pairs(span) if interleaved else partners[0]
        first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
        scale = self._scale(span, 2 * half, units)
        return Turn(scale, interleaved, self._tables(span, first, interleaved, half, scale))

    def _num_pairs(self, span: Span) -> int:
        even = np.zeros(span.size, np.float32)
        even[::2] = 1
        odd_seen = self._apply(span, _PROBE, even)[0, 0, :, 1::2]
        return int(np.count_nonzero(abs(odd_seen).max(0)))

    def _scale(self, span: Span, rotary_dim: int, units: Array) -> float:
        """Of the elements that stay, or else of the first pair at position 0."""
        if rotary_dim < span.size:
            return float(self._apply(span, _PROBE, units[-1])[0, 0, 0, -1])
        return float(np.linalg.norm(self._apply(span, Round(0, 1), units[0])[0, 0]))

    def _apply(self, span: Span, at: Round, vector: Array) -> Array:
        """The heads [1, H, M, D] that come of one vector [D] in each head and token."""
        rows = np.zeros((at.tokens, span.width), np.float32)
        rows[:, span.selected] = np.tile(vector, span.heads)
        return self.run(span, at, rows)

    def run(self, span: Span, at: Round, rows: Array) -> Array:
        """The heads [1, H, M, D] that come of rows [M, width]."""
        return run_span(self._editor, span, at, rows)

    def _tables(
        self, span: Span, first: slice, interleaved: bool, half: int, scale: float
    ) -> tuple[Value, Value]:
        vector = np.zeros(span.size, np.float32)
        vector[first] = 1
        second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)

        def rows(at: Round) -> Array:
            seen = self._apply(span, at, vector)[0, 0].astype(np.float32) / np.float32(scale)
            return np.stack([seen[:, first], seen[:, second]])

        count = num_positions(self._editor, rows)
        probes = [Round(0, 3), Round(5, 4), Round(count // 2, 2), Round(max(0, count - 2), 2)]
        seen = np.concatenate([rows(at) for at in probes], axis=1)
        for known, tables, layout in self._known:
            if (
                layout == interleaved
                and known.shape == seen.shape
                and relative_error(known, seen) < 1e-6
            ):
                return tables
        chunks = [rows(Round(p, min(_CHUNK, count - p))) for p in range(0, count, _CHUNK)]
        whole = np.concatenate(chunks, axis=1)
        places = np.concatenate(
            [np.arange(at.past, at.total) for at in probes if at.total <= count]
        )
        if relative_error(whole[:, places], seen[:, : len(places)]) > 1e-5:
            raise Refusal("its angles do not depend on the position alone (a dynamic rope scaling)")
        name = f"rope_{len(self._known)}"
        cos = self._editor.constant(f"{name}/cos_cache", whole[0])
        sin = self._editor.constant(f"{name}/sin_cache", whole[1])
        self._known.append((seen, (cos, sin), interleaved))
        return cos, sin

    def _check(self, span: Span, turn: Turn) -> None:
        """Compare with the rotation that is put in its place, on random rows."""
        rng = np.random.default_rng(1)
        for at in SMALL:
            rows = rng.standard_normal((at.tokens, span.width)).astype(np.float32)
            heads = rows[:, span.selected].reshape(at.tokens, span.heads, span.size)
            expected = turned(heads, turn, at) * np.float32(turn.scale)
            actual = self.run(span, at, rows)
            if relative_error(actual[0].swapaxes(0, 1), expected) > self._editor.tolerance:
                raise Refusal(f"{span.output.name} is no rotary embedding of {span.source.name}")


def run_span(editor: Editor, span: Span, at: Round, rows: Array) -> Array:
    """The heads [1, H, M, D] that come of rows [M, width].

    Raises:
        Refusal: something else comes of them.
        NotEvaluable: they cannot be computed.
    """
    given = rows_as(editor, span, at, rows)
    result = editor.rounds.region(span.output, at, {span.source: given})
    tokens, heads, size = at.tokens, span.heads, span.size
    shape = (heads, tokens, size) if span.head_major[1] else (tokens, heads, size)
    if result.size != tokens * heads * size or result.shape[-1] not in (size, heads * size):
        raise Refusal(
            f"{span.output.name} is {list(result.shape)}, expected {heads} heads of {size}"
        )
    result = result.reshape(shape)
    return (result if span.head_major[1] else result.swapaxes(0, 1))[None]


def rows_as(editor: Editor, span: Span, at: Round, rows: Array) -> Array:
    """Rows [M, width] in the shape of the span's source."""
    shape = editor.rounds.shape(span.source, at)
    if span.head_major[0]:
        rows = rows.reshape(at.tokens, span.heads, span.size).swapaxes(0, 1)
    if rows.size != np.prod(shape, dtype=np.int64):
        raise Refusal(f"{span.source.name} is {list(shape)}, not rows of {span.width}")
    return np.ascontiguousarray(rows.reshape(shape))


def turned(heads: Array, turn: Turn, at: Round) -> Array:
    """Heads [M, H, D] rotated as `turn` says, without its scale."""
    if turn.tables is None:
        return heads
    cos, sin = (np.asarray(v.const_value.numpy())[at.past : at.total] for v in turn.tables)  # type: ignore[union-attr]
    return rotate(heads, cos, sin, turn.interleaved)


def num_positions(editor: Editor, rows: Callable[[Round], object]) -> int:
    """How many positions a table can have: the context length, or fewer if the graph has fewer."""
    wanted = editor.context_length or DEFAULT_POSITIONS

    def exists(count: int) -> bool:
        try:
            rows(Round(count - 1, 1))
        except (NotEvaluable, Refusal):
            return False
        return True

    if exists(wanted):
        return wanted
    low, high = 1, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return low
