"""The shapes of published models, as their configuration files state them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.importers.onnx.decoder import Rotary


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, with a smooth change in between."""

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN as gpt-oss has it, without truncation of the ramp's ends."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and kinds of parts; `architecture` is GGUF's name for it."""

    architecture: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    epsilon: float
    theta: float = 0.0
    is_tied: bool = False
    max_context: int = 0
    experts: int = 0
    chosen_experts: int = 0
    window: int = -1
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    scaling: Llama3Scaling | Yarn | None = None

    @property
    def has_head_norms(self) -> bool:
        """RMSNorm on each head of q and k."""
        return self.architecture in ("qwen3", "qwen3moe")

    @property
    def has_biases(self) -> bool:
        """Every linear layer has a bias."""
        return self.architecture in ("gpt-oss", "opt")

    def rope_factors(self) -> NDArray[np.float32] | None:
        """What frequencies are divided by [D / 2] (Llama 3.1's scaling); None for 1."""
        if not isinstance(self.scaling, Llama3Scaling):
            return None
        scaling, frequencies = self.scaling, self._frequencies()
        turns = scaling.original_context * frequencies / (2 * np.pi)
        smooth = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        scaled = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
        return (frequencies / scaled).astype(np.float32)

    def rotary(self) -> Rotary | None:
        """Frequencies with all scaling applied; None for learned positions."""
        if not self.theta:
            return None
        frequencies = self._frequencies()
        factors = self.rope_factors()
        if factors is not None:
            return Rotary(frequencies / factors.astype(np.float64))
        if not isinstance(self.scaling, Yarn):
            return Rotary(frequencies)
        yarn = self.scaling

        def pair_of(turns: float) -> float:
            """The pair that turns so often within the original context."""
            ratio = yarn.original_context / (turns * 2 * math.pi)
            return self.head_size / 2 * math.log(ratio) / math.log(self.theta)

        low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
        ramp = np.clip((np.arange(self.head_size // 2) - low) / (high - low), 0, 1)
        mixed = frequencies / yarn.factor * ramp + frequencies * (1 - ramp)
        return Rotary(mixed, 0.1 * math.log(yarn.factor) + 1.0)

    def _frequencies(self) -> NDArray[np.float64]:
        pairs = np.arange(0, self.head_size, 2, dtype=np.float64)
        frequencies: NDArray[np.float64] = self.theta ** (-pairs / self.head_size)
        return frequencies


_QWEN3 = Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1e-6, theta=1e6)

SHAPES = {
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, 1e-5, theta=1e5, is_tied=True),
    "llama3.1-8b": Shape(
        "llama",
        *(4096, 14336, 32, 32, 8, 128, 128256, 1e-5),
        theta=5e5,
        scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
    ),
    "qwen3-0.6b": dataclasses.replace(_QWEN3, is_tied=True),
    "qwen3-8b": dataclasses.replace(_QWEN3, hidden=4096, inner=12288, layers=36, heads=32),
    "qwen3-14b": dataclasses.replace(_QWEN3, hidden=5120, inner=17408, layers=40, heads=40),
    "qwen3-30b-a3b": Shape(
        "qwen3moe",
        *(2048, 768, 48, 32, 4, 128, 151936, 1e-6),
        theta=1e6,
        experts=128,
        chosen_experts=8,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        *(2880, 2880, 24, 64, 8, 64, 201088, 1e-5),
        theta=150000.0,
        experts=32,
        chosen_experts=4,
        window=128,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        swiglu_beta=1.0,
        scaling=Yarn(32.0, 32.0, 1.0, 4096),
    ),
    "opt-6.7b": Shape(
        "opt", 4096, 16384, 32, 32, 32, 128, 50272, 1e-5, is_tied=True, max_context=2048
    ),
}


def shape_of(name: str) -> Shape:
    """A published shape, or with the prefix `tiny-` a model of its kind in a few megabytes.

    Raises:
        KeyError: there is no such name.
    """
    if not name.startswith("tiny-"):
        return SHAPES[name]
    shape = SHAPES[name.removeprefix("tiny-")]
    is_grouped = shape.heads != shape.kv_heads
    return dataclasses.replace(
        shape,
        hidden=128,
        inner=192,
        layers=2,
        heads=4,
        kv_heads=2 if is_grouped else 4,
        vocab=515,
        experts=min(shape.experts, 8),
        chosen_experts=min(shape.chosen_experts, 2),
        window=min(shape.window, 16),
    )
