// A plain AVX2 read: the limit that kernels are compared with.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

// Eight independent chains of xor, so that loads are the only limit.
inline std::uint64_t read_once(const std::byte* begin, const std::byte* end) {
  __m256i sums[8] = {};
  for (const std::byte* at = begin; at + 256 <= end; at += 256) {
    for (int i = 0; i < 8; ++i) {
      sums[i] = _mm256_xor_si256(
          sums[i], _mm256_load_si256(reinterpret_cast<const __m256i*>(at + 32 * i)));
    }
  }
  for (int i = 1; i < 8; ++i) sums[0] = _mm256_xor_si256(sums[0], sums[i]);
  return static_cast<std::uint64_t>(_mm256_extract_epi64(sums[0], 0));
}
