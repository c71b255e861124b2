// Quantises float rows to Q8 (kernel.h has the layout; compiler/ops/quantize.py the definition).
#pragma once

#include <immintrin.h>

#include "kernel.h"
#include "simd.h"

namespace atsc {

// 32 floats to the block at `index` (block * rows + row) of a Q8 value.
static inline void quantize_block(const __m256 (&x)[4], const Q8View& q, int64_t index) {
  const __m256 largest_lanes = _mm256_max_ps(_mm256_max_ps(absolute(x[0]), absolute(x[1])),
                                             _mm256_max_ps(absolute(x[2]), absolute(x[3])));
  const float largest = max_lanes(largest_lanes);
  const float scale = largest / 127.0f;
  // Of a block below 4e-37 the inverse would be infinite.
  const float inverse = largest > 4e-37f ? 127.0f / largest : 0.0f;
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i codes[4];
  for (int i = 0; i < 4; ++i) codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], factor));
  // Packing works within 128-bit halves; the permutation puts the words back in order.
  const __m256i packed = _mm256_permutevar8x32_epi32(
      _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]),
                         _mm256_packs_epi32(codes[2], codes[3])),
      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q.codes + index * kQ8Block), packed);
  const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), packed),
                                         _mm256_set1_epi16(1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 1));
  const int32_t sum = _mm_cvtsi128_si32(s);
  q.scales[index] = scale;
  q.scaled_sums[index] = scale * static_cast<float>(sum);
  q.sums[index] = sum;
}

// One row of `width` floats; the last block is filled with zeros.
static inline void quantize_row(const float* x, int64_t width, const Q8View& q, int64_t row,
                                int64_t rows) {
  const int64_t whole = width / kQ8Block;
  for (int64_t block = 0; block < whole; ++block) {
    const float* p = x + block * kQ8Block;
    const __m256 values[4] = {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), _mm256_loadu_ps(p + 16),
                              _mm256_loadu_ps(p + 24)};
    quantize_block(values, q, block * rows + row);
  }
  const int64_t rest = width % kQ8Block;
  if (rest == 0) return;
  __m256 values[4];
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t left = rest - 8 * i;
    values[i] = left > 0 ? load_first(x + whole * kQ8Block + 8 * i, left) : _mm256_setzero_ps();
  }
  quantize_block(values, q, whole * rows + row);
}

}  // namespace atsc
