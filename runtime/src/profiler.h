// Times of units and of the way between host and device, measured with the plan's own kernels: what
// the compiler's profiling pass (passes/annotate.py) asks for.
//
// Weights and caches are cold, as they are in a round of a model that is larger than any cache: on
// the host their lines are flushed before each run, on the device copies of them take turns.
// Activations are in the caches, as a round would have left them. What a unit reads of others is
// made up (profiler_inputs.h), and Q8 values are made of that by the kernels of a round.
// Source: ATSInfer 4.3.1.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device.h"
#include "executor.h"
#include "residency.h"
#include "tables.h"

namespace atsc {

struct LinkProfile {
  double to_device_bytes_per_s, to_host_bytes_per_s;  // pinned, by the copy engines
  double hand_off_to_device_ns, hand_off_to_host_ns;  // as in a decode round, payload included
  double to_device_beside_cpu_bytes_per_s;
  double cpu_slowdown;           // time beside such copies / time alone
  uint64_t fixed_device_bytes;   // held whatever is resident: context, modules, activations, ...
};

class Profiler {
 public:
  // `weights` holds all of weights.bin; `device` may be null.
  Profiler(const Plan& plan, Executor& executor, Pool& pool, const std::byte* weights,
           Device* device);
  ~Profiler();
  Profiler(const Profiler&) = delete;

  // Nanoseconds of a unit's nodes in a round of `rows` tokens after `position` others, with one row
  // of logits. A unit of which nothing can run on the device takes what it takes on the host.
  int64_t unit_ns(int unit, bool on_device, int64_t rows, int64_t position);

  LinkProfile link();

 private:
  struct Inputs;
  struct HostWork;
  struct DeviceWork;

  Device& device() const;
  int64_t time_segment(const HostWork& work);
  std::vector<int> nodes_of(int unit) const;
  int maker_of(uint64_t value) const;
  int64_t rows_of(uint64_t value, int64_t tokens) const;
  Inputs inputs_of(const std::vector<int>& nodes, int64_t tokens);
  void fill_input(uint64_t value, int64_t tokens, std::byte* place);
  std::unique_ptr<HostWork> host_work(const std::vector<int>& nodes, int64_t rows, int64_t position,
                                      bool shares_outputs = false);
  int64_t host_ns(int unit, int64_t rows, int64_t position);
  int64_t device_ns(int unit, const std::vector<int>& nodes, const DeviceShare& share,
                    int64_t rows, int64_t position);
  void upload(const DeviceWork& work, int64_t position);
  void record_copy(CommandList& list, const DeviceWork& work, int copy) const;
  double copy_rate(bool to_device, uint64_t bytes);
  void measure_hand_offs(LinkProfile& profile, uint64_t bytes);
  void measure_beside_cpu(LinkProfile& profile, uint64_t bytes);

  const Plan& plan_;
  Executor& executor_;
  Pool& pool_;
  const std::byte* weights_;
  Device* device_;
};

}  // namespace atsc
