// Q8 values in device memory (kernel.h has the layout; compiler/ops/quantize.py the definition).
// Kernels of the GPU write and read the first digit alone; the scales of the second they set to 0.
#pragma once

namespace atsc {

constexpr int kQ8Block = 32;          // activations of one int8 block
constexpr int kQ8BytesPerBlock = 44;  // of one digit

// blocks first: codes int8 [blocks][rows][32], then f32 or i32 [blocks][rows].
struct Q8View {
  signed char* codes;
  float* scales;
  float* scaled_sums;
  int* sums;
  float* fine_scales;  // of the second digit
};

__device__ inline Q8View q8_view(const void* value, long long rows, long long width) {
  const long long count = (width + kQ8Block - 1) / kQ8Block * rows;
  auto* base = static_cast<signed char*>(const_cast<void*>(value));
  auto* scales = reinterpret_cast<float*>(base + count * kQ8Block);
  auto* fine_scales = reinterpret_cast<float*>(base + count * (kQ8BytesPerBlock + kQ8Block));
  return {base, scales, scales + count, reinterpret_cast<int*>(scales + 2 * count), fine_scales};
}

}  // namespace atsc
