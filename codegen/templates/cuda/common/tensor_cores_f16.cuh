// Tensor-core products of halves with float sums, and what goes with them.
//
// Fragments of m16n8k16, lane = 4 r + q: A words a[0] row r, k = 2q, 2q + 1; a[1] row r + 8; a[2],
// a[3] the same at k + 8. B words b0 column r, k = 2q, 2q + 1; b1 at k + 8. Sums d[0], d[1] row r,
// columns 2q, 2q + 1; d[2], d[3] row r + 8.
#pragma once

#include "tensor_cores.cuh"

namespace atsc {

__device__ inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  mma_halves<false>(d, a, b0, b1);
#else
  const u32 b[2] = {b0, b1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
  }
#endif
}

// load_matrices (tensor_cores.cuh), each matrix transposed.
__device__ inline void load_transposed(u32 (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(row))
               : "memory");
}

// Two floats as halves, the first in the low one.
__device__ inline u32 pack_halves(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return to_f16(low) | static_cast<u32>(to_f16(high)) << 16;
#endif
}

// 2^x, to 2 units in the last place; 0 from -126 on, at -infinity too.
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace atsc
