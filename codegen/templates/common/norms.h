// Sums over a row, as the norms need them. Four vectors of partial sums keep the rounding error of
// a row of 16384 below 1e-6 of the sum.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "simd.h"

namespace atsc {

static inline float sum_of(const float* x, int64_t width) {
  __m256 sums[4] = {};
  int64_t i = 0;
  for (; i + 32 <= width; i += 32) {
    for (int k = 0; k < 4; ++k) sums[k] = _mm256_add_ps(sums[k], _mm256_loadu_ps(x + i + 8 * k));
  }
  for (; i < width; i += 8) sums[0] = _mm256_add_ps(sums[0], load_first(x + i, width - i));
  return sum_lanes(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

// The sum of (x - centre)^2.
static inline float sum_of_squares(const float* x, int64_t width, float centre) {
  const __m256 c = _mm256_set1_ps(centre);
  __m256 sums[4] = {};
  int64_t i = 0;
  for (; i + 32 <= width; i += 32) {
    for (int k = 0; k < 4; ++k) {
      const __m256 d = _mm256_sub_ps(_mm256_loadu_ps(x + i + 8 * k), c);
      sums[k] = _mm256_fmadd_ps(d, d, sums[k]);
    }
  }
  for (; i < width; i += 8) {
    const __m256 inside = _mm256_castsi256_ps(first_lanes(width - i < 8 ? width - i : 8));
    const __m256 d = _mm256_and_ps(_mm256_sub_ps(load_first(x + i, width - i), c), inside);
    sums[0] = _mm256_fmadd_ps(d, d, sums[0]);
  }
  return sum_lanes(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

// x / sqrt(mean(x^2) + eps) * weight into y, which may be x.
static inline void rms_normalise(const float* x, const float* weight, float* y, int64_t width,
                                 float eps) {
  const float mean = sum_of_squares(x, width, 0.0f) / static_cast<float>(width);
  const __m256 inverse = _mm256_set1_ps(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += 8) {
    const __m256 scaled = _mm256_mul_ps(load_first(x + i, width - i), inverse);
    store_first(y + i, _mm256_mul_ps(scaled, load_first(weight + i, width - i)), width - i);
  }
}

}  // namespace atsc
