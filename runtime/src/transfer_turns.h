// A round beside another program that has the device in turn.
//
// While two programs have work for a GPU, each has it for a time slice (some 2 ms), and neither kernels nor
// copies of the other one run meanwhile. Who has nothing left gives it up, and who comes back waits for
// the end of the other's slice. So it says little how long copies and hand-offs take on average: rounds in
// which each hand-off waits for a copy that was only just begun get twice as long, those that leave time
// for an interruption keep theirs; and a device that spins while it waits for the host is in time for
// hand-offs within its own slices.
//
// Measured on four H200s (docs/scheduling.md).
#pragma once

#include <cstdint>
#include <span>

#include "transfer_schedule.h"

namespace atsc {

// On average over some rounds, and over some slices about as long as `slice_ns`, for where a round meets
// them is chance. Times are those without the other program; a byte each of `promoted`. `spins`: the
// device keeps its turn while it waits for the host.
int64_t predict_in_turns(std::span<const TransferUnit> units, const TransferMachine& machine,
                         std::span<const uint8_t> promoted, int64_t slice_ns, bool spins);

}  // namespace atsc
