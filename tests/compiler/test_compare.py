"""What `atsc verify` measures, on logits made up for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from atsc.compiler.commands.compare import FLOAT_BOUNDS, INT8_BOUNDS, Bounds, Comparison, Result

RNG = np.random.default_rng(3)
REFERENCE = RNG.standard_normal((300, 50)).astype(np.float32) * 3
IDS = RNG.integers(0, 50, 301)


def compare(
    ours: np.ndarray, reference: np.ndarray = REFERENCE, bounds: Bounds = INT8_BOUNDS, cut: int = 0
) -> Result:
    comparison = Comparison(bounds)
    cuts = [0, cut, len(reference)] if cut else [0, len(reference)]
    for begin, end in itertools.pairwise(cuts):
        next_ids = IDS[begin + 1 : min(end + 1, len(reference))]
        comparison.add(reference[begin:end], ours[begin:end], next_ids)
    return comparison.result()


def test_equal_logits_are_within_every_bound() -> None:
    result = compare(REFERENCE.copy(), bounds=FLOAT_BOUNDS)
    assert result.failures(FLOAT_BOUNDS) == []
    assert (result.max_difference, result.top1_agreement, result.ratio_error) == (0, 1, 0)
    assert result.perplexity_ratio == 1


def test_figures_by_hand() -> None:
    reference = np.array([[0.0, np.log(3)], [2.0, 0.0]], np.float32)
    ours = reference + np.array([[0.0, 0.0], [0.0, 2.5]], np.float32)
    comparison = Comparison(Bounds(relative_l2=0.01, top1_agreement=0.5))
    comparison.add(reference, ours, np.array([1]))
    result = comparison.result()
    assert result.max_difference == 2.5
    assert result.mean_difference == pytest.approx(2.5 / 4)
    assert result.relative_l2 == pytest.approx(2.5 / np.sqrt(np.log(3) ** 2 + 4))
    assert (result.top1_agreement, result.num_clear, result.num_clear_wrong) == (0.5, 2, 1)
    assert result.reference_perplexity == pytest.approx(4 / 3)
    assert result.stated_error == pytest.approx(6 * 0.01 * (np.log(3) / 2 + 1) / 2)


def test_pieces_add_up() -> None:
    ours = REFERENCE + RNG.standard_normal(REFERENCE.shape).astype(np.float32) * 0.05
    whole, pieces = compare(ours), compare(ours, cut=117)
    for name in Result.__slots__:
        assert getattr(pieces, name) == pytest.approx(getattr(whole, name), rel=1e-6), name


def test_noise_of_the_stated_size_passes_and_more_fails() -> None:
    noise = RNG.standard_normal(REFERENCE.shape).astype(np.float32)
    within = compare(REFERENCE + 3 * 0.015 * noise)
    assert within.failures(INT8_BOUNDS) == []
    assert within.num_clear > 30 and within.relative_l2 > 0.01
    beyond = compare(REFERENCE + 3 * 0.2 * noise)
    assert "relative L2 error" in beyond.failures(INT8_BOUNDS)


def test_a_wrong_clear_winner_fails_alone() -> None:
    ours = REFERENCE.copy()
    order = REFERENCE.argsort(axis=1)
    rows = np.arange(len(REFERENCE))
    margin = REFERENCE[rows, order[:, -1]] - REFERENCE[rows, order[:, -2]]
    allowed = 6 * INT8_BOUNDS.relative_l2 * REFERENCE.std(axis=1)
    row = int(np.where(margin > allowed, margin, np.inf).argmin())
    first, second = order[row, -1], order[row, -2]
    ours[row, [first, second]] = REFERENCE[row, [second, first]]
    assert compare(ours).failures(INT8_BOUNDS) == ["top tokens ahead by more than the stated error"]


def test_a_biased_perplexity_fails() -> None:
    ours = REFERENCE * 1.035
    assert compare(ours).failures(INT8_BOUNDS) == ["perplexity"]


def test_the_scatter_of_a_short_text_excuses_no_perplexity() -> None:
    """Two tokens, off by 4 % and by -1 %: the mean is above 1 % and says little."""
    ids = np.array([0, 0, 0])
    reference = np.zeros((2, 2), np.float32)
    ours = np.array([[0.0, 0.08], [0.0, -0.02]], np.float32)
    comparison = Comparison(INT8_BOUNDS)
    comparison.add(reference, ours, ids[1:])
    result = comparison.result()
    assert 1.01 < result.perplexity_ratio < 1.01 + result.ratio_error
    assert "perplexity" in result.failures(INT8_BOUNDS)


def test_who_guesses_is_judged_with_the_scatter() -> None:
    """Random logits scatter by more than 1 % on a short text; those that know the text do not."""
    few = slice(0, 24)
    noise = RNG.standard_normal(REFERENCE.shape).astype(np.float32) * 0.2
    guess = compare((REFERENCE + noise)[few], REFERENCE[few])
    assert guess.guesses and guess.vocabulary == 50
    assert guess.perplexity_allowance == 0.01 + 3 * guess.ratio_error > 0.03
    assert "perplexity" not in guess.failures(INT8_BOUNDS)
    assert guess.top1_bound(INT8_BOUNDS) == pytest.approx(0.9 - 3 * (0.09 / 24) ** 0.5)
    knowing = REFERENCE.copy()
    knowing[np.arange(300), IDS[1:]] += 9
    doubting = knowing.copy()
    doubting[np.arange(300), IDS[1:]] -= 0.15
    sure = compare(doubting, knowing)
    assert not sure.guesses and sure.perplexity_allowance == 0.01
    assert sure.top1_bound(INT8_BOUNDS) == 0.9
    assert "perplexity" in sure.failures(INT8_BOUNDS)


def test_who_guesses_with_a_bias_fails() -> None:
    """More than any scatter: every token of the text is made less likely."""
    ours = REFERENCE.copy()
    ours[np.arange(300), IDS[1:]] -= 0.1
    result = compare(ours)
    assert result.guesses and result.failures(INT8_BOUNDS) == ["perplexity"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_numbers_fail(value: float) -> None:
    ours = REFERENCE.copy()
    ours[5, 7] = value
    with np.errstate(invalid="ignore"):
        assert "relative L2 error" in compare(ours).failures(INT8_BOUNDS)


def test_a_reference_of_zeros() -> None:
    zeros = np.zeros_like(REFERENCE)
    assert compare(zeros.copy(), zeros).relative_l2 == 0
    assert "relative L2 error" in compare(REFERENCE, zeros).failures(INT8_BOUNDS)


def test_a_hopeless_perplexity_fails() -> None:
    assert "perplexity" in compare(REFERENCE * 1e4).failures(INT8_BOUNDS)
