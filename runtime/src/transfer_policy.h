// When rounds choose their promotions anew: Algorithm 3.
//
// A choice is made for a shape of rounds, from the speeds of rounds like it: of few rows (decode), of
// many, and of at least a quarter of a chunk; each has statistics of its own. It remembers the drifts
// that it assumed. Where one of them is off by more than a threshold, and some rounds' time has
// passed since the last look, the question is asked again. Asking is left to another thread, for it
// takes as long as a small round. A change is asked about as soon as it shows, and once more when it
// has been measured for longer. The answer is taken only if it promises a gain worth the trouble;
// either way, what is assumed from then on is what was asked with, so that nothing is asked twice.
// A new choice is on trial (choice_trial.h): if rounds get slower than they were, the one before comes
// back, and what is assumed stays, so that it is not given up again until speeds move. Where the answer
// names some choices that may be as good, the fastest of them by rounds is found out next (choice_race.h).
//
// Where hand-offs show that another program keeps the device from coming back, decode makes two more
// choices (transfer_decision.h). Units may retreat: the host computes what lies between its own units, so
// that fewer hand-offs are left. And the device keeps its turn while it waits for the host: it spins.
// Hand-offs go on showing how late the device is; once it was in time for long enough, it yields again and
// units come home. Where a trial fails, the same is not tried again on a device that is as late, or given up
// later.
//
//     rounds' thread    choice_of, observe, due, settle, put_off
//     any thread        decide, take_change
//
// Source: ATSInfer 4.4.3, Algorithm 3; what differs is in docs/scheduling.md.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "atsc.h"
#include "choice_trial.h"
#include "load_monitor.h"
#include "transfer_decision.h"
#include "transfer_model.h"

namespace atsc {

enum class TransferMode : uint8_t { kLoadAware, kStatic, kNone };

struct TransferOptions {
  TransferMode mode = TransferMode::kLoadAware;
  double drift_threshold = 0.15;
  double reschedule_interval = 5;  // in times of a recent round
  bool may_spin = true;
  // That take as long as beginning a copy: 0.1 ms beside another program on a link of 10 GB/s.
  uint64_t copy_begin_bytes = 1 << 20;
  // For tests: chooses after every round instead of the scheduler. Two threads call it.
  std::function<Choice(const RoundShape&)> choose_at_random = {};
};

class TransferPolicy {
 public:
  TransferPolicy(const Plan& plan, const Residency& residency, const TransferOptions& options);

  // How late the device was when rounds refused something (0: they did not), and whether another program
  // was known to have it in turn.
  struct Refusal {
    double wake = 0;
    bool in_turns = false;
  };
  // What rounds of a shape do at present.
  struct Adopted {
    RoundShape shape;
    Choice choice;
    int version = 0;             // no other choice has the same
    Conditions assumed = {};
    int64_t asked_ns = 0;        // when it was last thought over; 0: never
    int rounds_to_confirm = 0;   // until it is asked once more; 0: it is not
    std::string reason = {};     // of the latest question
    int num_rounds = 0;          // seen
    ChoiceTrial trial = {};
    ChoiceRace race = {};        // once the trial is over
    Choice before = {};          // what comes back if the trial says so
    Conditions assumed_before = {};
    int rounds_to_wait = 0;      // until speeds are those of the choice that came back
    // To spin, or to retreat without that, alone or with exchanges, was no faster (or there was no memory).
    Refusal spin_refused = {}, retreat_refused = {}, exchange_refused = {};
    bool may_exchange = true;    // false: too little memory for it, or too many prompts
    // Drifts when the retreat began: the few hand-offs that are left say little.
    double late_hand_off = 1, late_wake = 1;
    int rounds_in_time = 0;      // since the device came back late, while it spins or units retreat
    int rounds_to_return = kRoundsToReturn;  // so many of those end that
    uint64_t last_used = 0;
  };
  const Adopted& choice_of(const RoundShape& shape);

  void observe(const HybridRound& round, const RoundRecord& record);

  // What to decide now, if anything.
  std::optional<TransferQuestion> due(const RoundShape& shape, int64_t now_ns);

  TransferAnswer decide(const TransferQuestion& question, TransferScheduler& scheduler) const;

  struct Cost {
    int64_t adoption_ns = 0, build_ns = 0;
    uint64_t host_bytes = 0;
  };
  // The end of a question: its answer is what rounds do from now on, if it is worthwhile.
  void settle(const TransferQuestion& question, const TransferAnswer& answer, const Cost& cost,
              int64_t now_ns);
  // It could not be made. Ask again later; if it was a retreat, soon, and then for promotions alone.
  void put_off(const TransferQuestion& question, const TransferAnswer& answer, int64_t until_ns);
  // Rounds of other shapes or sessions come too often: units stay where they are, or retreat alone.
  void stop_exchanges();

  // The oldest that was not taken yet, without struct_size; when_ns 0: there is none.
  atsc_change take_change();

 private:
  static constexpr int kNumClasses = 3;
  static constexpr int kRoundsToReturn = 20, kMostRoundsToReturn = 1280;
  int class_of(const RoundShape& shape) const;
  Adopted& find_or_choose(const RoundShape& shape);
  Choice plain_choice(const RoundShape& shape) const;
  // To spin or to move units, which was not refused under conditions like these.
  bool may_adapt(const Adopted& adopted, const Conditions& now, const Refusal& refusal) const;
  std::string reason_for(const Adopted& adopted, const Drifts& now, int64_t slice_ns) const;
  bool is_off(double assumed, double now) const;
  static void ask_again(Adopted& adopted);
  void go_back(Adopted& adopted);
  void go_on(Adopted& adopted);
  void log(const RoundShape& shape, const std::string& reason, const TransferAnswer& answer,
           const Cost& cost);

  const Plan& plan_;
  const Residency& residency_;
  const TransferOptions options_;
  const TransferModel model_;
  const bool chooses_;  // false: all is as with kNone
  std::array<LoadMonitor, kNumClasses> monitors_;
  std::vector<Adopted> adopted_;
  uint64_t num_uses_ = 0;
  int num_versions_ = 0;
  bool is_first_logged_[2] = {};
  TransferScheduler scheduler_;  // of the rounds' thread

  std::mutex mutex_;  // guards the rest
  std::deque<atsc_change> changes_;
};

}  // namespace atsc
