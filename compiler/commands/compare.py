"""How close two models' logits are, accumulated piece by piece over one text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32Array = NDArray[np.float32]

MARGIN_SIGMAS = 6.0
MAX_PERPLEXITY_DEVIATION = 0.01
SCATTER_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a comparison may show at most."""

    relative_l2: float
    top1_agreement: float


FLOAT_BOUNDS = Bounds(relative_l2=2e-3, top1_agreement=0.98)
INT8_BOUNDS = Bounds(relative_l2=4e-2, top1_agreement=0.90)
"""For linears that quantise activations to int8 (compiler/ops/quantize.py)."""


@dataclass(frozen=True, slots=True)
class Result:
    """Figures over all tokens; logits as the models give them, before any softmax."""

    num_tokens: int
    vocabulary: int
    max_difference: float
    mean_difference: float
    relative_l2: float
    top1_agreement: float
    stated_error: float
    """Mean over tokens of the error that the bound allows a logit: MARGIN_SIGMAS times the bound on
    the relative L2 error times the standard deviation of the token's logits."""
    num_clear: int
    """Tokens where the reference's first is ahead of its second by more than the stated error."""
    num_clear_wrong: int
    """Of these, the ones where the other model's first is another."""
    reference_perplexity: float
    perplexity: float
    ratio_error: float
    """Standard error of the perplexity ratio, from the spread of the tokens' losses."""

    @property
    def perplexity_ratio(self) -> float:
        """Ours over the reference's."""
        return self.perplexity / self.reference_perplexity

    @property
    def guesses(self) -> bool:
        """Whether the reference predicts the text worse than equal odds for every token would.

        So does a model of random weights, or any on random tokens. Its perplexity hangs on how the
        errors of a few logits happen to fall, and scatters by `ratio_error`; its top tokens are
        hardly ahead of others, so that few tokens say little of how many agree.
        """
        return self.reference_perplexity > self.vocabulary

    @property
    def perplexity_allowance(self) -> float:
        """How far the perplexity ratio may be from 1."""
        scattered = self.guesses and math.isfinite(self.ratio_error)
        scatter = SCATTER_SIGMAS * self.ratio_error if scattered else 0.0
        return MAX_PERPLEXITY_DEVIATION + scatter

    def top1_bound(self, bounds: Bounds) -> float:
        """The share of top tokens that must agree."""
        share = bounds.top1_agreement
        scatter = math.sqrt(share * (1 - share) / self.num_tokens) if self.guesses else 0.0
        return share - SCATTER_SIGMAS * scatter

    def failures(self, bounds: Bounds) -> list[str]:
        """What is out of bounds, in words; written so that NaN fails."""
        tests = {
            "relative L2 error": self.relative_l2 <= bounds.relative_l2,
            "top-1 agreement": self.top1_agreement >= self.top1_bound(bounds),
            "top tokens ahead by more than the stated error": self.num_clear_wrong == 0,
            "perplexity": abs(self.perplexity_ratio - 1) <= self.perplexity_allowance,
        }
        return [name for name, passed in tests.items() if not passed]


class Comparison:
    """Accumulates; memory does not grow with the text."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._tokens = self._agree = self._clear = self._clear_wrong = self._predicted = 0
        self._max = self._sum = self._square = self._reference_square = 0.0
        self._stated = self._loss = self._reference_loss = self._loss_square = 0.0
        self._elements = self._vocabulary = 0

    def add(self, reference: F32Array, ours: F32Array, next_ids: NDArray[np.int64]) -> None:
        """Compare the logits of some tokens.

        Args:
            reference: [M, vocabulary].
            ours: the same of the model to be judged.
            next_ids: [M], or [M - 1] at the end of the text: the tokens that follow.
        """
        difference = np.abs(ours - reference)
        self._vocabulary = reference.shape[1]
        self._tokens += len(reference)
        self._elements += difference.size
        # np.maximum lets NaN through, where max() might drop it.
        self._max = float(np.maximum(self._max, difference.max()))
        self._sum += float(difference.sum(dtype=np.float64))
        self._square += float(np.square(difference, dtype=np.float64).sum())
        self._reference_square += float(np.square(reference, dtype=np.float64).sum())
        self._add_tops(reference, ours)
        count = len(next_ids)
        self._predicted += count
        reference_losses = _losses(reference[:count], next_ids)
        losses = _losses(ours[:count], next_ids)
        self._reference_loss += float(reference_losses.sum())
        self._loss += float(losses.sum())
        self._loss_square += float(np.square(losses - reference_losses).sum())

    def _add_tops(self, reference: F32Array, ours: F32Array) -> None:
        same = reference.argmax(axis=1) == ours.argmax(axis=1)
        first_two = np.partition(reference, -2, axis=1)[:, -2:]
        margin = first_two[:, 1] - first_two[:, 0]
        allowed = MARGIN_SIGMAS * self._bounds.relative_l2 * reference.std(axis=1)
        clear = margin > allowed
        self._agree += int(same.sum())
        self._clear += int(clear.sum())
        self._clear_wrong += int((clear & ~same).sum())
        self._stated += float(allowed.sum())

    def _relative_l2(self) -> float:
        """A reference of nothing but zeros is met exactly or not at all."""
        if self._reference_square == 0:
            return 0.0 if self._square == 0 else math.inf
        return math.sqrt(self._square / self._reference_square)

    def result(self) -> Result:
        """The figures of everything added so far."""
        predicted = max(1, self._predicted)
        mean = (self._loss - self._reference_loss) / predicted
        variance = max(0.0, self._loss_square / predicted - mean**2)
        return Result(
            num_tokens=self._tokens,
            vocabulary=self._vocabulary,
            max_difference=self._max,
            mean_difference=self._sum / self._elements,
            relative_l2=self._relative_l2(),
            top1_agreement=self._agree / self._tokens,
            stated_error=self._stated / self._tokens,
            num_clear=self._clear,
            num_clear_wrong=self._clear_wrong,
            reference_perplexity=_exp(self._reference_loss / predicted),
            perplexity=_exp(self._loss / predicted),
            ratio_error=_exp(mean) * math.sqrt(variance / predicted),
        )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _losses(logits: F32Array, next_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """-log p(next) of each token."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True, initial=-np.inf)
    chosen: NDArray[np.float64] = shifted[np.arange(len(next_ids)), next_ids]
    losses: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=1)) - chosen
    return losses
