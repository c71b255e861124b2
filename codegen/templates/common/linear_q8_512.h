// The part of linear_q8.h that AVX-512 does better, with VNNI or without: several rows of two tiles,
// 16 outputs, in one register. Products are as exact as those of linear_q8.h, and by the same means;
// vpdpbusd broadcasts the activations that it multiplies.
#pragma once

#include "linear_q8.h"

namespace atsc {

// Two tiles' weights of one slab of 32 K: the codes of k = 4 i .. 4 i + 3 in codes[i].
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

// Without zero points a raw code stands for code - 8 or code - 128, which with VNNI the start of each
// integer sum takes into account: no operation, since it is a broadcast load in place of a zero.
template <class Layer>
constexpr bool starts_at_centre() {
  return kVnni && Layer::kZeros == Number::none && num_halves<Layer>() == 1;
}

template <class Layer>
static inline void fill_starts(const int32_t* sums, int64_t count, int32_t* starts) {
  constexpr int32_t kCentre = Layer::kFormat == Format::int4 ? 8 : 128;
  for (int64_t row = 0; row < count; ++row) starts[row] = -kCentre * sums[row];
}

static inline __m512i broadcast4_512(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

// Sums of products, a step: of raw codes in int32 by VNNI; without it, of int4 in int16, and of |code|
// and the activation, negated where the code is negative, in int32.
#if defined(__AVX512VNNI__)
static inline __m512i add_products(__m512i sum, __m512i codes, __m512i x) {
  return _mm512_dpbusd_epi32(sum, codes, x);
}
#else
static inline __m512i add_products(__m512i sum, __m512i codes, __m512i x) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, x));
}
#endif

static inline __m512i add_signed_products(__m512i sum, __m512i codes, __m512i x) {
  const __m512i size = _mm512_maskz_abs_epi8(~__mmask64{0}, codes);
  x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
  const __m512i products = _mm512_maddubs_epi16(size, x);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(products, _mm512_set1_epi16(1)));
}

// Adds the products of four k, of which x has the activations, to a sum.
template <class Layer>
static inline __m512i add_four(__m512i sum, __m512i codes, const int8_t* x) {
  if constexpr (kVnni || Layer::kFormat == Format::int4) {
    return add_products(sum, codes, broadcast4_512(x));
  } else {
    return add_signed_products(sum, codes, broadcast4_512(x));
  }
}

// A slab's integer sum, as floats of 16 outputs.
template <class Layer>
static inline __m512 sum_of_lanes(__m512i sum) {
  if constexpr (!kVnni && Layer::kFormat == Format::int4) {
    sum = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
  }
  return _mm512_maskz_cvtepi32_ps(0xffff, sum);
}

// y[row] + the product of a slab and a row's activations, for kRows rows from x on. Rows take turns
// at each step: enough independent sums to hide the latency of vpdpbusd.
template <class Layer, int kRows>
static inline void add_q8_rows(const Q8SlabPair<Layer>& slab, const Q8Row& x, const int32_t* starts,
                            float (*y)[2 * kTileRows]) {
  __m512i sums[kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    sums[row] = _mm512_set1_epi32(starts_at_centre<Layer>() ? starts[row] : 0);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const int8_t* four = x.codes + row * kQ8Bytes + 4 * i;
      sums[row] = add_four<Layer>(sums[row], slab.codes[i], four);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    __m512 all = _mm512_load_ps(y[row]);
    if constexpr (has_offset<Layer, kSigned>() && !starts_at_centre<Layer>()) {
      all = _mm512_fmadd_ps(slab.offset[0], _mm512_set1_ps(x.scaled_sum[row]), all);
    }
    const __m512 factor = _mm512_mul_ps(slab.scale[0], _mm512_set1_ps(x.scale[row]));
    _mm512_store_ps(y[row], _mm512_fmadd_ps(sum_of_lanes<Layer>(sums[row]), factor, all));
  }
}

template <class Layer, int kFirst>
static inline __m512 half_dot(const __m512i* codes, const int8_t* x) {
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = kFirst; i < kFirst + 4; ++i) sum = add_four<Layer>(sum, codes[i], x + 4 * i);
  return sum_of_lanes<Layer>(sum);
}

// The same for one row and blocks of 16.
template <class Layer>
static inline void add_halves(const Q8SlabPair<Layer>& slab, const Q8Row& x, float* y) {
  __m512 sum = _mm512_mul_ps(slab.scale[0], half_dot<Layer, 0>(slab.codes, x.codes));
  sum = _mm512_fmadd_ps(slab.scale[1], half_dot<Layer, 4>(slab.codes, x.codes), sum);
  if constexpr (has_offset<Layer, kSigned>()) {
    const float half = first_half_sum(x.codes), rest = static_cast<float>(*x.sum) - half;
    sum = _mm512_fmadd_ps(slab.offset[0], _mm512_set1_ps(half), sum);
    sum = _mm512_fmadd_ps(slab.offset[1], _mm512_set1_ps(rest), sum);
  }
  _mm512_store_ps(y, _mm512_fmadd_ps(_mm512_set1_ps(*x.scale), sum, _mm512_load_ps(y)));
}

// Adds a slab's products to the sums of the row at `index` of x.
template <class Layer>
static inline void add_one_row(const Q8SlabPair<Layer>& slab, const Q8View& x, int64_t index,
                               float (*y)[2 * kTileRows]) {
  if constexpr (num_halves<Layer>() == 2) {
    add_halves<Layer>(slab, q8_row(x, index), *y);
  } else {
    int32_t start = 0;
    if constexpr (starts_at_centre<Layer>()) fill_starts<Layer>(x.sums + index, 1, &start);
    add_q8_rows<Layer, 1>(slab, q8_row(x, index), &start, y);
  }
}

// Adds a slab's products to the sums of some rows, the first of which is x.
template <class Layer>
static inline void add_slab_pair(const Q8SlabPair<Layer>& slab, const Q8View& x, int64_t first,
                                 int64_t count, float (*y)[2 * kTileRows]) {
  int64_t row = 0;
  if constexpr (num_halves<Layer>() == 2) {
    for (; row < count; ++row) add_one_row<Layer>(slab, x, first + row, y + row);
  } else {
    alignas(64) int32_t starts[kMostRows];
    if constexpr (starts_at_centre<Layer>()) fill_starts<Layer>(x.sums + first, count, starts);
    for (; row + 8 <= count; row += 8) {
      add_q8_rows<Layer, 8>(slab, q8_row(x, first + row), starts + row, y + row);
    }
    for (; row < count; ++row) {
      add_q8_rows<Layer, 1>(slab, q8_row(x, first + row), starts + row, y + row);
    }
  }
}

// Some rows, at most kMostRows, of the tiles [tile, end), which are one or two.
template <class Layer>
static inline void q8_gemm_pair(const Operands<Layer>& at, int64_t tile, int64_t end, Rows rows,
                                const Q8Rows& x, const Q8Rows& fine,
                                const RefinedRows<Layer>& refined) {
  alignas(64) float y[kMostRows][2 * kTileRows];
  for (int64_t row = 0; row < rows.count; ++row) _mm512_store_ps(y[row], _mm512_setzero_ps());
  for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
    const Q8SlabPair<Layer> loaded = load_slab_pair<Layer>(at, tile, end - 1, slab);
    prefetch_refined<Layer>(fine, slab + 1, refined);
    add_slab_pair<Layer>(loaded, x.view, x.index(slab), rows.count, y);
    for (uint64_t left = refined.of_slab[slab]; left != 0; left &= left - 1) {
      const int64_t row = std::countr_zero(left);
      add_one_row<Layer>(loaded, fine.view, fine.index(slab) + row, y + row);
    }
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0; tile + i < end; ++i) {
      finish<Layer>(at, rows.first + row, tile + i, _mm256_load_ps(y[row] + i * kTileRows));
    }
  }
}

}  // namespace atsc
