// Sums over a row by a whole block, and rows that a block's threads hold between them.
//
// Thread t holds the columns 4 t .. 4 t + 3, and so on kThreads fours further: loads are 16 bytes
// wide where rows are aligned for it, and eight neighbouring lanes hold a Q8 block.
#pragma once

#include "numbers.cuh"
#include "q8.cuh"

namespace atsc {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ inline float largest_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
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

// Four floats of a block of 32 that eight neighbouring lanes hold, as Q8 block `index`; all lanes
// of the warp call it, those with `wanted` store.
__device__ inline void quantize_four(const float (&x)[4], const Q8View& q, long long index,
                                     bool wanted) {
  float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  const float scale = largest / 127.0f;
  // Of a block below 4e-37 the inverse would be infinite.
  const float inverse = largest > 4e-37f ? 127.0f / largest : 0.0f;
  u32 codes = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int code = __float2int_rn(x[i] * inverse);
    codes |= (code & 255u) << (8 * i);
    sum += code;
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (!wanted) return;
  const int lane = threadIdx.x % 8;
  reinterpret_cast<u32*>(q.codes + index * kQ8Block)[lane] = codes;
  if (lane == 0) {
    q.scales[index] = scale;
    q.scaled_sums[index] = scale * static_cast<float>(sum);
    q.sums[index] = sum;
    q.fine_scales[index] = 0.0f;
  }
}

// Columns first .. first + 3 of a row of kWidth, zeros behind its end.
template <int kWidth>
__device__ inline void load_four(const float* row, int first, float (&x)[4]) {
  if constexpr (kWidth % 4 == 0) {
    float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
    if (first < kWidth) four = *reinterpret_cast<const float4*>(row + first);
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = first + i < kWidth ? row[first + i] : 0.0f;
  }
}

// What a thread holds of a row of kWidth.
template <int kWidth, int kThreads>
struct RowShare {
  static constexpr int kCount = ((kWidth + 3) / 4 + kThreads - 1) / kThreads;  // fours
  float x[kCount][4];

  static __device__ int column(int i) { return 4 * (i * kThreads + threadIdx.x); }

  __device__ void load(const float* row) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_four<kWidth>(row, column(i), x[i]);
  }

  __device__ void store(float* row) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int first = column(i);
      if constexpr (kWidth % 4 == 0) {
        const float4 four = {x[i][0], x[i][1], x[i][2], x[i][3]};
        if (first < kWidth) *reinterpret_cast<float4*>(row + first) = four;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (first + j < kWidth) row[first + j] = x[i][j];
        }
      }
    }
  }

  // As a row of a Q8 value; x is zero behind the row's end.
  __device__ void quantize(void* value, int row, int rows) const {
    const Q8View q = q8_view(value, rows, kWidth);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int block = column(i) / kQ8Block;
      quantize_four(x[i], q, static_cast<long long>(block) * rows + row, block * kQ8Block < kWidth);
    }
  }

  __device__ float sum() const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) total += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
    return total;
  }

  __device__ float sum_of_squares() const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) total = fmaf(x[i][j], x[i][j], total);
    }
    return total;
  }
};

}  // namespace atsc
