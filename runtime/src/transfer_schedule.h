// Which host-resident units to promote in a round: dynamic transfer.
//
// Units run in order, one after the other, on the side where they live or, promoted, on the device.
// Where neighbours run on different sides, the inputs of the second cross first. Copies of promoted
// units go one after the other, into the slots in turn, each as early as its slot allows: what
// round_builder.cc makes of a choice without `not_before`. A round begins with empty slots. Beside
// copies the host computes at `cpu_share` of its speed. Wanted: the choice with the shortest round.
//
// What the rest of a round depends on, after its first units, is little: the time, the side, when
// the next copy could begin (the engine and the next slot are free), and when the slots after it
// get free. So labels with these figures are extended unit by unit, and a label that is no better
// than another one in any of them is dropped. If all others are kept the result is exact; a running
// program keeps the most promising ones, by an estimate of the whole round, and so finds a round
// within 1 % of the shortest (tests/passes/test_transfer.py).
//
// A copy begins before its unit is reached, so promoting a unit changes the past: what the host has
// computed since then took longer. A label therefore remembers the last end of a unit before the
// next copy may begin, its mark; the units since then are gone through again when there is a copy.
//
// Source: ATSInfer 4.4.2, Algorithm 2, extended by the serial copy engine, finite slots, and the
// slower host, late devices; docs/scheduling.md has an example to follow by hand and what differs.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "round_builder.h"

namespace atsc {

// One unit in this round; times as they are now, not as they were planned.
struct TransferUnit {
  int64_t cpu_ns, gpu_ns;
  int64_t transfer_ns;    // from host memory to a slot
  int64_t to_device_ns;   // its inputs cross, if the unit before runs on the host
  int64_t to_host_ns;     // the other way
  uint64_t bytes;         // a larger one than a slot is not promoted
  bool on_device;         // it lives there
  bool can_be_promoted;   // weights of the host alone, with kernels for the device
};

struct TransferMachine {
  int num_slots = 0;  // of which at most kMostSlots are used
  uint64_t slot_bytes = 0;
  double link_factor = 1;  // times of copies now, as a multiple of `transfer_ns`
  double cpu_share = 1;    // the host's speed beside a copy, as a share of its speed alone; above 0
  int64_t late_ns = 0;     // the device sees so long after its end that a copy is there
};

struct TransferSchedule {
  Promotions promotions;
  int64_t round_ns = 0;   // predicted
  int64_t static_ns = 0;  // the same without promotions; never less
};

inline constexpr int kMostSlots = 4;

// How many labels are kept after a unit: within limits, as many as let the whole search take about
// the same time, under a millisecond; or all, in exponential time.
enum class Effort : uint8_t { kQuick, kExact };
inline constexpr size_t kLabelsOfRound = 6000, kFewestLabels = 16, kMostLabels = 64;

// Keeps its memory, so that a later call allocates next to nothing. Not thread-safe.
class TransferScheduler {
 public:
  explicit TransferScheduler(Effort effort = Effort::kQuick) : effort_(effort) {}

  // Deterministic: the same input has the same result.
  TransferSchedule schedule(std::span<const TransferUnit> units, const TransferMachine& machine);

  // The time of a round in which these units are promoted, a byte each; what cannot be is not.
  int64_t predict(std::span<const TransferUnit> units, const TransferMachine& machine,
                  std::span<const uint8_t> promoted);

 private:
  struct Use {
    int64_t copied_ns = 0, finished_ns = 0;
    int unit = -1;  // -1: the slot has not been used in this round
  };

  // The state of a round after a unit: of all choices with the same figures one.
  struct Label {
    int64_t now_ns = 0;
    int64_t begin_ns = 0;  // the next copy's
    int64_t copied_ns = 0;  // the end of the last copy
    std::array<Use, kMostSlots> uses{};  // the last one of each slot, the oldest first
    int64_t mark_ns = 0;
    int mark_unit = -1;
    bool mark_on_device = false, on_device = false;
    int path = -1;  // in steps_: the last promotion
  };

  struct Step {
    int unit, before;  // before: in steps_
  };

  // What the units after one take together.
  struct Rest {
    double home_ns = 0;                    // without promotions
    double copies_ns = 0, saved_ns = 0;    // of units that can be promoted
    int64_t longest_copy_ns = 0;
    int num_copies = 0;
  };

  using Figures = std::array<int64_t, 1 + kMostSlots>;
  using Labels = std::vector<Label>;

  void prepare(std::span<const TransferUnit> units, const TransferMachine& machine);
  void add_up_rest();
  void take_unit(int unit);
  void prune(Labels& candidates, int unit);
  double rank(const Label& label, const Rest& rest) const;
  Figures figures_of(const Label& label, int unit) const;
  Figures most_to_dominate(const Label& label, int unit) const;
  bool all_at_most(const Figures& figures, const Figures& most) const;
  int64_t possible_delay_ns(const Label& label, int unit) const;

  void run_at_home(Label& label, int unit) const;
  void promote(Label& label, int unit) const;
  void slow_down(Label& label, int unit, int64_t copied_ns) const;
  int64_t beside_copies_ns(int64_t work_ns, int64_t beside_ns) const;
  template <class IsPromoted>
  int64_t follow(IsPromoted&& is_promoted) const;
  TransferSchedule answer();

  const Effort effort_;
  size_t most_labels_ = 0;  // after a unit, of a side
  std::span<const TransferUnit> units_;
  int num_slots_ = 0;
  double cpu_share_ = 1;
  int64_t late_ns_ = 0;
  std::vector<Rest> rest_;           // after a unit
  std::vector<int64_t> copy_ns_;     // of a unit
  std::vector<uint8_t> promotable_;  // a unit
  Labels labels_, on_host_, promoted_;
  std::vector<std::pair<double, int>> order_;
  std::vector<Figures> figures_;
  std::vector<Step> steps_;
};

}  // namespace atsc
