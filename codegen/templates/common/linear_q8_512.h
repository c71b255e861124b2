// The part of linear_q8.h that AVX-512 VNNI does better: several rows of two tiles, 16 outputs, in
// one register; activations are broadcast by the instruction that multiplies them.
#pragma once

#include "linear_q8.h"

namespace atsc {

// Two tiles' weights of one slab of 32 K: raw codes of k = 4 i .. 4 i + 3 in codes[i].
template <class Layer>
struct Q8SlabPair {
  __m512i codes[8];
  __m512 scale[num_halves<Layer>()], offset[num_halves<Layer>()];
};

// (The forms with a mask of all ones are the same instructions; GCC's others begin with a register
// that its own warnings take for uninitialised.)
static inline __m512i join(__m256i low, __m256i high) {
  return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1);
}

static inline __m512 join(__m256 low, __m256 high) {
  return _mm512_maskz_insertf32x8(0xffff, _mm512_castps256_ps512(low), high, 1);
}

template <class Layer>
static inline Q8SlabPair<Layer> load_slab_pair(const Operands<Layer>& at, int64_t tile,
                                               int64_t second, int64_t slab) {
  const Q8Slab<Layer> low = load_slab<Layer>(at, tile, slab);
  const Q8Slab<Layer> high = load_slab<Layer>(at, second, slab);
  Q8SlabPair<Layer> pair;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) pair.codes[i] = join(low.codes[i], high.codes[i]);
  for (int half = 0; half < num_halves<Layer>(); ++half) {
    pair.scale[half] = join(low.terms[half].scale, high.terms[half].scale);
    pair.offset[half] = join(low.terms[half].offset, high.terms[half].offset);
  }
  return pair;
}

template <int kFirst, int kCount>
static inline __m512 dot_pair(const __m512i* codes, const int8_t* x) {
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};  // two chains of latency
#pragma GCC unroll 8
  for (int i = kFirst; i < kFirst + kCount; ++i) {
    int32_t four;
    __builtin_memcpy(&four, x + 4 * i, 4);
    sums[i % 2] = _mm512_dpbusd_epi32(sums[i % 2], codes[i], _mm512_set1_epi32(four));
  }
  return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_add_epi32(sums[0], sums[1]));
}

// y + the product of a slab and a row's activations.
template <class Layer>
static inline __m512 add_slab_pair(const Q8SlabPair<Layer>& slab, const Q8Row& x, __m512 y) {
  const __m512 scale = _mm512_set1_ps(*x.scale);
  if constexpr (num_halves<Layer>() == 1) {
    y = _mm512_fmadd_ps(slab.offset[0], _mm512_set1_ps(*x.scaled_sum), y);
    const __m512 factor = _mm512_mul_ps(slab.scale[0], scale);
    return _mm512_fmadd_ps(dot_pair<0, 8>(slab.codes, x.codes), factor, y);
  } else {
    const float half = first_half_sum(x.codes), rest = static_cast<float>(*x.sum) - half;
    __m512 sum = _mm512_mul_ps(slab.scale[0], dot_pair<0, 4>(slab.codes, x.codes));
    sum = _mm512_fmadd_ps(slab.scale[1], dot_pair<4, 4>(slab.codes, x.codes), sum);
    sum = _mm512_fmadd_ps(slab.offset[0], _mm512_set1_ps(half), sum);
    sum = _mm512_fmadd_ps(slab.offset[1], _mm512_set1_ps(rest), sum);
    return _mm512_fmadd_ps(scale, sum, y);
  }
}

// Some rows, at most kMostRows, of the tiles [tile, end), which are one or two.
template <class Layer>
static inline void q8_gemm_pair(const Operands<Layer>& at, int64_t tile, int64_t end, int64_t all,
                                Rows rows) {
  const Q8View x = q8_view(at.x, all, Layer::kInputs);
  alignas(64) float y[kMostRows][2 * kTileRows];
  for (int64_t row = 0; row < rows.count; ++row) _mm512_store_ps(y[row], _mm512_setzero_ps());
  for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
    const Q8SlabPair<Layer> loaded = load_slab_pair<Layer>(at, tile, end - 1, slab);
    for (int64_t row = 0; row < rows.count; ++row) {
      const Q8Row a = q8_row(x, slab * all + rows.first + row);
      _mm512_store_ps(y[row], add_slab_pair<Layer>(loaded, a, _mm512_load_ps(y[row])));
    }
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0; tile + i < end; ++i) {
      finish<Layer>(at, rows.first + row, tile + i, _mm256_load_ps(y[row] + i * kTileRows));
    }
  }
}

}  // namespace atsc
