// One row of a weight table as floats, from any layout of codegen/layout.py. AVX2.
#pragma once

#include <cstring>

#include "linear.h"

namespace atsc {

static inline float number_at(Number kind, const void* base, int64_t index) {
  if (kind == Number::f32) return static_cast<const float*>(base)[index];
  if (kind == Number::u8) return static_cast<const uint8_t*>(base)[index];
  return _cvtsh_ss(static_cast<const uint16_t*>(base)[index]);
}

static inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Element `index` of an array of floats of the layer's format.
template <class Layer>
static inline float element(const void* data, int64_t index) {
  if constexpr (Layer::kFormat == Format::bf16) {
    return from_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[index]) << 16);
  } else {
    return number_at(Layer::kFormat == Format::f16 ? Number::f16 : Number::f32, data, index);
  }
}

template <class Layer>
static inline void embed_floats(const void* data, int64_t id, float* y) {
  constexpr int64_t kGroup = Layer::kFormat == Format::f32 ? 1 : 2;  // k of one row side by side
  constexpr int64_t kGroups = (Layer::kInputs + kGroup - 1) / kGroup;
  const int64_t tile = id / kTileRows, row = id % kTileRows;
  for (int64_t k = 0; k < Layer::kInputs; ++k) {
    const int64_t group = tile * kGroups + k / kGroup;
    const int64_t tiled = (group * kTileRows + row) * kGroup + k % kGroup;
    y[k] = element<Layer>(data, Layer::kTiled ? tiled : id * Layer::kInputs + k);
  }
}

// w = scale * (code - point), or scale * code + offset, as codegen/layout.py defines both.
struct CodeTerms {
  float scale, point, offset;
};

template <class Layer>
static inline CodeTerms code_terms(const void* const* table, int64_t id, int64_t block) {
  const int64_t index =
      (id / kTileRows * num_scales<Layer>() + block) * kTileRows + id % kTileRows;
  const float middle = Layer::kFormat == Format::int4 ? 8.0f : 128.0f;
  CodeTerms terms{number_at(Layer::kScales, table[1], index), middle, 0.0f};
  if constexpr (Layer::kZeros == Number::u8) {
    terms.point = number_at(Number::u8, table[2], index);
  } else if constexpr (Layer::kZeros != Number::none) {
    terms.point = Layer::kFormat == Format::int4 ? 0.0f : 128.0f;
    terms.offset = number_at(Layer::kZeros, table[2], index);
  }
  return terms;
}

// Words of one row of a slab; word g holds k = 4 g + b (int4: and 16 + 4 g + b above it).
template <class Layer>
static inline void embed_codes(const void* const* table, int64_t id, float* y) {
  constexpr bool kInt4 = Layer::kFormat == Format::int4;
  constexpr int64_t kWords = kInt4 ? 4 : 8;
  const int64_t tile = id / kTileRows, row = id % kTileRows;
  for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
    uint8_t codes[kQ8Block];
    const auto* p = static_cast<const uint8_t*>(table[0]) +
                    ((tile * num_slabs<Layer>() + slab) * kWords * kTileRows + row) * 4;
    for (int64_t g = 0; g < kWords; ++g) std::memcpy(codes + 4 * g, p + g * kTileRows * 4, 4);
    for (int k = 0; k < 16 && kInt4; ++k) codes[k + 16] = codes[k] >> 4;
    for (int k = 0; k < kQ8Block; ++k) codes[k] = kInt4 ? codes[k] & 15 : codes[k] ^ 128;
    const int64_t first = slab * kQ8Block, left = std::min(kQ8Block + 0L, Layer::kInputs - first);
    constexpr int64_t kRun = Layer::kBlock < kQ8Block ? Layer::kBlock : kQ8Block;
    for (int64_t k = 0; k < left; ++k) {
      const CodeTerms t = code_terms<Layer>(table, id, (first + k / kRun * kRun) / Layer::kBlock);
      y[first + k] = t.scale * (static_cast<float>(codes[k]) - t.point) + t.offset;
    }
  }
}

template <class Layer>
static inline void embed_row(const void* const* table, int64_t id, float* y) {
  if constexpr (is_block_format<Layer>()) {
    embed_codes<Layer>(table, id, y);
  } else {
    embed_floats<Layer>(table[0], id, y);
  }
}

}  // namespace atsc
