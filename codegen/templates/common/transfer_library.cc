// The scheduler of promotions as a library of its own, for the compiler, the simulator and tests:
// the code that a plan's runtime runs. codegen/transfer_library.py declares the same structs.
#include <algorithm>
#include <cstdio>

#include "transfer_schedule.h"
#include "transfer_turns.h"

namespace {

struct Result {
  int64_t round_ns, static_ns;
  int32_t num_promotions;
  char message[120];  // why there is none; else empty
};

}  // namespace

// `promotions` has room for one a unit.
extern "C" [[gnu::visibility("default")]] void atsc_schedule_transfers(
    const atsc::TransferUnit* units, int32_t num_units, const atsc::TransferMachine* machine,
    bool is_exact, atsc::Promotion* promotions, Result* result) {
  *result = {};
  try {
    atsc::TransferScheduler scheduler(is_exact ? atsc::Effort::kExact : atsc::Effort::kQuick);
    const atsc::TransferSchedule found =
        scheduler.schedule({units, static_cast<size_t>(num_units)}, *machine);
    std::ranges::copy(found.promotions, promotions);
    result->round_ns = found.round_ns;
    result->static_ns = found.static_ns;
    result->num_promotions = static_cast<int32_t>(found.promotions.size());
  } catch (const std::exception& error) {
    std::snprintf(result->message, sizeof result->message, "%s", error.what());
  }
}

// `promoted`: a byte a unit.
extern "C" [[gnu::visibility("default")]] int64_t atsc_predict_in_turns(
    const atsc::TransferUnit* units, int32_t num_units, const atsc::TransferMachine* machine,
    const uint8_t* promoted, int64_t slice_ns, bool spins) {
  const auto count = static_cast<size_t>(num_units);
  return atsc::predict_in_turns({units, count}, *machine, {promoted, count}, slice_ns, spins);
}
