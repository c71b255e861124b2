// Exact products of byte matrices in tiles (tile_i8.h), and how operands come into their forms: rows
// of whole quads, and panels [quads][kTileColumns][4]. What a quad has beyond the depth is 0 in one
// operand at least. `flip` is 0x80 where signed and unsigned bytes are exchanged, by adding 128 or
// taking it off; sums of an operand's bytes take zero points off the finished products.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "level.h"
#include "scalar.h"

extern "C" void ATSC_LEVEL(atsc_tile_u8s8)(int64_t rows, int64_t columns, int64_t quads,
                                           const void* a, int64_t stride, const void* b, int32_t* c,
                                           bool adds);
extern "C" void ATSC_LEVEL(atsc_tile_s8u8)(int64_t rows, int64_t columns, int64_t quads,
                                           const void* a, int64_t stride, const void* b, int32_t* c,
                                           bool adds);

namespace atsc::graph {

// sum - a * b modulo 2^32.
static inline int32_t less_product(int32_t sum, int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(sum) -
                              static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}

static inline int32_t sum_of_bytes(const uint8_t* x, int64_t count) {
  __m256i total = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 32 <= count; k += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
    total = _mm256_add_epi64(total, _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
  }
  int64_t parts[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), total);
  int64_t sum = parts[0] + parts[1] + parts[2] + parts[3];
  for (; k < count; ++k) sum += x[k];
  return static_cast<int32_t>(sum);
}

// Rows [rows][quads * 4] of unsigned bytes, and their sums if wanted.
static inline void copy_rows(uint8_t* to, int32_t* sums, const void* from, int64_t stride,
                             int64_t rows, int64_t depth, int64_t quads, uint8_t flip) {
  for (int64_t r = 0; r < rows; ++r, to += 4 * quads) {
    const auto* const row = static_cast<const uint8_t*>(from) + r * stride;
    for (int64_t k = 0; k < depth; ++k) to[k] = static_cast<uint8_t>(row[k] ^ flip);
    for (int64_t k = depth; k < 4 * quads; ++k) to[k] = 0;
    if (sums != nullptr) sums[r] = sum_of_bytes(to, depth);
  }
}

// The same of an operand that is a function at(row, k).
template <class At>
static inline __attribute__((always_inline)) void fill_rows(uint8_t* to, int32_t* sums,
                                                            int64_t rows, int64_t depth,
                                                            int64_t quads, uint8_t flip, At&& at) {
  for (int64_t r = 0; r < rows; ++r, to += 4 * quads) {
    for (int64_t k = 0; k < depth; ++k) to[k] = static_cast<uint8_t>(at(r, k) ^ flip);
    for (int64_t k = depth; k < 4 * quads; ++k) to[k] = 0;
    if (sums != nullptr) sums[r] = sum_of_bytes(to, depth);
  }
}

// A panel of the right operand at(k, column) of signed bytes, and the sums of its columns.
template <class At>
static inline __attribute__((always_inline)) void fill_quads(int8_t* panel, int32_t* sums,
                                                             int64_t depth, int64_t columns,
                                                             uint8_t flip, At&& at) {
  for (int64_t n = 0; n < kTileColumns; ++n) sums[n] = 0;
  for (int64_t first = 0; first < depth; first += 4, panel += 4 * kTileColumns) {
    __builtin_memset(panel, 0, 4 * kTileColumns);
    const int64_t count = least(4, depth - first);
    for (int64_t i = 0; i < count; ++i) {
#pragma GCC ivdep  // the workspace is nobody's operand
      for (int64_t n = 0; n < columns; ++n) {
        const auto byte = static_cast<int8_t>(at(first + i, n) ^ flip);
        panel[4 * n + i] = byte;
        sums[n] += byte;
      }
    }
  }
}

}  // namespace atsc::graph
