// Eight floats at a time: loads and stores of the first n, and sums across a vector. AVX2 and FMA.
// Everything is static: libraries hold the same function compiled for several ISA levels.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace atsc {

// All ones in the first n of 8 lanes, 0 <= n <= 8.
static inline __m256i first_lanes(int64_t n) {
  alignas(64) static constexpr int32_t kOnesThenZeros[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kOnesThenZeros + 8 - n));
}

// The first n of 8 floats, the others zero; reads nothing behind them.
static inline __m256 load_first(const float* p, int64_t n) {
  return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_lanes(n));
}

static inline void store_first(float* p, __m256 x, int64_t n) {
  if (n >= 8) {
    _mm256_storeu_ps(p, x);
  } else {
    _mm256_maskstore_ps(p, first_lanes(n), x);
  }
}

static inline float sum_lanes(__m256 x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline float max_lanes(__m256 x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline __m256 absolute(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

}  // namespace atsc
