// common/tensor_cores_f16.cuh in plain C++, and what else of CUDA C++ attention uses.
#pragma once

#include "tensor_cores.cuh"

struct alignas(8) float2 { float x, y; };

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) picked |= (bytes >> (select >> (4 * i) & 7) * 8 & 255) << (8 * i);
  return picked;
}

namespace atsc {

inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_halves<false>(d, a, b0, b1);
}

inline void load_transposed(u32 (&a)[4], const void* row) {
  const auto rows = lay_open(static_cast<const u16*>(row));
  const int r = lane() / 4, q = lane() % 4;
  for (int i = 0; i < 4; ++i) a[i] = rows[8 * i + 2 * q][r] | rows[8 * i + 2 * q + 1][r] << 16;
}

inline u32 pack_halves(float low, float high) {
  return to_f16(low) | static_cast<u32>(to_f16(high)) << 16;
}

inline float exp2_of(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

}  // namespace atsc
