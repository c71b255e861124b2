// Kernels that exist at two levels (codegen/tail.py LEVELS), and the size of register tiles.
#pragma once

#include <cstdint>

#ifdef __AVX512F__
#define ATSC_LEVEL(name) name##__avx512
#else
#define ATSC_LEVEL(name) name##__avx2
#endif

namespace atsc::graph {
inline constexpr int64_t kTileColumns = 32;
}  // namespace atsc::graph
