// common/atomics.cuh in plain C++: blocks run one after another.
#pragma once

#include "emulation.h"

namespace atsc {

inline int count_up(int* counter) { return (*counter)++; }

inline void wait_for_count(const int* counter, int least) {
  if (*counter < least) fail("a block waits for one that began after it");
}

}  // namespace atsc
