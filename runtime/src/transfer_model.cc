#include "transfer_model.h"

#include <algorithm>
#include <cmath>

#include "transfer_turns.h"

namespace atsc {
namespace {

constexpr size_t kMostRetreats = 8;  // sets to try; each takes up to a millisecond to schedule

bool reads_own_weights(const DeviceShare& share, const NodeEntry& node) {
  return std::ranges::any_of(node.in, [&](const Operand& in) {
    return in.kind == OperandKind::kWeight && share.unit_at(in.index) == node.unit;
  });
}

double between(int64_t of_token, int64_t of_chunk, int64_t rows, int64_t chunk) {
  if (rows <= 1) return static_cast<double>(of_token);
  if (rows >= chunk) return static_cast<double>(of_chunk);
  const double share = static_cast<double>(rows) / static_cast<double>(chunk);
  return std::max(static_cast<double>(of_token), static_cast<double>(of_chunk) * share);
}

}  // namespace

TransferModel::TransferModel(const Plan& plan, const Residency& residency)
    : plan_(plan),
      residency_(residency),
      units_(static_cast<size_t>(plan.num_units)),
      unit_timed_at_(static_cast<size_t>(plan.num_nodes), -1) {
  for (int node = 0; node < plan.num_nodes; ++node) {
    const int unit = plan.nodes[node].unit;
    if (units_[static_cast<size_t>(unit)].first_node >= 0) continue;
    units_[static_cast<size_t>(unit)].first_node = node;
    order_.push_back(unit);
  }
  UnitTimes token{}, chunk{};
  for (const int unit : order_) {
    describe(unit);
    const UnitEntry& entry = plan.units[unit];
    if (units_[static_cast<size_t>(unit)].rows == RowsOf::kLogitRows) continue;
    token.cpu_ns += entry.decode.cpu_ns;
    token.gpu_ns += entry.decode.gpu_ns;
    chunk.cpu_ns += entry.prefill.cpu_ns;
    chunk.gpu_ns += entry.prefill.gpu_ns;
  }
  pin_interleaved();
  find_lendable();
  fold_ = folded();
  has_times_ = token.cpu_ns > 0 && token.gpu_ns > 0;
  const auto ratio = [](int64_t of_chunk, int64_t of_token) {
    const auto most = static_cast<double>(std::max(of_chunk, of_token));
    return most / static_cast<double>(std::max<int64_t>(of_token, 1));
  };
  cpu_growth_ = ratio(chunk.cpu_ns, token.cpu_ns);
  gpu_growth_ = ratio(chunk.gpu_ns, token.gpu_ns);
}

// A unit's time counts at the node that takes most of it: the last one that reads its weights, or
// attention. Its other nodes may run elsewhere.
void TransferModel::describe(int index) {
  const DeviceShare& share = residency_.share();
  Unit& unit = units_[static_cast<size_t>(index)];
  int timed = -1;
  for (int node = unit.first_node; node < plan_.num_nodes; ++node) {
    const NodeEntry& entry = plan_.nodes[node];
    if (entry.unit != index) continue;
    unit.last_node = node;
    const bool is_main = entry.layer >= 0 || reads_own_weights(share, entry);
    if (is_main || timed < 0) timed = node;
    unit.can_come |= entry.layer < 0 && share.has_kernels(node) && reads_own_weights(share, entry);
  }
  unit_timed_at_[static_cast<size_t>(timed)] = index;
  unit.rows = plan_.nodes[timed].rows;
  unit.on_device = share.node_on_device[static_cast<size_t>(timed)] != 0;
  unit.can_come &= plan_.units[index].kind == UnitKind::kWeights &&
                   share.unit_on_device[static_cast<size_t>(index)] == 0;
  unit.can_be_promoted = unit.can_come;
  for (const Operand& in : plan_.nodes[unit.first_node].in) {
    if (in.kind == OperandKind::kValue) {
      unit.input_bytes += static_cast<double>(plan_.values[in.index].bytes);
    }
  }
}

// Promotions take the slots in turn. Where the nodes of two units alternate, both need a slot at a
// time, so that a unit which may still hold the slot of a later one stays where it is.
void TransferModel::pin_interleaved() {
  std::vector<Unit*> units;
  for (const int index : order_) {
    Unit& unit = units_[static_cast<size_t>(index)];
    if (unit.can_be_promoted) units.push_back(&unit);
  }
  const auto num_slots = static_cast<size_t>(residency_.num_slots());
  for (size_t at = 0; at + num_slots < units.size(); ++at) {
    if (units[at]->last_node > units[at + num_slots]->first_node) units[at]->can_be_promoted = false;
  }
}

// Weights that nodes of other units read as well stay where they are.
void TransferModel::find_lendable() {
  const DeviceShare& share = residency_.share();
  for (const int unit : order_) {
    const bool is_there = share.unit_offsets[static_cast<size_t>(unit)] != kNowhere;
    units_[static_cast<size_t>(unit)].is_lendable =
        is_there && plan_.units[unit].kind == UnitKind::kWeights && plan_.units[unit].bytes > 0;
  }
  for (int node = 0; node < plan_.num_nodes; ++node) {
    for (const Operand& in : plan_.nodes[node].in) {
      if (in.kind != OperandKind::kWeight) continue;
      const int unit = share.unit_at(in.index);
      if (unit != plan_.nodes[node].unit) units_[static_cast<size_t>(unit)].is_lendable = false;
    }
  }
}

std::vector<Advance> TransferModel::places_for(std::span<const int> units,
                                               std::span<const int> retreats) const {
  struct Gap {
    uint64_t begin, end;
  };
  const DeviceShare& share = residency_.share();
  std::vector<Gap> gaps;
  for (const int unit : retreats) {
    if (!units_[static_cast<size_t>(unit)].is_lendable) continue;
    const uint64_t begin = share.unit_offsets[static_cast<size_t>(unit)];
    gaps.push_back({begin, begin + DeviceShare::room_of(plan_.units[unit])});
  }
  std::ranges::sort(gaps, {}, &Gap::begin);
  size_t num_gaps = 0;  // once neighbours are one
  for (const Gap& gap : gaps) {
    if (num_gaps > 0 && gaps[num_gaps - 1].end == gap.begin) {
      gaps[num_gaps - 1].end = gap.end;
    } else {
      gaps[num_gaps++] = gap;
    }
  }
  gaps.resize(num_gaps);
  std::vector<Advance> placed;
  for (const int unit : units) {
    const uint64_t room = DeviceShare::room_of(plan_.units[unit]);
    if (!units_[static_cast<size_t>(unit)].can_come || room == 0) continue;
    const auto gap = std::ranges::find_if(gaps, [&](const Gap& each) {
      return each.end - each.begin >= room;
    });
    if (gap == gaps.end()) continue;
    placed.push_back({unit, gap->begin});
    gap->begin += room;
  }
  std::ranges::sort(placed, {}, &Advance::unit);
  return placed;
}

// The host computes the first units of a round: as few as leave room for the others.
Choice TransferModel::folded() const {
  for (size_t split = 1; split < order_.size(); ++split) {
    Choice choice;
    std::vector<int> coming;
    uint64_t room = 0, needed = 0;
    for (size_t at = 0; at < order_.size(); ++at) {
      const Unit& unit = units_[static_cast<size_t>(order_[at])];
      const uint64_t bytes = DeviceShare::room_of(plan_.units[order_[at]]);
      if (at < split && unit.on_device) {
        choice.retreats.push_back(order_[at]);
        if (unit.is_lendable) room += bytes;
      } else if (at >= split && unit.can_come) {
        coming.push_back(order_[at]);
        needed += bytes;
      }
    }
    if (coming.empty() || choice.retreats.empty() || room < needed) continue;
    choice.advances = places_for(coming, choice.retreats);
    if (choice.advances.size() < coming.size()) continue;
    std::ranges::sort(choice.retreats);
    return choice;
  }
  return {};
}

bool TransferModel::runs(int unit, const RoundShape& shape) const {
  const Unit& entry = units_[static_cast<size_t>(unit)];
  if (entry.first_node < 0) return false;
  return entry.rows == RowsOf::kTokens || shape.num_logit_rows > 0;
}

TransferModel::Times TransferModel::times(int unit, const RoundShape& shape) const {
  if (!runs(unit, shape)) return {0, 0};
  const UnitEntry& entry = plan_.units[unit];
  const int64_t chunk = plan_.chunk;
  if (units_[static_cast<size_t>(unit)].rows == RowsOf::kLogitRows) {
    const double share =
        static_cast<double>(shape.num_logit_rows) / static_cast<double>(chunk);
    return {static_cast<double>(entry.decode.cpu_ns) * std::max(1.0, cpu_growth_ * share),
            static_cast<double>(entry.decode.gpu_ns) * std::max(1.0, gpu_growth_ * share)};
  }
  return {between(entry.decode.cpu_ns, entry.prefill.cpu_ns, shape.num_tokens, chunk),
          between(entry.decode.gpu_ns, entry.prefill.gpu_ns, shape.num_tokens, chunk)};
}

double TransferModel::transfer_ns(int unit) const {
  return static_cast<double>(plan_.units[unit].transfer_ns);
}

double TransferModel::cpu_share() const {
  const double share = plan_.device.cpu_share;
  return share > 0 && share <= 1 ? share : 1;
}

uint64_t TransferModel::promoted_bytes(const Choice& choice) const {
  uint64_t bytes = 0;
  for (const Promotion& promotion : choice.promotions) bytes += plan_.units[promotion.unit].bytes;
  return bytes;
}

// In order of execution.
std::vector<int> TransferModel::running(const RoundShape& shape) const {
  std::vector<int> found;
  for (const int unit : order_) {
    if (runs(unit, shape)) found.push_back(unit);
  }
  return found;
}

std::vector<TransferUnit> TransferModel::units_of(const RoundShape& shape, const Speeds& speeds,
                                                  const Choice& moved) const {
  std::vector<TransferUnit> made;
  made.reserve(order_.size());
  const double link_ns = plan_.device.link_bytes_per_s > 0 ? 1e9 / plan_.device.link_bytes_per_s : 0;
  for (const int index : running(shape)) {
    const Unit& unit = units_[static_cast<size_t>(index)];
    const Times now = times(index, shape);
    const int64_t rows = unit.rows == RowsOf::kTokens ? shape.num_tokens : shape.num_logit_rows;
    const double bytes = unit.input_bytes * static_cast<double>(rows) / plan_.chunk;
    const auto crossing_ns = std::llrint(hand_off_ns() * speeds.hand_off + bytes * link_ns);
    const bool advances =
        std::ranges::binary_search(moved.advances, index, {}, &Advance::unit);
    const bool on_device =
        advances || (unit.on_device && !std::ranges::binary_search(moved.retreats, index));
    // To go on after a copy takes the device as long as a hand-off, which hides it.
    const int64_t resume_ns = on_device ? 0 : plan_.device.hand_off_ns;
    made.push_back({
        .cpu_ns = std::llrint(now.cpu_ns * speeds.cpu[static_cast<size_t>(index)]),
        .gpu_ns = std::llrint(now.gpu_ns * speeds.gpu[static_cast<size_t>(index)]) + resume_ns,
        .transfer_ns = plan_.units[index].transfer_ns,
        .to_device_ns = std::max<int64_t>(crossing_ns - resume_ns, 0),
        .to_host_ns = crossing_ns,
        .bytes = plan_.units[index].bytes,
        .on_device = on_device,
        .can_be_promoted = unit.can_be_promoted && !advances,
    });
  }
  return made;
}

// A device that yielded comes back from a wait for a copy as late as from one for the host.
TransferMachine TransferModel::machine(const Speeds& speeds) const {
  return {.num_slots = residency_.num_slots(),
          .slot_bytes = residency_.slot_bytes(),
          .link_factor = speeds.link,
          .cpu_share = cpu_share(),
          .late_ns = std::llrint(hand_off_ns() * std::max(speeds.wake - 1, 0.0))};
}

// Without promotions, a stretch that stays on the device costs the same whatever the others do: its
// time there and two hand-offs, or one if nothing follows; the last set is the best then. With
// promotions a smaller one may be.
std::vector<std::vector<int>> TransferModel::retreats(const RoundShape& shape,
                                                      const Speeds& speeds) const {
  struct Stretch {
    double share;  // of its time on the device that it takes on the host
    std::ptrdiff_t first, end;
  };
  const std::vector<TransferUnit> units = units_of(shape, speeds, {});
  std::vector<Stretch> stretches;
  for (size_t first = 1; first < units.size(); ++first) {
    if (!units[first].on_device || units[first - 1].on_device) continue;
    size_t end = first;
    int64_t gpu_ns = units[first].to_device_ns, cpu_ns = 0;
    for (; end < units.size() && units[end].on_device; ++end) {
      gpu_ns += units[end].gpu_ns;
      cpu_ns += units[end].cpu_ns;
    }
    if (end < units.size()) gpu_ns += units[end].to_host_ns;
    const double share = static_cast<double>(cpu_ns) /
                         static_cast<double>(std::max<int64_t>(gpu_ns, 1));
    if (share < 1) {
      stretches.push_back({share, static_cast<std::ptrdiff_t>(first),
                           static_cast<std::ptrdiff_t>(end)});
    }
    first = end;
  }
  std::ranges::stable_sort(stretches, {}, &Stretch::share);
  const std::vector<int> indices = running(shape);
  const size_t num_sets = std::min(stretches.size(), kMostRetreats);
  std::vector<std::vector<int>> sets;
  for (size_t number = 1; number <= num_sets; ++number) {
    std::vector<int>& made = sets.emplace_back();
    for (size_t taken = 0; taken < stretches.size() * number / num_sets; ++taken) {
      made.insert(made.end(), indices.begin() + stretches[taken].first,
                  indices.begin() + stretches[taken].end);
    }
    std::ranges::sort(made);
  }
  return sets;
}

TransferSchedule TransferModel::schedule(TransferScheduler& scheduler, const RoundShape& shape,
                                         const Speeds& speeds, const Choice& moved) const {
  const std::vector<TransferUnit> units = units_of(shape, speeds, moved);
  TransferSchedule found = scheduler.schedule(units, machine(speeds));
  const std::vector<int> indices = running(shape);
  for (Promotion& promotion : found.promotions) {
    promotion.unit = indices[static_cast<size_t>(promotion.unit)];
  }
  return found;
}

int64_t TransferModel::predict(TransferScheduler& scheduler, const RoundShape& shape,
                               const Speeds& speeds, const Choice& choice) const {
  return scheduler.predict(units_of(shape, speeds, choice), machine(speeds),
                           promoted_in(shape, choice.promotions));
}

int64_t TransferModel::predict_in_turns(const RoundShape& shape, const Speeds& between,
                                        int64_t slice_ns, const Choice& choice) const {
  return atsc::predict_in_turns(units_of(shape, between, choice), machine(between),
                                promoted_in(shape, choice.promotions), slice_ns, choice.spins);
}

// A byte for each unit that runs.
std::vector<uint8_t> TransferModel::promoted_in(const RoundShape& shape,
                                                const Promotions& promotions) const {
  std::vector<uint8_t> promoted;
  for (const int unit : running(shape)) {
    promoted.push_back(std::ranges::find(promotions, unit, &Promotion::unit) != promotions.end());
  }
  return promoted;
}

}  // namespace atsc
