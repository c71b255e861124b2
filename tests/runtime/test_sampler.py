"""The sampler by itself, on vocabularies of any size: who may be drawn, and how often."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sampling_chances import chances_of

from atsc.codegen.toolchain import RUNTIME_SOURCES, Unit, compile_units, link_library

pytestmark = pytest.mark.toolchain

Draws = NDArray[np.int32]
Draw = Callable[..., Draws]

SOURCE = """
#include "sampler.h"

extern "C" __attribute__((visibility("default"))) void draw(
    const float* logits, int vocab_size, float temperature, int top_k, float top_p, float min_p,
    int count, int* tokens) {
  atsc::Sampler sampler({temperature, top_k, top_p, min_p}, 3);
  for (int i = 0; i < count; ++i) tokens[i] = sampler.choose(logits, vocab_size);
}
"""


@pytest.fixture(scope="module")
def draw(tmp_path_factory: pytest.TempPathFactory) -> Draw:
    flags = ("-fexceptions",)
    sampler = (RUNTIME_SOURCES / "sampler.cc").read_text()
    units = [Unit("sampler", sampler, flags), Unit("draw", SOURCE, flags)]
    path = tmp_path_factory.mktemp("sampler") / "sampler.so"
    link_library(compile_units(units), path)
    library = ctypes.CDLL(str(path))

    def call(
        logits: NDArray[np.float32],
        count: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> Draws:
        tokens = np.empty(count, np.int32)
        floats = [ctypes.c_float(number) for number in (temperature, top_p, min_p)]
        at = [array.ctypes.data_as(ctypes.c_void_p) for array in (logits, tokens)]
        library.draw(at[0], len(logits), floats[0], top_k, *floats[1:], count, at[1])
        return tokens

    return call


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 40},
        {"top_k": 7, "top_p": 0.9},
        {"top_k": 900, "min_p": 0.01},
        {"top_p": 0.8},
        {"top_p": 0.95, "min_p": 0.02},
        {"min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [1, 3, 255, 256, 257, 1001, 20_003])
def test_draws_follow_the_definition(draw: Draw, vocab_size: int, options: dict[str, Any]) -> None:
    """Equal logits, numbers that are none, and the last tokens of a vocabulary among them."""
    rng = np.random.default_rng(vocab_size)
    logits = (2 * rng.standard_normal(vocab_size)).astype(np.float16).astype(np.float32)
    logits[::17] = logits[5 % vocab_size]
    logits[vocab_size // 2 :: 23] = np.nan
    logits[vocab_size // 2 :: 29] = -np.inf
    logits[-1] = 4
    count = 4000
    expected = chances_of(logits, **options)
    drawn = np.bincount(draw(logits, count, **options), minlength=vocab_size)
    # At the edge of top_p single precision may take one more.
    assert drawn[expected == 0].sum() <= 1
    # Rare tokens together are one class.
    rare = expected * count < 20
    found = np.append(drawn[~rare], drawn[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * count
    kept = wanted > 0
    chi_square = ((found - wanted)[kept] ** 2 / wanted[kept]).sum()
    degrees = kept.sum() - 1
    assert chi_square <= degrees + 4 * np.sqrt(2 * degrees) + 1e-9


def test_of_equal_logits_the_first_ones_are_kept(draw: Draw) -> None:
    logits = np.zeros(5000, np.float32)
    assert set(draw(logits, 300, top_k=3)) == {0, 1, 2}
    assert set(draw(logits, 300, top_p=2.5 / 5000)) == {0, 1, 2}
    logits[4000:4100] = 1
    assert set(draw(logits, 2000, top_k=100)) == set(range(4000, 4100))


def test_far_logits_are_drawn_at_a_high_temperature(draw: Draw) -> None:
    logits = np.linspace(0, -100, 700, dtype=np.float32)
    assert draw(logits, 500, temperature=1000).max() > 600
    assert draw(logits, 500, temperature=0.01).max() == 0
