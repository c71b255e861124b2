"""Attention masks, proved: which tokens each row of a round sees.

A mask is a value [.., M, T] that depends on the round alone, boolean or additive. It is evaluated
in rounds far and near, and right at the edge of a window, and compared with the rule
max(0, p - window + 1) <= t <= p that takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atsc.compiler.importers.onnx.canonical.editor import Editor, Refusal
from atsc.compiler.importers.onnx.canonical.rope import DEFAULT_POSITIONS
from atsc.compiler.importers.onnx.canonical.rounds import (
    SMALL,
    Array,
    NotEvaluable,
    Round,
    Value,
)


@dataclass(frozen=True, slots=True)
class Mask:
    """A value [.., M or 1, T] that says what rows see."""

    value: Value
    hides: bool = False
    """Whether a boolean one is true where a token is hidden."""


_HIDDEN = -1000.0
"""An additive mask at most this low hides a token: exp(-1000) is 0 in any float type."""


def window_of(editor: Editor, masks: list[Mask], capacity: int) -> int:
    """The window that all masks together leave of causal attention; 0: everything before.

    `capacity` is how many columns the masks have; 0: as many as there are tokens.

    Raises:
        Refusal: the masks are not causal, or not even masks.
    """
    far = (editor.context_length or DEFAULT_POSITIONS) - 1
    try:
        seen = np.count_nonzero(_visible(editor, masks, Round(far, 1), capacity))
        window = 0 if seen == far + 1 else int(seen)
        for at in _edges(window, far):
            if not capacity or at.total <= capacity:
                _check(editor, masks, at, window, capacity)
    except NotEvaluable as error:
        raise Refusal(f"its mask cannot be evaluated: {error}") from error
    return window


def _edges(window: int, far: int) -> list[Round]:
    rounds = [*SMALL, Round(far, 1), Round(max(0, far - 3), 4), Round(0, min(far + 1, 160))]
    if window:
        rounds += [
            Round(max(0, window - 2), 4),
            Round(window, 1),
            Round(max(0, window - 1), 1),
            Round(2 * window + 1, 3),
        ]
        rounds += [Round(0, window + 3)] if window <= 512 else []
    return rounds


def expected(at: Round, window: int, capacity: int = 0) -> Array:
    """The rule: [M, T or capacity], true where a row sees a token."""
    position = np.arange(at.past, at.total)[:, None]
    token = np.arange(capacity or at.total)[None, :]
    visible = token <= position
    return visible & (token > position - window) if window else visible


def _check(editor: Editor, masks: list[Mask], at: Round, window: int, capacity: int) -> None:
    seen = _visible(editor, masks, at, capacity)
    if not np.array_equal(seen, expected(at, window, capacity)):
        rule = f"causal with a window of {window}" if window else "causal"
        raise Refusal(
            f"its mask is not {rule}: it differs for {at.tokens} tokens after {at.past} "
            f"({', '.join(mask.value.name or '?' for mask in masks)})"
        )


def _visible(editor: Editor, masks: list[Mask], at: Round, capacity: int) -> Array:
    visible = np.ones((at.tokens, capacity or at.total), bool)
    for mask in masks:
        array = editor.rounds.value(mask.value, at)
        if array.dtype == bool:
            array = array ^ mask.hides
        else:
            wide = array.astype(np.float64)
            if not ((wide == 0) | (wide <= _HIDDEN)).all():
                raise Refusal(
                    f"its mask {mask.value.name} has values that are neither 0 nor -infinity"
                )
            array = wide == 0
        try:
            flat = array.reshape(-1, *array.shape[-2:])
            if not (flat == flat[:1]).all():
                raise Refusal(f"its mask {mask.value.name} differs between heads")
            visible &= flat[0]
        except ValueError:
            raise Refusal(
                f"its mask {mask.value.name} is {list(array.shape)} "
                f"for {at.tokens} tokens after {at.past}"
            ) from None
    return visible
