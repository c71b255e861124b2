// Runs rounds that a device takes part in.
//
// The device's part of a round is one executable, which is started first; the calling thread then
// goes through the host's segments, waiting for what the device hands over before each and raising a
// flag after each (splits.h). Rounds with equal rows, session and promotions run the same executable
// again: positions, tokens and row numbers are read from memory.
//
//     few rows     a graph (2 ms to build, then 1 us a node)
//     many rows    launches; from DeviceEntry::stream_from_rows on, the host's weights stream through
//                  the slots and nearly everything runs on the device
//
// Source: ATSInfer 4.2.2 and 4.3.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "executor.h"
#include "residency.h"
#include "round_builder.h"

namespace atsc {

// When the parts of the latest round ran, on the host's clock.
struct RoundRecord {
  struct Segment {
    int64_t wait_ns, begin_ns, end_ns;  // wait: when it began to wait for the device
    int first_node, last_node;
  };
  struct Run {
    int64_t begin_ns, end_ns;
    int first_node, last_node;
  };
  struct Copy {
    int unit;
    int64_t copied_ns;           // the copies before it were over by then, too
    int64_t wait_ns, ready_ns;   // their difference is the exposed wait
  };
  int64_t begin_ns = 0, end_ns = 0;
  std::vector<Segment> segments;
  std::vector<Run> runs;
  std::vector<Copy> copies;
};

class HybridExecutor {
 public:
  // `residency` is loaded, with the arena of `executor`.
  HybridExecutor(const Plan& plan, Residency& residency, Executor& executor, Pool& pool);

  // `place` is the session's. False: cancelled; the caches then hold part of the round. Raises
  // Failure if the device fails.
  bool run(const Round& round, const SessionPlace& place);

  // Ends the waits of the present round if `cancelled` is its flag. Any thread.
  void cancel(const std::atomic<bool>& cancelled);

  // Drops what was prepared for a session.
  void forget(const SessionPlace& place);

  // Empty after a round that was not whole. While no round runs.
  const RoundRecord& latest() const { return record_; }

 private:
  struct Prepared {
    int place;
    int64_t num_tokens, num_logit_rows;
    BuiltRound round;
    std::unique_ptr<Executor::Program> program;
    std::unique_ptr<Executable> executable;  // null: the host does everything
    uint64_t last_used;
  };
  class Running;

  Prepared& prepare(const Round& round, const SessionPlace& place);
  Choice choice_for(const Round& round) const;
  std::unique_ptr<Executable> build(const CommandList& commands, bool few_rows);
  void write_numbers(const Round& round);
  bool run_segments(Prepared& prepared, const Round& round);
  void take_stamps(const Prepared& prepared);

  const Plan& plan_;
  Residency& residency_;
  Executor& executor_;
  Pool& pool_;
  const size_t most_prepared_;
  const int64_t clock_offset_ns_;
  std::vector<std::unique_ptr<Prepared>> prepared_;
  uint64_t num_rounds_ = 0;
  RoundRecord record_;

  std::mutex mutex_;  // guards the rest
  Executable* running_ = nullptr;
  const std::atomic<bool>* cancelled_ = nullptr;  // of the round that runs
  bool was_released_ = false;
};

}  // namespace atsc
