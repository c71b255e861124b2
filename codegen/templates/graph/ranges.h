// The smallest and the largest of some floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace atsc::graph {

static inline void range_of(const float* x, int64_t count, float* range) {
  float low = __builtin_inff(), high = -__builtin_inff();
  int64_t k = 0;
  if (count >= 32) {
    __m256 lows[4], highs[4];
    for (int v = 0; v < 4; ++v) lows[v] = highs[v] = _mm256_loadu_ps(x + 8 * v);
    for (k = 32; k + 32 <= count; k += 32) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m256 here = _mm256_loadu_ps(x + k + 8 * v);
        lows[v] = _mm256_min_ps(lows[v], here);
        highs[v] = _mm256_max_ps(highs[v], here);
      }
    }
    for (int v = 0; v < 4; ++v) {
      float parts[2][8];
      _mm256_storeu_ps(parts[0], lows[v]);
      _mm256_storeu_ps(parts[1], highs[v]);
      for (int lane = 0; lane < 8; ++lane) {
        low = parts[0][lane] < low ? parts[0][lane] : low;
        high = parts[1][lane] > high ? parts[1][lane] : high;
      }
    }
  }
  for (; k < count; ++k) {
    low = x[k] < low ? x[k] : low;
    high = x[k] > high ? x[k] : high;
  }
  range[0] = low;
  range[1] = high;
}

}  // namespace atsc::graph
