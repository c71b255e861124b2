"""RoPE frequencies of GGUF files: plain, with factors (Llama 3), linear and YaRN scaling.

Pair i of a head of D elements turns by `base ** (-2 i / D) / factor[i]` radians a position, where
`rope_freqs.weight` holds the factors. Linear scaling divides that by the scaling factor s. YaRN
divides slow pairs and leaves fast ones: between the pairs that turn 32 times and once in the
original context it goes from one to the other in a straight line, and it multiplies cos and
sin by `1 + 0.1 ln s` (1 where s < 1). Source: arXiv 2309.00071, as ggml's rope and llama.cpp's keys
have it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.gguf_metadata import Metadata
from atsc.compiler.importers.onnx.decoder import F32Array, Rotary

_BETA_FAST, _BETA_SLOW = 32.0, 1.0
_USUAL = {
    "alpha": 0.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": _BETA_FAST,
    "yarn_beta_slow": _BETA_SLOW,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}
"""Keys that llama.cpp does not read in these architectures, and their values in ordinary files."""
_SHARPEST_RAMP = 0.001


def plain_rotary(head_size: int, base: float, factors: F32Array | None = None) -> Rotary:
    """RoPE without scaling; `factors` [D / 2] divide the frequencies."""
    frequencies = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    return Rotary(frequencies)


def scaled_rotary(
    metadata: Metadata, architecture: str, head_size: int, factors: F32Array | None = None
) -> Rotary:
    """RoPE as the keys `ARCHITECTURE.rope.*` say.

    Raises:
        ModelError: a kind of scaling that is not supported, or numbers that make no sense.
    """
    prefix = f"{architecture}.rope"
    base = metadata.real(f"{prefix}.freq_base", 10000.0)
    if not (math.isfinite(base) and base > 0):
        raise ModelError(f"{metadata.source}: {prefix}.freq_base is {base}, expected a number > 0")
    plain = plain_rotary(head_size, base, factors)
    kind = metadata.text(f"{prefix}.scaling.type", "linear")
    factor = metadata.real(f"{prefix}.scaling.factor", 0.0)
    factor = factor or metadata.real(f"{prefix}.scale_linear", 0.0) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{metadata.source}: RoPE scaling of type {kind!r} is not supported yet (supported:"
            " linear, yarn, and the factors of Llama 3)"
        )
    for key, usual in _USUAL.items():
        found = metadata.real(f"{prefix}.scaling.{key}", usual)
        if found != usual:
            raise ModelError(
                f"{metadata.source}: {prefix}.scaling.{key} is {found:g}, supported: {usual:g}"
            )
    if not (math.isfinite(factor) and factor > 0):
        raise ModelError(
            f"{metadata.source}: {prefix}.scaling.factor is {factor}, expected a number > 0"
        )
    magnitude = metadata.real(f"{prefix}.scaling.attn_factor", 1.0)
    if kind == "none":
        return Rotary(plain.inverse_frequencies, magnitude)
    if kind == "linear":
        return Rotary(plain.inverse_frequencies / factor, magnitude)
    share = _interpolated_share(metadata, architecture, head_size, base)
    frequencies = plain.inverse_frequencies * (share / factor + 1 - share)
    return Rotary(frequencies, magnitude * (1 + 0.1 * math.log(max(1.0, factor))))


def _interpolated_share(
    metadata: Metadata, architecture: str, head_size: int, base: float
) -> NDArray[np.float64]:
    """1 for the pairs that YaRN scales, 0 for those that it leaves alone, [D / 2]."""
    trained = metadata.integer(f"{architecture}.context_length")
    key = f"{architecture}.rope.scaling.original_context_length"
    original = metadata.integer(key, trained)
    if original < 1 or base <= 1:
        raise ModelError(
            f"{metadata.source}: YaRN from {original} tokens with a base of {base} makes no sense"
        )

    def pair_that_turns(times: float) -> float:
        return head_size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first = max(0, math.floor(pair_that_turns(_BETA_FAST)))
    last = min(head_size - 1, math.ceil(pair_that_turns(_BETA_SLOW)))
    pairs = np.arange(head_size // 2, dtype=np.float64)
    share: NDArray[np.float64] = (pairs - first) / max(_SHARPEST_RAMP, last - first)
    return share.clip(0.0, 1.0)
