// Kernels that exist at several levels (codegen/tail.py LEVELS), and the size of register tiles.
#pragma once

#include <cstdint>

#if defined(__AVX512VNNI__)
#define ATSC_LEVEL(name) name##__avx512vnni
#elif defined(__AVX512F__)
#define ATSC_LEVEL(name) name##__avx512
#elif defined(__AVXVNNI__)
#define ATSC_LEVEL(name) name##__avxvnni
#else
#define ATSC_LEVEL(name) name##__avx2
#endif

namespace atsc::graph {
inline constexpr int64_t kTileColumns = 32;
}  // namespace atsc::graph
