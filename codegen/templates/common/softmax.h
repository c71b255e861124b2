// The online softmax of one query over blocks of scores, and fp16 rows.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "simd.h"
#include "vector_math.h"

namespace atsc {

inline constexpr float kLog2E = 1.44269504f;

// What a query has seen so far: its largest score in units of log2(e), so that weights are powers of
// two, and the sum of 2^(score - largest).
struct SoftmaxState {
  float largest = -INFINITY;
  float total = 0.0f;
};

static inline float exp2_of_negative(float x) {
  return _mm256_cvtss_f32(exp2_of_negative(_mm256_set1_ps(x)));
}

// What queries are multiplied by: scores in units of log2(e), or tanh's argument under a softcap.
constexpr float query_scale(float scale, float softcap) {
  return softcap > 0.0f ? scale / softcap : scale * kLog2E;
}

// Turns scores into weights 2^(score - largest) in place and brings the state up to date. Columns
// outside [first, last] get weight 0, up to the next multiple of 8 after `columns`, to which the
// scores must be readable. Returns the factor for what was summed before. A softcap of 0 is none.
static inline float soften(float* scores, int64_t columns, int64_t first, int64_t last,
                           float softcap, SoftmaxState& state) {
  const __m256 lanes = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  const bool masked = first > 0 || last + 1 < columns || columns % 8 != 0;
  const float stop = static_cast<float>(last < columns ? last : columns - 1);
  __m256 largest = _mm256_set1_ps(-INFINITY);
  for (int64_t i = 0; i < columns; i += 8) {
    __m256 s = _mm256_loadu_ps(scores + i);
    if (softcap > 0.0f) {
      s = _mm256_mul_ps(_mm256_set1_ps(softcap * kLog2E), tanh8(s));
    }
    if (masked) {
      const __m256 column = _mm256_add_ps(lanes, _mm256_set1_ps(static_cast<float>(i)));
      const __m256 inside = _mm256_and_ps(
          _mm256_cmp_ps(column, _mm256_set1_ps(static_cast<float>(first)), _CMP_GE_OQ),
          _mm256_cmp_ps(column, _mm256_set1_ps(stop), _CMP_LE_OQ));
      s = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), s, inside);
    }
    if (masked || softcap > 0.0f) _mm256_storeu_ps(scores + i, s);
    largest = _mm256_max_ps(largest, s);
  }
  const float before = state.largest;
  state.largest = std::fmax(before, max_lanes(largest));
  // While nothing is visible, largest is -infinity and the differences are NaN: weights of 0.
  const __m256 shift = _mm256_set1_ps(state.largest);
  __m256 total = _mm256_setzero_ps();
  for (int64_t i = 0; i < columns; i += 8) {
    const __m256 w = exp2_of_negative(_mm256_sub_ps(_mm256_loadu_ps(scores + i), shift));
    _mm256_storeu_ps(scores + i, w);
    total = _mm256_add_ps(total, w);
  }
  const float factor = exp2_of_negative(before - state.largest);
  state.total = state.total * factor + sum_lanes(total);
  return factor;
}

static inline __m256 load_halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Rounds to fp16; size a multiple of 8.
static inline void store_halves(const float* x, int64_t size, uint16_t* y) {
  for (int64_t i = 0; i < size; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), halves);
  }
}

}  // namespace atsc
