// Functions of whole rows of floats, in place: what softmax and normalisations are made of.
#pragma once

#include <cstdint>

#include "level.h"
#include "scalar.h"

namespace atsc::graph {

typedef float Lanes16 __attribute__((vector_size(64)));

static inline Lanes16 load16(const float* from) {
  Lanes16 lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

static inline float sum_of(Lanes16 lanes) {
  float total = 0;
  for (int l = 0; l < 16; ++l) total += lanes[l];
  return total;
}

static inline float row_sum(const float* row, int64_t n) {
  Lanes16 total = {};
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) total += load16(row + j);
  for (; j < n; ++j) total[0] += row[j];
  return sum_of(total);
}

static inline float row_variance(const float* row, int64_t n, float mean) {
  Lanes16 total = {};
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    const Lanes16 centred = load16(row + j) - mean;
    total += centred * centred;
  }
  for (; j < n; ++j) total[0] += (row[j] - mean) * (row[j] - mean);
  return sum_of(total) / static_cast<float>(n);
}

// NaN may be passed over: it stays in its place, and comes back with the sum.
static inline float row_largest(const float* row, int64_t n) {
  Lanes16 top = Lanes16{} - __builtin_inff();
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    const Lanes16 lanes = load16(row + j);
    top = lanes > top ? lanes : top;
  }
  float largest = -__builtin_inff();
  for (; j < n; ++j) largest = row[j] > largest ? row[j] : largest;
  for (int l = 0; l < 16; ++l) largest = top[l] > largest ? top[l] : largest;
  return largest;
}

static inline void softmax_row(float* row, int64_t n) {
  const float top = row_largest(row, n);
  for (int64_t j = 0; j < n; ++j) row[j] = exp(row[j] - top);
  const float factor = 1.0f / row_sum(row, n);
  for (int64_t j = 0; j < n; ++j) row[j] *= factor;
}

}  // namespace atsc::graph
