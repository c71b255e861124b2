// Counters in device memory; tests/codegen/emulation has the same in C++.
#pragma once

namespace atsc {

// Adds one, returns what was there before: what this thread knows of is seen by whoever adds later.
__device__ inline int count_up(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// Waits until a counter has reached `least`, and then sees what those who counted knew of.
__device__ inline void wait_for_count(const int* counter, int least) {
  int count;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  } while (count < least);
}

}  // namespace atsc
