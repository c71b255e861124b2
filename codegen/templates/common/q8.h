// Quantises float rows to Q8 (kernel.h has the layout; compiler/ops/quantize.py the definition).
#pragma once

#include <immintrin.h>

#include "kernel.h"
#include "simd.h"

namespace atsc {

// compiler/ops/quantize.py has the same.
inline constexpr double kRefinedAbove = 2.0;     // times the mean scale of a row
inline constexpr float kLeastRefined = 1e-34f;  // 254 / scale must be finite

// 32 codes to the block at `index` (block * rows + row) of one digit.
static inline void store_block(const __m256i (&codes)[4], float scale, const Q8View& q,
                               int64_t index) {
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

// The first digit of 32 floats; returns its scale.
static inline float quantize_block(const __m256 (&x)[4], const Q8View& q, int64_t index) {
  const __m256 largest_lanes = _mm256_max_ps(_mm256_max_ps(absolute(x[0]), absolute(x[1])),
                                             _mm256_max_ps(absolute(x[2]), absolute(x[3])));
  const float largest = max_lanes(largest_lanes);
  const float scale = largest / 127.0f;
  // Of a block below 4e-37 the inverse would be infinite.
  const float inverse = largest > 4e-37f ? 127.0f / largest : 0.0f;
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i codes[4];
  for (int i = 0; i < 4; ++i) codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], factor));
  store_block(codes, scale, q, index);
  return scale;
}

// The second digit of 32 floats, whose first is there.
static inline void refine_block(const __m256 (&x)[4], const Q8View& first, const Q8View& second,
                                int64_t index) {
  const float scale = first.scales[index];
  const __m256 factor = _mm256_set1_ps(254.0f / scale);
  const int8_t* coarse = first.codes + index * kQ8Block;
  __m256i codes[4];
  for (int i = 0; i < 4; ++i) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(coarse + 8 * i));
    const __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    const __m256 rest = _mm256_fnmadd_ps(_mm256_set1_ps(scale), code, x[i]);
    codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(rest, factor));
  }
  store_block(codes, scale / 254.0f, second, index);
}

// 32 floats of a row of `width` from column `first` on, zeros behind its end.
static inline void load_block(const float* x, int64_t width, int64_t first, __m256 (&values)[4]) {
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t left = width - first - 8 * i;
    values[i] = left > 0 ? load_first(x + first + 8 * i, left) : _mm256_setzero_ps();
  }
}

// One row of `width` floats; the last block is filled with zeros.
static inline void quantize_row(const float* x, int64_t width, const Q8View& q, int64_t row,
                                int64_t rows) {
  const Q8View fine = q8_view(q.codes, rows, width, 1);
  const int64_t blocks = q8_blocks(width);
  __m256 values[4];
  double total = 0.0;
  for (int64_t block = 0; block < blocks; ++block) {
    load_block(x, width, block * kQ8Block, values);
    total += quantize_block(values, q, block * rows + row);
  }
  // Of a row with an infinity or a NaN no block compares as larger.
  const double least = kRefinedAbove * total / static_cast<double>(blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t index = block * rows + row;
    if (q.scales[index] > least && q.scales[index] > kLeastRefined) {
      load_block(x, width, block * kQ8Block, values);
      refine_block(values, q, fine, index);
    } else {
      fine.scales[index] = 0.0f;
    }
  }
}

}  // namespace atsc
