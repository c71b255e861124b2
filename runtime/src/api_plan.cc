#include "api_plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "api_calls.h"
#include "api_handles.h"
#include "isa.h"
#include "profiler.h"
#include "recorder.h"

namespace atsc {
namespace {

uint32_t isa_levels_up_to(const char* isa) {
  const uint32_t here = atsc_cpu_isa_levels();
  if (!(here & 1)) {
    fail(ATSC_DEVICE_ERROR, "this CPU lacks AVX2 and FMA (x86-64-v3), which the plan needs: run it "
                            "on a newer one");
  }
  if (isa == nullptr || *isa == '\0') return here;
  for (int level = 0; level < kNumIsaLevels; ++level) {
    if (std::strcmp(isa, atsc_isa_names[level]) != 0) continue;
    if (here >> level & 1) return here & ((2u << level) - 1);
    fail(ATSC_DEVICE_ERROR, "this CPU lacks %s: choose a lower level, or none", isa);
  }
  fail(ATSC_INVALID_ARGUMENT, "no ISA level is called %s: expected avx2, avxvnni, avx512, "
                              "avx512vnni or amx", isa);
}

void check_options(const atsc_plan_options& options) {
  present(options.weights_path, "options.weights_path");
  if (options.weights_mode != ATSC_WEIGHTS_MAP && options.weights_mode != ATSC_WEIGHTS_READ) {
    fail(ATSC_INVALID_ARGUMENT, "options.weights_mode is %d: expected ATSC_WEIGHTS_MAP or _READ",
         options.weights_mode);
  }
  if (options.max_sessions < 0) {
    fail(ATSC_INVALID_ARGUMENT, "options.max_sessions is %d", options.max_sessions);
  }
  if (options.num_units != 0 && options.num_units != kPlan.num_units) {
    fail(ATSC_INVALID_ARGUMENT, "options.num_units is %d: the plan has %d", options.num_units,
         kPlan.num_units);
  }
  if (options.transfer < ATSC_TRANSFER_LOAD_AWARE || options.transfer > ATSC_TRANSFER_NONE) {
    fail(ATSC_INVALID_ARGUMENT, "options.transfer is %d: expected ATSC_TRANSFER_*",
         options.transfer);
  }
  if (options.rounds < ATSC_ROUNDS_GRAPH || options.rounds > ATSC_ROUNDS_SYNCHRONOUS) {
    fail(ATSC_INVALID_ARGUMENT, "options.rounds is %d: expected ATSC_ROUNDS_*", options.rounds);
  }
  const auto check_amount = [](double amount, const char* name) {
    if (amount >= 0 && amount < 1e9) return;
    fail(ATSC_INVALID_ARGUMENT, "options.%s is %g: expected a number above 0, or 0 for the default",
         name, amount);
  };
  check_amount(options.drift_threshold, "drift_threshold");
  check_amount(options.reschedule_interval, "reschedule_interval");
  if (kPlan.abi_version != kAbiVersion) {
    fail(ATSC_PLAN_ERROR, "the plan's tables are of version %u, its runtime of version %u: "
                          "compile the model again", kPlan.abi_version, kAbiVersion);
  }
}

DeviceWishes wishes_of(const atsc_plan_options& options, uint32_t isa_levels) {
  DeviceWishes wishes;
  wishes.vram_bytes = options.vram_bytes;
  wishes.ordinal = options.device_ordinal;
  wishes.use_device = options.no_device == 0;
  wishes.sessions = std::max(1, options.max_sessions);
  wishes.strict = options.strict != 0;
  const std::string path = options.weights_path;
  const size_t slash = path.rfind('/');
  wishes.directory = slash == std::string::npos ? "." : path.substr(0, slash);
  if (options.num_units > 0) {
    const uint8_t* bits = &present(options.on_device, "options.on_device");
    wishes.on_device.assign(bits, bits + options.num_units);
  }
  wishes.virtual_device.isa_levels = isa_levels;
  if (options.virtual_device == nullptr) return wishes;
  const auto given = read_struct(options.virtual_device, "options.virtual_device");
  wishes.occupied_bytes = given.occupied_bytes;
  wishes.virtual_device.context_bytes = given.context_bytes;
  if (given.limits_pinning) wishes.virtual_device.pinnable_bytes = given.pinnable_bytes;
  wishes.virtual_device.has_graphs = given.no_graphs == 0;
  wishes.virtual_device.link_bytes_per_s = given.link_bytes_per_s;
  return wishes;
}

// Where the device refuses something after all, the plan runs without it and says so.
std::unique_ptr<atsc_plan> open_plan(const atsc_plan_options& options) {
  const char* isa = options.isa != nullptr ? options.isa : std::getenv("ATSC_ISA");
  const uint32_t isa_levels = isa_levels_up_to(isa);
  const auto mode = options.weights_mode == ATSC_WEIGHTS_READ ? WeightsMode::kRead
                    : options.verify ? WeightsMode::kMapAndVerify
                                     : WeightsMode::kMap;
  DeviceWishes wishes = wishes_of(options, isa_levels);
  try {
    return std::make_unique<atsc_plan>(options, wishes, isa_levels, mode);
  } catch (const Failure& failure) {
    const bool has_device = kPlan.device.kind != DeviceKind::kNone && wishes.use_device;
    if (failure.status != ATSC_DEVICE_ERROR || !has_device || wishes.strict) throw;
    wishes.use_device = false;
    auto plan = std::make_unique<atsc_plan>(options, wishes, isa_levels, mode);
    plan->notice = std::string(failure.what()) + kOnCpu;
    return plan;
  }
}

// Measurements have the machine to themselves.
template <class Measure>
void profile(atsc_plan* plan, Measure&& measure) {
  const std::lock_guard lock(present(plan, "plan").rounds);
  if (plan->residency) {
    fail(ATSC_INVALID_ARGUMENT, "profiling needs a plan without placements, or the CPU alone: this "
                                "one uses %s", plan->opened.device->info().name.c_str());
  }
  Profiler profiler(kPlan, plan->executor, plan->pool, plan->weights.data(),
                          plan->opened.device.get());
  measure(profiler);
}

}  // namespace

atsc_status plan_open(const atsc_plan_options* given, atsc_plan** plan, atsc_message* message) {
  return guard(message, [&] {
    present(plan, "plan") = nullptr;
    const auto options = read_struct(given, "options");
    check_options(options);
    *plan = open_plan(options).release();
  });
}

atsc_status plan_close(atsc_plan* plan, atsc_message* message) {
  return guard(message, [&] {
    if (plan == nullptr) return;
    {
      const std::lock_guard lock(plan->sessions);
      if (plan->num_sessions > 0) {
        fail(ATSC_INVALID_ARGUMENT, "%d sessions of the plan still exist: destroy them first",
             plan->num_sessions);
      }
    }
    delete plan;
  });
}

atsc_status plan_get_info(const atsc_plan* plan, atsc_plan_info* info, atsc_message* message) {
  return guard(message, [&] {
    present(plan, "plan");
    atsc_plan_info found{};
    found.model_name = kPlan.model_name;
    found.plan_id = kPlan.plan_id;
    found.vocab_size = kPlan.vocab_size;
    found.context_length = kPlan.context_length;
    found.chunk = kPlan.chunk;
    found.max_logit_rows = kPlan.max_logit_rows;
    found.bos_token_id = kPlan.bos_token_id;
    found.num_eos_token_ids = kPlan.num_eos_token_ids;
    found.eos_token_ids = kPlan.eos_token_ids;
    found.num_threads = plan->pool.num_threads();
    found.max_sessions = plan->max_sessions;
    found.isa = atsc_isa_names[plan->executor.highest_isa_level()];
    found.weights_bytes = kPlan.weights_bytes;
    found.cache_bytes = session_cache_bytes(kPlan);
    found.num_units = kPlan.num_units;
    found.num_placements = kPlan.device.num_rungs;
    found.placement = plan->opened.placement.rung;
    found.predicted_device_bytes = plan->opened.placement.required_bytes;
    if (const Device* device = plan->opened.device.get()) {
      const DeviceMemory memory = device->memory();
      found.device_bytes = memory.context + memory.modules + memory.ranges + memory.executables;
      found.device_name = device->info().name.c_str();
    }
    found.notice = plan->notice.c_str();
    write_struct(info, found, "info");
  });
}

atsc_status plan_profile_unit(atsc_plan* plan, atsc_unit_profile* given, atsc_message* message) {
  return guard(message, [&] {
    auto wanted = read_struct(given, "profile");
    if (wanted.unit < 0 || wanted.unit >= kPlan.num_units) {
      fail(ATSC_INVALID_ARGUMENT, "profile.unit is %d: the plan has %d units", wanted.unit,
           kPlan.num_units);
    }
    if (wanted.rows < 1 || wanted.rows > kPlan.chunk || wanted.position < 0 ||
        wanted.position + wanted.rows > kPlan.context_length) {
      fail(ATSC_INVALID_ARGUMENT, "profile: %lld rows after %lld tokens: rounds have 1 to %d rows, "
                                  "and the context %d tokens",
           static_cast<long long>(wanted.rows), static_cast<long long>(wanted.position),
           kPlan.chunk, kPlan.context_length);
    }
    profile(plan, [&](Profiler& profiler) {
      wanted.ns = profiler.unit_ns(wanted.unit, wanted.on_device != 0, wanted.rows, wanted.position);
    });
    write_struct(given, wanted, "profile");
  });
}

atsc_status plan_profile_link(atsc_plan* plan, atsc_link_profile* given, atsc_message* message) {
  return guard(message, [&] {
    read_struct(given, "profile");
    atsc_link_profile result{};
    profile(plan, [&](Profiler& profiler) {
      const LinkProfile found = profiler.link();
      result.to_device_bytes_per_s = found.to_device_bytes_per_s;
      result.to_host_bytes_per_s = found.to_host_bytes_per_s;
      result.hand_off_to_device_ns = found.hand_off_to_device_ns;
      result.hand_off_to_host_ns = found.hand_off_to_host_ns;
      result.to_device_beside_cpu_bytes_per_s = found.to_device_beside_cpu_bytes_per_s;
      result.cpu_slowdown = found.cpu_slowdown;
      result.fixed_device_bytes = found.fixed_device_bytes;
    });
    write_struct(given, result, "profile");
  });
}

atsc_status plan_script_device(atsc_plan* plan, const char* what, double value,
                               atsc_message* message) {
  return guard(message, [&] {
    VirtualControls* controls = present(plan, "plan").opened.controls;
    const std::string text = &present(what, "what");
    if (controls == nullptr) {
      fail(ATSC_INVALID_ARGUMENT, "%s: only a virtual device in use can be scripted", what);
    }
    const std::string name = text.substr(std::min(text.size(), text.find(' ') + 1));
    if (text == "link") {
      controls->set_link_rate(value, value);
    } else if (text == "cpu") {
      controls->set_host_slowdown(value);
    } else if (text == "wake") {
      controls->set_wake_ns(static_cast<int64_t>(value));
    } else if (text == "slowdown") {
      controls->set_slowdown(value);
    } else if (text.starts_with("kernel ")) {
      controls->set_kernel_ns(name, static_cast<int64_t>(value));
    } else if (text.starts_with("fault ")) {
      controls->fail_kernel(name);
    } else {
      fail(ATSC_INVALID_ARGUMENT, "%s: expected link, slowdown, cpu, wake, kernel NAME or fault NAME", what);
    }
  });
}

atsc_status plan_take_change(atsc_plan* plan, atsc_change* change, atsc_message* message) {
  return guard(message, [&] {
    HybridExecutor* const hybrid = present(plan, "plan").hybrid.get();
    write_struct(change, hybrid != nullptr ? hybrid->take_change() : atsc_change{}, "change");
  });
}

atsc_status plan_get_events(atsc_plan* plan, atsc_event* events, int64_t room, int64_t* count,
                            atsc_message* message) {
  return guard(message, [&] {
    const std::lock_guard lock(present(plan, "plan").rounds);
    std::vector<atsc_event> found;
    if (plan->hybrid) found = events_of(kPlan, plan->hybrid->latest());
    present(count, "count") = static_cast<int64_t>(found.size());
    const auto taken = std::clamp<int64_t>(room, 0, static_cast<int64_t>(found.size()));
    if (taken > 0) std::copy_n(found.begin(), taken, &present(events, "events"));
  });
}

}  // namespace atsc
