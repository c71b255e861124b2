// Runs rounds that a device takes part in.
//
// The device's part of a round is one executable, which is started first; the calling thread then
// goes through the host's segments, waiting for what the device hands over before each and raising a
// flag after each (splits.h). Rounds with equal rows, session and promotions run the same executable
// again: positions, tokens and row numbers are read from memory.
//
//     few rows     a graph (2 ms to build, then 1 us a node)
//     many rows    launches
//
// What is promoted and what retreats says the policy (transfer_policy.h). When it changes its mind, the
// round that is there runs on while the next is made on another thread (round_maker.h), and is swapped
// for it between two rounds. A session's caches are moved when its next round wants them elsewhere.
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
#include "round_maker.h"
#include "transfer_policy.h"

namespace atsc {

class HybridExecutor {
 public:
  // `residency` is loaded, with the arena of `executor`.
  HybridExecutor(const Plan& plan, Residency& residency, Executor& executor, Pool& pool,
                 const TransferOptions& options = {});

  // `place` is the session's. False: cancelled; the caches then hold part of the round. Raises
  // Failure if the device fails.
  bool run(const Round& round, SessionPlace& place);

  // Ends the waits of the present round if `cancelled` is its flag. Any thread.
  void cancel(const std::atomic<bool>& cancelled);

  // Drops what was prepared for a session.
  void forget(const SessionPlace& place);

  // Empty after a round that was not whole. While no round runs.
  const RoundRecord& latest() const { return record_; }

  // The oldest change of promotions that was not taken yet; when_ns 0: there is none. Any thread.
  atsc_change take_change() { return policy_.take_change(); }

 private:
  class Running;

  HybridRound& prepare(const RoundShape& shape, const SessionPlace& place);
  std::unique_ptr<HybridRound> make(const RoundShape& shape, const SessionPlace& place);
  HybridRound* find(const RoundShape& shape, const SessionPlace& place);
  void adopt_what_is_ready();
  void look_at_speeds(const HybridRound& round);
  void move_caches(const HybridRound& prepared, const Round& round, SessionPlace& place);
  void count_exchange();
  void write_numbers(const Round& round);
  bool run_whole(HybridRound& prepared, const Round& round);
  bool run_segments(HybridRound& prepared, const Round& round);
  void take_stamps(const HybridRound& prepared);

  const Plan& plan_;
  Residency& residency_;
  Executor& executor_;
  Pool& pool_;
  const size_t most_prepared_;
  const int64_t clock_offset_ns_;
  const uint64_t copy_begin_bytes_;
  TransferPolicy policy_;
  RoundMaker maker_;
  std::vector<std::unique_ptr<HybridRound>> prepared_;
  uint64_t num_rounds_ = 0;
  int64_t remake_from_ns_ = 0;  // not before, rounds of an old choice
  int num_exchanges_ = 0;
  int64_t exchanges_since_ns_ = 0;
  RoundRecord record_;

  std::mutex mutex_;  // guards the rest
  Executable* running_ = nullptr;
  const std::atomic<bool>* cancelled_ = nullptr;  // of the round that runs
  bool was_released_ = false;
};

}  // namespace atsc
