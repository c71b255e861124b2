// weights.bin in memory: mapped, or read and compared with the checksum of every unit.
#pragma once

#include <string>

#include "platform.h"
#include "pool.h"
#include "tables.h"

namespace atsc {

enum class WeightsMode { kMap, kMapAndVerify, kRead };

// Raises Failure: the file is missing, has another size, or a unit is damaged (named).
platform::Mapping load_weights(const Plan& plan, const std::string& path, WeightsMode mode,
                               Pool& pool);

}  // namespace atsc
