// Products in register tiles, whatever is multiplied (tile_f32.h, tile_i8.h): a block of rows and
// columns stays in registers for the whole depth; rows are split into strips of nearly equal height.
//
// `Ops` has the types Element (of a and b), Sum (of c) and Vector (kWidth sums, or what they are
// until `store`), kStep elements of a row or a column that make a step of the depth, kStrip, and
//
//     zero()                   left(a): a step of one row, in all lanes      dot(left, right, sum)
//     store(c, sum, adds)      right(b): a step of kWidth columns
#pragma once

#include <cstdint>

#include "level.h"

namespace atsc::graph {
namespace ATSC_LEVEL(tile_strips) {

// A pointer serves three rows, by the addresses p, p + stride and p + 2 stride.
template <class Ops, int kRows, int kVectors>
static void strip(int64_t depth, const typename Ops::Element* a, int64_t stride,
                  const typename Ops::Element* b, typename Ops::Sum* c, bool adds) {
  using Vector = typename Ops::Vector;
  constexpr int kPointers = (kRows + 2) / 3;
  Vector sum[kRows][kVectors];
  const typename Ops::Element* row[kPointers];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Ops::zero();
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPointers; ++p) row[p] = a + 3 * p * stride;
  for (int64_t k = 0; k < depth; ++k, b += Ops::kStep * kTileColumns) {
    Vector right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = Ops::right(b + Ops::kStep * v * Ops::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector left = Ops::left(row[r / 3] + r % 3 * stride);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Ops::dot(left, right[v], sum[r][v]);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPointers; ++p) row[p] += Ops::kStep;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Ops::store(c + r * kTileColumns + v * Ops::kWidth, sum[r][v], adds);
    }
  }
}

template <class Ops, int kRows, int kVectors>
static void strip_of(int64_t rows, int64_t depth, const typename Ops::Element* a, int64_t stride,
                     const typename Ops::Element* b, typename Ops::Sum* c, bool adds) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return strip_of<Ops, kRows - 1, kVectors>(rows, depth, a, stride, b, c, adds);
    }
  }
  strip<Ops, kRows, kVectors>(depth, a, stride, b, c, adds);
}

template <class Ops, int kVectors>
static void strips(int64_t rows, int64_t depth, const typename Ops::Element* a, int64_t stride,
                   const typename Ops::Element* b, typename Ops::Sum* c, bool adds) {
  int64_t left = (rows + Ops::kStrip - 1) / Ops::kStrip;
  while (rows > 0) {
    const int64_t now = (rows + left - 1) / left;
    strip_of<Ops, Ops::kStrip, kVectors>(now, depth, a, stride, b, c, adds);
    a += now * stride;
    c += now * kTileColumns;
    rows -= now;
    --left;
  }
}

template <class Ops>
static void tile(int64_t rows, int64_t columns, int64_t depth, const typename Ops::Element* a,
                 int64_t stride, const typename Ops::Element* b, typename Ops::Sum* c, bool adds) {
  constexpr int64_t kColumns = 2 * Ops::kWidth;
  for (int64_t first = 0; first < columns; first += kColumns, b += Ops::kStep * kColumns) {
    if (columns - first <= Ops::kWidth) {
      strips<Ops, 1>(rows, depth, a, stride, b, c + first, adds);
    } else {
      strips<Ops, 2>(rows, depth, a, stride, b, c + first, adds);
    }
  }
}

}  // namespace ATSC_LEVEL(tile_strips)
}  // namespace atsc::graph
