// A register block of a float product, and 8 x 8 transposition.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace atsc {

// c[kRows][16] = a[kRows][depth] b[depth][16], plus factors[kRows] * c if kAccumulate. b and c are
// 32-byte aligned, strides in floats. Each element is one chain of fused multiply-adds in order of
// depth, whatever kRows is.
template <int kRows, bool kAccumulate>
static inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                            float* c, int64_t c_stride, int64_t depth, const float* factors) {
  __m256 sums[kRows][2];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    if constexpr (kAccumulate) {
      const __m256 factor = _mm256_set1_ps(factors[i]);
      sums[i][0] = _mm256_mul_ps(factor, _mm256_load_ps(c + i * c_stride));
      sums[i][1] = _mm256_mul_ps(factor, _mm256_load_ps(c + i * c_stride + 8));
    } else {
      sums[i][0] = sums[i][1] = _mm256_setzero_ps();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    const __m256 b0 = _mm256_load_ps(b + k * b_stride), b1 = _mm256_load_ps(b + k * b_stride + 8);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m256 value = _mm256_broadcast_ss(a + i * a_stride + k);
      sums[i][0] = _mm256_fmadd_ps(value, b0, sums[i][0]);
      sums[i][1] = _mm256_fmadd_ps(value, b1, sums[i][1]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    _mm256_store_ps(c + i * c_stride, sums[i][0]);
    _mm256_store_ps(c + i * c_stride + 8, sums[i][1]);
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
