// c[r][n] = sum over k of a[r][k] * b[k][n], or with `adds` that added to c: float, kTileColumns
// columns, any number of rows.
//
// A function of its own at each level, compiled once for all plans. a is row-major with rows
// `stride` elements apart, b is packed [depth][kTileColumns], c is [rows][kTileColumns]; b and c are
// 64-byte aligned. A block of rows and columns stays in registers for the whole depth; rows are
// split into strips of nearly equal height. With `columns` of at most half a tile only that half of
// c is written.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "level.h"

namespace atsc::graph {
namespace ATSC_LEVEL(tile) {

#ifdef __AVX512F__
using Vector = __m512;
constexpr int kWidth = 16, kStrip = 14;
static inline Vector zero() { return _mm512_setzero_ps(); }
static inline Vector all(const float* x) { return _mm512_set1_ps(*x); }
static inline Vector load(const float* x) { return _mm512_load_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
static inline void store(float* x, Vector v) { _mm512_store_ps(x, v); }
#else
using Vector = __m256;
constexpr int kWidth = 8, kStrip = 6;
static inline Vector zero() { return _mm256_setzero_ps(); }
static inline Vector all(const float* x) { return _mm256_broadcast_ss(x); }
static inline Vector load(const float* x) { return _mm256_load_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
static inline void store(float* x, Vector v) { _mm256_store_ps(x, v); }
#endif

// A pointer serves three rows, by the addresses p, p + stride and p + 2 stride.
template <int kRows, int kVectors>
static void strip(int64_t depth, const float* a, int64_t stride, const float* b, float* c,
                  bool adds) {
  constexpr int kPointers = (kRows + 2) / 3;
  Vector sum[kRows][kVectors];
  const float* row[kPointers];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPointers; ++p) row[p] = a + 3 * p * stride;
  for (int64_t k = 0; k < depth; ++k, b += kTileColumns) {
    Vector right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector left = all(row[r / 3] + r % 3 * stride);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPointers; ++p) ++row[p];
  }
  if (adds) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] += load(c + r * kTileColumns + v * kWidth);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(c + r * kTileColumns + v * kWidth, sum[r][v]);
  }
}

template <int kRows, int kVectors>
static void strip_of(int64_t rows, int64_t depth, const float* a, int64_t stride, const float* b,
                     float* c, bool adds) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return strip_of<kRows - 1, kVectors>(rows, depth, a, stride, b, c, adds);
  }
  strip<kRows, kVectors>(depth, a, stride, b, c, adds);
}

template <int kVectors>
static void strips(int64_t rows, int64_t depth, const float* a, int64_t stride, const float* b,
                   float* c, bool adds) {
  int64_t left = (rows + kStrip - 1) / kStrip;
  while (rows > 0) {
    const int64_t now = (rows + left - 1) / left;
    strip_of<kStrip, kVectors>(now, depth, a, stride, b, c, adds);
    a += now * stride;
    c += now * kTileColumns;
    rows -= now;
    --left;
  }
}

}  // namespace ATSC_LEVEL(tile)
}  // namespace atsc::graph

extern "C" void ATSC_LEVEL(atsc_tile_f32)(int64_t rows, int64_t columns, int64_t depth,
                                          const float* a, int64_t stride, const float* b,
                                          float* c, bool adds) {
  using namespace atsc::graph;
  using namespace atsc::graph::ATSC_LEVEL(tile);
  constexpr int64_t kColumns = 2 * kWidth;
  for (int64_t first = 0; first < columns; first += kColumns) {
    if (columns - first <= kWidth) {
      strips<1>(rows, depth, a, stride, b + first, c + first, adds);
    } else {
      strips<2>(rows, depth, a, stride, b + first, c + first, adds);
    }
  }
}
