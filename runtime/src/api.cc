// The C interface (atsc.h) over Executor and Session. Nothing is thrown across it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "executor.h"
#include "failure.h"
#include "hybrid_executor.h"
#include "isa.h"
#include "profiler.h"
#include "residency.h"
#include "rungs.h"
#include "session.h"
#include "weights.h"

using atsc::Executor;
using atsc::fail;
using atsc::Failure;
using atsc::kPlan;
using atsc::Plan;
using atsc::Pool;
using atsc::Session;

struct atsc_plan {
  Pool pool;
  atsc::OpenedDevice opened;
  atsc::platform::Mapping weights;
  Executor executor;
  std::unique_ptr<atsc::Residency> residency;     // null: everything is on the host
  std::unique_ptr<atsc::HybridExecutor> hybrid;   // likewise
  std::string notice;
  int32_t max_sessions;
  std::mutex rounds;          // one round at a time
  std::mutex sessions;        // guards num_sessions
  int32_t num_sessions = 0;

  atsc_plan(const atsc_plan_options& options, const atsc::DeviceWishes& wishes,
            uint32_t isa_levels, atsc::WeightsMode mode)
      : pool(options.num_threads),
        opened(atsc::open_device(kPlan, wishes)),
        weights(uses_device() ? atsc::platform::Mapping::anonymous(kPlan.weights_bytes, true,
                                                                   "weights")
                              : atsc::load_weights(kPlan, options.weights_path, mode, pool)),
        executor(kPlan, weights.data(), isa_levels, pool),
        notice(opened.notice),
        max_sessions(wishes.sessions) {
    if (!uses_device()) return;
    residency = std::make_unique<atsc::Residency>(
        kPlan, *opened.device, opened.placement, max_sessions,
        atsc::Residency::HostMemory{weights.data(), executor.arena()}, options.weights_path, pool);
    hybrid = std::make_unique<atsc::HybridExecutor>(kPlan, *residency, executor, pool);
    if (!notice.empty() && !residency->notice().empty()) notice += "; ";
    notice += residency->notice();
  }

  // A plan without placements is opened to be profiled: it has a device, and runs on the CPU.
  bool uses_device() const { return opened.device && kPlan.device.num_rungs > 0; }

  bool run(const atsc::Round& round, const atsc::SessionPlace* place) {
    return hybrid ? hybrid->run(round, *place) : executor.run(round);
  }
};

// A session's place on the device, while the session lives.
class Place {
 public:
  explicit Place(atsc_plan& plan)
      : plan_(plan), place_(plan.residency ? plan.residency->take_place() : nullptr) {}
  ~Place() {
    if (place_ == nullptr) return;
    const std::lock_guard lock(plan_.rounds);
    plan_.hybrid->forget(*place_);
    plan_.residency->give_back(place_);
  }
  Place(const Place&) = delete;

  const atsc::SessionPlace* get() const { return place_; }

 private:
  atsc_plan& plan_;
  atsc::SessionPlace* const place_;
};

struct atsc_session {
  atsc_plan* plan;
  Place place;
  Session state;

  explicit atsc_session(atsc_plan* plan) : plan(plan), place(*plan), state(kPlan, place.get()) {}
};

namespace {

void tell(atsc_message* message, const char* text) {
  if (message == nullptr || message->struct_size <= offsetof(atsc_message, text)) return;
  const size_t room = std::min(message->struct_size, sizeof *message) - offsetof(atsc_message, text);
  const size_t length = std::min(std::strlen(text), room - 1);
  std::memcpy(message->text, text, length);
  message->text[length] = '\0';
}

// Runs a call; whatever it throws becomes a status and a message.
template <class Call>
atsc_status guard(atsc_message* message, Call&& call) noexcept {
  try {
    call();
    tell(message, "");
    return ATSC_OK;
  } catch (const Failure& failure) {
    tell(message, failure.what());
    return failure.status;
  } catch (const std::bad_alloc&) {
    tell(message, "out of memory: close other programs, or compile with a smaller --ctx");
    return ATSC_DEVICE_ERROR;
  } catch (const std::exception& error) {
    tell(message, error.what());
    return ATSC_INTERNAL_ERROR;
  }
}

template <class T>
T& present(T* handle, const char* name) {
  if (handle == nullptr) fail(ATSC_INVALID_ARGUMENT, "%s is NULL", name);
  return *handle;
}

// A caller's struct, which may be shorter or longer than ours: what it lacks is zero.
template <class T>
T read_struct(const T* from, const char* name) {
  const size_t size = present(from, name).struct_size;
  if (size < sizeof(size_t) || size > 1 << 16) {
    fail(ATSC_INVALID_ARGUMENT, "%s.struct_size is %zu: set it to sizeof the struct", name, size);
  }
  T copy{};
  std::memcpy(&copy, from, std::min(size, sizeof copy));
  return copy;
}

template <class T>
void write_struct(T* to, T value, const char* name) {
  const size_t size = read_struct(to, name).struct_size;
  value.struct_size = size;
  std::memcpy(to, &value, std::min(size, sizeof value));
}

// A session is one thread's at a time.
class Turn {
 public:
  explicit Turn(atsc_session& session) : session_(session) {
    if (session.state.busy.exchange(true, std::memory_order_acquire)) {
      fail(ATSC_INVALID_ARGUMENT, "another thread is using this session: create one for each");
    }
  }
  ~Turn() {
    if (ends_) session_.state.busy.store(false, std::memory_order_release);
  }
  Turn(const Turn&) = delete;

  void keep() { ends_ = false; }

 private:
  atsc_session& session_;
  bool ends_ = true;
};

// A call on a session: its turn, its failures.
template <class Call>
atsc_status on_session(atsc_session* session, atsc_message* message, Call&& call) noexcept {
  return guard(message, [&] {
    const Turn turn(present(session, "session"));
    call(session->state);
  });
}

uint32_t isa_levels_up_to(const char* isa) {
  const uint32_t here = atsc_cpu_isa_levels();
  if (!(here & 1)) {
    fail(ATSC_DEVICE_ERROR, "this CPU lacks AVX2 and FMA (x86-64-v3), which the plan needs: run it "
                            "on a newer one");
  }
  if (isa == nullptr || *isa == '\0') return here;
  for (int level = 0; level < atsc::kNumIsaLevels; ++level) {
    if (std::strcmp(isa, atsc_isa_names[level]) != 0) continue;
    if (here >> level & 1) return here & ((2u << level) - 1);
    fail(ATSC_DEVICE_ERROR, "this CPU lacks %s: choose a lower level, or none", isa);
  }
  fail(ATSC_INVALID_ARGUMENT, "no ISA level is called %s: expected avx2, avxvnni, avx512 or "
                              "avx512vnni", isa);
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
  if (kPlan.abi_version != atsc::kAbiVersion) {
    fail(ATSC_PLAN_ERROR, "the plan's tables are of version %u, its runtime of version %u: "
                          "compile the model again", kPlan.abi_version, atsc::kAbiVersion);
  }
}

atsc::DeviceWishes wishes_of(const atsc_plan_options& options, uint32_t isa_levels) {
  atsc::DeviceWishes wishes;
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
  const auto mode = options.weights_mode == ATSC_WEIGHTS_READ ? atsc::WeightsMode::kRead
                    : options.verify ? atsc::WeightsMode::kMapAndVerify
                                     : atsc::WeightsMode::kMap;
  atsc::DeviceWishes wishes = wishes_of(options, isa_levels);
  try {
    return std::make_unique<atsc_plan>(options, wishes, isa_levels, mode);
  } catch (const Failure& failure) {
    const bool has_device = kPlan.device.kind != atsc::DeviceKind::kNone && wishes.use_device;
    if (failure.status != ATSC_DEVICE_ERROR || !has_device || wishes.strict) throw;
    wishes.use_device = false;
    auto plan = std::make_unique<atsc_plan>(options, wishes, isa_levels, mode);
    plan->notice = std::string(failure.what()) + atsc::kOnCpu;
    return plan;
  }
}

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
    found.cache_bytes = atsc::session_cache_bytes(kPlan);
    found.num_units = kPlan.num_units;
    found.num_placements = kPlan.device.num_rungs;
    found.placement = plan->opened.placement.rung;
    found.predicted_device_bytes = plan->opened.placement.required_bytes;
    if (const atsc::Device* device = plan->opened.device.get()) {
      const atsc::DeviceMemory memory = device->memory();
      found.device_bytes = memory.context + memory.modules + memory.ranges + memory.executables;
      found.device_name = device->info().name.c_str();
    }
    found.notice = plan->notice.c_str();
    write_struct(info, found, "info");
  });
}

atsc_status session_create(atsc_plan* plan, atsc_session** session, atsc_message* message) {
  return guard(message, [&] {
    present(session, "session") = nullptr;
    const std::lock_guard lock(present(plan, "plan").sessions);
    if (plan->num_sessions >= plan->max_sessions) {
      fail(ATSC_INVALID_ARGUMENT, "the plan's %d sessions exist already: destroy one, or open the "
                                  "plan for more", plan->max_sessions);
    }
    auto made = std::make_unique<atsc_session>(plan);
    made->state.set_sampler({}, 0, {kPlan.eos_token_ids,
                                    kPlan.eos_token_ids + kPlan.num_eos_token_ids});
    ++plan->num_sessions;
    *session = made.release();
  });
}

atsc_status session_destroy(atsc_session* session, atsc_message* message) {
  return guard(message, [&] {
    if (session == nullptr) return;
    Turn turn(*session);
    turn.keep();
    atsc_plan* plan = session->plan;
    delete session;
    const std::lock_guard lock(plan->sessions);
    --plan->num_sessions;
  });
}

atsc_status session_get_position(atsc_session* session, int64_t* position, atsc_message* message) {
  return on_session(session, message, [&](const Session& state) {
    present(position, "position") = state.position();
  });
}

// One round, behind whatever other sessions run.
void run_round(atsc_session& session, const int32_t* tokens, int64_t count, const int32_t* rows,
               int64_t num_rows) {
  const std::lock_guard lock(session.plan->rounds);
  const auto execute = [&](const atsc::Round& round) {
    return session.plan->run(round, session.place.get());
  };
  session.state.run(execute, tokens, count, rows, num_rows);
}

void check_prefill(const Session& state, const atsc_prefill& call) {
  if (call.batch != 0 && call.batch != 1) {
    fail(ATSC_INVALID_ARGUMENT, "prefill.batch is %d: this version runs batch 1 alone; use a "
                                "session for each sequence", call.batch);
  }
  if (call.num_tokens < 1) fail(ATSC_INVALID_ARGUMENT, "prefill.num_tokens must be at least 1");
  present(call.tokens, "prefill.tokens");
  if (call.logits < ATSC_LOGITS_LAST || call.logits > ATSC_LOGITS_ROWS) {
    fail(ATSC_INVALID_ARGUMENT, "prefill.logits is %d: expected ATSC_LOGITS_*", call.logits);
  }
  state.check_room(call.num_tokens);
  for (int64_t i = 0; i < call.num_tokens; ++i) state.check_token(call.tokens[i]);
  int64_t num_rows = call.logits == ATSC_LOGITS_ALL ? call.num_tokens : 1;
  if (call.logits == ATSC_LOGITS_NONE) num_rows = 0;
  if (call.logits == ATSC_LOGITS_ROWS) {
    num_rows = call.num_rows;
    if (num_rows > 0) present(call.rows, "prefill.rows");
    for (int64_t i = 0; i < num_rows; ++i) {
      if (call.rows[i] <= (i > 0 ? call.rows[i - 1] : -1) || call.rows[i] >= call.num_tokens) {
        fail(ATSC_INVALID_ARGUMENT, "prefill.rows must ascend within the %lld tokens; entry %lld "
                                    "is %lld", static_cast<long long>(call.num_tokens),
             static_cast<long long>(i), static_cast<long long>(call.rows[i]));
      }
    }
  }
  if (call.out != nullptr && call.out_floats < num_rows * kPlan.vocab_size) {
    fail(ATSC_INVALID_ARGUMENT, "prefill.out has room for %lld floats; %lld rows of %d need %lld",
         static_cast<long long>(call.out_floats), static_cast<long long>(num_rows),
         kPlan.vocab_size, static_cast<long long>(num_rows * kPlan.vocab_size));
  }
}

void prefill(atsc_session& session, const atsc_prefill& call) {
  Session& state = session.state;
  check_prefill(state, call);
  state.pending = Session::kNoToken;
  std::vector<int32_t> rows;
  float* out = call.out;
  int64_t next_listed = 0;
  for (int64_t done = 0; done < call.num_tokens;) {
    int64_t count = std::min<int64_t>(kPlan.chunk, call.num_tokens - done);
    if (call.logits == ATSC_LOGITS_ALL) count = std::min<int64_t>(count, kPlan.max_logit_rows);
    rows.clear();
    const bool is_last = done + count == call.num_tokens;
    if (call.logits == ATSC_LOGITS_LAST && is_last) rows.push_back(static_cast<int32_t>(count - 1));
    for (int64_t row = 0; call.logits == ATSC_LOGITS_ALL && row < count; ++row) {
      rows.push_back(static_cast<int32_t>(row));
    }
    while (call.logits == ATSC_LOGITS_ROWS && next_listed < call.num_rows &&
           call.rows[next_listed] < done + count) {
      if (static_cast<int32_t>(rows.size()) == kPlan.max_logit_rows) {
        count = call.rows[next_listed] - done;
        break;
      }
      rows.push_back(static_cast<int32_t>(call.rows[next_listed++] - done));
    }
    const auto num_rows = static_cast<int64_t>(rows.size());
    run_round(session, call.tokens + done, count, rows.data(), num_rows);
    if (out != nullptr) out = std::copy_n(state.logits(), num_rows * kPlan.vocab_size, out);
    done += count;
  }
}

atsc_status session_prefill(atsc_session* session, const atsc_prefill* given,
                            atsc_message* message) {
  return on_session(session, message,
                    [&](Session&) { prefill(*session, read_struct(given, "prefill")); });
}

void decode(atsc_session& session, int32_t token) {
  session.state.check_token(token);
  session.state.check_room(1);
  session.state.pending = Session::kNoToken;
  const int32_t row = 0;
  run_round(session, &token, 1, &row, 1);
}

atsc_status session_decode(atsc_session* session, int32_t token, float* out,
                           atsc_message* message) {
  return on_session(session, message, [&](const Session& state) {
    decode(*session, token);
    if (out != nullptr) std::copy_n(state.logits(), kPlan.vocab_size, out);
  });
}

atsc_status session_logits(atsc_session* session, const float** logits, int64_t* rows,
                           atsc_message* message) {
  return on_session(session, message, [&](const Session& state) {
    present(logits, "logits") = state.logits();
    present(rows, "rows") = state.num_logit_rows();
  });
}

atsc_status session_set_sampling(atsc_session* session, const atsc_sampling* given,
                                 atsc_message* message) {
  return on_session(session, message, [&](Session& state) {
    const auto sampling = read_struct(given, "sampling");
    const auto refuse_unless = [](bool fine, const char* name, double value, const char* range) {
      if (!fine) fail(ATSC_INVALID_ARGUMENT, "sampling.%s is %g: expected %s", name, value, range);
    };
    const float heat = sampling.temperature;
    refuse_unless(heat >= 0 && heat < 1e6f, "temperature", heat, "0 or more");
    refuse_unless(sampling.top_k >= 0, "top_k", sampling.top_k, "0 or more");
    refuse_unless(sampling.top_p >= 0 && sampling.top_p <= 1, "top_p", sampling.top_p, "0 to 1");
    refuse_unless(sampling.min_p >= 0 && sampling.min_p <= 1, "min_p", sampling.min_p, "0 to 1");
    const int32_t num_stops = sampling.num_stop_token_ids;
    refuse_unless(num_stops >= 0, "num_stop_token_ids", num_stops, "0 or more");
    std::vector<int32_t> stops;
    if (num_stops > 0) {
      const int32_t* ids = &present(sampling.stop_token_ids, "sampling.stop_token_ids");
      stops.assign(ids, ids + num_stops);
    }
    if (!sampling.ignore_eos) {
      stops.insert(stops.end(), kPlan.eos_token_ids,
                   kPlan.eos_token_ids + kPlan.num_eos_token_ids);
    }
    const uint64_t seed = sampling.has_seed ? sampling.seed : atsc::platform::random_seed();
    state.set_sampler({heat, sampling.top_k, sampling.top_p, sampling.min_p}, seed,
                      std::move(stops));
  });
}

atsc_status session_next(atsc_session* session, atsc_next* next, atsc_message* message) {
  return on_session(session, message, [&](Session& state) {
    read_struct(next, "next");
    if (state.pending != Session::kNoToken) decode(*session, state.pending);
    atsc_next found{};
    found.token = state.choose();
    state.pending = found.token;
    if (state.is_stop(found.token)) {
      found.finish = ATSC_FINISH_STOP;
    } else if (state.position() == kPlan.context_length) {
      found.finish = ATSC_FINISH_CONTEXT;
    }
    write_struct(next, found, "next");
  });
}

atsc_status session_rewind(atsc_session* session, int64_t position, atsc_message* message) {
  return on_session(session, message, [&](Session& state) { state.rewind(position); });
}

atsc_status session_cancel(atsc_session* session, atsc_message* message) {
  return guard(message, [&] {
    std::atomic<bool>& cancelled = present(session, "session").state.cancelled;
    cancelled = true;
    if (session->plan->hybrid) session->plan->hybrid->cancel(cancelled);
  });
}

atsc_status session_save(atsc_session* session, const char* path, atsc_message* message) {
  return on_session(session, message,
                    [&](const Session& state) { state.save(&present(path, "path")); });
}

atsc_status session_restore(atsc_session* session, const char* path, atsc_message* message) {
  return on_session(session, message,
                    [&](Session& state) { state.restore(&present(path, "path")); });
}

// Measurements have the machine to themselves.
template <class Measure>
void profile(atsc_plan* plan, Measure&& measure) {
  const std::lock_guard lock(present(plan, "plan").rounds);
  if (plan->residency) {
    fail(ATSC_INVALID_ARGUMENT, "profiling needs a plan without placements, or the CPU alone: this "
                                "one uses %s", plan->opened.device->info().name.c_str());
  }
  atsc::Profiler profiler(kPlan, plan->executor, plan->pool, plan->weights.data(),
                          plan->opened.device.get());
  measure(profiler);
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
    profile(plan, [&](atsc::Profiler& profiler) {
      wanted.ns = profiler.unit_ns(wanted.unit, wanted.on_device != 0, wanted.rows, wanted.position);
    });
    write_struct(given, wanted, "profile");
  });
}

atsc_status plan_profile_link(atsc_plan* plan, atsc_link_profile* given, atsc_message* message) {
  return guard(message, [&] {
    read_struct(given, "profile");
    atsc_link_profile result{};
    profile(plan, [&](atsc::Profiler& profiler) {
      const atsc::LinkProfile found = profiler.link();
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
    atsc::VirtualControls* controls = present(plan, "plan").opened.controls;
    const std::string text = &present(what, "what");
    if (controls == nullptr) {
      fail(ATSC_INVALID_ARGUMENT, "%s: only a virtual device in use can be scripted", what);
    }
    const std::string name = text.substr(std::min(text.size(), text.find(' ') + 1));
    if (text == "link") {
      controls->set_link_rate(value, value);
    } else if (text == "slowdown") {
      controls->set_slowdown(value);
    } else if (text.starts_with("kernel ")) {
      controls->set_kernel_ns(name, static_cast<int64_t>(value));
    } else if (text.starts_with("fault ")) {
      controls->fail_kernel(name);
    } else {
      fail(ATSC_INVALID_ARGUMENT, "%s: expected link, slowdown, kernel NAME or fault NAME", what);
    }
  });
}

std::vector<atsc_event> events_of(const atsc::RoundRecord& record) {
  std::vector<atsc_event> events;
  int32_t index = 0;
  for (const auto& segment : record.segments) {
    events.push_back({ATSC_TRACK_CPU_WAIT, index, segment.wait_ns, segment.begin_ns});
    events.push_back({ATSC_TRACK_CPU, index++, segment.begin_ns, segment.end_ns});
  }
  index = 0;
  for (const auto& run : record.runs) {
    events.push_back({ATSC_TRACK_DEVICE, index++, run.begin_ns, run.end_ns});
  }
  int64_t before = record.begin_ns;
  for (const auto& copy : record.copies) {
    events.push_back({ATSC_TRACK_COPY, copy.unit, before, copy.copied_ns});
    events.push_back({ATSC_TRACK_DEVICE_WAIT, copy.unit, copy.wait_ns, copy.ready_ns});
    before = copy.copied_ns;
  }
  return events;
}

atsc_status plan_get_events(atsc_plan* plan, atsc_event* events, int64_t room, int64_t* count,
                            atsc_message* message) {
  return guard(message, [&] {
    const std::lock_guard lock(present(plan, "plan").rounds);
    std::vector<atsc_event> found;
    if (plan->hybrid) found = events_of(plan->hybrid->latest());
    present(count, "count") = static_cast<int64_t>(found.size());
    const auto taken = std::clamp<int64_t>(room, 0, static_cast<int64_t>(found.size()));
    if (taken > 0) std::copy_n(found.begin(), taken, &present(events, "events"));
  });
}

constexpr atsc_api kApi = {
    sizeof(atsc_api),    ATSC_API_VERSION,     plan_open,      plan_close,
    plan_get_info,       session_create,       session_destroy, session_get_position,
    session_prefill,     session_decode,       session_logits, session_set_sampling,
    session_next,        session_rewind,       session_cancel, session_save,
    session_restore,     plan_profile_unit,    plan_profile_link, plan_script_device,
    plan_get_events,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const atsc_api* atsc_get_api(uint32_t version) {
  return version == ATSC_API_VERSION ? &kApi : nullptr;
}
