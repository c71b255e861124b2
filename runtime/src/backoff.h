// How a thread waits for something that no one will wake it for, such as a word that a GPU writes:
// it spins while that is likely to help, then gives the core to others, then sleeps.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace atsc {

inline constexpr int64_t kSpinNs = 20'000;
inline constexpr int64_t kYieldNs = 5'000'000;

// Call it between looks, with the time since the first.
inline void pause_after(int64_t waited_ns) {
  if (waited_ns < kSpinNs) {
    for (int i = 0; i < 16; ++i) __builtin_ia32_pause();
  } else if (waited_ns < kYieldNs) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace atsc
