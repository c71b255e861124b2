// Products of float matrices in tiles (tile_f32.h): operands are read where they are, or copied into
// a workspace as the register tiles want them; what a tile holds is finished element by element.
#pragma once

#include <cstdint>

#include "level.h"
#include "scalar.h"

extern "C" void ATSC_LEVEL(atsc_tile_f32)(int64_t rows, int64_t columns, int64_t depth,
                                          const float* a, int64_t stride, const float* b,
                                          float* c, bool adds);

namespace atsc::graph {

// Rows of the left operand. Where their distance is a multiple of 4 KiB, all of a strip would fall
// into the same lines of the cache; they are copied then.
static inline const float* rows_of(const float* from, int64_t& stride, int64_t rows, int64_t depth,
                                   float* copy) {
  if (stride % 1024 != 0 || rows < 8) return from;
  const int64_t own = depth + 16;
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(copy + r * own, from + r * stride, static_cast<uint64_t>(depth) * sizeof(float));
  }
  stride = own;
  return copy;
}

// A panel [depth][kTileColumns] of the right operand, zero beyond its last column; at(k, n).
template <class At>
static inline __attribute__((always_inline)) void fill_panel(float* panel, int64_t depth,
                                                             int64_t columns, At&& at) {
  for (int64_t k = 0; k < depth; ++k, panel += kTileColumns) {
    if (columns == kTileColumns) {
#pragma GCC ivdep  // the workspace is nobody's operand
      for (int64_t n = 0; n < kTileColumns; ++n) panel[n] = at(k, n);
      continue;
    }
    for (int64_t n = 0; n < columns; ++n) panel[n] = at(k, n);
    for (int64_t n = columns; n < kTileColumns; ++n) panel[n] = 0;
  }
}

// The same of an operand whose columns are contiguous: read along those.
static inline void turn_panel(float* panel, int64_t depth, int64_t columns, const float* from,
                              int64_t stride) {
  for (int64_t n = 0; n < kTileColumns; ++n) {
    const float* const column = from + n * stride;
    if (n < columns) {
      for (int64_t k = 0; k < depth; ++k) panel[k * kTileColumns + n] = column[k];
    } else {
      for (int64_t k = 0; k < depth; ++k) panel[k * kTileColumns + n] = 0;
    }
  }
}

// Calls finish(row, column) for each element of a tile.
template <class Finish>
static inline __attribute__((always_inline)) void finish_tile(int64_t rows, int64_t columns,
                                                              Finish&& finish) {
  for (int64_t r = 0; r < rows; ++r) {
    if (columns == kTileColumns) {
#pragma GCC ivdep  // the sums are nobody's output
      for (int64_t c = 0; c < kTileColumns; ++c) finish(r, c);
    } else {
#pragma GCC ivdep
      for (int64_t c = 0; c < columns; ++c) finish(r, c);
    }
  }
}

}  // namespace atsc::graph
