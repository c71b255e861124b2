// Sums over a row by a whole block, and the output of a row that its threads hold.
//
// A row lies across the block: thread t holds columns t, t + kThreads, and so on, so that a warp
// holds whole Q8 blocks and its loads are whole lines.
#pragma once

#include "q8.cuh"

namespace atsc {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The sum over a block of kThreads threads, in all of them. `shared` [kThreads / 32] may be used
// again only after a barrier.
template <int kThreads>
__device__ inline float sum_of_block(float x, float* shared) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32;
  x = sum_of_warp(x);
  if (kWarps == 1) return x;
  if (lane == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_of_warp(lane < kWarps ? shared[lane] : 0.0f);
}

template <int kWidth, int kThreads>
constexpr int columns_of_thread() {
  return (kWidth + kThreads - 1) / kThreads;
}

// This thread's columns of a row, zeros behind its end.
template <int kWidth, int kThreads>
__device__ inline void load_columns(const float* row,
                                    float (&x)[columns_of_thread<kWidth, kThreads>()]) {
#pragma unroll
  for (int i = 0; i < columns_of_thread<kWidth, kThreads>(); ++i) {
    const int column = i * kThreads + threadIdx.x;
    x[i] = column < kWidth ? row[column] : 0.0f;
  }
}

template <int kWidth, int kThreads>
__device__ inline void store_columns(const float (&y)[columns_of_thread<kWidth, kThreads>()],
                                     float* row) {
#pragma unroll
  for (int i = 0; i < columns_of_thread<kWidth, kThreads>(); ++i) {
    const int column = i * kThreads + threadIdx.x;
    if (column < kWidth) row[column] = y[i];
  }
}

// The same as a row of a Q8 value; y is zero behind the row's end.
template <int kWidth, int kThreads>
__device__ inline void quantize_columns(const float (&y)[columns_of_thread<kWidth, kThreads>()],
                                        void* value, int row, int rows) {
  const Q8View q = q8_view(value, rows, kWidth);
#pragma unroll
  for (int i = 0; i < columns_of_thread<kWidth, kThreads>(); ++i) {
    const int block = (i * kThreads + threadIdx.x) / kQ8Block;
    if (block * kQ8Block >= kWidth) break;
    quantize_block(y[i], q, static_cast<long long>(block) * rows + row);
  }
}

}  // namespace atsc
