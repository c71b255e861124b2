// The FMA kernel of linear_f32.h in AVX-512: a panel's 16 outputs are one register, and up to 12
// rows share each load of it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace atsc {

// y[row][0..16) += x[row][0..count) . panel[k][0..16), for kRows rows.
template <int kRows>
static inline void add_rows_512(const float* x, int64_t stride, const float* panel, int64_t count,
                                float* y) {
  __m512 sums[kRows];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) sums[row] = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; ++k) {
    const __m512 w = _mm512_load_ps(panel + k * 16);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      sums[row] = _mm512_fmadd_ps(w, _mm512_set1_ps(x[row * stride + k]), sums[row]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(y + row * 16, _mm512_add_ps(_mm512_load_ps(y + row * 16), sums[row]));
  }
}

// `rows` rows, fewer than 2 * kRows.
template <int kRows>
static inline void add_last_rows_512(const float* x, int64_t stride, int64_t rows,
                                     const float* panel, int64_t count, float* y) {
  if (rows >= kRows) {
    add_rows_512<kRows>(x, stride, panel, count, y);
    x += kRows * stride;
    y += kRows * 16;
    rows -= kRows;
  }
  if constexpr (kRows > 1) add_last_rows_512<kRows / 2>(x, stride, rows, panel, count, y);
}

static inline void add_panel_512(const float* x, int64_t stride, int64_t rows, const float* panel,
                                 int64_t count, float* y) {
  for (; rows >= 12; rows -= 12, x += 12 * stride, y += 12 * 16) {
    add_rows_512<12>(x, stride, panel, count, y);
  }
  add_last_rows_512<8>(x, stride, rows, panel, count, y);
}

}  // namespace atsc
