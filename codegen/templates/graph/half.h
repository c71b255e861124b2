// fp16 as it is stored, to float and back.
#pragma once

#include <immintrin.h>

namespace atsc::graph {

static inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
static inline uint16_t float_to_half(float value) {
  return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// A float has more than twice a half's digits: to round twice is to round once.
static inline float round_half(float value) { return half_to_float(float_to_half(value)); }

}  // namespace atsc::graph
