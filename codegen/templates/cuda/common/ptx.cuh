// Single instructions that CUDA C++ has no name for. tests/codegen/emulation has the same in C++,
// so that kernels which use nothing else but tensor_cores.cuh run on a CPU.
#pragma once

namespace atsc {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

__device__ inline float from_f16(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

__device__ inline u16 to_f16(float value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

// 16 bytes that are read once: past the L1 cache.
__device__ inline uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// (word & 0xf0f0f0f0) ^ 0x80808080 in one operation, which takes the masks from registers.
__device__ inline u32 high_nibbles(u32 word) {
  u32 codes;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;"
      : "=r"(codes)
      : "r"(word), "r"(0xf0f0f0f0u), "r"(0x80808080u));
  return codes;
}

}  // namespace atsc
