// What rounds should promote, whether units should move, and whether the device should spin, at the speeds
// of a moment. When that is asked, and what follows from the answer, is transfer_policy.h.
//
// Mean speeds say what a round takes where hand-offs and copies are all about as late. Where another program
// has the device in turn, a slice each, a model of that does (transfer_turns.h). It is right to a few per
// cent; so the answer names some choices more, between which rounds decide (choice_race.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "choice_race.h"
#include "load_monitor.h"
#include "transfer_model.h"

namespace atsc {

inline bool has_retreated(const Choice& choice) { return !choice.retreats.empty(); }
inline bool has_advanced(const Choice& choice) { return !choice.advances.empty(); }
// To the device that comes back late.
inline bool has_adapted(const Choice& choice) { return choice.spins || has_retreated(choice); }

struct Conditions {
  Drifts drifts = {};
  int64_t slice_ns = 0;  // of another program that has the device in turn; 0: none has
  Drifts calm = {};      // before it came
};

struct TransferQuestion {
  RoundShape shape;
  int version;  // that the choice will have
  Choice present;
  bool may_spin;
  bool may_retreat;   // units to the host, and none to the device
  bool may_exchange;  // units both ways
  Speeds speeds;
  Conditions now;
  std::string reason;
  Speeds between = {};  // another program's slices
};

struct TransferAnswer {
  Choice choice;
  int64_t before_ns = 0, after_ns = 0;  // predicted, with the present choice and with this one
  bool is_worthwhile = false;
  std::vector<ChoiceRace::Entry> compared = {};  // this one and others with the same units moved
};

TransferAnswer decide(const TransferQuestion& question, const TransferModel& model,
                      TransferScheduler& scheduler);

}  // namespace atsc
