// Elementary functions and activations of eight floats. AVX2 and FMA.
//
// Each activate_<kind> is a kind of compiler/ops/activation.py. Relative errors stay below 2e-7
// (gelu 7e-7), plus 1e-7 |e| where an exponential of a large e is in it. NaN stays NaN.
// Coefficients are our own minimax fits. (Not named math.h: system headers would include it.)
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace atsc {

// e^x; 1.2e-38 below -87.3, infinity above 88.7.
static inline __m256 exp8(__m256 x) {
  // The order of operands makes max and min hand NaN on.
  x = _mm256_min_ps(_mm256_set1_ps(89.0f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // r = x - n ln 2, with ln 2 in two parts, the first of few bits.
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.3814540e-3f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3687454e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.16683908e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.66665204e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.99999934e-1f));
  p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r);
  p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
  // Times 2^n in two steps, of which 2^128 needs both.
  const __m256i exponent = _mm256_cvtps_epi32(n), bias = _mm256_set1_epi32(127);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i rest = _mm256_sub_epi32(exponent, half);
  p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

static inline __m256 sigmoid8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 e = exp8(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
  return _mm256_div_ps(one, _mm256_add_ps(one, e));
}

static inline __m256 tanh8(__m256 x) {
  const __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f)), one = _mm256_set1_ps(1.0f);
  const __m256 size = absolute(x);
  // Near zero an odd polynomial: 1 - e^(-2 |x|) would cancel.
  const __m256 square = _mm256_mul_ps(x, x);
  __m256 p = _mm256_set1_ps(-5.89508279e-3f);
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(2.07959125e-2f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(-5.37838145e-2f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(1.33319240e-1f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(-3.33332980e-1f));
  const __m256 small = _mm256_fmadd_ps(_mm256_mul_ps(p, square), x, x);
  const __m256 e = exp8(_mm256_mul_ps(size, _mm256_set1_ps(-2.0f)));
  const __m256 large = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
  const __m256 is_large = _mm256_cmp_ps(size, _mm256_set1_ps(0.6f), _CMP_GT_OQ);
  return _mm256_blendv_ps(small, _mm256_or_ps(large, sign), is_large);
}

static inline __m256 activate_none(__m256 x) { return x; }

static inline __m256 activate_silu(__m256 x) { return _mm256_mul_ps(x, sigmoid8(x)); }

static inline __m256 activate_sigmoid(__m256 x) { return sigmoid8(x); }

static inline __m256 activate_tanh(__m256 x) { return tanh8(x); }

static inline __m256 activate_relu(__m256 x) { return _mm256_max_ps(_mm256_setzero_ps(), x); }

static inline __m256 activate_relu2(__m256 x) {
  const __m256 kept = activate_relu(x);
  return _mm256_mul_ps(kept, kept);
}

static inline __m256 activate_quick_gelu(__m256 x) {
  return _mm256_mul_ps(x, sigmoid8(_mm256_mul_ps(x, _mm256_set1_ps(1.702f))));
}

// (1 + tanh u) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline __m256 activate_gelu_tanh(__m256 x) {
  const __m256 square = _mm256_mul_ps(x, x);
  const __m256 inner = _mm256_fmadd_ps(square, _mm256_set1_ps(7.13548162e-2f),
                                       _mm256_set1_ps(1.59576912f));
  return _mm256_mul_ps(x, sigmoid8(_mm256_mul_ps(x, inner)));
}

// x (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - |x| erfc(z) / 2 with z = |x| / sqrt 2, which cancels
// nowhere; erfc(z) = e^(-z^2) Q(1 / (1 + 0.45 z)) to 3e-7 for a polynomial Q.
static inline __m256 activate_gelu(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 size = _mm256_min_ps(_mm256_set1_ps(20.0f), absolute(x));  // keeps 0 * inf away
  const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(size, _mm256_set1_ps(0.318198052f), one));
  __m256 q = _mm256_set1_ps(6.62012042e-02f);
  q = _mm256_fmadd_ps(q, t, _mm256_set1_ps(-2.37378643e-01f));
  q = _mm256_fmadd_ps(q, t, _mm256_set1_ps(2.03641231e-01f));
  q = _mm256_fmadd_ps(q, t, _mm256_set1_ps(4.52843855e-02f));
  q = _mm256_fmadd_ps(q, t, _mm256_set1_ps(1.85897350e-01f));
  q = _mm256_fmadd_ps(q, t, _mm256_set1_ps(2.28943170e-01f));
  q = _mm256_fmadd_ps(q, t, _mm256_set1_ps(2.53493053e-01f));
  q = _mm256_fmadd_ps(q, t, _mm256_set1_ps(2.53918542e-01f));
  q = _mm256_mul_ps(q, t);
  const __m256 e = exp8(_mm256_mul_ps(_mm256_mul_ps(size, size), _mm256_set1_ps(-0.5f)));
  const __m256 half_erfc = _mm256_mul_ps(_mm256_mul_ps(q, e), _mm256_set1_ps(0.5f));
  return _mm256_fnmadd_ps(size, half_erfc, activate_relu(x));
}

}  // namespace atsc
