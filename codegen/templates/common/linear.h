// What the AVX2 linear kernels share: a layer's constants, its operands, scales and epilogue.
//
// A kernel describes its layer by a struct of constants that common/linear_layer.h.j2 writes. All
// functions here are templates over it or static: libraries hold them for several ISA levels.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "kernel.h"
#include "simd.h"

namespace atsc {

enum class Format { int4, int8, f32, f16, bf16 };
enum class Number { none, u8, f16, f32 };

inline constexpr int64_t kQ8Bytes = kQ8Block;  // codes of one block of activations

template <class Layer>
constexpr int64_t num_tiles() {
  return (Layer::kOutputs + kTileRows - 1) / kTileRows;
}

// K in units of 32, the last one padded.
template <class Layer>
constexpr int64_t num_slabs() {
  return (Layer::kInputs + kQ8Block - 1) / kQ8Block;
}

// Stored scales of a row, as codegen/layout.py num_blocks().
template <class Layer>
constexpr int64_t num_scales() {
  constexpr int64_t unit = Layer::kBlock < kQ8Block ? kQ8Block : Layer::kBlock;
  return (Layer::kInputs + unit - 1) / unit * unit / Layer::kBlock;
}

template <class Layer>
constexpr bool is_block_format() {
  return Layer::kFormat == Format::int4 || Layer::kFormat == Format::int8;
}

// Blocks of 16 split a slab of 32 K into two halves with scales of their own.
template <class Layer>
constexpr int num_halves() {
  return Layer::kBlock == 16 ? 2 : 1;
}

static inline __m256i load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// Bytes of codes of one slab of a tile.
template <class Layer>
constexpr int64_t slab_bytes() {
  return Layer::kFormat == Format::int4 ? 128 : 256;
}

// Fetches what follows in kAhead bytes. Tiles follow each other, so that this runs on into the next
// one; the hardware's own prefetch alone reaches two thirds of a plain read.
inline constexpr int64_t kAhead = 4096;

template <int64_t kBytes>
static inline void prefetch_ahead(const void* p) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kBytes; i += 64) {
    _mm_prefetch(static_cast<const char*>(p) + kAhead + i, _MM_HINT_T0);
  }
}

// Four activations, for all eight rows of a tile.
static inline __m256i broadcast4(const int8_t* p) {
  return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
}

// Eight numbers of an array, as floats.
template <Number kKind>
static inline __m256 load_numbers(const void* base, int64_t index) {
  if constexpr (kKind == Number::f32) {
    return _mm256_loadu_ps(static_cast<const float*>(base) + index);
  } else if constexpr (kKind == Number::f16) {
    const auto* p = static_cast<const uint16_t*>(base) + index;
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else {
    const auto* p = static_cast<const uint8_t*>(base) + index;
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
}

// What turns a sum of products into the layer's terms: w.x = scale * (code.x) + offset * sum(x).
struct Terms {
  __m256 scale, offset;
};

// kSigned: the codes of int8 are taken as they are stored, raw code - 128; else as raw codes.
template <class Layer, bool kSigned>
constexpr bool has_offset() {
  return !(kSigned && Layer::kFormat == Format::int8 && Layer::kZeros == Number::none);
}

// The terms of eight rows: `block` counts scales along K.
template <class Layer, bool kSigned>
static inline Terms load_terms(const void* scales, const void* zeros, int64_t tile, int64_t block) {
  constexpr bool kInt8 = Layer::kFormat == Format::int8;
  constexpr float kTaken = kInt8 && kSigned ? 128.0f : 0.0f;  // raw code that counts as zero
  const int64_t index = (tile * num_scales<Layer>() + block) * kTileRows;
  Terms terms;
  terms.scale = load_numbers<Layer::kScales>(scales, index);
  if constexpr (Layer::kZeros == Number::none) {
    const float centre = (kInt8 ? 128.0f : 8.0f) - kTaken;
    terms.offset = _mm256_mul_ps(terms.scale, _mm256_set1_ps(-centre));
  } else if constexpr (Layer::kZeros == Number::u8) {
    const __m256 point = load_numbers<Number::u8>(zeros, index);
    const __m256 minus = _mm256_sub_ps(_mm256_set1_ps(kTaken), point);
    terms.offset = _mm256_mul_ps(terms.scale, minus);
  } else {
    const float shift = (kInt8 ? 128.0f : 0.0f) - kTaken;  // stored offsets belong to code - 128
    const __m256 stored = load_numbers<Layer::kZeros>(zeros, index);
    terms.offset = _mm256_fnmadd_ps(terms.scale, _mm256_set1_ps(shift), stored);
  }
  return terms;
}

// A layer's pointers in one call.
template <class Layer>
struct Operands {
  const void *x, *codes, *scales, *zeros;
  const float *bias, *gate, *residual;
  float* y;

  explicit Operands(const KernelArgs& args)
      : x(args.in[Layer::kX]),
        codes(args.in[Layer::kWeight]),
        scales(args.in[Layer::kWeight + 1]),
        zeros(args.in[Layer::kWeight + 2]),
        bias(static_cast<const float*>(args.in[Layer::kBias])),
        gate(static_cast<const float*>(args.in[Layer::kGate])),
        residual(static_cast<const float*>(args.in[Layer::kResidual])),
        y(static_cast<float*>(args.out[0])) {}
};

// Bias, activation, gate and residual of eight outputs of one row, and their store.
template <class Layer>
static inline void finish(const Operands<Layer>& at, int64_t row, int64_t tile, __m256 y) {
  const int64_t column = tile * kTileRows;
  const int64_t place = row * Layer::kOutputs + column;
  const int64_t left = Layer::kOutputs % kTileRows ? Layer::kOutputs - column : kTileRows;
  if constexpr (Layer::kHasBias) y = _mm256_add_ps(y, load_first(at.bias + column, left));
  if constexpr (Layer::kHasGate) {
    y = _mm256_mul_ps(Layer::activate(load_first(at.gate + place, left)), y);
  } else {
    y = Layer::activate(y);
  }
  if constexpr (Layer::kHasResidual) y = _mm256_add_ps(load_first(at.residual + place, left), y);
  store_first(at.y + place, y, left);
}

// Rounds of many rows: items are pairs of tiles x blocks of rows, the pairs of one block in order,
// so that its activations stay in the cache.
inline constexpr int64_t kMostRows = 64;  // rows of one block

template <class Layer>
constexpr int64_t num_pairs() {
  return (num_tiles<Layer>() + 1) / 2;
}

static inline int64_t num_row_blocks(int64_t rows) { return (rows + kMostRows - 1) / kMostRows; }

struct Rows {
  int64_t first, count;
};

// Block `index` of the rows, all about equally large.
static inline Rows row_block(int64_t rows, int64_t index) {
  const int64_t blocks = num_row_blocks(rows);
  const int64_t first = rows * index / blocks;
  return {first, rows * (index + 1) / blocks - first};
}

}  // namespace atsc
