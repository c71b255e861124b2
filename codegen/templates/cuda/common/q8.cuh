// Q8 values in device memory (kernel.h has the layout; compiler/ops/quantize.py the definition).
#pragma once

namespace atsc {

constexpr int kQ8Block = 32;  // activations of one int8 block

// blocks first: codes int8 [blocks][rows][32], then f32 or i32 [blocks][rows].
struct Q8View {
  signed char* codes;
  float* scales;
  float* scaled_sums;
  int* sums;
};

__device__ inline Q8View q8_view(const void* value, long long rows, long long width) {
  const long long count = (width + kQ8Block - 1) / kQ8Block * rows;
  auto* base = static_cast<signed char*>(const_cast<void*>(value));
  auto* scales = reinterpret_cast<float*>(base + count * kQ8Block);
  return {base, scales, scales + count, reinterpret_cast<int*>(scales + 2 * count)};
}

// 32 floats, one a lane of a whole warp, to the block at `index` (block * rows + row).
__device__ inline void quantize_block(float x, const Q8View& q, long long index) {
  float largest = fabsf(x);
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  const float scale = largest / 127.0f;
  // Of a block below 4e-37 the inverse would be infinite.
  const float inverse = largest > 4e-37f ? 127.0f / largest : 0.0f;
  const int code = __float2int_rn(x * inverse);
  int sum = code;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  const int lane = threadIdx.x % 32;
  q.codes[index * kQ8Block + lane] = static_cast<signed char>(code);
  if (lane == 0) {
    q.scales[index] = scale;
    q.scaled_sums[index] = scale * static_cast<float>(sum);
    q.sums[index] = sum;
  }
}

}  // namespace atsc
