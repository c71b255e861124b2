// The device's part of a round as a list of commands, from a placement and a choice of what runs on
// the other side than where it lives.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"
#include "residency.h"
#include "splits.h"
#include "tables.h"

namespace atsc {

// A host-resident unit that is copied to a slot and computed on the device in this round.
struct Promotion {
  int unit;
  int slot;             // -1: the unit has no bytes
  int not_before = -1;  // node of the device before which its copy must not begin; -1: none

  bool operator==(const Promotion&) const = default;
};

// Ascending units. Copies run one after the other; one begins when the unit before it in its slot
// was used.
using Promotions = std::vector<Promotion>;

struct Choice {
  Promotions promotions;
  // Device-resident units that the host computes in this round; ascending. Their weights must be on
  // the host too (Residency::hold_on_host).
  std::vector<int> retreats;
  // Host-resident units whose weights have taken the place of some of those (Residency::exchange), so
  // that the device computes them; ascending units.
  std::vector<Advance> advances;
  bool spins = false;  // the device keeps its turn while it waits for the host
};

inline constexpr int kFlagFromHost = 0;    // value: segments that are over
inline constexpr int kFlagFromDevice = 1;  // value: runs that are over

// Stamps of one promotion: its copy began (kNoStamp: as soon as the one before was over) and was
// over; the device began to wait for it, and went on. It also waits for a segment of the host's there
// (0: for none), before which it could not have gone on.
struct PromotionStamps {
  int unit;
  int begin, copied, wait, ready;
  int wait_segment;
};

struct BuiltRound {
  Splits splits;
  CommandList commands;  // empty: the host does everything
  // Stamps of each run: before its first pull (kNoStamp: it has none) and when it is over.
  std::vector<int> begin_stamps, end_stamps;
  std::vector<PromotionStamps> promotion_stamps;  // in the order of the copies
  // Of each cache that has a place on the device: whether this round's attention runs on the host.
  std::vector<bool> caches_on_host;
};

// `place` has the session's caches and logits.
BuiltRound build_round(const Plan& plan, const Residency& residency, const SessionPlace& place,
                       int64_t num_tokens, int64_t num_logit_rows, const Choice& choice);

// Every host unit that fits a slot, the slots in turn: what a round of many rows does. A unit that
// runs for the rows of logits alone (the head) stays on the host if those are few.
Choice streaming_choice(const Plan& plan, const Residency& residency, bool many_logit_rows);

}  // namespace atsc
