// What the attention kernels share: new heads, normalised and rotated; the cache; scores.
//
// A kernel describes its node by a struct of constants that attention_shape.cuh.j2 writes.
//
// Queries enter the tensor cores as halves, multiplied by the power of two that brings their
// largest element to 256 .. 512: no score overflows, no element that matters loses digits. Scores
// leave as `product * factor`, in units of log2(e) so that weights are powers of two, or as tanh's
// argument under a softcap.
#pragma once

#include "device_kernel.h"
#include "rows.cuh"
#include "tensor_cores_f16.cuh"

namespace atsc {

constexpr float kLog2E = 1.44269504f;
constexpr float kNothing = -1e30f;  // a largest score before there is any; finite: no NaN arises

// A head of a new token on its way: lane i of a warp holds elements i, i + 32, and so on.
template <class Shape, int kNorm>
struct NewHead {
  static constexpr int kCount = (Shape::kSize + 31) / 32;
  static constexpr int kPairs = (Shape::kHalf + 31) / 32;
  float x[kCount];
  float weight[kCount];  // of the norm: input kNorm, none below 0
  float cos[kPairs ? kPairs : 1], sin[kPairs ? kPairs : 1];

  // All loads; `at` is the token's position. Lanes beyond the head hold zeros.
  __device__ void load(const DeviceArgs& args, const float* head, long long at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int d = lane + 32 * i;
      x[i] = d < Shape::kSize ? head[d] : 0.0f;
      if constexpr (kNorm >= 0) {
        weight[i] = d < Shape::kSize ? static_cast<const float*>(args.in[kNorm])[d] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (lane + 32 * i >= Shape::kHalf) continue;
      const long long angle = at * Shape::kHalf + lane + 32 * i;
      cos[i] = static_cast<const float*>(args.in[Shape::kCos])[angle];
      sin[i] = static_cast<const float*>(args.in[Shape::kSin])[angle];
    }
  }

  // x / sqrt(mean(x^2) + eps) * weight, where there is a weight.
  __device__ void normalise() {
    if constexpr (kNorm >= 0) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum = fmaf(x[i], x[i], sum);
      const float inverse = 1.0f / sqrtf(sum_of_warp(sum) / Shape::kSize + Shape::kNormEps);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= inverse * weight[i];
    }
  }

  // Rotates by way of `shared` [kSize], this warp's own.
  __device__ void rotate(float* shared) {
    if constexpr (Shape::kHalf > 0) {
      const int lane = threadIdx.x % 32;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (lane + 32 * i < Shape::kSize) shared[lane + 32 * i] = x[i];
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int pair = lane + 32 * i;
        if (pair >= Shape::kHalf) continue;
        const int first = Shape::kInterleaved ? 2 * pair : pair;
        const int second = Shape::kInterleaved ? 2 * pair + 1 : pair + Shape::kHalf;
        const float x1 = shared[first], x2 = shared[second];
        shared[first] = x1 * cos[i] - x2 * sin[i];
        shared[second] = x1 * sin[i] + x2 * cos[i];
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (lane + 32 * i < Shape::kSize) x[i] = shared[lane + 32 * i];
      }
    }
  }

  // Scales x to halves' range; returns the factor of its products.
  __device__ float scale() {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(x[i]));
    largest = largest_of_warp(largest);
    int exponent = (__float_as_int(largest) >> 23) - 127 - 8;
    exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
    const float down = __int_as_float((127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= down;
    constexpr float kUnit =
        Shape::kSoftcap > 0.0f ? Shape::kScale / Shape::kSoftcap : Shape::kScale * kLog2E;
    return kUnit * __int_as_float((127 + exponent) << 23);
  }

  __device__ void store_halves(u16* head) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int d = threadIdx.x % 32 + 32 * i;
      if (d < Shape::kSize) head[d] = to_f16(x[i]);
    }
  }
};

// The ring of one kv head, fp16 [capacity][kSize].
template <class Shape>
struct Cache {
  u16 *keys, *values;
  u32 capacity;

  __device__ Cache(const DeviceArgs& args, int kv_head) : capacity(args.kv_capacity) {
    const long long first = kv_head * args.kv_capacity * Shape::kSize;
    keys = static_cast<u16*>(args.k_cache) + first;
    values = static_cast<u16*>(args.v_cache) + first;
  }

  // Where a token's elements begin. Without a window the cache holds every token.
  __device__ long long place_of(int token) const {
    const u32 index = Shape::kWindow ? static_cast<u32>(token) % capacity : token;
    return static_cast<long long>(index) * Shape::kSize;
  }
};

// A new token of one kv head on its way into the cache, by a whole warp.
template <class Shape>
struct NewToken {
  using Head = NewHead<Shape, Shape::kKNorm>;
  Head key;
  float value[Head::kCount];

  __device__ void load(const DeviceArgs& args, int row, int kv_head) {
    key.load(args, Shape::k_of(args, row) + kv_head * Shape::kSize, args.round->position + row);
    const float* source = Shape::v_of(args, row) + kv_head * Shape::kSize;
#pragma unroll
    for (int i = 0; i < Head::kCount; ++i) {
      const int d = threadIdx.x % 32 + 32 * i;
      value[i] = d < Shape::kSize ? source[d] : 0.0f;
    }
  }

  // `shared` as in NewHead::rotate().
  __device__ void store(const DeviceArgs& args, int row, int kv_head, float* shared) {
    const Cache<Shape> cache(args, kv_head);
    const long long place = cache.place_of(static_cast<int>(args.round->position) + row);
    key.normalise();
    key.rotate(shared);
    key.store_halves(cache.keys + place);
#pragma unroll
    for (int i = 0; i < Head::kCount; ++i) {
      const int d = threadIdx.x % 32 + 32 * i;
      if (d < Shape::kSize) cache.values[place + d] = to_f16(value[i]);
    }
  }
};

// The tokens that a query at `position` sees: [first, position].
template <class Shape>
__device__ inline int first_seen(int position) {
  const int first = Shape::kWindow ? position - Shape::kWindow + 1 : 0;
  return first > 0 ? first : 0;
}

// A score in units of log2(e), from the product of halves.
template <class Shape>
__device__ inline float score_of(float product, float factor) {
  const float score = product * factor;
  return Shape::kSoftcap > 0.0f ? Shape::kSoftcap * kLog2E * tanhf(score) : score;
}

// The larger, or the sum, over the four lanes of a quad.
__device__ inline float largest_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ inline float sum_of_quad(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

}  // namespace atsc
