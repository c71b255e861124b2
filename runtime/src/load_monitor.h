// How fast CPU, GPU and link are at present, from the records of rounds, as multiples of the plan's
// times.
//
// A round says, for each side, what it took and what it should have taken: that ratio is the side's
// drift. Where in a side the time went is said by its segments and runs: their units' shares change
// slowly, and are kept where a unit does not run at present, which then follows its side's drift.
// Waits for copies are no time of the GPU's, and what the CPU loses beside copies is none of its own.
//
// A drift is a running mean. A sample that is far off does not count, for a round may be held up by
// anything; four in a row on the same side are a change, and the mean begins anew with them. What is
// far follows from how much samples jitter, and is at least the threshold. A drift that rounds have not
// shown for a while (no copies, no link) is forgotten, so that the plan's own time is tried again: that
// is the probe. Where trying shows it is as it was, the next one comes later.
//
// Source: ATSInfer 4.4.3, Algorithm 3 (what it calls the profile that is updated at run time).
#pragma once

#include <cstdint>
#include <vector>

#include "hybrid_round.h"
#include "transfer_model.h"

namespace atsc {

class Drift {
 public:
  // `threshold`: what is far off, as a share.
  explicit Drift(double threshold) : threshold_(threshold) {}

  void observe(double ratio, int64_t now_ns);
  double at(int64_t now_ns) const;  // 1: as the plan says

 private:
  void begin_anew();

  const double threshold_;
  double mean_ = 1;
  double jitter_ = 0;         // mean distance of a sample, as a share
  int count_ = kFirstCount;
  std::vector<double> far_;  // latest samples, all above or all below
  int64_t seen_ns_ = 0;
  int64_t memory_ns_ = kMemoryNs;

  static constexpr int kFirstCount = 3;      // what the plan's times weigh, in rounds
  static constexpr int kMostCount = 9;       // the next sample weighs a tenth
  static constexpr size_t kChangeCount = 4;
  static constexpr double kFarJitter = 3, kJitterRate = 0.05;
  static constexpr int64_t kMemoryNs = 10'000'000'000, kMostMemoryNs = 320'000'000'000;
};

// 100 us and more: no clock is so wrong, and another program's time slice takes longer.
inline constexpr double kLateWake = 10;

// Of the drifts at one moment.
struct Drifts {
  double cpu = 1, gpu = 1, link = 1, hand_off = 1;
  double wake = 1;  // of a hand-off to the device
};

class LoadMonitor {
 public:
  LoadMonitor(const Plan& plan, const TransferModel& model, double threshold);

  // A whole round.
  void observe(const HybridRound& round, const RoundRecord& record);

  Drifts drifts() const;
  Speeds speeds() const;
  // Whether another program has the device in turn: it interrupts some copies and not others, and holds up
  // some hand-offs for a slice; and how long that is.
  bool is_interrupted() const;
  int64_t slice_ns() const { return slice_ns_; }
  const Drifts& calm() const { return calm_; }  // of rounds before interruptions
  // Those between interruptions: the device's and the link's are `calm`.
  Speeds speeds_between(const Drifts& calm) const;
  int64_t recent_round_ns() const { return recent_round_ns_; }  // 0: none yet
  int num_hand_offs() const { return num_hand_offs_; }  // to the device, measured in the latest round

 private:
  // A segment or a run.
  struct Part {
    double taken_ns = 0, expected_ns = 0;
    size_t first_unit = 0, end_unit = 0;  // in units_
  };
  struct Planned {
    int unit;
    double ns;
  };
  struct CopyTime {
    double taken_ns, expected_ns;
  };

  void observe_cpu(const RoundShape& shape, const RoundRecord& record, const Splits& splits);
  void observe_gpu(const RoundShape& shape, const RoundRecord& record, const Splits& splits);
  void observe_link(const RoundRecord& record, const Splits& splits);
  void observe_hand_offs(const RoundRecord& record, const Splits& splits);
  void add_part(double taken_ns);
  void add_unit(int unit, double planned_ns, double share);
  void learn(std::vector<double>& shares, Drift& drift);

  const Plan& plan_;
  const TransferModel& model_;
  Drift cpu_, gpu_, link_, hand_off_, wake_;
  // How far copies of a round are from their mean, as a share of their time (an H200: 0.7, alone 0.02).
  double copy_spread_ = 0;
  int64_t slice_ns_ = 0;  // the longest that a hand-off of a round is late; 0: none was
  Drifts calm_;  // of rounds that nothing interrupts
  std::vector<double> cpu_shares_, gpu_shares_;  // of a unit: its own factor besides the drift
  std::vector<Part> parts_;  // of the side that is looked at; kept, so that rounds allocate nothing
  std::vector<Planned> units_;
  std::vector<CopyTime> copies_;
  int num_learned_ = 0;
  int64_t recent_round_ns_ = 0;
  int num_hand_offs_ = 0;
  int64_t clock_ns_ = 1;  // of the drifts: time in rounds, so that a pause makes nobody forget
};

}  // namespace atsc
