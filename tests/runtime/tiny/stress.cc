// Runs the tiny plan hard, for a sanitizer to watch: pools of several sizes, sessions in threads of
// their own, cancels at any moment, save and restore, records; if the plan is for the virtual device, with
// units here and there. stress WEIGHTS STATE_FILE; prints "fine".
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "atsc.h"

extern "C" const atsc_api* atsc_get_api(uint32_t version);

namespace {

constexpr int kVocab = 32, kTokens = 90;
const atsc_api* api = nullptr;

atsc_message message() {
  atsc_message empty{};
  empty.struct_size = sizeof empty;
  return empty;
}

// Ends the program unless the call did what was expected of it.
void check(atsc_status status, const atsc_message& said, atsc_status also_fine = ATSC_OK) {
  if (status == ATSC_OK || status == also_fine) return;
  std::fprintf(stderr, "status %d: %s\n", status, said.text);
  std::exit(1);
}

std::vector<int32_t> prompt() {
  std::vector<int32_t> tokens;
  for (int i = 0; i < kTokens; ++i) tokens.push_back(i * 7 % 30);
  return tokens;
}

std::vector<float> forward(atsc_session* session) {
  const auto tokens = prompt();
  std::vector<float> logits(size_t{kTokens} * kVocab);
  atsc_message said = message();
  atsc_prefill call{};
  call.struct_size = sizeof call;
  call.tokens = tokens.data();
  call.num_tokens = kTokens;
  call.logits = ATSC_LOGITS_ALL;
  call.out = logits.data();
  call.out_floats = static_cast<int64_t>(logits.size());
  check(api->session_rewind(session, 0, &said), said);
  check(api->session_prefill(session, &call, &said), said);
  return logits;
}

std::vector<float> decode_all(atsc_session* session) {
  std::vector<float> logits(size_t{kTokens} * kVocab);
  atsc_message said = message();
  check(api->session_rewind(session, 0, &said), said);
  float* out = logits.data();
  for (const int32_t token : prompt()) {
    check(api->session_decode(session, token, out, &said), said);
    out += kVocab;
  }
  return logits;
}

// Decodes until the canceller is done; every call either works or is cancelled.
void decode_while_cancelled(atsc_session* session) {
  std::atomic<bool> done{false};
  std::thread canceller([&] {
    atsc_message said = message();
    for (int i = 0; i < 30; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * (i % 3)));
      check(api->session_cancel(session, &said), said);
    }
    done = true;
  });
  atsc_message said = message();
  while (!done) {
    int64_t position = 0;
    check(api->session_get_position(session, &position, &said), said);
    if (position == kTokens) check(api->session_rewind(session, 0, &said), said);
    check(api->session_decode(session, 5, nullptr, &said), said, ATSC_CANCELLED);
  }
  canceller.join();
}

// Takes all records of a session, and reads what they borrow. The rounds that were cancelled left none.
void take_records(atsc_session* session, int64_t least) {
  atsc_message said = message();
  int64_t num_tokens = 0;
  for (;;) {
    atsc_round round{};
    round.struct_size = sizeof round;
    check(api->session_take_round(session, &round, &said), said);
    if (round.num_tokens == 0) break;
    num_tokens += round.num_tokens;
    for (int64_t i = 0; i < round.num_events; ++i) {
      const atsc_event& event = round.events[i];
      const bool runs_nodes = event.track == ATSC_TRACK_CPU || event.track == ATSC_TRACK_DEVICE;
      if (runs_nodes && std::strlen(event.first_node) == 0) std::exit(4);
      if (event.begin_ns < round.begin_ns || event.end_ns > round.end_ns) std::exit(5);
    }
  }
  if (num_tokens < least) std::exit(6);
}

void use_plan(const char* weights, const std::string& state, int num_threads, bool read,
              bool has_device, std::vector<float>& expected) {
  atsc_message said = message();
  atsc_plan_options options{};
  options.struct_size = sizeof options;
  options.weights_path = weights;
  options.num_threads = num_threads;
  options.weights_mode = read ? ATSC_WEIGHTS_READ : ATSC_WEIGHTS_MAP;
  options.verify = 1;
  options.max_sessions = 3;
  const uint8_t on_device[3][4] = {{0, 1, 0, 1}, {0, 0, 1, 0}, {0, 1, 1, 0}};
  if (has_device) {
    options.num_units = 4;
    options.on_device = on_device[num_threads % 3];
    options.strict = 1;
  }
  atsc_plan* plan = nullptr;
  check(api->plan_open(&options, &plan, &said), said);
  std::vector<std::thread> users;
  for (int user = 0; user < 3; ++user) {
    users.emplace_back([&, user] {
      atsc_message own = message();
      atsc_session* session = nullptr;
      check(api->session_create(plan, &session, &own), own);
      if (user != 1) check(api->session_set_recording(session, 1, &own), own);
      const std::vector<float> got = user == 0 ? forward(session) : decode_all(session);
      if (got != expected) std::exit(2);
      decode_while_cancelled(session);
      const std::string path = state + std::to_string(user);
      check(api->session_save(session, path.c_str(), &own), own);
      check(api->session_restore(session, path.c_str(), &own), own);
      if (decode_all(session) != expected) std::exit(3);
      take_records(session, user != 1 ? 2 * kTokens : 0);
      check(api->session_destroy(session, &own), own);
    });
  }
  for (std::thread& user : users) user.join();
  check(api->plan_close(plan, &said), said);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  api = atsc_get_api(ATSC_API_VERSION);
  atsc_message said = message();
  atsc_plan_options options{};
  options.struct_size = sizeof options;
  options.weights_path = argv[1];
  options.num_threads = 1;
  options.no_device = 1;
  atsc_plan* plan = nullptr;
  atsc_session* session = nullptr;
  check(api->plan_open(&options, &plan, &said), said);
  check(api->session_create(plan, &session, &said), said);
  atsc_plan_info info{};
  info.struct_size = sizeof info;
  check(api->plan_get_info(plan, &info, &said), said);
  std::vector<float> expected = forward(session);
  check(api->session_destroy(session, &said), said);
  check(api->plan_close(plan, &said), said);
  for (const int num_threads : {1, 2, 4}) {
    use_plan(argv[1], argv[2], num_threads, num_threads == 2, info.num_placements > 0, expected);
  }
  std::puts("fine");
}
