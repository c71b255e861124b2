// CRC-32 as zlib computes it (polynomial 0xEDB88320, reflected), eight bytes a step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace atsc {

// Continues from `crc`, the checksum of what came before (0 at first).
uint32_t crc32(uint32_t crc, const void* data, size_t bytes);

}  // namespace atsc
