#include "load_monitor.h"

#include <algorithm>
#include <cmath>

namespace atsc {
namespace {

constexpr double kMostShare = 16;        // a unit's own factor, and its inverse
constexpr double kLearningRate = 0.05;   // of those
constexpr double kMostDrift = 1000;
constexpr double kLatestRound = 0.2;     // its weight in what is recent
// A spread of copies that only interruptions make.
constexpr double kInterruptedSpread = 0.3;
// Of another program's slices, hand-offs meet some: else the device is late in another way.
constexpr double kSomeHandOffs = 0.6;
constexpr int kManyHandOffs = 10;  // of which one meets a slice as it begins
constexpr double kLatestSpread = 0.4;  // a question comes after four rounds that are far off

double length(int64_t begin_ns, int64_t end_ns) {
  return static_cast<double>(std::max<int64_t>(end_ns - begin_ns, 0));
}

double common(int64_t begin_ns, int64_t end_ns, int64_t other_begin_ns, int64_t other_end_ns) {
  return length(std::max(begin_ns, other_begin_ns), std::min(end_ns, other_end_ns));
}

}  // namespace

void Drift::observe(double ratio, int64_t now_ns) {
  if (!std::isfinite(ratio) || ratio <= 0) return;
  ratio = std::clamp(ratio, 1 / kMostDrift, kMostDrift);
  if (now_ns - seen_ns_ > memory_ns_ && seen_ns_ > 0 && mean_ != 1) {
    // It was forgotten and comes back: was that worth the trial?
    const bool is_as_it_was = std::abs(ratio / mean_ - 1) < std::abs(ratio - 1);
    memory_ns_ = is_as_it_was ? std::min(2 * memory_ns_, kMostMemoryNs) : kMemoryNs;
    mean_ = 1;
    count_ = kFirstCount;
    far_.clear();
  }
  seen_ns_ = now_ns;
  const double far = std::max(threshold_, kFarJitter * jitter_);
  const double distance = std::abs(ratio / mean_ - 1);
  jitter_ += (std::min(distance, 2 * threshold_) - jitter_) * kJitterRate;
  const double most = mean_ * (1 + far), least = mean_ / (1 + far);
  if (ratio > most || ratio < least) {
    if (!far_.empty() && (far_.front() > mean_) != (ratio > mean_)) far_.clear();
    far_.push_back(ratio);
    if (far_.size() == kChangeCount) begin_anew();
    return;
  }
  far_.clear();
  mean_ += (ratio - mean_) / (count_ + 1);
  count_ = std::min(count_ + 1, kMostCount);
}

// The samples of a change; the largest and the smallest say least.
void Drift::begin_anew() {
  std::ranges::sort(far_);
  mean_ = (far_[1] + far_[2]) / 2;
  count_ = kFirstCount;
  far_.clear();
}

double Drift::at(int64_t now_ns) const {
  return seen_ns_ > 0 && now_ns - seen_ns_ > memory_ns_ ? 1 : mean_;
}

LoadMonitor::LoadMonitor(const Plan& plan, const TransferModel& model, double threshold)
    : plan_(plan),
      model_(model),
      cpu_(threshold),
      gpu_(threshold),
      link_(threshold),
      hand_off_(threshold),
      wake_(threshold),
      cpu_shares_(static_cast<size_t>(plan.num_units), 1),
      gpu_shares_(static_cast<size_t>(plan.num_units), 1) {}

void LoadMonitor::observe(const HybridRound& round, const RoundRecord& record) {
  const RoundShape& shape = round.shape;
  const Splits& splits = round.built.splits;
  const int64_t round_ns = record.end_ns - record.begin_ns;
  const auto change_ns = static_cast<double>(round_ns - recent_round_ns_) * kLatestRound;
  recent_round_ns_ = recent_round_ns_ == 0 ? round_ns
                                           : recent_round_ns_ + static_cast<int64_t>(change_ns);
  clock_ns_ += std::max<int64_t>(round_ns, 0);
  observe_cpu(shape, record, splits);
  observe_gpu(shape, record, splits);
  observe_link(record, splits);
  observe_hand_offs(record, splits);
  if (copy_spread_ < kInterruptedSpread / 2) calm_ = drifts();
  ++num_learned_;
}

void LoadMonitor::observe_cpu(const RoundShape& shape, const RoundRecord& record,
                              const Splits& splits) {
  parts_.clear();
  units_.clear();
  for (size_t index = 0; index < record.segments.size(); ++index) {
    const RoundRecord::Segment& segment = record.segments[index];
    const double taken_ns = length(segment.begin_ns, segment.end_ns);
    double beside_ns = 0;
    for (const RoundRecord::Copy& copy : record.copies) {
      beside_ns += common(segment.begin_ns, segment.end_ns, copy.begin_ns, copy.copied_ns);
    }
    add_part(taken_ns - std::min(beside_ns, taken_ns) * (1 - model_.cpu_share()));
    for (const int node : splits.segments[index].nodes) {
      const int unit = model_.unit_timed_at(node);
      if (unit < 0) continue;
      add_unit(unit, model_.times(unit, shape).cpu_ns, cpu_shares_[static_cast<size_t>(unit)]);
    }
  }
  learn(cpu_shares_, cpu_);
}

void LoadMonitor::observe_gpu(const RoundShape& shape, const RoundRecord& record,
                              const Splits& splits) {
  parts_.clear();
  units_.clear();
  for (size_t index = 0; index < record.runs.size(); ++index) {
    const RoundRecord::Run& run = record.runs[index];
    double taken_ns = length(run.begin_ns, run.end_ns);
    for (const RoundRecord::Copy& copy : record.copies) {
      taken_ns -= common(run.begin_ns, run.end_ns, copy.wait_ns, copy.ready_ns);
    }
    add_part(taken_ns);
    for (const DeviceStep& step : splits.runs[index].steps) {
      const int unit = model_.unit_timed_at(step.node);
      if (unit < 0) continue;
      add_unit(unit, model_.times(unit, shape).gpu_ns, gpu_shares_[static_cast<size_t>(unit)]);
    }
  }
  learn(gpu_shares_, gpu_);
}

void LoadMonitor::add_part(double taken_ns) {
  parts_.push_back({taken_ns, 0, units_.size(), units_.size()});
}

void LoadMonitor::add_unit(int unit, double planned_ns, double share) {
  units_.push_back({unit, planned_ns});
  parts_.back().expected_ns += planned_ns * share;
  parts_.back().end_unit = units_.size();
}

// The side's drift from all parts; from what each differs from it, its units' own factors. These keep
// their mean: where a few parts take far longer, such as those that another program's time slice
// interrupts, all others would seem to get faster round by round, and the drift would grow with it.
void LoadMonitor::learn(std::vector<double>& shares, Drift& drift) {
  double taken_ns = 0, expected_ns = 0;
  for (const Part& part : parts_) {
    if (part.expected_ns <= 0) continue;
    taken_ns += part.taken_ns;
    expected_ns += part.expected_ns;
  }
  if (expected_ns <= 0 || taken_ns <= 0) return;
  const double ratio = taken_ns / expected_ns;
  drift.observe(ratio, clock_ns_);
  const double rate = std::max(kLearningRate, 1.0 / (num_learned_ + 2));
  double learned_ns = 0;
  for (const Part& part : parts_) {
    double own = 1;
    if (part.expected_ns > 0 && part.taken_ns > 0) {
      own = std::clamp(part.taken_ns / part.expected_ns / ratio, 0.5, 2.0);
    }
    for (size_t index = part.first_unit; index < part.end_unit; ++index) {
      double& share = shares[static_cast<size_t>(units_[index].unit)];
      share = std::clamp(share * (1 + rate * (own - 1)), 1 / kMostShare, kMostShare);
      learned_ns += units_[index].ns * share;
    }
  }
  for (const Planned& planned : units_) {
    shares[static_cast<size_t>(planned.unit)] *= expected_ns / learned_ns;
  }
}

// When the first ones of a round begin, the device cannot tell well. Others could begin when the one
// before them had ended, and a slot was free.
void LoadMonitor::observe_link(const RoundRecord& record, const Splits& splits) {
  const std::vector<RoundRecord::Copy>& copies = record.copies;
  const auto num_slots = static_cast<size_t>(model_.num_slots());
  copies_.clear();
  double taken_ns = 0, expected_ns = 0;
  const auto add = [&](const RoundRecord::Copy& copy, int64_t begin_ns) {
    copies_.push_back({length(begin_ns, copy.copied_ns), model_.transfer_ns(copy.unit)});
    taken_ns += copies_.back().taken_ns;
    expected_ns += copies_.back().expected_ns;
  };
  if (copies.size() <= num_slots && !is_interrupted()) {
    for (const RoundRecord::Copy& copy : copies) add(copy, copy.begin_ns);
  }
  size_t run = 0;
  for (size_t index = num_slots; index < copies.size(); ++index) {
    const int freed = copies[index - num_slots].unit;
    const auto reads = [&](const DeviceStep& step) { return model_.unit_timed_at(step.node) == freed; };
    while (run < splits.runs.size() && std::ranges::none_of(splits.runs[run].steps, reads)) ++run;
    if (run == splits.runs.size()) break;
    const int64_t free_ns = std::max(copies[index - 1].copied_ns, record.runs[run].end_ns);
    add(copies[index], std::min(copies[index].begin_ns, free_ns));
  }
  double spread = 0;
  if (expected_ns > 0 && taken_ns > 0) {
    const double ratio = taken_ns / expected_ns;
    link_.observe(ratio, clock_ns_);
    for (const auto& copy : copies_) {
      spread += std::abs(copy.taken_ns - ratio * copy.expected_ns) / taken_ns;
    }
  }
  copy_spread_ += (spread - copy_spread_) * kLatestSpread;
}

// From the end of one side's part to the begin of the other's that it was waiting for. The clocks'
// difference is known to microseconds, and its error goes into both directions with opposite signs.
void LoadMonitor::observe_hand_offs(const RoundRecord& record, const Splits& splits) {
  double to_host_ns = 0, to_device_ns = 0, longest_ns = 0;
  int num_to_host = 0, num_to_device = 0;
  for (size_t index = 0; index < record.segments.size(); ++index) {
    const int run = splits.segments[index].await_run;
    if (run == 0) continue;
    const RoundRecord::Segment& segment = record.segments[index];
    const int64_t end_ns = record.runs[static_cast<size_t>(run) - 1].end_ns;
    if (segment.wait_ns > end_ns) continue;
    to_host_ns += static_cast<double>(segment.begin_ns - end_ns);
    ++num_to_host;
  }
  for (size_t index = 0; index < record.runs.size(); ++index) {
    const DeviceStep& first = splits.runs[index].steps.front();
    if (first.wait_segment == 0 || first.pulls.empty()) continue;
    const int64_t end_ns = record.segments[static_cast<size_t>(first.wait_segment) - 1].end_ns;
    const int64_t begin_ns = record.runs[index].begin_ns;
    const bool waited_for_copy = std::ranges::any_of(record.copies, [&](const auto& copy) {
      return copy.ready_ns > end_ns && copy.ready_ns <= begin_ns;
    });
    if (waited_for_copy) continue;
    to_device_ns += static_cast<double>(begin_ns - end_ns);
    longest_ns = std::max(longest_ns, static_cast<double>(begin_ns - end_ns));
    ++num_to_device;
  }
  num_hand_offs_ = num_to_device;
  const auto expected_ns = static_cast<double>(plan_.device.hand_off_ns);
  if (num_to_host == 0 || num_to_device == 0 || expected_ns <= 0) return;
  const double to_device_mean_ns = to_device_ns / num_to_device;
  const double mean_ns = (to_host_ns / num_to_host + to_device_mean_ns) / 2;
  hand_off_.observe(mean_ns / expected_ns, clock_ns_);
  wake_.observe(to_device_mean_ns / expected_ns, clock_ns_);
  if (longest_ns < kLateWake * expected_ns) return;
  const auto slice_ns = static_cast<double>(slice_ns_);
  if (slice_ns > 0) longest_ns = std::min(longest_ns, 2 * slice_ns);
  if (longest_ns < slice_ns && num_to_device < kManyHandOffs) return;
  const double weight = slice_ns == 0 ? 1 : kLatestRound;
  slice_ns_ += std::llrint((longest_ns - slice_ns) * weight);
}

bool LoadMonitor::is_interrupted() const {
  const double late_ns = drifts().wake * static_cast<double>(plan_.device.hand_off_ns);
  return copy_spread_ > kInterruptedSpread && slice_ns_ > 0 &&
         late_ns < kSomeHandOffs * static_cast<double>(slice_ns_);
}

Speeds LoadMonitor::speeds_between(const Drifts& calm) const {
  Speeds speeds = this->speeds();
  std::ranges::fill(speeds.gpu, calm.gpu);
  speeds.link = calm.link;
  speeds.hand_off = calm.hand_off;
  speeds.wake = 1;
  return speeds;
}

Drifts LoadMonitor::drifts() const {
  return {cpu_.at(clock_ns_), gpu_.at(clock_ns_), link_.at(clock_ns_), hand_off_.at(clock_ns_),
          wake_.at(clock_ns_)};
}

Speeds LoadMonitor::speeds() const {
  const Drifts now = drifts();
  Speeds speeds{cpu_shares_, gpu_shares_, now.link, now.hand_off, now.wake};
  for (double& factor : speeds.cpu) factor *= now.cpu;
  for (double& factor : speeds.gpu) factor *= now.gpu;
  return speeds;
}

}  // namespace atsc
