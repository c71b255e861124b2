// A policy of promotions on a machine of the test's: rounds are played by rules that the policy does not
// know the figures of, on a clock of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "random_plan.h"
#include "transfer_policy.h"

namespace atsc::testing {

// Times of a unit as compilation found them; a layer's link takes about as long as its CPU.
inline RandomPlan plan_with_times(Random& random, int num_layers) {
  RandomPlan made(random, num_layers);
  for (UnitEntry& unit : made.units) {
    const bool is_heavy = unit.kind == UnitKind::kWeights;
    const double cpu_ns = is_heavy ? between(random, 100e3, 400e3) : between(random, 5e3, 30e3);
    unit.decode.cpu_ns = std::llrint(cpu_ns);
    unit.decode.gpu_ns = std::llrint(cpu_ns / between(random, 4, 10));
    unit.prefill.cpu_ns = std::llrint(cpu_ns * 8);
    unit.prefill.gpu_ns = unit.decode.gpu_ns * 3;
    unit.transfer_ns = is_heavy ? std::llrint(cpu_ns * between(random, 0.7, 1.3)) : 0;
  }
  return made;
}

// Times and sizes of all weights alike, their ratios those of a large model on a machine with a PCIe link.
inline RandomPlan regular_plan(Random& random, int num_layers) {
  RandomPlan made = plan_with_times(random, num_layers);
  for (UnitEntry& unit : made.units) {
    if (unit.kind != UnitKind::kWeights) continue;
    unit.bytes = kWidth * kWidth * sizeof(float);
    unit.crc32 = crc32(0, made.weights.data() + unit.offset, unit.bytes);
    unit.decode.cpu_ns = 250'000;
    unit.decode.gpu_ns = 9'000;
    unit.transfer_ns = 300'000;
  }
  return made;
}

// Every second weight of the first layers is the host's, all else lives on the device.
inline Placement alternating_placement(const RandomPlan& plan, double share_of_layers) {
  Placement made;
  made.num_slots = 2;
  for (const auto& unit : plan.units) made.slot_bytes = std::max(made.slot_bytes, unit.bytes);
  const auto end = static_cast<size_t>(share_of_layers * static_cast<double>(plan.units.size()));
  size_t num_weights = 0;
  for (size_t unit = 0; unit < plan.units.size(); ++unit) {
    const bool is_weight = plan.units[unit].kind == UnitKind::kWeights;
    const bool is_hosts = is_weight && unit < end && num_weights++ % 2 == 0;
    made.on_device.push_back(unit > 0 && !is_hosts);
  }
  return made;
}

inline std::vector<int> units_of(const Choice& choice) {
  std::vector<int> units;
  for (const Promotion& promotion : choice.promotions) units.push_back(promotion.unit);
  std::ranges::sort(units);
  return units;
}

struct Noise {
  Random& random;
  double share = 0;

  double operator()() {
    return std::max(0.1, 1 + share * std::normal_distribution(0.0, 1.0)(random));
  }
};

// Two programs have the device in turn, for slices that differ a little, while both have work for it. The
// other one always has; whoever leaves it to that one comes back at the end of one of its slices.
class Turns {
 public:
  int64_t slice_ns = 0;  // 0: there is no other program

  bool are_ours(int64_t now_ns, bool has_work, Random& random) {
    if (slice_ns == 0) return has_work;
    if (is_ours_ && (!has_work || now_ns >= end_ns_)) {
      is_ours_ = false;
      end_ns_ = now_ns + length_ns(random);
    }
    if (!is_ours_ && now_ns >= end_ns_) {
      is_ours_ = has_work;
      end_ns_ = now_ns + length_ns(random);
    }
    return is_ours_;
  }

 private:
  int64_t length_ns(Random& random) const {
    return std::llrint(static_cast<double>(slice_ns) * between(random, 0.75, 1.25));
  }

  bool is_ours_ = false;
  int64_t end_ns_ = 0;  // of our slice, or of theirs
};

// A machine whose speeds only the test knows.
class Machine {
 public:
  Machine(const Setup& setup, Random& random) : setup_(setup), model(setup.plan, *setup.residency) {
    for (int unit = 0; unit < setup.plan.num_units; ++unit) {
      own_cpu_.push_back(between(random, 0.9, 1.1));
      own_gpu_.push_back(between(random, 0.9, 1.1));
    }
  }

  double cpu = 1, gpu = 1, link = 1;  // factors of times
  int64_t wake_ns = 0;                // the device comes back so much later, on average
  // Of the CPU's times, and of a whole round, with other choices than `innocent`.
  double hidden_cpu = 1, hidden_round = 1;
  double hidden_retreat = 1, hidden_spin = 1;  // of a round in which units retreat, the device spins
  double late_spinning = 0.6;  // what is left of its lateness then
  Choice innocent;
  Turns turns;

  Speeds speeds(bool spins = false) const {
    const auto hand_off_ns = static_cast<double>(setup_.plan.device.hand_off_ns);
    const double late = static_cast<double>(wake_ns) * (spins ? late_spinning : 1) / hand_off_ns;
    Speeds made{own_cpu_, own_gpu_, link, 1 + late / 2, 1 + late};
    for (double& factor : made.cpu) factor *= cpu;
    for (double& factor : made.gpu) factor *= gpu;
    return made;
  }

  // Plays a round that begins now, and lets it pass.
  RoundRecord run(const HybridRound& round, const Choice& choice, Noise noise);
  // The same in small steps, where another program takes turns.
  RoundRecord run_in_turns(const HybridRound& round, const Choice& choice, Noise noise);

  int64_t now_ns = 1'000'000, position = 0;
  const Setup& setup_;
  const TransferModel model;

 private:
  // Of a node: the segment or the run that it is part of.
  struct Place {
    bool on_device;
    size_t index;
  };
  std::vector<Place> places_of(const Splits& splits) const;
  double hidden_adapting(const Choice& choice) const {
    return (choice.retreats.empty() ? 1 : hidden_retreat) * (choice.spins ? hidden_spin : 1);
  }

  std::vector<double> own_cpu_, own_gpu_;
};

inline std::vector<Machine::Place> Machine::places_of(const Splits& splits) const {
  std::vector<Place> places(static_cast<size_t>(setup_.plan.num_nodes));
  for (size_t index = 0; index < splits.segments.size(); ++index) {
    for (int node : splits.segments[index].nodes) places[static_cast<size_t>(node)] = {false, index};
  }
  for (size_t index = 0; index < splits.runs.size(); ++index) {
    for (const DeviceStep& step : splits.runs[index].steps) {
      places[static_cast<size_t>(step.node)] = {true, index};
    }
  }
  return places;
}

class Copies {
 public:
  Copies(const Promotions& choice, RoundRecord& record, std::function<double(int)> time_of)
      : choice_(choice), record_(record), time_of_(std::move(time_of)) {
    free_ns_.assign(kMostSlots, record.begin_ns);
    go_on();
  }

  const RoundRecord::Copy* of(int unit) const {
    const auto found = std::ranges::find(record_.copies, unit, &RoundRecord::Copy::unit);
    return found == record_.copies.end() ? nullptr : &*found;
  }
  RoundRecord::Copy* of(int unit) {
    return const_cast<RoundRecord::Copy*>(std::as_const(*this).of(unit));
  }
  int64_t end_ns() const {
    return record_.copies.empty() ? 0 : record_.copies.back().copied_ns;
  }
  void release(int unit, int64_t now_ns) {
    const auto used = std::ranges::find(choice_, unit, &Promotion::unit);
    if (used == choice_.end()) return;
    free_ns_[static_cast<size_t>(used->slot)] = now_ns;
    go_on();
  }

 private:
  void go_on() {
    while (record_.copies.size() < choice_.size()) {
      const Promotion& next = choice_[record_.copies.size()];
      int64_t& free_ns = free_ns_[static_cast<size_t>(next.slot)];
      if (free_ns < 0) return;
      const int64_t begin_ns = std::max(free_ns, end_ns());
      const auto taken_ns = static_cast<int64_t>(time_of_(next.unit));
      record_.copies.push_back({next.unit, begin_ns, begin_ns + taken_ns, 0, 0});
      free_ns = -1;
    }
  }

  const Promotions& choice_;
  RoundRecord& record_;
  const std::function<double(int)> time_of_;
  std::vector<int64_t> free_ns_;  // of slots; -1: in use
};

inline double beside_copies(double work_ns, double beside_ns) {
  if (beside_ns <= 0) return work_ns;
  const double done = beside_ns * kCpuShare;
  return work_ns <= done ? work_ns / kCpuShare : beside_ns + work_ns - done;
}

inline RoundRecord Machine::run(const HybridRound& round, const Choice& choice, Noise noise) {
  const RoundShape& shape = round.shape;
  const Splits& splits = round.built.splits;
  const bool is_innocent = units_of(choice) == units_of(innocent);
  const double cpu_now = cpu * noise() * (is_innocent ? 1 : hidden_cpu);
  const double gpu_now = gpu * noise(), link_now = link * noise();
  RoundRecord record;
  record.position = position++;
  record.begin_ns = now_ns;
  Copies copies(choice.promotions, record, [&](int unit) { return model.transfer_ns(unit) * link_now; });
  record.segments.resize(splits.segments.size());
  record.runs.resize(splits.runs.size());
  const std::vector<Place> places = places_of(splits);
  std::vector<bool> has_begun[2];
  has_begun[0].resize(splits.segments.size());
  has_begun[1].resize(splits.runs.size());
  const auto lateness = [&] {
    const double mean_ns = static_cast<double>(wake_ns) * (choice.spins ? late_spinning : 1);
    return std::llrint(mean_ns * between(noise.random, 0.7, 1.3));
  };
  bool was_on_device = false;
  int64_t device_free_ns = now_ns;
  for (int node = 0; node < setup_.plan.num_nodes; ++node) {
    const auto [on_device, index] = places[static_cast<size_t>(node)];
    const int64_t wait_ns = now_ns;
    if (node > 0 && on_device != was_on_device) {
      now_ns += setup_.plan.device.hand_off_ns;
      if (on_device) {
        now_ns += lateness();
      }
    }
    was_on_device = on_device;
    const int unit = model.unit_timed_at(node);
    const bool begins = !has_begun[on_device][index];
    has_begun[on_device][index] = true;
    if (!on_device) {
      RoundRecord::Segment& segment = record.segments[index];
      if (begins) segment.wait_ns = wait_ns, segment.begin_ns = now_ns;
      if (unit >= 0) {
        const double work_ns =
            model.times(unit, shape).cpu_ns * own_cpu_[static_cast<size_t>(unit)] * cpu_now;
        const auto busy_ns = static_cast<double>(copies.end_ns() - now_ns);
        now_ns += static_cast<int64_t>(beside_copies(work_ns, busy_ns));
      }
      segment.end_ns = now_ns;
      continue;
    }
    RoundRecord::Run& run = record.runs[index];
    if (RoundRecord::Copy* copy = unit >= 0 ? copies.of(unit) : nullptr) {
      copy->wait_ns = device_free_ns;  // before it waits for the host
      copy->ready_ns = device_free_ns;
      if (copy->copied_ns > device_free_ns) copy->ready_ns = copy->copied_ns + lateness();
      copy->ready_ns += setup_.plan.device.hand_off_ns;  // to go on
      now_ns = std::max(now_ns, copy->ready_ns);
    }
    if (begins) run.begin_ns = now_ns;
    if (unit >= 0) {
      now_ns += static_cast<int64_t>(model.times(unit, shape).gpu_ns *
                                     own_gpu_[static_cast<size_t>(unit)] * gpu_now);
      copies.release(unit, now_ns);
    }
    run.end_ns = device_free_ns = now_ns;
  }
  const double hidden = (is_innocent ? 1 : hidden_round) * hidden_adapting(choice);
  now_ns += static_cast<int64_t>(static_cast<double>(now_ns - record.begin_ns) * (hidden - 1));
  record.end_ns = now_ns;
  return record;
}

inline RoundRecord Machine::run_in_turns(const HybridRound& round, const Choice& choice, Noise noise) {
  constexpr int64_t kStepNs = 4'000;
  struct Work {
    bool on_device;
    size_t index;
    int unit;
    double left_ns;
  };
  const Splits& splits = round.built.splits;
  const double cpu_now = cpu * noise(), gpu_now = gpu * noise(), link_now = link * noise();
  std::vector<Work> work;
  for (const auto [on_device, index] : places_of(splits)) {
    const int unit = model.unit_timed_at(static_cast<int>(work.size()));
    work.push_back({on_device, index, unit, 0});
    if (unit < 0) continue;
    const TransferModel::Times times = model.times(unit, round.shape);
    work.back().left_ns = on_device ? times.gpu_ns * own_gpu_[static_cast<size_t>(unit)] * gpu_now
                                    : times.cpu_ns * own_cpu_[static_cast<size_t>(unit)] * cpu_now;
  }

  RoundRecord record;
  record.position = position++;
  record.begin_ns = now_ns;
  record.segments.resize(splits.segments.size());
  record.runs.resize(splits.runs.size());
  const Promotions& promotions = choice.promotions;
  const auto num_slots = static_cast<size_t>(setup_.residency->num_slots());
  size_t num_copied = 0, num_computed = 0;
  double copy_left_ns = 0;
  int64_t arrival_ns = now_ns, device_free_ns = now_ns;
  for (auto now = work.begin(); now != work.end();) {
    if (record.copies.size() == num_copied && num_copied < promotions.size() &&
        num_copied < num_computed + num_slots) {
      copy_left_ns = model.transfer_ns(promotions[num_copied].unit) * link_now;
      record.copies.push_back({promotions[num_copied].unit, 0, 0, 0, 0});
    }
    const bool is_copying = record.copies.size() > num_copied;
    const bool is_promoted = now->on_device && num_computed < promotions.size() &&
                             promotions[num_computed].unit == now->unit;
    const bool is_ready = now_ns >= arrival_ns && !(is_promoted && num_computed >= num_copied);
    const bool is_ours =
        turns.are_ours(now_ns, is_copying || (now->on_device && is_ready) || choice.spins,
                       noise.random);
    const int64_t end_ns = now_ns + kStepNs;
    if (is_copying && is_ours) {
      RoundRecord::Copy& copy = record.copies.back();
      if (copy.begin_ns == 0) copy.begin_ns = now_ns;
      copy_left_ns -= static_cast<double>(kStepNs);
      if (copy_left_ns <= 0) copy.copied_ns = end_ns, ++num_copied;
    }
    if (is_ready && (!now->on_device || is_ours)) {
      int64_t& begin_ns = now->on_device ? record.runs[now->index].begin_ns
                                         : record.segments[now->index].begin_ns;
      if (begin_ns == 0) begin_ns = now_ns;
      const bool is_slower = !now->on_device && is_copying && is_ours;
      now->left_ns -= static_cast<double>(kStepNs) * (is_slower ? kCpuShare : 1);
      if (now->left_ns <= 0) {
        (now->on_device ? record.runs[now->index].end_ns : record.segments[now->index].end_ns) = end_ns;
        if (is_promoted) {
          RoundRecord::Copy& copy = record.copies[num_computed++];
          copy.wait_ns = device_free_ns;
          copy.ready_ns = std::max(copy.copied_ns, device_free_ns);
        }
        if (now->on_device) device_free_ns = end_ns;
        const bool was_on_device = now->on_device;
        if (++now != work.end() && now->on_device != was_on_device) {
          arrival_ns = end_ns + setup_.plan.device.hand_off_ns;
          if (!now->on_device) record.segments[now->index].wait_ns = end_ns;
        }
      }
    }
    now_ns = end_ns;
  }
  now_ns += std::llrint(static_cast<double>(now_ns - record.begin_ns) * (hidden_adapting(choice) - 1));
  record.end_ns = now_ns;
  return record;
}

// A policy on such a machine. Answers come two rounds late, as from another thread.
class Game {
 public:
  Game(Random& random, const std::string& path, const TransferOptions& options = {})
      : Game(random, path, plan_with_times(random, 6 + below(random, 6)), options, placed_at_random) {}
  Game(Random& random, const std::string& path, RandomPlan made, const TransferOptions& options,
       const std::function<Placement(Random&, const RandomPlan&)>& place)
      : random_(random),
        made_(std::move(made)),
        setup_(made_, path, place(random, made_), VirtualOptions{}, 1, 1),
        policy_(setup_.plan, *setup_.residency, options),
        machine_(setup_, random) {
    place_ = setup_.residency->take_place();
  }

  void play(int num_rounds, double noise) {
    for (int round = 0; round < num_rounds; ++round) play_round({random_, noise});
  }

  // How much longer than the best round the present one is, at the true speeds; with units that retreat
  // among what could be, or not. The device spins as it does at present.
  double regret(bool may_retreat = false) {
    const auto best_ns = may_retreat ? std::min(best_at_home_ns(), best_retreated_ns())
                                     : best_at_home_ns();
    return static_cast<double>(present_ns()) / static_cast<double>(best_ns) - 1;
  }
  int64_t present_ns() {
    return machine_.model.predict(scheduler_, shape, machine_.speeds(choice().spins), choice());
  }
  // A round with a choice while another program takes turns, on average.
  int64_t in_turns_ns(const Choice& choice) {
    constexpr int kRounds = 20;
    Machine machine = machine_;
    HybridRound round{.shape = shape};
    round.built = build_round(setup_.plan, *setup_.residency, *place_, shape.num_tokens,
                              shape.num_logit_rows, choice);
    const int64_t begin_ns = machine.now_ns;
    for (int count = 0; count < kRounds; ++count) machine.run_in_turns(round, choice, {random_, 0.02});
    return (machine.now_ns - begin_ns) / kRounds;
  }
  // Of choices that a scheduler makes for links and hand-offs of all kinds the best one.
  int64_t best_in_turns_ns() {
    int64_t best_ns = INT64_MAX;
    const auto try_with = [&](const Speeds& speeds, Choice moved) {
      moved.promotions = machine_.model.schedule(scheduler_, shape, speeds, moved).promotions;
      best_ns = std::min(best_ns, in_turns_ns(moved));
    };
    for (const double link : {1.0, 1.5, 2.0, 3.0}) {
      for (const double late : {1.0, 5.0, 20.0, 60.0}) {
        Speeds speeds = machine_.speeds();
        speeds.link = link;
        speeds.hand_off = speeds.wake = late;
        try_with(speeds, {});
        if (!machine_.model.fold().advances.empty()) try_with(speeds, machine_.model.fold());
      }
    }
    return best_ns;
  }
  int64_t best_at_home_ns() {
    return machine_.model.schedule(scheduler_, shape, best_speeds()).round_ns;
  }
  int64_t best_retreated_ns() {
    const Speeds speeds = best_speeds();
    int64_t best_ns = INT64_MAX;
    for (const std::vector<int>& retreats : machine_.model.retreats(shape, speeds)) {
      const Choice moved{.promotions = {}, .retreats = retreats, .advances = {}};
      best_ns = std::min(best_ns, machine_.model.schedule(scheduler_, shape, speeds, moved).round_ns);
    }
    const Choice& fold = machine_.model.fold();
    if (fold.advances.empty()) return best_ns;
    return std::min(best_ns, machine_.model.schedule(scheduler_, shape, speeds, fold).round_ns);
  }

  size_t num_promoted() { return policy_.choice_of(shape).choice.promotions.size(); }
  bool has_retreated() { return !policy_.choice_of(shape).choice.retreats.empty(); }
  bool spins() { return choice().spins; }
  bool has_folded() { return !policy_.choice_of(shape).choice.advances.empty(); }
  // Of a round, to the device, that do not wait for a copy.
  int64_t num_hand_offs() const {
    return std::ranges::count_if(round_.built.splits.runs, [](const auto& run) {
      return run.steps.front().wait_segment > 0 && !run.steps.front().pulls.empty();
    });
  }
  const Choice& choice() { return policy_.choice_of(shape).choice; }

  // The latest change's; empty: none since the last call.
  std::string reason() {
    std::string found;
    for (atsc_change change = policy_.take_change(); change.when_ns != 0;
         change = policy_.take_change()) {
      found = change.reason;
    }
    return found;
  }

  RoundShape shape{1, 1};
  bool has_memory = true;  // for what retreats
  int num_questions = 0, num_changes = 0;
  Machine& machine() { return machine_; }

 private:
  Speeds best_speeds() { return machine_.speeds(choice().spins); }

  static Placement placed_at_random(Random& random, const RandomPlan& plan) {
    Placement made = random_placement(random, plan, 0);
    made.num_slots = 2 + below(random, 2);
    made.slot_bytes = 1 << 20;
    for (auto& here : made.on_device) here = between(random, 0, 1) < 0.4;
    return made;
  }

  void play_round(Noise noise) {
    if (question_ && --delay_ == 0) {
      const auto answer = policy_.decide(*question_, scheduler_);
      if (has_memory || answer.choice.retreats.empty()) {
        policy_.settle(*question_, answer, {}, machine_.now_ns);
        num_changes += answer.is_worthwhile;
      } else {
        policy_.put_off(*question_, answer, machine_.now_ns + 60'000'000'000);
      }
      question_.reset();
    }
    const TransferPolicy::Adopted& adopted = policy_.choice_of(shape);
    if (adopted.version != round_.version) {
      round_.shape = shape;
      round_.built = build_round(setup_.plan, *setup_.residency, *place_, shape.num_tokens,
                                 shape.num_logit_rows, adopted.choice);
    }
    round_.version = adopted.version;
    policy_.observe(round_, machine_.turns.slice_ns > 0
                                ? machine_.run_in_turns(round_, adopted.choice, noise)
                                : machine_.run(round_, adopted.choice, noise));
    if (question_) return;
    question_ = policy_.due(shape, machine_.now_ns);
    delay_ = 2;
    num_questions += question_.has_value();
  }

  Random& random_;
  RandomPlan made_;
  Setup setup_;
  TransferPolicy policy_;
  Machine machine_;
  TransferScheduler scheduler_;
  SessionPlace* place_;
  std::optional<TransferQuestion> question_;
  HybridRound round_{.version = -1};
  int delay_ = 0;
};

}  // namespace atsc::testing
