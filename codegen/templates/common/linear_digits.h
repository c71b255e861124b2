// One row of float activations and int4 weights, in integers: three quarters of the operations that
// turning every code into a float takes, and so at the speed of the memory.
//
// Of each block of 32 activations, x / factor is rounded to an integer of 24 bits, which is written
// in three signed digits of base 256; each digit's products are exact (linear_q8.h). So x is exact
// to 2^-24 of the largest of its block. Infinities and NaN give NaN.
#pragma once

#include "linear_q8.h"

namespace atsc {

inline constexpr int kDigits = 3;

struct DigitSlab {
  alignas(32) int8_t digits[kDigits][kQ8Block];  // the highest first
  float factor;                                  // of the lowest digit
  float sums[2];                                 // of x, of k < 16 and of the others
};

static inline int32_t sum_lanes(__m256i x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, _MM_SHUFFLE(2, 3, 0, 1))));
}

// Takes the lowest digit off eight integers.
static inline __m256i take_digit(__m256i& values) {
  const __m256i digit = _mm256_srai_epi32(_mm256_slli_epi32(values, 24), 24);
  values = _mm256_srai_epi32(_mm256_sub_epi32(values, digit), 8);
  return digit;
}

static inline void store_bytes(int8_t* p, const __m256i (&values)[4]) {
  const __m256i low = _mm256_packs_epi32(values[0], values[1]);
  const __m256i high = _mm256_packs_epi32(values[2], values[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), bytes);
}

static inline void to_digits(const float* x, DigitSlab& slab) {
  constexpr float kMost = 127.0f * 65536.0f;
  __m256 largest8 = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    const __m256 eight = _mm256_loadu_ps(x + 8 * i);
    largest8 = _mm256_max_ps(largest8, absolute(eight));
    nothing = _mm256_fmadd_ps(eight, _mm256_setzero_ps(), nothing);  // or NaN
  }
  const float largest = max_lanes(largest8);
  const float inverse = largest > 1e-31f ? kMost / largest : 0.0f;
  slab.factor = largest / kMost + sum_lanes(nothing);
  __m256i values[4], digits[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse));
    values[i] = _mm256_cvtps_epi32(scaled);
  }
  for (int half = 0; half < 2; ++half) {
    const __m256i both = _mm256_add_epi32(values[2 * half], values[2 * half + 1]);
    slab.sums[half] = slab.factor * static_cast<float>(sum_lanes(both));
  }
  for (int digit = kDigits - 1; digit >= 0; --digit) {
    for (int i = 0; i < 4; ++i) digits[i] = take_digit(values[i]);
    store_bytes(slab.digits[digit], digits);
  }
}

// The products of codes[kFirst .. kFirst + kCount), in units of the slab's factor.
template <class Layer, int kFirst, int kCount>
static inline __m256 dot_digits(const __m256i* codes, const DigitSlab& x) {
  __m256 sum = _mm256_cvtepi32_ps(dot<Layer, kFirst, kCount>(codes, x.digits[0]));
#pragma GCC unroll 2
  for (int digit = 1; digit < kDigits; ++digit) {
    const __m256i next = dot<Layer, kFirst, kCount>(codes, x.digits[digit]);
    sum = _mm256_fmadd_ps(sum, _mm256_set1_ps(256.0f), _mm256_cvtepi32_ps(next));
  }
  return sum;
}

template <class Layer>
static inline __m256 add_digits(const Q8Slab<Layer>& slab, const DigitSlab& x, __m256 y) {
  const __m256 factor = _mm256_broadcast_ss(&x.factor);
  const Terms* terms = slab.terms;
  if constexpr (num_halves<Layer>() == 1) {
    y = _mm256_fmadd_ps(terms[0].offset, _mm256_set1_ps(x.sums[0] + x.sums[1]), y);
    const __m256 scale = _mm256_mul_ps(terms[0].scale, factor);
    return _mm256_fmadd_ps(dot_digits<Layer, 0, 8>(slab.codes, x), scale, y);
  } else {
    y = _mm256_fmadd_ps(terms[0].offset, _mm256_broadcast_ss(&x.sums[0]), y);
    y = _mm256_fmadd_ps(terms[1].offset, _mm256_broadcast_ss(&x.sums[1]), y);
    __m256 sum = _mm256_mul_ps(terms[0].scale, dot_digits<Layer, 0, 4>(slab.codes, x));
    sum = _mm256_fmadd_ps(terms[1].scale, dot_digits<Layer, 4, 4>(slab.codes, x), sum);
    return _mm256_fmadd_ps(factor, sum, y);
  }
}

// The tiles [begin, end) of one row.
template <class Layer>
static inline void digits_gemv(const Operands<Layer>& at, int64_t begin, int64_t end) {
  static_assert(Layer::kFormat == Format::int4);
  const auto* x = static_cast<const float*>(at.x);
  DigitSlab row[num_slabs<Layer>()];
  for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
    const int64_t first = slab * kQ8Block, left = Layer::kInputs - first;
    float padded[kQ8Block] = {};
    if (left < kQ8Block) std::copy_n(x + first, left, padded);
    to_digits(left < kQ8Block ? padded : x + first, row[slab]);
  }
  for (int64_t tile = begin; tile < end; ++tile) {
    __m256 y = _mm256_setzero_ps();
    for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
      y = add_digits<Layer>(load_slab<Layer>(at, tile, slab), row[slab], y);
    }
    finish<Layer>(at, 0, tile, y);
  }
}

}  // namespace atsc
