"""session_next: distributions, limits, seeds, stop tokens. A table of logits is the model's own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sampling_chances import chances_of
from tiny_model import CONTEXT, EOS, VOCAB

from atsc.compiler.errors import UsageError
from atsc.runtime import capi
from atsc.runtime.loader import Plan, Session

pytestmark = pytest.mark.toolchain

OpenTiny = Callable[..., Plan]
PROMPT = [4, 9, 2]
HOT = 30.0
"""A temperature at which the tiny model's distribution is broad."""


def _draw(session: Session, count: int, **options: Any) -> NDArray[np.int64]:
    """Tokens drawn independently from the logits after PROMPT."""
    sampling = capi.Sampling(has_seed=1, ignore_eos=1, **options)
    session.rewind(0)
    session.prefill(PROMPT)
    session._call("session_set_sampling", ctypes.byref(sampling))
    chosen = capi.Next()
    tokens = []
    for _ in range(count):
        session._call("session_next", ctypes.byref(chosen))
        tokens.append(chosen.token)
        # Back to the prompt's logits; the random state goes on.
        session.rewind(len(PROMPT) - 1)
        session.decode(PROMPT[-1])
    return np.array(tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": HOT},
        {"temperature": 2 * HOT, "top_k": 5},
        {"temperature": HOT, "top_p": 0.8},
        {"temperature": HOT, "min_p": 0.2},
        {"temperature": HOT, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_distribution(open_tiny: OpenTiny, options: dict[str, Any]) -> None:
    """Chi-square against the definition; the seed is fixed, so the test cannot flicker."""
    plan = open_tiny(threads=1)
    count = 4000
    with plan.session() as session:
        expected = chances_of(session.prefill(PROMPT), **options)
        drawn = np.bincount(_draw(session, count, seed=11, **options), minlength=VOCAB)
    possible = expected > 0
    assert possible.sum() > 2
    assert not drawn[~possible].any()
    wanted = expected[possible] * count
    kept = wanted >= 5
    chi_square = (((drawn[possible] - wanted) ** 2) / wanted)[kept].sum()
    degrees = kept.sum() - 1
    # Mean `degrees`, variance 2 * degrees: four standard deviations.
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


def test_top_p_keeps_what_crosses_the_limit(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=1)
    with plan.session() as session:
        best = int(session.prefill(PROMPT).argmax())
        assert set(_draw(session, 50, temperature=HOT, top_p=1e-6, seed=1)) == {best}
        assert set(_draw(session, 50, temperature=HOT, top_k=1, seed=1)) == {best}
        assert set(_draw(session, 50, temperature=HOT, min_p=1.0, seed=1)) == {best}


def test_same_seed_same_tokens(open_tiny: OpenTiny) -> None:
    def tokens(threads: int, seed: int | None) -> list[int]:
        plan = open_tiny(threads=threads)
        return list(plan.generate(PROMPT, max_new_tokens=40, temperature=HOT, seed=seed))

    assert tokens(1, 5) == tokens(2, 5)
    assert tokens(1, 5) != tokens(1, 6)
    # Now and then two of them end with their first token; never all of them.
    assert len({tuple(tokens(1, None)) for _ in range(8)}) > 1


def test_greedy_follows_the_largest_logit(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=2)
    tokens = list(plan.generate(PROMPT, max_new_tokens=25))
    expected: list[int] = []
    with plan.session() as session:
        logits = session.prefill(PROMPT)
        for _ in range(25):
            expected.append(int(logits.argmax()))
            logits = session.decode(expected[-1])
    assert tokens == expected


def test_stop_tokens_end_the_text_unseen(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=1)
    free = list(plan.generate(PROMPT, max_new_tokens=60, temperature=HOT, seed=2))
    stop = free[7]
    first = free.index(stop)
    again = plan.generate(PROMPT, max_new_tokens=60, temperature=HOT, seed=2, stop_token_ids=[stop])
    assert list(again) == free[:first]
    assert EOS not in free
    with_eos = plan.session()
    drawn = _draw(with_eos, 400, temperature=100.0, seed=2)
    assert EOS in drawn


def test_generation_ends_with_the_context(open_tiny: OpenTiny) -> None:
    """The last token is chosen after CONTEXT tokens, and has no place in the caches."""
    plan = open_tiny(threads=1)
    tokens = list(plan.generate(PROMPT, max_new_tokens=1000))
    assert len(tokens) == CONTEXT - len(PROMPT) + 1
    assert list(plan.generate(PROMPT, max_new_tokens=0)) == []


def test_bad_sampling_is_named(open_tiny: OpenTiny) -> None:
    plan = open_tiny(threads=1)
    for options, message in (
        ({"temperature": -1.0}, r"sampling\.temperature is -1: expected 0 or more"),
        ({"temperature": float("nan")}, r"sampling\.temperature"),
        ({"top_p": 1.5}, r"sampling\.top_p is 1\.5: expected 0 to 1"),
        ({"min_p": -0.1}, r"sampling\.min_p"),
        ({"top_k": -1}, r"sampling\.top_k"),
        ({"top_k": 1 << 40}, "top_k: a number is beyond 32 bits"),
    ):
        with pytest.raises(UsageError, match=message):
            list(plan.generate(PROMPT, max_new_tokens=1, **options))  # type: ignore[arg-type]
