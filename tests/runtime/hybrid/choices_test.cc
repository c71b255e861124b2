// Rounds on host and device whose promotions and retreats change all the time: the same logits as the
// CPU's.
//
//     choices_test choices ROUNDS SEED FILE   random plans, placements, slots, choices
//     choices_test damaged ROUNDS SEED FILE   weights of what retreats cannot be read: nothing changes
//     choices_test no_host_memory ROUNDS SEED FILE   nor where they do not fit
//     choices_test torn ROUNDS SEED FILE      exchanges that fail midway: the next round is right again
//     choices_test no_memory ROUNDS SEED FILE two graphs do not fit: the first choice stays
//     choices_test late ROUNDS SEED FILE      at most so many until units retreat from a late device,
//                                             and come home
//     choices_test speeds ROUNDS SEED FILE    at most so many until choices follow the CPU's speed
//
// Prints "fine"; FILE is for the weights.
#include "failure.h"
#include "random_plan.h"

namespace atsc::testing {
namespace {

// Promotes units that fit, each in a slot of its own choosing; others retreat, sometimes.
class RandomChooser {
 public:
  RandomChooser(const RandomPlan& made, const Placement& placement, uint64_t seed,
                double most_retreats)
      : made_(made), placement_(placement), random_(seed), most_retreats_(most_retreats) {}

  Choice operator()() {
    const std::lock_guard lock(mutex_);
    ++num_calls_;
    const double share = between(random_, 0, 1.2);
    const double retreats = between(random_, -0.5, most_retreats_);
    Choice choice;
    choice.spins = below(random_, 2) == 0;
    for (size_t unit = 0; unit < made_.units.size(); ++unit) {
      const UnitEntry& entry = made_.units[unit];
      if (placement_.on_device[unit] && between(random_, 0, 1) < retreats) {
        choice.retreats.push_back(static_cast<int>(unit));
      }
      const bool stays = between(random_, 0, 1) > share;
      if (entry.kind != UnitKind::kWeights || placement_.on_device[unit] || stays) continue;
      if (below(random_, 2) == 0) {  // where there is room
        choice.advances.push_back({static_cast<int>(unit), 0});
      } else if (entry.bytes <= placement_.slot_bytes) {
        choice.promotions.push_back(
            {static_cast<int>(unit), below(random_, placement_.num_slots), -1});
      }
    }
    return choice;
  }

  int num_calls() {
    const std::lock_guard lock(mutex_);
    return num_calls_;
  }

 private:
  const RandomPlan& made_;
  const Placement& placement_;
  std::mutex mutex_;
  Random random_;
  const double most_retreats_;  // share of units; 0: none
  int num_calls_ = 0;
};

struct Tokens {
  std::vector<int32_t> ids, rows;
};

Tokens draw_round(Random& random, int64_t room) {
  const bool is_step = below(random, 4) > 0;
  const auto count = is_step ? 1 : std::min<int64_t>(1 + below(random, kChunk), room);
  Tokens drawn;
  for (int64_t token = 0; token < count; ++token) drawn.ids.push_back(below(random, kVocab));
  for (int32_t row = 0; row < count; ++row) {
    if (is_step || below(random, 3) == 0) drawn.rows.push_back(row);
  }
  return drawn;
}

void run_round(Session& session, const Tokens& tokens,
               const std::function<bool(const Round&)>& execute) {
  session.run(execute, tokens.ids.data(), static_cast<int64_t>(tokens.ids.size()),
              tokens.rows.data(), static_cast<int64_t>(tokens.rows.size()));
}

// Rounds of several sessions in turn, each beside one that the CPU computes alone.
void compare(Setup& setup, HybridExecutor& hybrid, Random& random, const std::string& path,
             int num_rounds) {
  struct Pair {
    SessionPlace* place;
    std::unique_ptr<Session> ours, expected;
  };
  std::vector<Pair> pairs(static_cast<size_t>(setup.residency->num_places()));
  const auto begin = [&](Pair& pair) {
    pair.place = setup.residency->take_place();
    pair.ours = std::make_unique<Session>(setup.plan, pair.place);
    pair.expected = std::make_unique<Session>(setup.plan);
  };
  const auto end = [&](Pair& pair) {
    hybrid.forget(*pair.place);
    pair.ours.reset();
    setup.residency->give_back(pair.place);
  };
  for (Pair& pair : pairs) begin(pair);
  for (int round = 0; round < num_rounds; ++round) {
    Pair& pair = pairs[static_cast<size_t>(below(random, static_cast<int>(pairs.size())))];
    if (below(random, 40) == 0) {
      end(pair);
      begin(pair);
    }
    const int64_t room = kContext - pair.ours->position();
    if (room < kChunk || below(random, 30) == 0) {
      const int64_t most = std::min<int64_t>(pair.ours->position(), kContext - kChunk);
      const int64_t kept = below(random, static_cast<int>(most) + 1);
      pair.ours->rewind(kept);
      pair.expected->rewind(kept);
    }
    if (below(random, 20) == 0) {
      // Also between sides: what the CPU has saved goes on here, and the other way round.
      pair.expected->save(path + ".expected");
      pair.ours->save(path + ".ours");
      pair.ours->restore(path + ".expected");
      pair.expected->restore(path + ".ours");
    }
    const Tokens tokens = draw_round(random, kChunk);
    run_round(*pair.expected, tokens, [&](const Round& r) { return setup.reference.run(r); });
    run_round(*pair.ours, tokens, [&](const Round& r) { return hybrid.run(r, *pair.place); });
    const size_t bytes = tokens.rows.size() * kVocab * sizeof(float);
    EXPECT(std::memcmp(pair.ours->logits(), pair.expected->logits(), bytes) == 0);
  }
  for (Pair& pair : pairs) end(pair);
}

int count_changes(HybridExecutor& hybrid) {
  int count = 0;
  while (hybrid.take_change().when_ns != 0) ++count;
  return count;
}

void test_choices(Random& random, const std::string& path, int num_rounds) {
  constexpr int kRoundsOfPlan = 100;
  int num_changes = 0, num_retreats = 0, num_exchanges = 0, num_left = num_rounds;
  for (; num_left > 0; num_left -= kRoundsOfPlan) {
    const RandomPlan made(random, 1 + below(random, 5));
    const Placement placement = random_placement(random, made, between(random, 0, 0.8));
    VirtualOptions options;
    options.has_graphs = below(random, 4) > 0;
    options.link_bytes_per_s = below(random, 2) == 0 ? 0 : between(random, 50e6, 5e9);
    Setup setup(made, path, placement, options, 1 + below(random, 3), 1 + below(random, 3));
    RandomChooser chooser(made, placement, random(), 1.2);
    TransferOptions transfer;
    transfer.choose_at_random = [&](const RoundShape&) { return chooser(); };
    transfer.copy_begin_bytes = below(random, 2) == 0 ? 0 : 100;  // per head, or mostly whole
    HybridExecutor hybrid(setup.plan, *setup.residency, setup.executor, setup.pool, transfer);
    compare(setup, hybrid, random, path, std::min(num_left, kRoundsOfPlan));
    for (atsc_change change = hybrid.take_change(); change.when_ns != 0;
         change = hybrid.take_change()) {
      ++num_changes;
      num_retreats += change.num_retreated > 0;
      num_exchanges += std::strstr(change.reason, " advance") != nullptr;
    }
  }
  EXPECT(num_changes > num_rounds / 20);
  EXPECT(num_retreats > num_changes / 10);
  EXPECT(num_exchanges > num_changes / 50);  // that begin
}

// A session on both sides, and one of the host alone that says what it should answer.
class Decoding {
 public:
  Decoding(Setup& setup, const TransferOptions& options)
      : setup_(setup),
        hybrid_(setup.plan, *setup.residency, setup.executor, setup.pool, options),
        place_(setup.residency->take_place()),
        ours_(setup.plan, place_),
        expected_(setup.plan) {}

  // A decode step of both, with the same logits; near the end of the context both go back.
  void step(int32_t round) {
    if (ours_.position() == kContext) {
      ours_.rewind(3);
      expected_.rewind(3);
    }
    const int32_t token = round % kVocab, row = 0;
    ours_.run([&](const Round& r) { return hybrid_.run(r, *place_); }, &token, 1, &row, 1);
    expected_.run([&](const Round& r) { return setup_.reference.run(r); }, &token, 1, &row, 1);
    EXPECT(std::memcmp(ours_.logits(), expected_.logits(), kVocab * sizeof(float)) == 0);
  }

  HybridExecutor& hybrid() { return hybrid_; }

 private:
  Setup& setup_;
  HybridExecutor hybrid_;
  SessionPlace* place_;
  Session ours_, expected_;
};

void test_no_memory(Random& random, const std::string& path, int num_rounds) {
  const RandomPlan made(random, 3);
  Placement placement = random_placement(random, made, 0);
  placement.on_device[1] = 1;  // so that there is always a graph
  placement.slot_bytes = 1 << 20;
  VirtualOptions options;
  options.graph_bytes = 40 << 20;
  Setup setup(made, path, placement, options, 2, 1);
  RandomChooser chooser(made, placement, random(), 0);
  TransferOptions transfer;
  transfer.choose_at_random = [&](const RoundShape&) { return chooser(); };
  Decoding decoding(setup, transfer);
  for (int32_t round = 0; round < num_rounds; ++round) {
    decoding.step(round);
    EXPECT(setup.device->memory().executables == options.graph_bytes);
  }
  EXPECT(chooser.num_calls() > 1);
  EXPECT(count_changes(decoding.hybrid()) <= 1);  // the first choice
}

void test_torn(Random& random, const std::string& path, int num_rounds) {
  constexpr int kRoundsOfPlan = 50;
  int num_failures = 0;
  for (int round = 0; round < num_rounds;) {
    const RandomPlan made(random, 2 + below(random, 4));
    const Placement placement = random_placement(random, made, 0.5);
    Setup setup(made, path, placement, VirtualOptions{}, 2, 1);
    RandomChooser chooser(made, placement, random(), 1.2);
    TransferOptions transfer;
    transfer.choose_at_random = [&](const RoundShape&) { return chooser(); };
    Decoding decoding(setup, transfer);
    for (int end = round + kRoundsOfPlan; round < end;) {
      if (below(random, 2) == 0) setup.device->fail_upload(below(random, 4));
      try {
        decoding.step(round);
        ++round;
      } catch (const Failure&) {
        ++num_failures;
      }
    }
  }
  std::fprintf(stderr, "%d failures in %d rounds\n", num_failures, num_rounds);
  EXPECT(num_failures > num_rounds / 20);
}

// Everything lives on the device and shall retreat, but weights.bin is cut short after loading, or the
// machine has not so much memory.
void test_refused(Random& random, const std::string& path, int num_rounds, bool is_damaged) {
  const RandomPlan made(random, 3);
  Placement placement = random_placement(random, made, 1.1);
  placement.on_device[0] = 0;  // as the compiler has it
  Setup setup(made, path, placement, VirtualOptions{}, 2, 1, is_damaged ? 0 : uint64_t{1} << 62);
  if (is_damaged) std::ofstream(path, std::ios::binary | std::ios::trunc) << "cut short";
  std::atomic<int> num_calls{0};
  TransferOptions transfer;
  transfer.choose_at_random = [&](const RoundShape&) {
    ++num_calls;
    return Choice{{}, {1, 2, 3}};
  };
  Decoding decoding(setup, transfer);
  for (int32_t round = 0; round < num_rounds; ++round) {
    decoding.step(round);
  }
  EXPECT(num_calls > 1);
  EXPECT(count_changes(decoding.hybrid()) <= 1);  // the first choice
}

// A plan with made-up times: a unit takes 100 us on the CPU, and a tenth of that on the device. On
// this machine all are far faster, and about alike: what counts is to wake up for them.
RandomPlan plan_with_times(Random& random) {
  RandomPlan made(random, 3);
  for (UnitEntry& unit : made.units) {
    unit.decode = unit.prefill = {100'000, 10'000};
    unit.transfer_ns = 100'000;
  }
  return made;
}

// Rounds of two sessions, now and then of a chunk, until units have retreated or come home, be it for a
// trial: on this machine the host may be faster. False: they did not in time.
bool play_until(bool retreated, Setup& setup, HybridExecutor& hybrid, Random& random,
                const std::string& path, int num_rounds) {
  constexpr int kRoundsAtOnce = 50;
  for (int round = 0; round < num_rounds; round += kRoundsAtOnce) {
    compare(setup, hybrid, random, path, kRoundsAtOnce);
    bool has_changed = false;
    for (atsc_change change = hybrid.take_change(); change.when_ns != 0;
         change = hybrid.take_change()) {
      std::fprintf(stderr, "%s: %d retreated, %.2f ms -> %.2f ms, %.2f MiB\n", change.reason,
                   change.num_retreated, static_cast<double>(change.before_ns) / 1e6,
                   static_cast<double>(change.after_ns) / 1e6,
                   static_cast<double>(change.host_bytes) / (1 << 20));
      has_changed |= (change.num_retreated > 0) == retreated;
    }
    if (has_changed) return true;
  }
  return false;
}

// A device that comes back late, and then in time again. What takes long on the CPU stays there, so
// that some hand-offs are left to tell.
void test_late(Random& random, const std::string& path, int num_rounds) {
  constexpr int kLayers = 5, kLayersAtHome = 2;
  RandomPlan made(random, kLayers);
  Placement placement;
  placement.on_device = {0};
  for (int layer = 0; layer < kLayers; ++layer) {
    const bool is_at_home = layer < kLayersAtHome;
    placement.on_device.insert(placement.on_device.end(), {is_at_home, 1, 1});
  }
  placement.on_device.push_back(1);
  for (size_t unit = 0; unit < made.units.size(); ++unit) {
    const bool is_heavy = unit > 0 && (unit <= 3 * kLayersAtHome || unit + 1 == made.units.size());
    made.units[unit].decode = made.units[unit].prefill = {is_heavy ? 10'000'000'000 : 100'000, 10'000};
  }
  Setup setup(made, path, placement, VirtualOptions{}, 1, 2);
  setup.plan.device.hand_off_ns = 200'000;  // threads of this machine play the device
  HybridExecutor hybrid(setup.plan, *setup.residency, setup.executor, setup.pool);
  compare(setup, hybrid, random, path, 50);
  count_changes(hybrid);
  setup.device->set_wake_ns(6'000'000);
  EXPECT(play_until(true, setup, hybrid, random, path, num_rounds));
  compare(setup, hybrid, random, path, 50);
  setup.device->set_wake_ns(0);
  EXPECT(play_until(false, setup, hybrid, random, path, num_rounds));
  compare(setup, hybrid, random, path, 50);
}

// The CPU is far faster than planned, then far slower, then fast again.
void test_speeds(Random& random, const std::string& path, int num_rounds) {
  const RandomPlan made = plan_with_times(random);
  Placement placement = random_placement(random, made, 0);
  placement.on_device.assign(made.units.size(), 0);
  placement.slot_bytes = 1 << 20;
  VirtualOptions options;
  options.link_bytes_per_s = 100e6;
  Setup setup(made, path, placement, options, 1, 1);
  Decoding decoding(setup, {});
  int num_promoted = 0, num_changes = 0;
  for (const double slowdown : {1, 2000, 1}) {
    setup.device->set_host_slowdown(slowdown);
    const auto is_as_wanted = [&] { return (num_promoted > 0) == (slowdown > 1); };
    for (int32_t round = 0; round < num_rounds; ++round) {
      decoding.step(round);
      for (atsc_change change = decoding.hybrid().take_change(); change.when_ns != 0;
           change = decoding.hybrid().take_change()) {
        num_promoted = change.num_promoted;
        ++num_changes;
        std::fprintf(stderr, "%s: %d promoted, %.2f ms -> %.2f ms, swap %.1f us, made in %.1f us\n",
                     change.reason, change.num_promoted, static_cast<double>(change.before_ns) / 1e6,
                     static_cast<double>(change.after_ns) / 1e6,
                     static_cast<double>(change.adoption_ns) / 1e3,
                     static_cast<double>(change.build_ns) / 1e3);
      }
      if (round > 40 && is_as_wanted()) break;
    }
    EXPECT(is_as_wanted());
  }
  EXPECT(num_changes >= 2);
}

}  // namespace
}  // namespace atsc::testing

int main(int argc, char** argv) {
  if (argc != 5) return 64;
  using namespace atsc::testing;
  Random random(static_cast<uint64_t>(std::atoi(argv[3])));
  const std::string name = argv[1];
  if (name == "choices") test_choices(random, argv[4], std::atoi(argv[2]));
  if (name == "speeds") test_speeds(random, argv[4], std::atoi(argv[2]));
  if (name == "late") test_late(random, argv[4], std::atoi(argv[2]));
  if (name == "damaged") test_refused(random, argv[4], std::atoi(argv[2]), true);
  if (name == "no_host_memory") test_refused(random, argv[4], std::atoi(argv[2]), false);
  if (name == "torn") test_torn(random, argv[4], std::atoi(argv[2]));
  if (name == "no_memory") test_no_memory(random, argv[4], std::atoi(argv[2]));
  std::puts("fine");
}
