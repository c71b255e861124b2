#include "transfer_turns.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace atsc {
namespace {

constexpr double kSlices[] = {0.75, 0.85, 0.95, 1.05, 1.15, 1.25};
constexpr int kRounds = 3;          // the first is not counted
constexpr double kOverNs = 0.5;     // less is left of what is over

class Turns {
 public:
  Turns(double slice_ns, bool spins) : slice_ns_(slice_ns), spins_(spins) {}

  // Whether the device is ours from now on, if that is so.
  bool are_ours(double now_ns, bool has_work) {
    const bool arrives = !is_ours_ && !wants_;
    wants_ = has_work || spins_;
    if (arrives && wants_ && now_ns > end_ns_) {  // their slices followed each other meanwhile
      end_ns_ += slice_ns_ * std::ceil((now_ns - end_ns_ - kOverNs) / slice_ns_);
    }
    if (is_ours_ && (!wants_ || now_ns > end_ns_ - kOverNs)) {
      is_ours_ = false;
      end_ns_ = now_ns + slice_ns_;
    }
    if (!is_ours_ && wants_ && now_ns > end_ns_ - kOverNs) {
      is_ours_ = true;
      end_ns_ = now_ns + slice_ns_;
    }
    return is_ours_;
  }
  // Until that may change.
  double left_ns(double now_ns) const {
    return wants_ ? end_ns_ - now_ns : std::numeric_limits<double>::infinity();
  }

 private:
  const double slice_ns_;
  const bool spins_;
  bool is_ours_ = false, wants_ = false;
  double end_ns_ = 0;  // of our slice, or of theirs
};

struct Rules {
  std::span<const TransferUnit> units;
  std::vector<int> copied;  // units, in order
  size_t num_slots;
  double link_factor, cpu_share;
};

// The time after a round that begins now. One thing after the other happens on the host or the device,
// copies beside it; from one event to the next all have a constant speed.
double play_round(const Rules& rules, Turns& turns, double now_ns) {
  size_t num_copied = 0, num_computed = 0;
  double copy_ns = 0, crossing_ns = 0, left_ns = 0;
  bool is_copying = false, was_on_device = false;
  for (int unit = 0; unit < static_cast<int>(rules.units.size()); ++unit) {
    const TransferUnit& entry = rules.units[static_cast<size_t>(unit)];
    const bool is_promoted = num_computed < rules.copied.size() && rules.copied[num_computed] == unit;
    const bool on_device = entry.on_device || is_promoted;
    if (unit > 0 && on_device != was_on_device) {
      crossing_ns = static_cast<double>(on_device ? entry.to_device_ns : entry.to_host_ns);
    }
    was_on_device = on_device;
    left_ns = static_cast<double>(on_device ? entry.gpu_ns : entry.cpu_ns);
    while (left_ns > kOverNs || crossing_ns > kOverNs || (is_promoted && num_computed == num_copied)) {
      if (!is_copying && num_copied < rules.copied.size() &&
          num_copied < num_computed + rules.num_slots) {
        const int next = rules.copied[num_copied];
        copy_ns = static_cast<double>(rules.units[static_cast<size_t>(next)].transfer_ns) *
                  rules.link_factor;
        is_copying = true;
      }
      const bool has_arrived = crossing_ns <= kOverNs;
      const bool is_ready = has_arrived && !(is_promoted && num_computed == num_copied);
      const bool is_ours = turns.are_ours(now_ns, is_copying || (on_device && is_ready));
      const bool copies = is_copying && is_ours;
      const bool computes = is_ready && (!on_device || is_ours);
      const double speed = copies && !on_device ? rules.cpu_share : 1;
      double step_ns = turns.left_ns(now_ns);
      if (!has_arrived) step_ns = std::min(step_ns, crossing_ns);
      if (computes) step_ns = std::min(step_ns, left_ns / speed);
      if (copies) step_ns = std::min(step_ns, copy_ns);
      now_ns += step_ns;
      if (!has_arrived) crossing_ns -= step_ns;
      if (computes) left_ns -= step_ns * speed;
      if (copies) copy_ns -= step_ns;
      if (copies && copy_ns <= kOverNs) {
        is_copying = false;
        ++num_copied;
      }
    }
    if (is_promoted) ++num_computed;
  }
  return now_ns;
}

}  // namespace

int64_t predict_in_turns(std::span<const TransferUnit> units, const TransferMachine& machine,
                         std::span<const uint8_t> promoted, int64_t slice_ns, bool spins) {
  Rules rules{units, {}, static_cast<size_t>(std::max(machine.num_slots, 1)), machine.link_factor,
              machine.cpu_share};
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (promoted[unit] && !units[unit].on_device) rules.copied.push_back(static_cast<int>(unit));
  }
  double sum_ns = 0;
  for (const double share : kSlices) {
    Turns turns(share * static_cast<double>(std::max<int64_t>(slice_ns, 1)), spins);
    const double begin_ns = play_round(rules, turns, 0);
    double now_ns = begin_ns;
    for (int round = 1; round < kRounds; ++round) now_ns = play_round(rules, turns, now_ns);
    sum_ns += (now_ns - begin_ns) / (kRounds - 1);
  }
  return std::llrint(sum_ns / static_cast<double>(std::size(kSlices)));
}

}  // namespace atsc
