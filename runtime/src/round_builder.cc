#include "round_builder.h"

#include <algorithm>

#include "failure.h"

namespace atsc {
namespace {

class Builder {
 public:
  Builder(const Plan& plan, const Residency& residency, const SessionPlace& place,
          int64_t num_tokens, int64_t num_logit_rows, const Choice& choice)
      : plan_(plan),
        residency_(residency),
        share_(residency.share()),
        place_(place),
        num_rows_{num_tokens, num_logit_rows},
        spins_(choice.spins),
        slot_of_unit_(static_cast<size_t>(plan.num_units), kNoSlot),
        place_of_unit_(static_cast<size_t>(plan.num_units), kNowhere),
        last_node_of_unit_(static_cast<size_t>(plan.num_units), -1),
        retreats_(static_cast<size_t>(plan.num_units)),
        copied_(static_cast<size_t>(plan.num_units), kNoPoint),
        slots_(static_cast<size_t>(residency.num_slots())) {
    for (const int unit : choice.retreats) retreats_[unit] = true;
    for (const Advance& advance : choice.advances) place_of_unit_[advance.unit] = advance.offset;
    for (const Promotion& promotion : choice.promotions) {
      if (promotion.slot >= residency.num_slots() ||
          (promotion.slot >= 0 && plan.units[promotion.unit].bytes > residency.slot_bytes())) {
        fail(ATSC_INTERNAL_ERROR, "unit %s was promoted to slot %d, which it does not fit",
             plan.units[promotion.unit].name, promotion.slot);
      }
      slot_of_unit_[promotion.unit] = promotion.slot;
    }
    assign_nodes();
    for (const Promotion& promotion : choice.promotions) {
      const bool is_used = last_node_of_unit_[promotion.unit] >= 0;
      if (is_used && promotion.slot >= 0) waiting_.push_back(promotion);
    }
  }

  BuiltRound build() {
    made_.splits = make_splits(plan_, runners_);
    if (made_.splits.runs.empty()) return std::move(made_);
    const int64_t ids = num_rows_[0] * static_cast<int64_t>(sizeof(int32_t));
    list().transfer(Branch::kCompute, residency_.round(), residency_.staging().address(),
                    share_.token_ids_offset + static_cast<uint64_t>(ids), next_stamp_++);
    copy_ahead(-1);
    for (size_t run = 0; run < made_.splits.runs.size(); ++run) add_run(static_cast<int>(run));
    return std::move(made_);
  }

 private:
  static constexpr int kNoSlot = -2;
  static constexpr CommandList::Point kNoPoint = -1;

  struct Slot {
    bool is_taken = false;
    CommandList::Point freed = kNoPoint;  // after its last use
  };

  CommandList& list() { return made_.commands; }
  int64_t rows_of(const NodeEntry& node) const { return num_rows_[static_cast<int>(node.rows)]; }

  void assign_nodes() {
    made_.caches_on_host.resize(static_cast<size_t>(plan_.num_caches));
    for (int node = 0; node < plan_.num_nodes; ++node) {
      const NodeEntry& entry = plan_.nodes[node];
      if (rows_of(entry) == 0) {
        runners_.push_back(Runner::kNobody);
        continue;
      }
      const bool comes = can_come(node);
      const bool promoted = comes && slot_of_unit_[entry.unit] != kNoSlot;
      const bool advances = comes && place_of_unit_[entry.unit] != kNowhere;
      if (promoted) last_node_of_unit_[entry.unit] = node;
      const bool retreats = share_.node_on_device[node] && retreats_[entry.unit];
      const bool here = promoted || advances || (share_.node_on_device[node] && !retreats);
      runners_.push_back(here ? Runner::kDevice : Runner::kHost);
      if (entry.layer >= 0 && retreats) made_.caches_on_host[entry.layer] = true;
    }
  }

  // Whether the device can compute a node of the host's, once its unit's weights are there.
  bool can_come(int node) const {
    const NodeEntry& entry = plan_.nodes[node];
    if (!share_.has_kernels(node) || entry.layer >= 0) return false;
    return std::ranges::all_of(entry.in, [&](const Operand& in) {
      if (in.kind != OperandKind::kWeight) return true;
      const int unit = share_.unit_at(in.index);
      return unit == entry.unit || share_.unit_on_device[unit];
    });
  }

  // Emits copies in order while their slots are free and their time has come.
  void copy_ahead(int node) {
    while (next_copy_ < waiting_.size()) {
      const Promotion& promotion = waiting_[next_copy_];
      Slot& slot = slots_[promotion.slot];
      if (slot.is_taken || promotion.not_before > node) return;
      if (slot.freed != kNoPoint) list().wait_for(Branch::kCopy, slot.freed);
      if (promotion.not_before >= 0) {
        list().wait_for(Branch::kCopy, list().record(Branch::kCompute));
      }
      const bool is_first = made_.promotion_stamps.empty();
      const bool may_wait = slot.freed != kNoPoint || promotion.not_before >= 0;
      const int begin = is_first || may_wait ? next_stamp_++ : kNoStamp;
      if (begin != kNoStamp) stamp_copies(begin);
      const UnitEntry& unit = plan_.units[promotion.unit];
      list().copy_to_device(Branch::kCopy, residency_.slot(promotion.slot),
                            residency_.weights() + unit.offset, unit.bytes);
      made_.promotion_stamps.push_back(
          {promotion.unit, begin, next_stamp_, next_stamp_ + 1, next_stamp_ + 2, 0});
      stamp_copies(next_stamp_);
      next_stamp_ += 3;
      copied_[promotion.unit] = list().record(Branch::kCopy);
      slot.is_taken = true;
      ++next_copy_;
    }
  }

  // What the copies' branch has reached, without holding it up.
  void stamp_copies(int stamp) {
    list().wait_for(Branch::kStamps, list().record(Branch::kCopy));
    list().stamp(Branch::kStamps, stamp);
  }

  void add_run(int index) {
    const DeviceRun& run = made_.splits.runs[index];
    made_.begin_stamps.push_back(kNoStamp);
    made_.end_stamps.push_back(kNoStamp);
    for (const DeviceStep& step : run.steps) add_step(step);
    wait_for_host(run.wait_segment);
    for (const int value : run.pushes) push(value);
    const bool has_logits = std::ranges::any_of(run.steps, [&](const DeviceStep& step) {
      return makes_logits(plan_.nodes[step.node]);
    });
    if (has_logits) {
      const uint64_t row = sizeof(float) * static_cast<uint64_t>(plan_.vocab_size);
      list().transfer(Branch::kCompute, place_.logits.address(), residency_.logits(),
                      row * static_cast<uint64_t>(num_rows_[1]));
    }
    made_.end_stamps.back() = next_stamp_++;
    if (run.is_awaited) {
      announce(index + 1);
    } else {
      list().stamp(Branch::kCompute, made_.end_stamps.back());
    }
  }

  static bool makes_logits(const NodeEntry& node) {
    return node.out[0].kind == OperandKind::kLogits;
  }

  void wait_for_host(int segment) {
    if (segment == 0) return;
    list().wait_flag(Branch::kCompute, kFlagFromHost, static_cast<uint32_t>(segment), spins_);
  }

  void push(int value) {
    send_pending();
    const uint64_t offset = plan_.values[value].offset;
    residency_.host_arena(offset, bytes_of(value), [&](DeviceAddress host, uint64_t at,
                                                       uint64_t bytes) {
      send_pending();
      pending_ = {host, residency_.arena() + at, bytes};
    });
  }

  // The last push of a run raises the flag itself.
  void send_pending() {
    if (pending_.bytes == 0) return;
    list().transfer(Branch::kCompute, pending_.target, pending_.source, pending_.bytes);
    pending_ = {};
  }

  void announce(int run) {
    list().send(Branch::kCompute, pending_.target, pending_.source, pending_.bytes,
                kFlagFromDevice, static_cast<uint32_t>(run), made_.end_stamps.back());
    pending_ = {};
  }

  void pull(int value) {
    residency_.host_arena(plan_.values[value].offset, bytes_of(value),
                          [&](DeviceAddress host, uint64_t at, uint64_t bytes) {
                            int& begin = made_.begin_stamps.back();
                            const int stamp = begin == kNoStamp ? next_stamp_++ : kNoStamp;
                            if (begin == kNoStamp) begin = stamp;
                            list().transfer(Branch::kCompute, residency_.arena() + at, host, bytes,
                                            stamp);
                          });
  }

  uint64_t bytes_of(int value) const {
    const RowsOf rows_of = rows_of_value(value);
    return value_bytes(plan_, value, rows_of, num_rows_[static_cast<int>(rows_of)]);
  }

  RowsOf rows_of_value(int value) const {
    for (int node = 0; node < plan_.num_nodes; ++node) {
      for (const Operand& out : plan_.nodes[node].out) {
        if (out.kind == OperandKind::kValue && static_cast<int>(out.index) == value) {
          return plan_.nodes[node].rows;
        }
      }
    }
    fail(ATSC_PLAN_ERROR, "value %d is made by no node", value);
  }

  void add_step(const DeviceStep& step) {
    const NodeEntry& node = plan_.nodes[step.node];
    copy_ahead(step.node);
    // What the device takes to go on after a copy is hidden where it has to wait for the host anyway. But
    // there it yields, so that spinning comes first.
    if (!spins_) wait_for_copy(node, step.wait_segment);
    wait_for_host(step.wait_segment);
    for (const int value : step.pulls) pull(value);
    if (spins_) wait_for_copy(node, 0);
    launch(step.node);
    if (last_node_of_unit_[node.unit] != step.node || slot_of_unit_[node.unit] < 0) return;
    Slot& slot = slots_[slot_of_unit_[node.unit]];
    slot.is_taken = false;
    slot.freed = list().record(Branch::kCompute);
    copy_ahead(step.node);
  }

  void wait_for_copy(const NodeEntry& node, int segment) {
    const int unit = node.unit;
    if (slot_of_unit_[unit] < 0 || waited_unit_ == unit) return;
    if (copied_[unit] == kNoPoint) {
      fail(ATSC_INTERNAL_ERROR, "unit %s is promoted to slot %d, which is never free for it",
           plan_.units[unit].name, slot_of_unit_[unit]);
    }
    auto& stamps = *std::ranges::find(made_.promotion_stamps, unit, &PromotionStamps::unit);
    stamps.wait_segment = segment;
    list().stamp(Branch::kCompute, stamps.wait);
    list().wait_for(Branch::kCompute, copied_[unit]);
    list().stamp(Branch::kCompute, stamps.ready);
    waited_unit_ = unit;
  }

  void launch(int index) {
    const NodeEntry& node = plan_.nodes[index];
    const int64_t rows = rows_of(node);
    const KernelHandle kernel = share_.kernel(index, rows <= kFewRows);
    DeviceArgs args{};
    for (int slot = 0; slot < kMaxInputs; ++slot) {
      args.in[slot] = as_operand(address_of(node, node.in[slot]));
    }
    for (int slot = 0; slot < kMaxOutputs; ++slot) {
      args.out[slot] = as_operand(address_of(node, node.out[slot]));
    }
    args.round = static_cast<const RoundParams*>(as_operand(residency_.round()));
    args.logit_rows = static_cast<const int*>(as_operand(residency_.logit_rows()));
    if (node.layer >= 0) {
      args.k_cache = as_operand(place_.caches[node.layer].k);
      args.v_cache = as_operand(place_.caches[node.layer].v);
      args.kv_capacity = plan_.caches[node.layer].capacity;
    }
    args.scratch = as_operand(residency_.scratch(kernel, args.kv_capacity));
    args.rows_of = node.rows == RowsOf::kTokens ? kDeviceTokens : kDeviceLogitRows;
    list().launch(Branch::kCompute, kernel, args,
                  {rows, args.kv_capacity, residency_.device().info().num_sms});
  }

  DeviceAddress address_of(const NodeEntry& node, const Operand& operand) const {
    switch (operand.kind) {
      case OperandKind::kNone: return 0;
      case OperandKind::kTokenIds: return residency_.token_ids();
      case OperandKind::kLogits: return residency_.logits();
      case OperandKind::kValue:
        return residency_.arena() + plan_.values[operand.index].offset;
      case OperandKind::kWeight: break;
    }
    const int unit = share_.unit_at(operand.index);
    const uint64_t inside = operand.index - plan_.units[unit].offset;
    const bool is_own = unit == node.unit;
    if (is_own && slot_of_unit_[unit] >= 0) return inside + residency_.slot(slot_of_unit_[unit]);
    if (is_own && place_of_unit_[unit] != kNowhere) {
      return inside + residency_.place(place_of_unit_[unit]);
    }
    return inside + residency_.unit(unit);
  }

  struct Push {
    DeviceAddress target = 0, source = 0;
    uint64_t bytes = 0;
  };

  const Plan& plan_;
  const Residency& residency_;
  const DeviceShare& share_;
  const SessionPlace& place_;
  const int64_t num_rows_[2];  // by RowsOf
  const bool spins_;
  std::vector<Runner> runners_;
  std::vector<int> slot_of_unit_, last_node_of_unit_;
  std::vector<uint64_t> place_of_unit_;  // of those that advance, in the region of weights
  std::vector<bool> retreats_;  // a unit
  std::vector<CommandList::Point> copied_;
  std::vector<Slot> slots_;
  Promotions waiting_;  // for their copies
  size_t next_copy_ = 0;
  int waited_unit_ = -1;
  int next_stamp_ = 0;
  Push pending_;
  BuiltRound made_;
};

}  // namespace

BuiltRound build_round(const Plan& plan, const Residency& residency, const SessionPlace& place,
                       int64_t num_tokens, int64_t num_logit_rows, const Choice& choice) {
  return Builder(plan, residency, place, num_tokens, num_logit_rows, choice).build();
}

Choice streaming_choice(const Plan& plan, const Residency& residency, bool many_logit_rows) {
  std::vector<bool> is_for_logits(static_cast<size_t>(plan.num_units));
  for (int node = 0; node < plan.num_nodes; ++node) {
    if (plan.nodes[node].rows == RowsOf::kLogitRows) is_for_logits[plan.nodes[node].unit] = true;
  }
  Choice choice;
  int next = 0;
  for (int unit = 0; unit < plan.num_units; ++unit) {
    const UnitEntry& entry = plan.units[unit];
    if (entry.kind != UnitKind::kWeights || residency.share().unit_on_device[unit]) continue;
    if (entry.bytes > residency.slot_bytes() || residency.num_slots() == 0) continue;
    if (is_for_logits[unit] && !many_logit_rows) continue;
    const int slot = entry.bytes > 0 ? next % residency.num_slots() : -1;
    choice.promotions.push_back({.unit = unit, .slot = slot});
    if (entry.bytes > 0) ++next;
  }
  return choice;
}

}  // namespace atsc
