"""From which distribution a sampler must draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def chances_of(
    logits: NDArray[np.float32],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> NDArray[np.float64]:
    """By definition (src/sampler.h); what is no number is never drawn."""
    scaled = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64) / temperature
    chances = np.exp(scaled - scaled.max())
    chances[chances < min_p] = 0
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        chances[order[top_k:]] = 0
    if 0 < top_p < 1:
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[before >= top_p * chances.sum()]] = 0
    return np.asarray(chances / chances.sum())
