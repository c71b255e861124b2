// What the opaque handles of the C interface are.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "atsc.h"
#include "executor.h"
#include "graph_executor.h"
#include "hybrid_executor.h"
#include "recorder.h"
#include "residency.h"
#include "rungs.h"
#include "session.h"
#include "weights.h"

struct atsc_plan {
  atsc::Pool pool;
  atsc::OpenedDevice opened;
  atsc::platform::Mapping weights;
  atsc::Executor executor;
  std::unique_ptr<atsc::Residency> residency;     // null: everything is on the host
  std::unique_ptr<atsc::HybridExecutor> hybrid;   // likewise
  std::unique_ptr<atsc::GraphExecutor> graph;     // null: a language model
  std::vector<const char*> graph_names;           // of its inputs, then of its outputs
  std::string notice;
  int32_t max_sessions;
  std::mutex rounds;          // one round at a time
  std::mutex sessions;        // guards num_sessions
  int32_t num_sessions = 0;

  atsc_plan(const atsc_plan_options& options, const atsc::DeviceWishes& wishes,
            uint32_t isa_levels, atsc::WeightsMode mode)
      : pool(options.num_threads),
        opened(atsc::open_device(atsc::kPlan, wishes)),
        weights(uses_device() ? atsc::platform::Mapping::anonymous(atsc::kPlan.weights_bytes, true,
                                                                   "weights")
                              : atsc::load_weights(atsc::kPlan, options.weights_path, mode, pool)),
        executor(atsc::kPlan, weights.data(), isa_levels, pool),
        notice(opened.notice),
        max_sessions(wishes.sessions) {
    if (atsc::kPlan.graph != nullptr) open_graph(*atsc::kPlan.graph, isa_levels);
    if (!uses_device()) return;
    opened.device->set_least_plain(static_cast<atsc::BuildMode>(options.rounds));
    residency = std::make_unique<atsc::Residency>(
        atsc::kPlan, *opened.device, opened.placement, max_sessions,
        atsc::Residency::HostMemory{weights.data(), executor.arena()}, options.weights_path, pool);
    hybrid = std::make_unique<atsc::HybridExecutor>(
        atsc::kPlan, *residency, executor, pool,
        atsc::TransferOptions{static_cast<atsc::TransferMode>(options.transfer),
                              options.drift_threshold > 0 ? options.drift_threshold : 0.15,
                              options.reschedule_interval > 0 ? options.reschedule_interval : 5,
                              options.yield_gpu == 0});
    if (!notice.empty() && !residency->notice().empty()) notice += "; ";
    notice += residency->notice();
  }

  void open_graph(const atsc::GraphTables& tables, uint32_t isa_levels) {
    graph = std::make_unique<atsc::GraphExecutor>(tables, weights.data(), isa_levels, pool);
    for (int i = 0; i < tables.num_inputs; ++i) graph_names.push_back(tables.inputs[i].name);
    for (int i = 0; i < tables.num_outputs; ++i) graph_names.push_back(tables.outputs[i].name);
  }

  // A plan without placements is opened to be profiled: it has a device, and runs on the CPU.
  bool uses_device() const { return opened.device && atsc::kPlan.device.num_rungs > 0; }

  bool run(const atsc::Round& round, atsc::SessionPlace* place) {
    return hybrid ? hybrid->run(round, *place) : executor.run(round);
  }
};

namespace atsc {

// A session's place on the device, while the session lives.
class HeldPlace {
 public:
  explicit HeldPlace(atsc_plan& plan)
      : plan_(plan), place_(plan.residency ? plan.residency->take_place() : nullptr) {}
  ~HeldPlace() {
    if (place_ == nullptr) return;
    const std::lock_guard lock(plan_.rounds);
    plan_.hybrid->forget(*place_);
    plan_.residency->give_back(place_);
  }
  HeldPlace(const HeldPlace&) = delete;

  SessionPlace* get() const { return place_; }

 private:
  atsc_plan& plan_;
  SessionPlace* const place_;
};

}  // namespace atsc

struct atsc_session {
  atsc_plan* plan;
  atsc::HeldPlace place;
  atsc::Session state;
  std::optional<atsc::Recorder> recorder;  // none: rounds leave no record

  explicit atsc_session(atsc_plan* plan)
      : plan(plan), place(*plan), state(atsc::kPlan, place.get()) {}
};
