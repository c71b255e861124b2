// Linear layers with float activations: float weights, and int4 or int8 at accuracy level 1. AVX2
// or, where the translation unit is compiled for it, AVX-512.
//
// One row: int4 by linear_digits.h; other codes become floats in registers. A code is masked where
// it stands in its word, as code * 256^p, so that no shift is needed; the sums of the four places p
// are scaled back once a slab. More rows: weights of 16 outputs become a panel of floats [k][16] in
// the L1 cache, which an FMA kernel of up to 6 rows x 16 outputs (AVX-512: 12) reads. Sums go on in
// float within 256 K at most, then panels are added.
#pragma once

#include "linear.h"
#include "linear_digits.h"
#if defined(__AVX512F__)
#include "linear_f32_512.h"
#endif

namespace atsc {

inline constexpr int64_t kPanel = 256;  // K of one panel
inline constexpr int64_t kPanelOutputs = 2 * kTileRows;

// The activations of one row by slabs of 32, the last padded with zeros, with the sums that offsets
// multiply: of every 16.
template <class Layer>
struct FloatRow {
  const float* x;
  float last[kQ8Block];
  float sums[2 * num_slabs<Layer>()];

  explicit FloatRow(const float* row) : x(row) {
    constexpr int64_t kFull = Layer::kInputs / kQ8Block * kQ8Block;
    for (int64_t k = 0; k < kQ8Block; ++k) last[k] = kFull + k < Layer::kInputs ? x[kFull + k] : 0;
    for (int64_t half = 0; half < 2 * num_slabs<Layer>(); ++half) {
      const float* p = slab(half / 2) + 16 * (half % 2);
      sums[half] = sum_lanes(_mm256_add_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)));
    }
  }

  const float* slab(int64_t index) const {
    return (index + 1) * kQ8Block <= Layer::kInputs ? x + index * kQ8Block : last;
  }
};

// Codes of a slab where they stand: word g of int4 holds k = 4 g + b in bits 8 b (and k + 16 in
// bits 8 b + 4), of int8 k = 4 g + b in bits 8 b.
template <class Layer>
static inline __m256i load_words(const Operands<Layer>& at, int64_t tile, int64_t slab, int g) {
  constexpr bool kInt4 = Layer::kFormat == Format::int4;
  const auto* p = static_cast<const uint8_t*>(at.codes) +
                  (tile * num_slabs<Layer>() + slab) * slab_bytes<Layer>() + 32 * g;
  if (g % 2 == 0) prefetch_ahead<64>(p);
  const __m256i words = load_bytes(p);
  return kInt4 ? words : _mm256_xor_si256(words, _mm256_set1_epi8(-128));  // raw codes
}

// Field kPlace of kBits bits of each word, times 2^(kPlace * kBits) but for the highest.
template <int kBits, int kPlace>
static inline __m256 field(__m256i words) {
  if constexpr ((kPlace + 1) * kBits == 32) {
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 32 - kBits));
  } else {
    const __m256i mask = _mm256_set1_epi32(((1 << kBits) - 1) << (kPlace * kBits));
    return _mm256_cvtepi32_ps(_mm256_and_si256(words, mask));
  }
}

// What undoes the factor of field().
template <int kBits, int kPlace>
constexpr float field_scale() {
  return (kPlace + 1) * kBits == 32 ? 1.0f : 1.0f / static_cast<float>(1 << (kPlace * kBits));
}

static inline __m256 add4(__m256 a, __m256 b, __m256 c, __m256 d) {
  return _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
}

// int8: sum over the words [kFirst, kFirst + 4) of byte kPlace times its activations x[4 g].
template <int kPlace, int kFirst>
static inline __m256 byte_sum(const __m256i* words, const float* x) {
  __m256 sum = _mm256_setzero_ps();
#pragma GCC unroll 4
  for (int g = kFirst; g < kFirst + 4; ++g) {
    sum = _mm256_fmadd_ps(field<8, kPlace>(words[g]), _mm256_broadcast_ss(x + 4 * g), sum);
  }
  return _mm256_mul_ps(sum, _mm256_set1_ps(field_scale<8, kPlace>()));
}

template <int kFirst>
static inline __m256 word_sums(const __m256i* words, const float* x) {
  return add4(byte_sum<0, kFirst>(words, x), byte_sum<1, kFirst>(words, x + 1),
              byte_sum<2, kFirst>(words, x + 2), byte_sum<3, kFirst>(words, x + 3));
}

template <class Layer>
static inline __m256 gemv_int8(const Operands<Layer>& at, int64_t tile,
                                 const FloatRow<Layer>& row) {
  __m256 y = _mm256_setzero_ps();
  for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
    __m256i words[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) words[g] = load_words<Layer>(at, tile, slab, g);
    const float* x = row.slab(slab);
    const __m256 sums[2] = {word_sums<0>(words, x), word_sums<4>(words, x)};
    const float *x0 = row.sums + 2 * slab, *x1 = x0 + 1;
    const int64_t block = slab * kQ8Block / Layer::kBlock;
    const Terms first = load_terms<Layer, false>(at.scales, at.zeros, tile, block);
    if constexpr (num_halves<Layer>() == 1) {
      y = _mm256_fmadd_ps(first.scale, _mm256_add_ps(sums[0], sums[1]), y);
      y = _mm256_fmadd_ps(first.offset, _mm256_set1_ps(*x0 + *x1), y);
    } else {
      const Terms second = load_terms<Layer, false>(at.scales, at.zeros, tile, block + 1);
      y = _mm256_fmadd_ps(first.scale, sums[0], y);
      y = _mm256_fmadd_ps(first.offset, _mm256_broadcast_ss(x0), y);
      y = _mm256_fmadd_ps(second.scale, sums[1], y);
      y = _mm256_fmadd_ps(second.offset, _mm256_broadcast_ss(x1), y);
    }
  }
  return y;
}

static inline __m256 add8(const __m256* sums) {
  return _mm256_add_ps(add4(sums[0], sums[1], sums[2], sums[3]),
                       add4(sums[4], sums[5], sums[6], sums[7]));
}

// f32 [k][8 rows].
template <class Layer>
static inline __m256 gemv_f32(const Operands<Layer>& at, int64_t tile, const float* x) {
  const auto* w = static_cast<const float*>(at.codes) + tile * Layer::kInputs * kTileRows;
  __m256 sums[8];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + 8 <= Layer::kInputs; k += 8) {
    prefetch_ahead<256>(w + k * kTileRows);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      sums[i] = _mm256_fmadd_ps(_mm256_loadu_ps(w + (k + i) * kTileRows),
                                _mm256_broadcast_ss(x + k + i), sums[i]);
    }
  }
  for (; k < Layer::kInputs; ++k) {
    sums[0] = _mm256_fmadd_ps(_mm256_loadu_ps(w + k * kTileRows), _mm256_broadcast_ss(x + k),
                              sums[0]);
  }
  return add8(sums);
}

// A pair of k of eight rows of f16 or bf16, [8 rows][2], as two vectors of eight rows.
struct TwoColumns {
  __m256 even, odd;
};

template <class Layer>
static inline TwoColumns load_pair(const Operands<Layer>& at, int64_t tile, int64_t pair) {
  const auto* p = static_cast<const uint16_t*>(at.codes) +
                  (tile * ((Layer::kInputs + 1) / 2) + pair) * 2 * kTileRows;
  if (pair % 2 == 0) prefetch_ahead<64>(p);
  const __m256i both = load_bytes(p);
  if constexpr (Layer::kFormat == Format::bf16) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536)))};
  } else {
    const __m256i even = _mm256_and_si256(both, _mm256_set1_epi32(65535));
    const __m256i sorted = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(even, _mm256_srli_epi32(both, 16)), _MM_SHUFFLE(3, 1, 2, 0));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(sorted)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1))};
  }
}

template <class Layer>
static inline __m256 gemv_pairs(const Operands<Layer>& at, int64_t tile, const float* x) {
  __m256 sums[8];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  constexpr int64_t kPairs = Layer::kInputs / 2;
  int64_t pair = 0;
  for (; pair + 4 <= kPairs; pair += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const TwoColumns w = load_pair<Layer>(at, tile, pair + i);
      const float* two = x + 2 * (pair + i);
      sums[2 * i] = _mm256_fmadd_ps(w.even, _mm256_broadcast_ss(two), sums[2 * i]);
      sums[2 * i + 1] = _mm256_fmadd_ps(w.odd, _mm256_broadcast_ss(two + 1), sums[2 * i + 1]);
    }
  }
  for (; pair < kPairs; ++pair) {
    const TwoColumns w = load_pair<Layer>(at, tile, pair);
    sums[0] = _mm256_fmadd_ps(w.even, _mm256_broadcast_ss(x + 2 * pair), sums[0]);
    sums[1] = _mm256_fmadd_ps(w.odd, _mm256_broadcast_ss(x + 2 * pair + 1), sums[1]);
  }
  if constexpr (Layer::kInputs % 2) {
    const TwoColumns w = load_pair<Layer>(at, tile, kPairs);
    sums[0] = _mm256_fmadd_ps(w.even, _mm256_broadcast_ss(x + 2 * kPairs), sums[0]);
  }
  return add8(sums);
}

// One row: the tiles [begin, end).
template <class Layer>
static inline void f32_gemv(const Operands<Layer>& at, int64_t begin, int64_t end) {
  const auto* x = static_cast<const float*>(at.x);
  if constexpr (Layer::kFormat == Format::int4) {
    digits_gemv<Layer>(at, begin, end);
  } else if constexpr (Layer::kFormat == Format::int8) {
    const FloatRow<Layer> row(x);
    for (int64_t tile = begin; tile < end; ++tile) {
      finish<Layer>(at, 0, tile, gemv_int8<Layer>(at, tile, row));
    }
  } else {
    for (int64_t tile = begin; tile < end; ++tile) {
      const __m256 y = Layer::kFormat == Format::f32 ? gemv_f32<Layer>(at, tile, x)
                                                     : gemv_pairs<Layer>(at, tile, x);
      finish<Layer>(at, 0, tile, y);
    }
  }
}

template <class Layer, int kPlace>
static inline void fill_field(const __m256i* words, const Terms& terms, int first, int count,
                              float* panel) {
  constexpr int kBits = Layer::kFormat == Format::int4 ? 4 : 8;
  const __m256 back = _mm256_set1_ps(field_scale<kBits, kPlace>());
  const __m256 scale = _mm256_mul_ps(terms.scale, back);
#pragma GCC unroll 4
  for (int g = first; g < first + count; ++g) {
    const __m256 w = _mm256_fmadd_ps(field<kBits, kPlace>(words[g]), scale, terms.offset);
    _mm256_store_ps(panel + 4 * g * kPanelOutputs, w);
  }
}

// A slab of a tile as floats, at panel[k][0..8).
template <class Layer>
static inline void fill_slab(const Operands<Layer>& at, int64_t tile, int64_t slab, float* panel) {
  Terms terms[2];
  const int64_t block = slab * kQ8Block / Layer::kBlock;
  terms[0] = load_terms<Layer, false>(at.scales, at.zeros, tile, block);
  terms[1] = terms[0];
  if constexpr (num_halves<Layer>() == 2) {
    terms[1] = load_terms<Layer, false>(at.scales, at.zeros, tile, block + 1);
  }
  constexpr int64_t kStep = kPanelOutputs;
  __m256i words[8];
  if constexpr (Layer::kFormat == Format::int4) {
    for (int g = 0; g < 4; ++g) words[g] = load_words<Layer>(at, tile, slab, g);
    float* upper = panel + 16 * kStep;
    fill_field<Layer, 0>(words, terms[0], 0, 4, panel);
    fill_field<Layer, 2>(words, terms[0], 0, 4, panel + kStep);
    fill_field<Layer, 4>(words, terms[0], 0, 4, panel + 2 * kStep);
    fill_field<Layer, 6>(words, terms[0], 0, 4, panel + 3 * kStep);
    fill_field<Layer, 1>(words, terms[1], 0, 4, upper);
    fill_field<Layer, 3>(words, terms[1], 0, 4, upper + kStep);
    fill_field<Layer, 5>(words, terms[1], 0, 4, upper + 2 * kStep);
    fill_field<Layer, 7>(words, terms[1], 0, 4, upper + 3 * kStep);
  } else {
    for (int g = 0; g < 8; ++g) words[g] = load_words<Layer>(at, tile, slab, g);
    for (int half = 0; half < 2; ++half) {
      fill_field<Layer, 0>(words, terms[half], 4 * half, 4, panel);
      fill_field<Layer, 1>(words, terms[half], 4 * half, 4, panel + kStep);
      fill_field<Layer, 2>(words, terms[half], 4 * half, 4, panel + 2 * kStep);
      fill_field<Layer, 3>(words, terms[half], 4 * half, 4, panel + 3 * kStep);
    }
  }
}

// The weights of a tile for k = first .. first + count as panel[k - first][0..8); `first` is a
// multiple of kPanel. May write up to the next multiple of 32.
template <class Layer>
static inline void fill_panel(const Operands<Layer>& at, int64_t tile, int64_t first, int64_t count,
                              float* panel) {
  if constexpr (is_block_format<Layer>()) {
    for (int64_t k = 0; k < count; k += kQ8Block) {
      fill_slab<Layer>(at, tile, (first + k) / kQ8Block, panel + k * kPanelOutputs);
    }
  } else if constexpr (Layer::kFormat == Format::f32) {
    const auto* w = static_cast<const float*>(at.codes) + tile * Layer::kInputs * kTileRows;
    for (int64_t k = 0; k < count; ++k) {
      _mm256_store_ps(panel + k * kPanelOutputs, _mm256_loadu_ps(w + (first + k) * kTileRows));
    }
  } else {
    for (int64_t k = 0; k < count; k += 2) {
      const TwoColumns w = load_pair<Layer>(at, tile, (first + k) / 2);
      _mm256_store_ps(panel + k * kPanelOutputs, w.even);
      _mm256_store_ps(panel + (k + 1) * kPanelOutputs, w.odd);
    }
  }
}

// y[row][0..16) += x[row][0..count) . panel, for kRows rows.
template <int kRows>
static inline void add_rows(const float* x, int64_t stride, const float* panel, int64_t count,
                            float* y) {
  __m256 sums[kRows][2];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < count; ++k) {
    const __m256 w0 = _mm256_load_ps(panel + k * kPanelOutputs);
    const __m256 w1 = _mm256_load_ps(panel + k * kPanelOutputs + kTileRows);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const __m256 a = _mm256_broadcast_ss(x + row * stride + k);
      sums[row][0] = _mm256_fmadd_ps(w0, a, sums[row][0]);
      sums[row][1] = _mm256_fmadd_ps(w1, a, sums[row][1]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    float* p = y + row * kPanelOutputs;
    _mm256_store_ps(p, _mm256_add_ps(_mm256_load_ps(p), sums[row][0]));
    _mm256_store_ps(p + kTileRows, _mm256_add_ps(_mm256_load_ps(p + kTileRows), sums[row][1]));
  }
}

static inline void add_panel(const float* x, int64_t stride, int64_t rows, const float* panel,
                             int64_t count, float* y) {
#if defined(__AVX512F__)
  add_panel_512(x, stride, rows, panel, count, y);
#else
  for (; rows >= 6; rows -= 6, x += 6 * stride, y += 6 * kPanelOutputs) {
    add_rows<6>(x, stride, panel, count, y);
  }
  switch (rows) {
    case 5: return add_rows<5>(x, stride, panel, count, y);
    case 4: return add_rows<4>(x, stride, panel, count, y);
    case 3: return add_rows<3>(x, stride, panel, count, y);
    case 2: return add_rows<2>(x, stride, panel, count, y);
    case 1: return add_rows<1>(x, stride, panel, count, y);
  }
#endif
}

// Some rows, at most kMostRows, of the tiles [tile, end), which are one or two.
template <class Layer>
static inline void f32_gemm_pair(const Operands<Layer>& at, int64_t tile, int64_t end, Rows rows) {
  alignas(64) float panel[kPanel * kPanelOutputs];
  alignas(64) float y[kMostRows * kPanelOutputs];
  std::fill_n(y, rows.count * kPanelOutputs, 0.0f);
  const auto* x = static_cast<const float*>(at.x) + rows.first * Layer::kInputs;
  for (int64_t first = 0; first < Layer::kInputs; first += kPanel) {
    const int64_t count = std::min(kPanel, Layer::kInputs - first);
    fill_panel<Layer>(at, tile, first, count, panel);
    fill_panel<Layer>(at, end - 1, first, count, panel + kTileRows);
    add_panel(x + first, Layer::kInputs, rows.count, panel, count, y);
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0; tile + i < end; ++i) {
      const __m256 sum = _mm256_load_ps(y + row * kPanelOutputs + i * kTileRows);
      finish<Layer>(at, rows.first + row, tile + i, sum);
    }
  }
}

template <class Layer>
static inline void f32_gemm(const Operands<Layer>& at, int64_t begin, int64_t end, Rows rows) {
  for (int64_t tile = begin; tile < end; tile += 2) {
    f32_gemm_pair<Layer>(at, tile, std::min(tile + 2, end), rows);
  }
}

}  // namespace atsc
