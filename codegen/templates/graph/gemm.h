// C[m][n] = sum over k of a(m, k) * b(k, n), one tile of C at a time, for kernels of general graphs.
//
// Both operands are functions of their indices, which are inlined into the packing loops: transposes,
// broadcasts, casts and the windows of a convolution cost nothing of their own. Per block of kDepth,
// a tile's rows of A and columns of B are packed; a register tile is kRows x 2 vectors.
#pragma once

#include <cstdint>

#include "scalar.h"

namespace atsc::graph {

inline constexpr int64_t kTileRows = 96, kTileColumns = 64, kDepth = 256;

// Compiled with -ffp-contract=fast, so that products and sums become one instruction.
template <class T>
struct Lanes {
  typedef T Vector __attribute__((vector_size(32)));
  static constexpr int64_t kWidth = 32 / sizeof(T);
};

// Bytes of workspace: packed A [strips][kDepth][6], packed B [kDepth][panel], the tile's sums.
template <class T>
constexpr int64_t gemm_workspace_bytes() {
  return static_cast<int64_t>(sizeof(T)) *
         (kTileRows * kDepth + kDepth * kTileColumns + kTileRows * kTileColumns);
}

// Calls store(m, n, sum) for each element of the tile that begins at (first_m, first_n).
template <class T, class A, class B, class Store>
static inline __attribute__((always_inline)) void gemm_tile(
    int64_t num_m, int64_t num_n, int64_t num_k, int64_t first_m, int64_t first_n, void* workspace,
    A&& a, B&& b, Store&& store) {
  using Vector = typename Lanes<T>::Vector;
  constexpr int64_t kWidth = Lanes<T>::kWidth, kPanel = 2 * kWidth, kStrip = 6;
  const int64_t rows = least(kTileRows, num_m - first_m);
  const int64_t columns = least(kTileColumns, num_n - first_n);
  T* const packed_a = static_cast<T*>(workspace);
  T* const packed_b = packed_a + kTileRows * kDepth;
  T* const sums = packed_b + kDepth * kTileColumns;
  for (int64_t i = 0; i < kTileRows * kTileColumns; ++i) sums[i] = 0;
  for (int64_t begin = 0; begin < num_k; begin += kDepth) {
    const int64_t depth = least(kDepth, num_k - begin);
    for (int64_t m = 0; m < rows; ++m) {
      T* const strip = packed_a + m / kStrip * kStrip * kDepth + m % kStrip;
      for (int64_t k = 0; k < depth; ++k) strip[k * kStrip] = a(first_m + m, begin + k);
    }
    // Row by row: whole lines of a row-major operand, one page after the other.
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t panel = 0; panel < columns; panel += kPanel) {
        const int64_t width = columns - panel;
        T* const to = packed_b + panel * kDepth + k * kPanel;
        if (width >= kPanel) {  // of known length: a vector or two
#pragma GCC ivdep  // the workspace is nobody's operand
          for (int64_t n = 0; n < kPanel; ++n) to[n] = b(begin + k, first_n + panel + n);
          continue;
        }
        for (int64_t n = 0; n < kPanel; ++n) {
          to[n] = n < width ? b(begin + k, first_n + panel + n) : 0;
        }
      }
    }
    for (int64_t panel = 0; panel < columns; panel += kPanel) {
      for (int64_t m = 0; m < rows; m += kStrip) {
        const T* left = packed_a + m * kDepth;
        const T* right = packed_b + panel * kDepth;
        Vector total[kStrip][2] = {};
        for (int64_t k = 0; k < depth; ++k, left += kStrip, right += kPanel) {
          Vector low, high;
          __builtin_memcpy(&low, right, sizeof low);
          __builtin_memcpy(&high, right + kWidth, sizeof high);
#pragma GCC unroll 6
          for (int64_t r = 0; r < kStrip; ++r) {
            const Vector value = left[r] - Vector{};
            total[r][0] = value * low + total[r][0];
            total[r][1] = value * high + total[r][1];
          }
        }
        // Constant indices alone, or the sums would live in memory; rows beyond the last are nobody's.
#pragma GCC unroll 6
        for (int64_t r = 0; r < kStrip; ++r) {
          T* const to = sums + (m + r) * kTileColumns + panel;
          Vector low, high;
          __builtin_memcpy(&low, to, sizeof low);
          __builtin_memcpy(&high, to + kWidth, sizeof high);
          low += total[r][0];
          high += total[r][1];
          __builtin_memcpy(to, &low, sizeof low);
          __builtin_memcpy(to + kWidth, &high, sizeof high);
        }
      }
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      store(first_m + m, first_n + n, sums[m * kTileColumns + n]);
    }
  }
}

}  // namespace atsc::graph
