// A kernel's scratch: the first kCounterBytes hold counters only, zero between launches; what lies
// behind is left as it falls. So kernels that keep to this may share one region.
#pragma once

#include "atomics.cuh"

namespace atsc {

constexpr int kCounterBytes = 4096;
constexpr int kMaxCounters = kCounterBytes / 4;

__device__ inline void* behind_counters(void* scratch) {
  return static_cast<char*>(scratch) + kCounterBytes;
}

// Called by all threads of a block when it has written its share: true in the last of `blocks`,
// which then sees what the others wrote, and finds the counter at zero again.
__device__ inline bool finished_last(void* scratch, int counter, int blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    int* count = static_cast<int*>(scratch) + counter;
    last = count_up(count) == blocks - 1;
    if (last) *count = 0;
  }
  __syncthreads();
  return last;
}

}  // namespace atsc
