// CRC-32 as zlib computes it (polynomial 0xEDB88320, reflected): 64 bytes a step by products without
// carry, or eight by tables. Source: Gopal et al., Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ (2009).
#pragma once

#include <cstddef>
#include <cstdint>

namespace atsc {

// Continues from `crc`, the checksum of what came before (0 at first).
uint32_t crc32(uint32_t crc, const void* data, size_t bytes);

}  // namespace atsc
