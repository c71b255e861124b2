// A round as the scheduler of promotions takes it: which units it runs, where they live, and what
// they take at the speeds of now.
//
// The plan holds the times of one token and of a whole chunk. In between a unit reads its weights
// once, however few the rows, and computes in proportion to them (passes/simulate.py times_at); what
// runs for rows of logits alone was timed for one of them. Speeds are factors of those times.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hybrid_round.h"
#include "residency.h"
#include "tables.h"
#include "transfer_schedule.h"

namespace atsc {

// Times of now as multiples of the plan's.
struct Speeds {
  std::vector<double> cpu, gpu;  // of a unit
  double link = 1;
  double hand_off = 1;
  double wake = 1;               // of a hand-off to the device
};

class TransferModel {
 public:
  TransferModel(const Plan& plan, const Residency& residency);

  // False: the plan has no times, and nothing can be predicted.
  bool has_times() const { return has_times_; }

  struct Times {
    double cpu_ns, gpu_ns;
  };
  // Of a unit in a round; zero if it does not run.
  Times times(int unit, const RoundShape& shape) const;
  double transfer_ns(int unit) const;
  double cpu_share() const;  // the host's speed beside copies
  double hand_off_ns() const { return static_cast<double>(plan_.device.hand_off_ns); }
  int num_slots() const { return residency_.num_slots(); }
  uint64_t bytes_of_slots() const { return residency_.slot_bytes() * static_cast<uint64_t>(num_slots()); }
  uint64_t promoted_bytes(const Choice& choice) const;

  // The unit whose time a node's stands for; -1: next to nothing.
  int unit_timed_at(int node) const { return unit_timed_at_[static_cast<size_t>(node)]; }

  // Sets of device-resident units, each ascending, of stretches between two of the host's units or
  // after the last one, which the host computes sooner than activations cross to the device and back:
  // the stretch that gains most, with more and more others, at last all of them.
  std::vector<std::vector<int>> retreats(const RoundShape& shape, const Speeds& speeds) const;

  // Gives host units, in this order, the places of units that retreat. Those that the device cannot
  // compute, or that fit nowhere, are left out.
  std::vector<Advance> places_for(std::span<const int> units, std::span<const int> retreats) const;
  // The placement with its units exchanged so that the host computes the first ones of a round and the
  // device all others: as many bytes on each side, and next to no hand-offs. May be empty.
  const Choice& fold() const { return fold_; }

  // Promotions for a round with the retreats and advances of `moved`: slots in turn, in the plan's units.
  TransferSchedule schedule(TransferScheduler& scheduler, const RoundShape& shape,
                            const Speeds& speeds, const Choice& moved = {}) const;
  // The time of a round with a choice.
  int64_t predict(TransferScheduler& scheduler, const RoundShape& shape, const Speeds& speeds,
                  const Choice& choice) const;
  // The same where another program has the device in turn, a slice each; `between` are the speeds between its
  // slices.
  int64_t predict_in_turns(const RoundShape& shape, const Speeds& between, int64_t slice_ns,
                           const Choice& choice) const;

 private:
  struct Unit {
    int first_node = -1, last_node = -1;
    RowsOf rows = RowsOf::kTokens;
    bool on_device = false;
    bool can_come = false;         // from the host's part to the device
    bool can_be_promoted = false;  // by way of a slot
    bool is_lendable = false;      // its place on the device
    double input_bytes = 0;  // of a whole chunk; those that other units made
  };

  void describe(int unit);
  void find_lendable();
  void pin_interleaved();
  Choice folded() const;
  std::vector<int> running(const RoundShape& shape) const;
  std::vector<TransferUnit> units_of(const RoundShape& shape, const Speeds& speeds,
                                     const Choice& moved) const;
  TransferMachine machine(const Speeds& speeds) const;
  bool runs(int unit, const RoundShape& shape) const;
  std::vector<uint8_t> promoted_in(const RoundShape& shape, const Promotions& promotions) const;

  const Plan& plan_;
  const Residency& residency_;
  bool has_times_ = false;
  double cpu_growth_ = 1, gpu_growth_ = 1;  // a chunk's time to that of a token
  std::vector<Unit> units_;
  std::vector<int> order_;  // units with nodes, as they run
  std::vector<int> unit_timed_at_;
  Choice fold_;
};

}  // namespace atsc
