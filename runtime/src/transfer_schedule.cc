#include "transfer_schedule.h"

#include <algorithm>
#include <cmath>

namespace atsc {

TransferSchedule TransferScheduler::schedule(std::span<const TransferUnit> units,
                                             const TransferMachine& machine) {
  prepare(units, machine);
  labels_.assign(1, Label{});
  for (int unit = 0; unit < static_cast<int>(units.size()); ++unit) take_unit(unit);
  return answer();
}

// The time of the round with a choice.
template <class IsPromoted>
int64_t TransferScheduler::follow(IsPromoted&& is_promoted) const {
  Label label;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (promotable_[unit] && is_promoted(unit)) {
      promote(label, unit);
    } else {
      run_at_home(label, unit);
    }
  }
  return label.now_ns;
}

int64_t TransferScheduler::predict(std::span<const TransferUnit> units,
                                   const TransferMachine& machine,
                                   std::span<const uint8_t> promoted) {
  prepare(units, machine);
  return follow([&](int unit) { return promoted[static_cast<size_t>(unit)] != 0; });
}

void TransferScheduler::prepare(std::span<const TransferUnit> units,
                                const TransferMachine& machine) {
  units_ = units;
  num_slots_ = std::min(machine.num_slots, kMostSlots);
  cpu_share_ = machine.cpu_share;
  late_ns_ = machine.late_ns;
  steps_.clear();
  copy_ns_.clear();
  promotable_.clear();
  for (const TransferUnit& unit : units) {
    copy_ns_.push_back(
        std::llrint(static_cast<double>(unit.transfer_ns) * machine.link_factor));
    promotable_.push_back(num_slots_ > 0 && !unit.on_device && unit.can_be_promoted &&
                          unit.bytes <= machine.slot_bytes);
  }
  add_up_rest();
  const auto num_promotable = static_cast<size_t>(std::ranges::count(promotable_, 1));
  most_labels_ = std::clamp(kLabelsOfRound / std::max<size_t>(num_promotable, 1), kFewestLabels,
                            kMostLabels);
  most_labels_ = effort_ == Effort::kExact ? SIZE_MAX : most_labels_ / 2;  // of a side
}

// Sums over the units after each one.
void TransferScheduler::add_up_rest() {
  rest_.assign(units_.size(), Rest{});
  for (size_t unit = units_.size(); unit-- > 1;) {
    Rest sum = rest_[unit];
    const TransferUnit& entry = units_[unit];
    sum.home_ns += static_cast<double>(entry.on_device ? entry.gpu_ns : entry.cpu_ns);
    if (promotable_[unit]) {
      ++sum.num_copies;
      sum.copies_ns += static_cast<double>(copy_ns_[unit]);
      const double beside_ns = static_cast<double>(copy_ns_[unit]) * (1 - cpu_share_);
      const auto faster_ns = static_cast<double>(entry.cpu_ns - entry.gpu_ns);
      sum.saved_ns += std::max(faster_ns - beside_ns, 0.0);
      sum.longest_copy_ns = std::max(sum.longest_copy_ns, copy_ns_[unit]);
    }
    rest_[unit - 1] = sum;
  }
}

// An estimate of the whole round after a label, to compare labels with. If the rest takes d, there
// is time for copies of d and of what can be in the slots already, h. If promotions save s of the
// round for a nanosecond of copying, d = home - s (h + d), unless all are promoted.
double TransferScheduler::rank(const Label& label, const Rest& rest) const {
  const auto now_ns = static_cast<double>(label.now_ns);
  if (rest.copies_ns == 0) return now_ns + rest.home_ns - rest.saved_ns;
  const int to_fill = std::min(num_slots_, rest.num_copies);
  const double copy_ns = rest.copies_ns / rest.num_copies;
  auto filled_ns = static_cast<double>(label.begin_ns);
  for (int slot = 0; slot < to_fill; ++slot) {
    filled_ns = std::max(filled_ns, static_cast<double>(label.uses[slot].finished_ns)) + copy_ns;
  }
  const double head_start_ns = copy_ns * to_fill - std::max(filled_ns - now_ns, 0.0);
  const double saved = rest.saved_ns / rest.copies_ns;
  return now_ns + std::max((rest.home_ns - saved * head_start_ns) / (1 + saved),
                           rest.home_ns - rest.saved_ns);
}

void TransferScheduler::take_unit(int unit) {
  if (!promotable_[unit]) {
    for (Label& label : labels_) run_at_home(label, unit);
    return;
  }
  on_host_.assign(labels_.begin(), labels_.end());
  promoted_.assign(labels_.begin(), labels_.end());
  for (Label& label : on_host_) run_at_home(label, unit);
  for (Label& label : promoted_) promote(label, unit);
  labels_.clear();
  prune(on_host_, unit);
  prune(promoted_, unit);
  for (Label& label : promoted_) {
    steps_.push_back({unit, label.path});
    label.path = static_cast<int>(steps_.size()) - 1;
  }
  labels_.assign(on_host_.begin(), on_host_.end());
  labels_.insert(labels_.end(), promoted_.begin(), promoted_.end());
}

void TransferScheduler::run_at_home(Label& label, int unit) const {
  const TransferUnit& entry = units_[unit];
  if (unit > 0 && label.on_device != entry.on_device) {
    label.now_ns += entry.on_device ? entry.to_device_ns : entry.to_host_ns;
  }
  label.now_ns += entry.on_device ? entry.gpu_ns : entry.cpu_ns;
  label.on_device = entry.on_device;
}

void TransferScheduler::promote(Label& label, int unit) const {
  const TransferUnit& entry = units_[unit];
  const int64_t copied_ns = label.begin_ns + copy_ns_[unit];
  if (cpu_share_ != 1) slow_down(label, unit, copied_ns);
  if (unit > 0 && !label.on_device) label.now_ns += entry.to_device_ns;
  label.now_ns = std::max(label.now_ns, copied_ns + late_ns_) + entry.gpu_ns;
  label.on_device = true;
  for (int slot = 1; slot < num_slots_; ++slot) label.uses[slot - 1] = label.uses[slot];
  label.uses[num_slots_ - 1] = {copied_ns, label.now_ns, unit};
  label.copied_ns = copied_ns;
  const Use& next = label.uses[0];
  label.begin_ns = std::max(copied_ns, next.finished_ns);
  if (next.unit >= 0 && next.finished_ns >= copied_ns) {
    label.mark_ns = next.finished_ns;
    label.mark_unit = next.unit;
    label.mark_on_device = true;
  }
}

// What ran since the next copy could begin, until `unit`, ran beside that copy. From the mark on,
// the engine is busy without a gap: until `label.copied_ns` as the label has it, until `copied_ns`
// with that copy.
void TransferScheduler::slow_down(Label& label, int unit, int64_t copied_ns) const {
  int64_t before_ns = label.mark_ns, now_ns = label.mark_ns;
  bool on_device = label.mark_on_device;
  int use = 0, at = label.mark_unit + 1;
  for (; at < unit && now_ns < copied_ns + late_ns_; ++at) {
    const TransferUnit& entry = units_[at];
    while (use < num_slots_ && label.uses[use].unit < at) ++use;
    const bool promoted = use < num_slots_ && label.uses[use].unit == at;
    const bool here = entry.on_device || promoted;
    if (at > 0 && here != on_device) {
      const int64_t crossing_ns = here ? entry.to_device_ns : entry.to_host_ns;
      before_ns += crossing_ns;
      now_ns += crossing_ns;
    }
    on_device = here;
    if (promoted) {
      const int64_t ready_ns = label.uses[use].copied_ns + late_ns_;
      before_ns = std::max(before_ns, ready_ns);
      now_ns = std::max(now_ns, ready_ns);
    }
    before_ns += here ? entry.gpu_ns
                      : beside_copies_ns(entry.cpu_ns, label.copied_ns - before_ns);
    now_ns += here ? entry.gpu_ns : beside_copies_ns(entry.cpu_ns, copied_ns - now_ns);
    if (promoted) label.uses[use].finished_ns = now_ns;
    // Not where they end together: rounding may hide that the copy ends first, and another one would
    // then slow the unit's end down.
    if (now_ns < copied_ns) {
      label.mark_ns = now_ns;
      label.mark_unit = at;
      label.mark_on_device = here;
    }
  }
  const int64_t delay_ns = now_ns - before_ns;
  label.now_ns += delay_ns;
  for (Use& later : label.uses) {
    if (later.unit >= at) later.finished_ns += delay_ns;
  }
}

// How long work takes on the host that begins when the engine is busy for so long.
int64_t TransferScheduler::beside_copies_ns(int64_t work_ns, int64_t beside_ns) const {
  if (beside_ns <= 0) return work_ns;
  const auto work = static_cast<double>(work_ns), beside = static_cast<double>(beside_ns);
  const double done = beside * cpu_share_;
  return std::llrint(work <= done ? work / cpu_share_ : beside + (work - done));
}

void TransferScheduler::prune(Labels& candidates, int unit) {
  order_.clear();
  for (const Label& label : candidates) {
    order_.push_back({rank(label, rest_[unit]), static_cast<int>(order_.size())});
  }
  std::ranges::sort(order_);
  Labels& kept = labels_;  // free at this point
  kept.clear();
  figures_.clear();
  for (const auto& [_, index] : order_) {
    if (kept.size() == most_labels_) break;
    const Label& label = candidates[index];
    const Figures needed = most_to_dominate(label, unit);
    const bool is_dominated = std::ranges::any_of(
        figures_, [&](const Figures& better) { return all_at_most(better, needed); });
    if (is_dominated) continue;
    figures_.push_back(figures_of(label, unit));
    kept.push_back(label);
  }
  candidates.swap(kept);
}

// A label dominates another one on the same side, that is, no continuation of the other is better
// than the same one of this, if its figures are at most those that the other asks for: the time,
// and when each of the next copies may begin. What copies may still delay of what this label has
// computed already counts against it.
TransferScheduler::Figures TransferScheduler::figures_of(const Label& label, int unit) const {
  Figures figures{label.now_ns, label.begin_ns};
  const int64_t delay_ns = cpu_share_ == 1 ? 0 : possible_delay_ns(label, unit);
  figures[0] += delay_ns;
  for (int slot = 1; slot < num_slots_; ++slot) {
    figures[slot + 1] = label.uses[slot].finished_ns + delay_ns;
  }
  return figures;
}

// A slot that got free so long ago that it and those after it can be filled by now is as good as
// any.
TransferScheduler::Figures TransferScheduler::most_to_dominate(const Label& label,
                                                               int unit) const {
  const int64_t longest_ns = rest_[unit].longest_copy_ns;
  int64_t early_ns = label.now_ns - num_slots_ * longest_ns - late_ns_;
  Figures figures{label.now_ns, std::max(label.begin_ns, early_ns)};
  for (int slot = 1; slot < num_slots_; ++slot) {
    early_ns += longest_ns;
    figures[slot + 1] = std::max({label.uses[slot].finished_ns, label.begin_ns, early_ns});
  }
  return figures;
}

bool TransferScheduler::all_at_most(const Figures& figures, const Figures& most) const {
  for (int each = 0; each <= num_slots_; ++each) {
    if (figures[each] > most[each]) return false;
  }
  return true;
}

// The most by which copies can delay what has been computed: those that fill the slots, beside work
// of the host all the time. A nanosecond a unit for rounding.
int64_t TransferScheduler::possible_delay_ns(const Label& label, int unit) const {
  const auto since_ns = static_cast<double>(label.now_ns - label.mark_ns);
  const auto copies_ns = static_cast<double>(num_slots_ * rest_[unit].longest_copy_ns);
  const double delay_ns =
      std::min(since_ns * (1 / cpu_share_ - 1), copies_ns * (1 - cpu_share_));
  return static_cast<int64_t>(delay_ns) + 1 + unit - label.mark_unit;
}

// The best label's choice, or all or nothing, which the limit may have lost.
TransferSchedule TransferScheduler::answer() {
  TransferSchedule found;
  found.static_ns = follow([](int) { return false; });
  const Label& best = *std::ranges::min_element(labels_, {}, &Label::now_ns);
  const int64_t all_ns = follow([](int) { return true; });
  found.round_ns = std::min({found.static_ns, best.now_ns, all_ns});
  if (found.round_ns == found.static_ns) return found;
  if (found.round_ns == best.now_ns) {
    for (int step = best.path; step >= 0; step = steps_[step].before) {
      found.promotions.push_back({.unit = steps_[step].unit, .slot = -1});
    }
    std::ranges::reverse(found.promotions);
  } else {
    for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
      if (promotable_[unit]) found.promotions.push_back({.unit = unit, .slot = -1});
    }
  }
  int next = 0;
  for (Promotion& promotion : found.promotions) {
    if (units_[promotion.unit].bytes > 0) promotion.slot = next++ % num_slots_;
  }
  return found;
}

}  // namespace atsc
