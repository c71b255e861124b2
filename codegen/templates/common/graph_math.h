// Arithmetic of sizes, for kernels and tables of general graphs.
#pragma once

#include <cstdint>

// Rounded down; 0 where the divisor is, which only an empty tensor's sizes make it.
static inline int64_t atsc_floor_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
