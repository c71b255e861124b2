// Rotary position embedding of one head (compiler/ops/rope.py has the formula).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd.h"

namespace atsc {

// Element i turns with i + half. In place; cos and sin [half].
static inline void rotate_halves(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += 8) {
    const int64_t left = half - i;
    const __m256 c = load_first(cos + i, left), s = load_first(sin + i, left);
    const __m256 x1 = load_first(x + i, left), x2 = load_first(x + half + i, left);
    store_first(x + i, _mm256_fmsub_ps(x1, c, _mm256_mul_ps(x2, s)), left);
    store_first(x + half + i, _mm256_fmadd_ps(x1, s, _mm256_mul_ps(x2, c)), left);
  }
}

// Element 2i turns with 2i + 1. In place; cos and sin [half].
static inline void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half) {
  const int64_t whole = half / 4 * 4;
  for (int64_t i = 0; i < whole; i += 4) {
    const __m128 c = _mm_loadu_ps(cos + i), s = _mm_loadu_ps(sin + i);
    const __m256 cc = _mm256_set_m128(_mm_unpackhi_ps(c, c), _mm_unpacklo_ps(c, c));
    const __m256 ss = _mm256_set_m128(_mm_unpackhi_ps(s, s), _mm_unpacklo_ps(s, s));
    const __m256 pairs = _mm256_loadu_ps(x + 2 * i);
    const __m256 swapped = _mm256_permute_ps(pairs, 0xb1);
    // Even lanes subtract, odd lanes add.
    const __m256 turned = _mm256_fmaddsub_ps(pairs, cc, _mm256_mul_ps(swapped, ss));
    _mm256_storeu_ps(x + 2 * i, turned);
  }
  for (int64_t i = whole; i < half; ++i) {
    const float x1 = x[2 * i], x2 = x[2 * i + 1];
    x[2 * i] = x1 * cos[i] - x2 * sin[i];
    x[2 * i + 1] = x1 * sin[i] + x2 * cos[i];
  }
}

}  // namespace atsc
