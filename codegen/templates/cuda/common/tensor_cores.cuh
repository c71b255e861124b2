// Tensor-core products, fragment loads and asynchronous copies, each with what sm_75 has instead.
//
// Fragments of m16n8k32 int8, lane = 4 r + q: A words a[0] row r, k = 4q..4q+3; a[1] row r + 8;
// a[2], a[3] the same at k + 16. B words b[0] column r, k = 4q..4q+3; b[1] at k + 16.
// Sums d[0], d[1] row r, columns 2q, 2q + 1; d[2], d[3] row r + 8.
#pragma once

#include "numbers.cuh"

namespace atsc {

// Integer sums start at this, 1.5 * 2^23 as a float: their bits are then the float of the sum plus
// 1.5 * 2^23 for |sum| < 2^22, and one subtraction does what a conversion would.
constexpr int kSumStart = 0x4b400000;

__device__ inline float sum_of(int started) { return __int_as_float(started) - 12582912.0f; }

#if __CUDA_ARCH__ < 800
__device__ inline void mma_8x8x16(int& d0, int& d1, u32 a, u32 b, int c0, int c1) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %5};"
      : "=r"(d0), "=r"(d1)
      : "r"(a), "r"(b), "r"(c0), "r"(c1));
}
#endif

// 16 rows x 8 columns x 32 k.
__device__ inline void mma_k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(kSumStart));
#else
  mma_8x8x16(d[0], d[1], a[0], b0, kSumStart, kSumStart);
  mma_8x8x16(d[2], d[3], a[1], b0, kSumStart, kSumStart);
  mma_8x8x16(d[0], d[1], a[2], b1, d[0], d[1]);
  mma_8x8x16(d[2], d[3], a[3], b1, d[2], d[3]);
#endif
}

// 16 rows x 8 columns x 16 k.
__device__ inline void mma_k16(int (&d)[4], u32 a0, u32 a1, u32 b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %7, %7, %7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(kSumStart));
#else
  mma_8x8x16(d[0], d[1], a0, b, kSumStart, kSumStart);
  mma_8x8x16(d[2], d[3], a1, b, kSumStart, kSumStart);
#endif
}

#if __CUDA_ARCH__ >= 800
// d += 16 rows x 8 columns x 16 k of f16 or bf16: the fragments of m16n8k32 with pairs of k, 8
// apart where those are 16 apart.
template <bool kBf16>
__device__ inline void mma_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
#endif

__device__ inline u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Four 8 x 16-byte matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(u32 (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copy kBytes (4, 8 or 16) from global to shared memory, or zeros where `wanted` is false.
template <int kBytes>
__device__ inline void copy_async(void* to, const void* from, bool wanted) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if __CUDA_ARCH__ >= 800
  const int size = wanted ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(size), "n"(kBytes)
                 : "memory");
  }
#else
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(to) = wanted ? *static_cast<const uint4*>(from) : uint4{};
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = wanted ? *static_cast<const uint2*>(from) : uint2{};
  } else {
    *static_cast<u32*>(to) = wanted ? *static_cast<const u32*>(from) : 0u;
  }
#endif
}

__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// All but the youngest kYounger groups of this thread's copies have arrived.
template <int kYounger>
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kYounger) : "memory");
#endif
}

}  // namespace atsc
