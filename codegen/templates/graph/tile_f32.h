// c[r][n] = sum over k of a[r][k] * b[k][n], or with `adds` that added to c: float, kTileColumns
// columns, any number of rows.
//
// A function of its own at each level, compiled once for all plans. a is row-major with rows
// `stride` elements apart, b is packed [depth][kTileColumns], c is [rows][kTileColumns]; b and c are
// 64-byte aligned. With `columns` of at most half a tile only that half of c is written.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "level.h"
#include "tile_strips.h"

namespace atsc::graph {
namespace ATSC_LEVEL(tile) {

#ifdef __AVX512F__
struct Floats {
  using Element = float;
  using Sum = float;
  using Vector = __m512;
  static constexpr int kWidth = 16, kStrip = 14, kStep = 1;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector left(const float* x) { return _mm512_set1_ps(*x); }
  static Vector right(const float* x) { return _mm512_load_ps(x); }
  static Vector dot(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* x, Vector v, bool adds) { _mm512_store_ps(x, adds ? v + right(x) : v); }
};
#else
struct Floats {
  using Element = float;
  using Sum = float;
  using Vector = __m256;
  static constexpr int kWidth = 8, kStrip = 6, kStep = 1;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector left(const float* x) { return _mm256_broadcast_ss(x); }
  static Vector right(const float* x) { return _mm256_load_ps(x); }
  static Vector dot(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* x, Vector v, bool adds) { _mm256_store_ps(x, adds ? v + right(x) : v); }
};
#endif

}  // namespace ATSC_LEVEL(tile)
}  // namespace atsc::graph

extern "C" void ATSC_LEVEL(atsc_tile_f32)(int64_t rows, int64_t columns, int64_t depth,
                                          const float* a, int64_t stride, const float* b,
                                          float* c, bool adds) {
  using atsc::graph::ATSC_LEVEL(tile)::Floats;
  atsc::graph::ATSC_LEVEL(tile_strips)::tile<Floats>(rows, columns, depth, a, stride, b, c, adds);
}
