// Windows of images: frames, which are images with their padding, and panels of products (product.h)
// that are read from frames. In a row of a frame, columns whose distance is a multiple of the
// convolution's stride are neighbours: [phase][width]. What one tap of the kernel reads for
// neighbouring windows then is contiguous, whatever the stride.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "level.h"
#include "scalar.h"

namespace atsc::graph {

// One row of a frame, from a row of the image or, above and below it, from none; `zero` is taken off.
template <class T>
static inline void frame_row(float* to, const T* row, int64_t size, int64_t before, int64_t stride,
                             int64_t phases, int64_t width, float outside, float zero) {
  for (int64_t phase = 0; phase < phases; ++phase, to += width) {
    const int64_t shift = phase - before;
    const auto [begin, end] = columns_inside(row == nullptr ? 0 : size, stride, shift, width);
    for (int64_t x = 0; x < begin; ++x) to[x] = outside;
    if (stride == 1) {
      for (int64_t x = begin; x < end; ++x) to[x] = static_cast<float>(row[x + shift]) - zero;
    } else {
      for (int64_t x = begin; x < end; ++x) {
        to[x] = static_cast<float>(row[x * stride + shift]) - zero;
      }
    }
    for (int64_t x = begin > end ? begin : end; x < width; ++x) to[x] = outside;
  }
}

// Rows that are `pitch` apart, without what is between them; both have 16 elements to spare.
static inline void close_rows(float* to, const float* from, int64_t rows, int64_t pitch,
                              int64_t width) {
  for (int64_t r = 0; r < rows; ++r, to += width, from += pitch) {
    for (int64_t x = 0; x < width; x += 16) __builtin_memcpy(to + x, from + x, 16 * sizeof(float));
  }
}

namespace ATSC_LEVEL(windows) {

#ifdef __AVX512F__
using Vector = __m512;
using Mask = __mmask16;
constexpr int64_t kLanes = 16;
static inline Mask mask_of(int64_t first, int64_t count) {
  return static_cast<Mask>(((1u << count) - 1) << first);
}
static inline Vector masked(Vector rest, Mask mask, const float* x) {
  return _mm512_mask_loadu_ps(rest, mask, x);
}
static inline Vector whole(const float* x) { return _mm512_loadu_ps(x); }
static inline Vector zero() { return _mm512_setzero_ps(); }
static inline void put(float* x, Vector v) { _mm512_store_ps(x, v); }
#else
using Vector = __m256;
using Mask = __m256i;
constexpr int64_t kLanes = 8;
static inline Mask mask_of(int64_t first, int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i low = _mm256_set1_epi32(static_cast<int>(first) - 1);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(first + count));
  return _mm256_and_si256(_mm256_cmpgt_epi32(lane, low), _mm256_cmpgt_epi32(high, lane));
}
static inline Vector masked(Vector rest, Mask mask, const float* x) {
  return _mm256_or_ps(rest, _mm256_maskload_ps(x, mask));
}
static inline Vector whole(const float* x) { return _mm256_loadu_ps(x); }
static inline Vector zero() { return _mm256_setzero_ps(); }
static inline void put(float* x, Vector v) { _mm256_store_ps(x, v); }
#endif

// A vector of a panel's columns: windows of one row of the output are contiguous in the frame.
struct Pieces {
  int64_t count;
  int64_t from[kLanes];  // of lane 0, as if it were of the same row
  Mask mask[kLanes];
};

constexpr int64_t kVectors = kTileColumns / kLanes;

// At least four pieces, of which some may be empty.
static inline Pieces pieces_of(int64_t first, int64_t columns, int64_t width, int64_t row_step) {
  Pieces pieces;
  pieces.count = 0;
  for (int64_t lane = 0; lane < least(kLanes, columns);) {
    const int64_t y = (first + lane) / width, x = (first + lane) % width;
    const int64_t count = least(least(kLanes, columns) - lane, width - x);
    pieces.from[pieces.count] = y * row_step + x - lane;
    pieces.mask[pieces.count] = mask_of(lane, count);
    ++pieces.count;
    lane += count;
  }
  for (int64_t p = pieces.count; p < 4; ++p) {
    pieces.from[p] = 0;
    pieces.mask[p] = mask_of(0, 0);
  }
  return pieces;
}

// kPieces 0: any number of them. Masked lanes are not read, wherever they would be.
template <int kPieces, int64_t kTaps>
static inline void fill(float* to, const float* frame, const Pieces* pieces, int64_t channels,
                        int64_t channel_stride, const int64_t* taps) {
  for (int64_t c = 0; c < channels; ++c, frame += channel_stride) {
    for (int64_t t = 0; t < kTaps; ++t, to += kTileColumns) {
      for (int64_t v = 0; v < kVectors; ++v) {
        Vector lanes = zero();
        const int64_t count = kPieces > 0 ? kPieces : pieces[v].count;
        for (int64_t p = 0; p < count; ++p) {
          lanes = masked(lanes, pieces[v].mask[p], frame + taps[t] + pieces[v].from[p]);
        }
        put(to + v * kLanes, lanes);
      }
    }
  }
}

}  // namespace ATSC_LEVEL(windows)

// Panel [channels][kTaps][kTileColumns] of the windows from `first` on, `width` of them in a row.
template <int64_t kTaps>
static inline void window_panel(float* panel, const float* frame, int64_t first, int64_t columns,
                                int64_t width, int64_t row_step, int64_t channels,
                                int64_t channel_stride, const int64_t* taps) {
  using namespace ATSC_LEVEL(windows);
  if (row_step == width) width = INT64_MAX;  // rows follow each other
  const int64_t y = first / width, x = first % width;
  if (columns == kTileColumns && x + columns <= width) {
    const float* from = frame + y * row_step + x;
    for (int64_t c = 0; c < channels; ++c, from += channel_stride) {
      for (int64_t t = 0; t < kTaps; ++t, panel += kTileColumns) {
        for (int64_t v = 0; v < kVectors; ++v) {
          put(panel + v * kLanes, whole(from + taps[t] + v * kLanes));
        }
      }
    }
    return;
  }
  Pieces pieces[kVectors];
  int64_t most = 0;
  for (int64_t v = 0; v < kVectors; ++v) {
    pieces[v] = pieces_of(first + v * kLanes, columns - v * kLanes, width, row_step);
    most = pieces[v].count > most ? pieces[v].count : most;
  }
  if (most <= 2) {
    fill<2, kTaps>(panel, frame, pieces, channels, channel_stride, taps);
  } else if (most <= 4) {
    fill<4, kTaps>(panel, frame, pieces, channels, channel_stride, taps);
  } else {
    fill<0, kTaps>(panel, frame, pieces, channels, channel_stride, taps);
  }
}

}  // namespace atsc::graph
