// The online softmax of one query over blocks of scores, and fp16 rows.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "lanes.h"
#include "vector_math.h"

namespace atsc {

inline constexpr float kLog2E = 1.44269504f;

// What a query has seen so far: its largest score in units of log2(e), so that weights are powers
// of two, and the sum of 2^(score - largest).
struct SoftmaxState {
  float largest = -INFINITY;
  float total = 0.0f;
};

// What queries are multiplied by: scores in units of log2(e), or tanh's argument under a softcap.
static constexpr float query_scale(float scale, float softcap) {
  return softcap > 0.0f ? scale / softcap : scale * kLog2E;
}

// 2^x for x <= 0; 0 up to -127, at -infinity and for NaN.
template <typename L>
static inline typename L::V exp2_of_negative(typename L::V x) {
  x = L::larger(x, L::all(-127.0f));
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const auto shift = L::all(12582912.0f), shifted = L::add(x, shift);
  const auto r = L::subtract(x, L::subtract(shifted, shift));
  auto p = L::all(1.32647273e-03f);
  p = L::multiply_add(p, r, L::all(9.67151305e-03f));
  p = L::multiply_add(p, r, L::all(5.55073375e-02f));
  p = L::multiply_add(p, r, L::all(2.40222421e-01f));
  p = L::multiply_add(p, r, L::all(6.93146978e-01f));
  p = L::multiply_add(p, r, L::all(1.0f));
  // At -127, p is 1 and its exponent bits are 127: adding -127 to them leaves 0.
  return L::scale(p, shifted);
}

static inline float exp2_of_negative(float x) {
  return _mm256_cvtss_f32(exp2_of_negative<Avx>(_mm256_set1_ps(x)));
}

// The softcap of scores that come as tanh's argument; they leave in units of log2(e).
static inline void cap_scores(float* scores, int64_t columns, float softcap) {
  const __m256 factor = _mm256_set1_ps(softcap * kLog2E);
  for (int64_t i = 0; i < columns; i += 8) {
    _mm256_store_ps(scores + i, _mm256_mul_ps(factor, tanh8(_mm256_load_ps(scores + i))));
  }
}

// Turns scores into weights 2^(score - largest) in place and brings the state up to date. Columns
// outside [first, last] get weight 0, also those behind `columns`, up to a multiple of 16, to which
// the scores (64-byte aligned) must reach. Returns the factor for what was summed before.
template <typename L>
static inline float soften(float* scores, int64_t columns, int64_t first, int64_t last,
                           SoftmaxState& state) {
  const bool masked = first > 0 || last + 1 < columns || columns % L::kCount != 0;
  if (last >= columns) last = columns - 1;
  auto largest = L::all(-INFINITY);
  for (int64_t i = 0; i < columns; i += L::kCount) {
    auto s = L::load(scores + i);
    if (masked) {
      s = L::inside(s, i, first, last);
      L::store(scores + i, s);
    }
    largest = L::larger(largest, s);
  }
  const float before = state.largest;
  state.largest = std::fmax(before, L::largest(largest));
  // While nothing is visible, largest is -infinity and the differences are NaN: weights of 0.
  const auto shift = L::all(state.largest);
  auto total = L::zero();
  for (int64_t i = 0; i < columns; i += L::kCount) {
    const auto weights = exp2_of_negative<L>(L::subtract(L::load(scores + i), shift));
    L::store(scores + i, weights);
    total = L::add(total, weights);
  }
  const float factor = exp2_of_negative(before - state.largest);
  state.total = state.total * factor + L::sum(total);
  return factor;
}

// Rounds to fp16; size a multiple of 8.
static inline void store_halves(const float* x, int64_t size, uint16_t* y) {
  for (int64_t i = 0; i < size; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), halves);
  }
}

}  // namespace atsc
