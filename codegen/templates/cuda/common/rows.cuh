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

// The scale above which blocks of a row have a second digit. `total` adds the scales of the blocks
// that a thread has a share in, so that each counts in eight neighbouring lanes. Doubles add floats
// of like size exactly, so the order is of no matter; beyond a ratio of 2^29 between a row's scales
// it may move the bound by 1e-16 of it.
template <int kThreads>
__device__ inline float least_refined(double total, int num_blocks) {
  __shared__ double of_warps[kThreads / 32];
  __shared__ float least;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 8; step < 32; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  if (lane == 0) of_warps[warp] = total;
  __syncthreads();
  if (warp == 0) {
    total = lane < kThreads / 32 ? of_warps[lane] : 0.0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
    // A float is above the double if and only if it is above the float below that.
    if (lane == 0) least = __double2float_rd(kRefinedAbove * total / num_blocks);
  }
  __syncthreads();
  return least;
}

// The largest of a block of 32 that eight neighbouring lanes hold.
__device__ inline float largest_of_block(const float (&x)[4]) {
  float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  return largest;
}

__device__ inline u32 round_four(const float (&x)[4], float factor) {
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= (__float2int_rn(x[i] * factor) & 255u) << (8 * i);
  return codes;
}

// Four floats less what `codes` stand for.
__device__ inline void subtract_codes(float (&x)[4], u32 codes, float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = fmaf(-scale, static_cast<float>(static_cast<signed char>(codes >> (8 * i))), x[i]);
  }
}

// The codes of a block of 32 that eight neighbouring lanes hold, as block `index` of one digit; all
// lanes of the warp call it, those with `wanted` store.
__device__ inline void store_codes(u32 codes, float scale, const Q8View& q, long long index,
                                   bool wanted) {
  int sum = __dp4a(static_cast<int>(codes), 0x01010101, 0);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (!wanted) return;
  const int lane = threadIdx.x % 8;
  reinterpret_cast<u32*>(q.codes + index * kQ8Block)[lane] = codes;
  if (lane == 0) {
    q.scales[index] = scale;
    q.scaled_sums[index] = scale * static_cast<float>(sum);
    q.sums[index] = sum;
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

  // As a row of a Q8 value; x is zero behind the row's end. All threads of the block call it, and
  // once in a kernel.
  __device__ void quantize(void* value, int row, int rows) const {
    constexpr int kBlocks = (kWidth + kQ8Block - 1) / kQ8Block;
    const Q8View first = q8_view(value, rows, kWidth), second = q8_view(value, rows, kWidth, 1);
    u32 codes[kCount];
    float scales[kCount];
    double total = 0.0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int block = column(i) / kQ8Block;
      const float largest = largest_of_block(x[i]);
      // Of a block below 4e-37 the inverse would be infinite.
      codes[i] = round_four(x[i], largest > 4e-37f ? 127.0f / largest : 0.0f);
      scales[i] = largest / 127.0f;
      total += scales[i];
      store_codes(codes[i], scales[i], first, place(block, row, rows), block < kBlocks);
    }
    // Of a row with an infinity or a NaN no block compares as larger.
    const float least = least_refined<kThreads>(total, kBlocks);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int block = column(i) / kQ8Block;
      const bool refined = scales[i] > least && scales[i] > kLeastRefined;
      float rest[4] = {x[i][0], x[i][1], x[i][2], x[i][3]};
      subtract_codes(rest, codes[i], scales[i]);
      const u32 fine = round_four(rest, refined ? 254.0f / scales[i] : 0.0f);
      store_codes(fine, scales[i] / 254.0f, second, place(block, row, rows), refined);
      if (!refined && block < kBlocks && threadIdx.x % 8 == 0) {
        second.scales[place(block, row, rows)] = 0.0f;
      }
    }
  }

  static __device__ long long place(int block, int row, int rows) {
    return static_cast<long long>(block) * rows + row;
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
