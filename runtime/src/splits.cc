#include "splits.h"

#include <algorithm>

namespace atsc {
namespace {

// One pass over the nodes; what it has seen so far.
class Cutter {
 public:
  Cutter(const Plan& plan, std::span<const Runner> runners)
      : plan_(plan), runners_(runners), values_(static_cast<size_t>(plan.num_values)) {
    made_.crosses.resize(values_.size());
    note_readers();
  }

  Splits cut() {
    for (int node = 0; node < plan_.num_nodes; ++node) {
      if (runners_[node] == Runner::kHost) add_to_host(node);
      if (runners_[node] == Runner::kDevice) add_to_device(node);
    }
    if (in_run_) end_run();
    for (const HostSegment& segment : made_.segments) {
      if (segment.await_run > 0) made_.runs[segment.await_run - 1].is_awaited = true;
    }
    return std::move(made_);
  }

 private:
  struct Value {
    bool read_by_host = false, read_by_device = false;
    int segment = 0, run = 0;  // that made it
    int pulled_in = 0;         // run
  };

  template <class Use>
  void for_values(const Operand* operands, int count, Use&& use) const {
    for (int slot = 0; slot < count; ++slot) {
      if (operands[slot].kind == OperandKind::kValue) use(static_cast<int>(operands[slot].index));
    }
  }

  void note_readers() {
    for (int node = 0; node < plan_.num_nodes; ++node) {
      for_values(plan_.nodes[node].in, kMaxInputs, [&](int value) {
        if (runners_[node] == Runner::kHost) values_[value].read_by_host = true;
        if (runners_[node] == Runner::kDevice) values_[value].read_by_device = true;
      });
    }
  }

  bool overlap(int one, int other) const {
    const ValueEntry &a = plan_.values[one], &b = plan_.values[other];
    return a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
  }

  void add_to_host(int node) {
    if (in_run_) end_run();
    const NodeEntry& entry = plan_.nodes[node];
    int await = 0;
    for_values(entry.in, kMaxInputs, [&](int v) { await = std::max(await, values_[v].run); });
    for_values(entry.out, kMaxOutputs, [&](int written) {
      for (const int pulled : pulled_) {
        if (overlap(written, pulled)) await = std::max(await, values_[pulled].pulled_in);
      }
    });
    if (!in_segment_ || await > awaited_run_) {
      made_.segments.push_back({await > awaited_run_ ? await : 0, {}});
      awaited_run_ = std::max(awaited_run_, await);
      in_segment_ = true;
      std::erase_if(pulled_, [&](int v) { return values_[v].pulled_in <= awaited_run_; });
    }
    made_.segments.back().nodes.push_back(node);
    for_values(entry.out, kMaxOutputs, [&](int value) {
      values_[value].segment = static_cast<int>(made_.segments.size());
      made_.crosses[value] = values_[value].read_by_device;
    });
  }

  void add_to_device(int node) {
    in_segment_ = false;
    if (!in_run_) made_.runs.emplace_back();
    in_run_ = true;
    DeviceStep step{node};
    const NodeEntry& entry = plan_.nodes[node];
    const int run = static_cast<int>(made_.runs.size());
    for_values(entry.in, kMaxInputs, [&](int value) {
      Value& v = values_[value];
      if (v.segment == 0 || v.pulled_in > 0) return;
      v.pulled_in = run;
      pulled_.push_back(value);
      step.pulls.push_back(value);
      step.wait_segment = std::max(step.wait_segment, v.segment);
    });
    if (step.wait_segment <= waited_segment_) step.wait_segment = 0;
    waited_segment_ = std::max(waited_segment_, step.wait_segment);
    for_values(entry.out, kMaxOutputs, [&](int value) {
      values_[value].run = run;
      if (values_[value].read_by_host) made_.runs.back().pushes.push_back(value);
    });
    made_.runs.back().steps.push_back(std::move(step));
  }

  // The host may still be at segments that use the places that this run pushes to.
  void end_run() {
    in_run_ = false;
    DeviceRun& run = made_.runs.back();
    for (int segment = static_cast<int>(made_.segments.size()); segment > waited_segment_;
         --segment) {
      if (!uses_any(made_.segments[segment - 1], run.pushes)) continue;
      run.wait_segment = waited_segment_ = segment;
    }
  }

  bool uses_any(const HostSegment& segment, const std::vector<int>& places) const {
    bool found = false;
    for (const int node : segment.nodes) {
      const auto look = [&](int used) {
        for (const int place : places) found = found || overlap(used, place);
      };
      for_values(plan_.nodes[node].in, kMaxInputs, look);
      for_values(plan_.nodes[node].out, kMaxOutputs, look);
    }
    return found;
  }

  const Plan& plan_;
  std::span<const Runner> runners_;
  std::vector<Value> values_;
  std::vector<int> pulled_;  // by runs that the host has not waited for
  Splits made_;
  bool in_segment_ = false, in_run_ = false;
  int awaited_run_ = 0, waited_segment_ = 0;
};

}  // namespace

Splits make_splits(const Plan& plan, std::span<const Runner> runners) {
  return Cutter(plan, runners).cut();
}

uint64_t value_bytes(const Plan& plan, int value, RowsOf rows_of, int64_t rows) {
  const int64_t most = rows_of == RowsOf::kTokens ? plan.chunk : plan.max_logit_rows;
  // The entry's bytes are those of the most rows, rounded up to 64: a little more does no harm.
  const uint64_t of_row = plan.values[value].bytes / static_cast<uint64_t>(most) / 4 * 4;
  return of_row * static_cast<uint64_t>(rows);
}

}  // namespace atsc
