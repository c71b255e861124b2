// A round beside another program that has the device in turn.
//
// While two programs have work for a GPU, each has it for a time slice (some 2 ms), and neither kernels nor
// copies of the other one run meanwhile. Who has nothing left gives it up, and gets it back at once if
// the other has had it for a slice, else when that slice is over. So it does not matter how long hand-offs
// take on average: one that comes soon after the device was left waits for a slice, a later one does not,
// and a copy takes a slice longer or not. Rounds in which each hand-off waits for a copy that was only
// just begun get twice as long; those that leave time for an interruption keep theirs.
//
// Measured on an H200 (docs/scheduling.md): rounds of 58.0, 53.4, 55.2 and 42.5 ms with 36, 24, 26 and 16
// promotions are 60, 52, 58 and 45 by these rules, and 55, 52, 51 and 52 by mean times of copies and
// hand-offs.
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
