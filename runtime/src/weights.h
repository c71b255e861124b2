// weights.bin in memory: mapped, or read and compared with the checksum of every unit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "checksum.h"
#include "platform.h"
#include "pool.h"
#include "tables.h"

namespace atsc {

enum class WeightsMode { kMap, kMapAndVerify, kRead };

// Raises Failure: the file is missing, has another size, or a unit is damaged (named).
platform::Mapping load_weights(const Plan& plan, const std::string& path, WeightsMode mode,
                               Pool& pool);

// The file, whose size is checked.
platform::File open_weights(const Plan& plan, const std::string& path);

// Raises Failure unless the checksum is the unit's.
void check_unit(const UnitEntry& unit, const std::string& path, uint32_t crc);

inline constexpr uint64_t kReadBytes = 8 << 20;

// Reads a unit piece by piece, to where `target(offset in the unit)` says, then compares its
// checksum. `taken(offset, bytes)` is called after each piece.
template <class Target, class Taken>
void read_checked(const UnitEntry& unit, const platform::File& file, const std::string& path,
                  Target&& target, Taken&& taken) {
  uint32_t crc = 0;
  for (uint64_t done = 0; done < unit.bytes; done += kReadBytes) {
    const uint64_t size = std::min(kReadBytes, unit.bytes - done);
    std::byte* const piece = target(done);
    file.read_at(unit.offset + done, piece, size);
    crc = crc32(crc, piece, size);
    taken(done, size);
  }
  check_unit(unit, path, crc);
}

}  // namespace atsc
