// The C interface (atsc.h): its table, and the functions that concern a session. Nothing is thrown
// across it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "api_calls.h"
#include "api_graph.h"
#include "api_handles.h"
#include "api_plan.h"

namespace atsc {
namespace {

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

atsc_status session_create(atsc_plan* plan, atsc_session** session, atsc_message* message) {
  return guard(message, [&] {
    present(session, "session") = nullptr;
    const std::lock_guard lock(present(plan, "plan").sessions);
    if (plan->graph) {
      fail(ATSC_INVALID_ARGUMENT, "%s is no language model and has no sessions: call plan_run",
           kPlan.model_name);
    }
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
  const auto execute = [&](const Round& round) {
    SessionPlace* place = session.place.get();
    return session.recorder ? session.recorder->run(round, place) : session.plan->run(round, place);
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
    const uint64_t seed = sampling.has_seed ? sampling.seed : platform::random_seed();
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

atsc_status session_set_recording(atsc_session* session, int32_t on, atsc_message* message) {
  return on_session(session, message, [&](const Session&) {
    if (on == 0) return session->recorder.reset();
    if (session->recorder) return;
    session->recorder.emplace(kPlan, session->plan->executor, session->plan->hybrid.get());
  });
}

atsc_status session_take_round(atsc_session* session, atsc_round* round, atsc_message* message) {
  return on_session(session, message, [&](const Session&) {
    read_struct(round, "round");
    write_struct(round, session->recorder ? session->recorder->take() : atsc_round{}, "round");
  });
}

constexpr atsc_api kApi = {
    sizeof(atsc_api),    ATSC_API_VERSION,     plan_open,      plan_close,
    plan_get_info,       session_create,       session_destroy, session_get_position,
    session_prefill,     session_decode,       session_logits, session_set_sampling,
    session_next,        session_rewind,       session_cancel, session_save,
    session_restore,     plan_profile_unit,    plan_profile_link, plan_script_device,
    plan_get_events,     session_set_recording, session_take_round,
    plan_take_change,    plan_get_graph,       plan_run,
};

}  // namespace
}  // namespace atsc

extern "C" __attribute__((visibility("default"))) const atsc_api* atsc_get_api(uint32_t version) {
  const bool served = version >= ATSC_API_OLDEST && version <= ATSC_API_VERSION;
  return served ? &atsc::kApi : nullptr;
}
