// Keeps what the rounds of one session did, and when, until somebody takes it.
//
// Where a device takes part, an event is a segment of the host, a run of the device, a copy, or a
// wait; on the CPU alone it is a step between two barriers.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "atsc.h"
#include "executor.h"
#include "hybrid_executor.h"
#include "tables.h"

namespace atsc {

class Recorder {
 public:
  // `hybrid` is null where everything runs on the host.
  Recorder(const Plan& plan, Executor& executor, HybridExecutor* hybrid);

  // Runs a round and keeps its record. False: cancelled, and nothing is kept. Raises as they do.
  bool run(const Round& round, SessionPlace* place);

  // The oldest round that was not taken yet, without struct_size; num_tokens 0: there is none. Its
  // events live until the next call of any function.
  atsc_round take();

 private:
  struct Recorded {
    atsc_round round;
    std::vector<atsc_event> events;
  };

  const Plan& plan_;
  Executor& executor_;
  HybridExecutor* const hybrid_;
  std::deque<Recorded> rounds_;
  bool is_first_taken_ = false;
};

// The record as events: of the host first, then of the device, then copies and the waits for them.
std::vector<atsc_event> events_of(const Plan& plan, const RoundRecord& record);

}  // namespace atsc
