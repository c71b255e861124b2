// Q8 values in device memory (kernel.h has the layout; compiler/ops/quantize.py the definition).
#pragma once

namespace atsc {

constexpr int kQ8Block = 32;          // activations of one int8 block
constexpr int kQ8BytesPerBlock = 44;  // of one digit

// compiler/ops/quantize.py has the same.
constexpr double kRefinedAbove = 2.0;    // times the mean scale of a row
constexpr float kLeastRefined = 1e-34f;  // 254 / scale must be finite

// One digit, blocks first: codes int8 [blocks][rows][32], then f32 or i32 [blocks][rows]. Of a block
// without a second digit that has scale 0, and nothing else of it is set.
struct Q8View {
  signed char* codes;
  float* scales;
  float* scaled_sums;
  int* sums;
};

__device__ inline Q8View q8_view(const void* value, long long rows, long long width,
                                 int digit = 0) {
  const long long count = (width + kQ8Block - 1) / kQ8Block * rows;
  auto* base = static_cast<signed char*>(const_cast<void*>(value));
  base += digit * count * kQ8BytesPerBlock;
  auto* scales = reinterpret_cast<float*>(base + count * kQ8Block);
  return {base, scales, scales + count, reinterpret_cast<int*>(scales + 2 * count)};
}

}  // namespace atsc
