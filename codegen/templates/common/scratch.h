// A kernel's scratch: the first kCounterBytes hold counters only, zero between calls; what lies
// behind is left as it falls. So kernels that keep to this may share one region.
#pragma once

#include <cstddef>
#include <cstdint>

namespace atsc {

inline constexpr int64_t kCounterBytes = 4096;
inline constexpr int64_t kMaxCounters = kCounterBytes / sizeof(int32_t);

// Counts one finished piece; true for the last of `pieces`, whose caller sees what the others wrote
// and finds the counter at zero again.
static inline bool finished_last(void* scratch, int64_t counter, int64_t pieces) {
  auto* count = static_cast<int32_t*>(scratch) + counter;
  if (__atomic_add_fetch(count, 1, __ATOMIC_ACQ_REL) != pieces) return false;
  __atomic_store_n(count, 0, __ATOMIC_RELAXED);
  return true;
}

}  // namespace atsc
