// Float vectors of the width that the ISA level has, for code that is the same at any width: a
// parameter L is Avx (8 lanes) or Avx512 (16), and Widest the wider of those that there are.
// In an anonymous namespace, since libraries hold the same code compiled for several ISA levels.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace atsc {
namespace {

struct Avx {
  using V = __m256;
  static constexpr int64_t kCount = 8;

  static V zero() { return _mm256_setzero_ps(); }
  static V all(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_load_ps(p); }
  static void store(float* p, V x) { _mm256_store_ps(p, x); }
  static V load_halves(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V subtract(V a, V b) { return _mm256_sub_ps(a, b); }
  static V multiply(V a, V b) { return _mm256_mul_ps(a, b); }
  static V multiply_add(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V larger(V a, V b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  static float sum(V x) { return sum_lanes(x); }
  static float largest(V x) { return max_lanes(x); }
  static __m256 fold(V x) { return x; }  // to eight lanes of the same sum

  // x where `column` plus the lane lies in [first, last], else -infinity.
  static V inside(V x, int64_t column, int64_t first, int64_t last) {
    const __m256i at = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(column)),
                                        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(first)), at);
    const __m256i behind = _mm256_cmpgt_epi32(at, _mm256_set1_epi32(static_cast<int32_t>(last)));
    const __m256 outside = _mm256_castsi256_ps(_mm256_or_si256(before, behind));
    return _mm256_blendv_ps(x, all(-INFINITY), outside);
  }

  // x * 2^n, with n in the low bits of `exponent`.
  static V scale(V x, V exponent) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(exponent), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n));
  }
};

#ifdef __AVX512F__
// Masks of all lanes cost nothing: GCC 12 warns of the undefined operand of the forms without.
struct Avx512 {
  using V = __m512;
  static constexpr int64_t kCount = 16;

  static V zero() { return _mm512_setzero_ps(); }
  static V all(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, V x) { _mm512_store_ps(p, x); }
  static V load_halves(const uint16_t* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V subtract(V a, V b) { return _mm512_sub_ps(a, b); }
  static V multiply(V a, V b) { return _mm512_mul_ps(a, b); }
  static V multiply_add(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V larger(V a, V b) { return _mm512_maskz_max_ps(0xffff, a, b); }
  static __m256 lower(V x) { return _mm512_maskz_extractf32x8_ps(0xff, x, 0); }
  static __m256 upper(V x) { return _mm512_maskz_extractf32x8_ps(0xff, x, 1); }
  static float sum(V x) { return sum_lanes(fold(x)); }
  static float largest(V x) { return max_lanes(_mm256_max_ps(lower(x), upper(x))); }
  static __m256 fold(V x) { return _mm256_add_ps(lower(x), upper(x)); }

  static V inside(V x, int64_t column, int64_t first, int64_t last) {
    const __m512i at = _mm512_add_epi32(
        _mm512_set1_epi32(static_cast<int32_t>(column)),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m512i lowest = _mm512_set1_epi32(static_cast<int32_t>(first));
    const __m512i highest = _mm512_set1_epi32(static_cast<int32_t>(last));
    const __mmask16 in = _mm512_cmpge_epi32_mask(at, lowest) & _mm512_cmple_epi32_mask(at, highest);
    return _mm512_mask_blend_ps(in, all(-INFINITY), x);
  }

  static V scale(V x, V exponent) {
    const __m512i n = _mm512_maskz_slli_epi32(0xffff, _mm512_castps_si512(exponent), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n));
  }
};
using Widest = Avx512;
#else
using Widest = Avx;
#endif

}  // namespace
}  // namespace atsc
