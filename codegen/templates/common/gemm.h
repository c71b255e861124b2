// A register block of a float product, and 8 x 8 transposition.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "lanes.h"

namespace atsc {

// c[kRows][kV vectors] = a[kRows][depth] b[depth][kV vectors], plus factors[kRows] * c if
// kAccumulate. b and c are aligned to vectors, strides in floats. Each element is one chain of
// fused multiply-adds in order of depth, whatever kRows is.
template <typename L, int kRows, int kV, bool kAccumulate>
static inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                            float* c, int64_t c_stride, int64_t depth, const float* factors) {
  typename L::V sums[kRows][kV];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) {
      sums[i][v] = L::zero();
      if constexpr (kAccumulate) {
        sums[i][v] = L::multiply(L::all(factors[i]), L::load(c + i * c_stride + v * L::kCount));
      }
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    typename L::V right[kV];
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) right[v] = L::load(b + k * b_stride + v * L::kCount);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const auto left = L::all(a[i * a_stride + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kV; ++v) sums[i][v] = L::multiply_add(left, right[v], sums[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) L::store(c + i * c_stride + v * L::kCount, sums[i][v]);
  }
}

// y[j][i] = x[i][j] for 8 x 8 floats; y 32-byte aligned.
static inline void transpose8(const float* x, int64_t x_stride, float* y, int64_t y_stride) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(x + i * x_stride);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_store_ps(y + i * y_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_store_ps(y + (i + 4) * y_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

}  // namespace atsc
