// Halves, and other numbers as they are stored, without CUDA's headers.
#pragma once

#include "ptx.cuh"

namespace atsc {

__device__ inline float from_bf16(u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

// To nearest, ties to even; NaN stays NaN.
__device__ inline u16 to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>(bits >> 16 | 0x40u);
  return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

enum class Number { none, u8, f16, f32 };

template <Number kKind>
constexpr int bytes_of() {
  return kKind == Number::none ? 0 : kKind == Number::u8 ? 1 : kKind == Number::f16 ? 2 : 4;
}

// kCount numbers at p, which is aligned for them, as floats; global or shared memory.
template <Number kKind, int kCount>
__device__ inline void load_numbers(const void* p, float (&values)[kCount]) {
  constexpr int kBytes = kCount * bytes_of<kKind>();
  constexpr int kWords = (kBytes + 3) / 4;
  u32 words[kWords] = {};
  if constexpr (kBytes % 16 == 0) {
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 four = static_cast<const uint4*>(p)[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  } else if constexpr (kBytes % 4 == 0) {
    for (int i = 0; i < kWords; ++i) words[i] = static_cast<const u32*>(p)[i];
  } else {
    static_assert(kBytes == 2);
    words[0] = *static_cast<const u16*>(p);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kKind == Number::f32) {
      values[i] = __uint_as_float(words[i]);
    } else if constexpr (kKind == Number::f16) {
      values[i] = from_f16(static_cast<u16>(words[i / 2] >> (i % 2 * 16)));
    } else {
      values[i] = static_cast<float>(words[i / 4] >> (i % 4 * 8) & 255u);
    }
  }
}

}  // namespace atsc
