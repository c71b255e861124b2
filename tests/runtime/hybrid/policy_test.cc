// When promotions are chosen anew, on a clock of its own: rounds are played by rules that the policy
// does not know the figures of.
//
//     policy_test change TRIALS SEED FILE    speeds change: two questions find a choice within 5 %
//     policy_test noise MINUTES SEED FILE    speeds jitter by 10 %: no more than a change a minute
//     policy_test probe TRIALS SEED FILE     a link that nobody uses has recovered: it is tried again
//     policy_test mistake TRIALS SEED FILE   choices slow rounds down for reasons that no model knows
//     policy_test retreat TRIALS SEED FILE   the device comes back late: the host takes units over
//     policy_test fold TRIALS SEED FILE      units exchanged so that the host has the first ones
//     policy_test turns TRIALS SEED FILE     another program has the device in turn
//     policy_test refusal TRIALS SEED FILE   what is refused, and tried again under other conditions
//     policy_test options TRIALS SEED FILE   how large a change is one, and how soon the next
//     policy_test overhead ROUNDS SEED FILE  what watching costs a round; constant speeds are no news
//
// Prints "fine"; FILE is for the weights.
#include "policy_game.h"

namespace atsc::testing {
namespace {

void test_change(Random& random, const std::string& path, int num_trials) {
  for (int trial = 0; trial < num_trials; ++trial) {
    Game game(random, path);
    if (trial % 3 == 2) game.shape = {kChunk, 1};
    game.play(40, 0.02);
    game.num_questions = 0;
    const double factors[] = {0.4, 0.6, 1, 1.6, 2.5};
    Machine& machine = game.machine();
    machine.cpu = factors[below(random, 5)];
    machine.gpu = factors[below(random, 5)];
    if (game.num_promoted() > 0) machine.link = factors[below(random, 5)];
    const double before = game.regret();
    game.play(60, 0.02);
    std::fprintf(stderr, "%d: cpu %.1f gpu %.1f link %.1f: regret %.3f -> %.3f, %d questions\n",
                 trial, machine.cpu, machine.gpu, machine.link, before, game.regret(),
                 game.num_questions);
    EXPECT(game.regret() < 0.05);
    EXPECT(game.num_questions <= 2);
  }
}

void test_noise(Random& random, const std::string& path, int num_minutes) {
  constexpr int kMinutesOfGame = 10;
  for (int minute = 0; minute < num_minutes; minute += kMinutesOfGame) {
    Game game(random, path);
    game.play(200, 0.1);
    game.num_changes = 0;
    const int64_t begin_ns = game.machine().now_ns;
    while (game.machine().now_ns < begin_ns + kMinutesOfGame * 60'000'000'000) game.play(100, 0.1);
    std::fprintf(stderr, "%d changes, %d questions\n", game.num_changes, game.num_questions);
    EXPECT(game.num_changes <= kMinutesOfGame);
  }
}

// The link is so slow that nothing is promoted; then it is as planned again.
void test_probe(Random& random, const std::string& path, int num_trials) {
  for (int trial = 0; trial < num_trials; ++trial) {
    Game game(random, path);
    game.play(20, 0.02);
    if (game.num_promoted() == 0) continue;
    game.machine().link = 200;
    game.play(60, 0.02);
    EXPECT(game.num_promoted() == 0);
    game.machine().link = 1;
    const int64_t begin_ns = game.machine().now_ns;
    while (game.num_promoted() == 0) {
      game.play(1, 0.02);
      EXPECT(game.machine().now_ns < begin_ns + 15'000'000'000);
    }
    game.play(40, 0.02);
    EXPECT(game.regret() < 0.05);
  }
}

// A change makes the policy choose anew, but the new choice is slower than the old one: it goes
// back and stays there, until the next change, when nothing is wrong any more.
void test_mistake(Random& random, const std::string& path, int num_trials) {
  int num_mistakes = 0;
  for (int trial = 0; trial < num_trials; ++trial) {
    Game game(random, path);
    Machine& machine = game.machine();
    game.play(40, 0.02);
    const Choice first = game.choice();
    machine.innocent = first;
    machine.hidden_round = between(random, 1.5, 3);
    if (trial % 2 == 0) machine.hidden_cpu = 1.8;  // which looks like one more change
    machine.cpu = 1.8;
    game.reason();
    game.num_changes = 0;
    game.play(80, 0.02);
    if (game.num_changes == 0) continue;  // the first choice is still the best one
    ++num_mistakes;
    const std::string reason = game.reason();
    std::fprintf(stderr, "%d: %zu promoted, then %zu; %d questions; %s\n", trial, first.promotions.size(),
                 game.num_promoted(), game.num_questions, reason.c_str());
    EXPECT(reason == "back: measured slower than before");
    EXPECT(units_of(game.choice()) == units_of(first));
    game.num_questions = 0;
    game.play(1000, 0.02);
    EXPECT(game.num_questions == 0);
    EXPECT(units_of(game.choice()) == units_of(first));
    machine.hidden_cpu = machine.hidden_round = 1;
    machine.cpu = 2.6;
    game.play(80, 0.02);
    EXPECT(game.num_questions > 0);
    EXPECT(game.regret() < 0.05);
  }
  EXPECT(num_mistakes > num_trials / 3);
}

// Another program keeps a device that yields. It spins then, and units retreat, until that one is gone.
// Where rounds get slower by either than any model knows, or there is no memory, it is not done.
void test_retreat(Random& random, const std::string& path, int num_trials) {
  int num_retreats = 0, num_refused = 0, num_spinning = 0;
  for (int trial = 0; trial < num_trials; ++trial) {
    Game game(random, path);
    Machine& machine = game.machine();
    game.play(40, 0.02);
    EXPECT(!game.has_retreated());
    game.num_questions = 0;
    const bool helps = trial % 3 != 0;
    machine.wake_ns = std::llrint(between(random, 0.4e6, 1.5e6));
    if (!helps) machine.hidden_retreat = 4;
    const bool may_spin = trial % 4 != 1;
    if (!may_spin) machine.hidden_spin = 4;
    game.has_memory = trial % 6 != 3;
    if (trial % 2 == 0) machine.link = 2.5;  // it presses the link as well
    if (game.num_hand_offs() == 0 || game.regret(true) < 0.1) continue;
    const double before = game.regret(true);
    game.play(140, 0.02);
    std::fprintf(stderr,
                 "%d: wake %.1f ms, regret %.2f -> %.2f, %s%s, %lld hand-offs, %d questions\n", trial,
                 static_cast<double>(machine.wake_ns) / 1e6, before, game.regret(true),
                 game.has_folded() ? "folded" : game.has_retreated() ? "retreated" : "at home",
                 game.spins() ? ", spins" : "", static_cast<long long>(game.num_hand_offs()),
                 game.num_questions);
    EXPECT(game.num_questions <= (helps ? 4 : 5));
    EXPECT(may_spin || !game.spins());
    num_spinning += game.spins();
    if (!helps) {
      EXPECT(!game.has_retreated());
      EXPECT(game.regret() < 0.05);
      ++num_refused;
      game.num_questions = 0;
      game.play(1000, 0.02);
      EXPECT(game.num_questions <= 2);
      EXPECT(!game.has_retreated());
      continue;
    }
    // What a trial has found faster stays, also where predictions are in favour of a little more.
    EXPECT(game.regret(true) < 0.1);
    if (!game.has_retreated()) continue;  // another choice of promotions does as well
    ++num_retreats;
    const int64_t begin_ns = machine.now_ns;
    int num_retreated = 0, num_rounds = 0;
    game.num_changes = 0;
    for (; machine.now_ns < begin_ns + 60'000'000'000; ++num_rounds) {
      game.play(1, 0.02);
      num_retreated += game.has_retreated();
    }
    std::fprintf(stderr, "   retreated in %d of %d rounds, %d changes\n", num_retreated, num_rounds,
                 game.num_changes);
    const bool is_clear = 1.15 * static_cast<double>(game.best_retreated_ns()) <
                          static_cast<double>(game.best_at_home_ns());
    EXPECT(num_retreated > 0.95 * num_rounds || !is_clear);
    EXPECT(game.num_changes <= 6);
    machine.wake_ns = 0;
    machine.link = 1;
    const int64_t gone_ns = machine.now_ns;
    while (game.has_retreated() || game.spins()) {
      game.play(1, 0.02);
      EXPECT(machine.now_ns < gone_ns + 100'000'000'000);
    }
    // A random placement may be worse than the fold also while nobody presses.
    const auto home_ns = static_cast<double>(game.best_at_home_ns());
    if (static_cast<double>(game.best_retreated_ns()) < 0.97 * home_ns) continue;
    game.play(1000, 0.02);
    EXPECT(!game.has_retreated());
    const bool knows_link = trial % 2 != 0;  // after 10 s and more without copies
    EXPECT(game.regret() < 0.05 || !knows_link);
  }
  EXPECT(num_retreats > num_trials / 4 && num_refused > num_trials / 8);
  EXPECT(num_spinning > num_trials / 4);
}

// On a device that can be folded.
Game regular_game(Random& random, const std::string& path) {
  const double share = between(random, 0.6, 0.9);
  return Game(random, path, regular_plan(random, 30 + below(random, 20)), {},
              [&](Random&, const RandomPlan& plan) { return alternating_placement(plan, share); });
}

// Another program has the device in turn: what comes while it is the other's waits for long, copies as well.
// Units change places, and so few are promoted that copies are there in spite of that; until it is gone. Whether
// to spin is found out by rounds, whatever the model promises.
void test_turns(Random& random, const std::string& path, int num_trials) {
  double sum_of_gains = 0;
  int num_still_folded = 0, num_folded_again = 0, num_questions = 0;
  for (int trial = 0; trial < num_trials; ++trial) {
    Game game = regular_game(random, path);
    Machine& machine = game.machine();
    game.play(40, 0.02);
    machine.turns.slice_ns = std::llrint(between(random, 0.5e6, 0.9e6));
    const bool is_misled = trial % 2 == 1;
    if (is_misled) machine.hidden_spin = 1.3;
    const auto first_ns = static_cast<double>(game.in_turns_ns(game.choice()));
    game.play(300, 0.02);
    const auto now_ns = static_cast<double>(game.in_turns_ns(game.choice()));
    const auto best_ns = static_cast<double>(game.best_in_turns_ns());
    std::fprintf(stderr, "%d: %.1f ms, then %.1f, the best %.1f; %d questions, %d changes\n", trial,
                 first_ns / 1e6, now_ns / 1e6, best_ns / 1e6, game.num_questions, game.num_changes);
    EXPECT(game.has_folded());
    EXPECT(now_ns < 0.95 * first_ns && now_ns < 1.1 * best_ns);
    EXPECT(!is_misled || !game.spins());
    sum_of_gains += 1 - now_ns / first_ns;
    num_questions += game.num_questions;
    game.num_changes = 0;
    game.play(3000, 0.02);
    std::fprintf(stderr, "   then %d changes\n", game.num_changes);
    EXPECT(game.num_changes <= 10);
    num_still_folded += game.has_folded();
    machine.turns.slice_ns = 0;
    const int64_t gone_ns = machine.now_ns;
    while (game.has_retreated() || game.spins()) {
      game.play(1, 0.02);
      EXPECT(machine.now_ns < gone_ns + 100'000'000'000);
    }
    game.play(100, 0.02);
    machine.turns.slice_ns = 700'000;
    game.play(200, 0.02);
    num_folded_again += game.has_folded();
  }
  EXPECT(sum_of_gains > 0.1 * num_trials);
  EXPECT(num_questions < 2 * num_trials);  // what rounds have compared is not asked about once more
  EXPECT(num_still_folded > 0.8 * num_trials && num_folded_again > 0.8 * num_trials);
}

// What rounds have refused before it shows that another program has the device in turn is tried then, and
// what they refuse then as well is not.
void test_refusal(Random& random, const std::string& path, int num_trials) {
  int num_folded = 0, num_spun = 0;
  for (int trial = 0; trial < num_trials; ++trial) {
    Game game = regular_game(random, path);
    Machine& machine = game.machine();
    game.play(40, 0.02);
    machine.wake_ns = 400'000;
    machine.hidden_spin = machine.hidden_retreat = 4;
    game.play(200, 0.02);
    EXPECT(!game.spins() && !game.has_retreated());
    machine.wake_ns = 0;
    machine.turns.slice_ns = 700'000;
    const bool helps = trial % 2 == 0;
    if (helps) machine.hidden_spin = machine.hidden_retreat = 1;
    bool has_spun = false;
    for (int round = 0; round < 300; ++round) {
      game.play(1, 0.02);
      has_spun |= game.spins();
    }
    std::fprintf(stderr, "%d: %s, %s\n", trial, game.has_folded() ? "folded" : "at home",
                 has_spun ? "has spun" : "has not spun");
    if (helps) {
      num_folded += game.has_folded();
      num_spun += has_spun;
      continue;
    }
    EXPECT(!game.spins() && !game.has_retreated());
    game.num_changes = 0;
    game.play(1000, 0.02);
    EXPECT(game.num_changes <= 2);
    EXPECT(!game.spins() && !game.has_retreated());
  }
  EXPECT(num_folded > 0.4 * num_trials && num_spun > 0.4 * num_trials);
}

// Of the host's units that advance into what those before give up, the first one if all the room can be used.
int first_with_room(const RandomPlan& made, const DeviceShare& on) {
  uint64_t room = 0, needed = 0;
  const auto is_weights = [&](size_t unit) { return made.units[unit].kind == UnitKind::kWeights; };
  const auto bytes = [&](size_t unit) { return DeviceShare::room_of(made.units[unit]); };
  for (size_t unit = 0; unit < made.units.size(); ++unit) {
    if (is_weights(unit) && !on.unit_on_device[unit]) needed += bytes(unit);
  }
  for (size_t unit = 0; unit < made.units.size(); ++unit) {
    if (!is_weights(unit)) continue;
    if (on.unit_on_device[unit]) {
      room += bytes(unit);
    } else if (room > 0 && room >= needed) {
      return static_cast<int>(unit);
    } else {
      needed -= bytes(unit);
    }
  }
  return -1;
}

// Who takes whose place in a fold: the same memory, used once and all of it, and one hand-off each way.
void test_fold(Random& random, const std::string& path, int num_trials) {
  int num_folds = 0;
  for (int trial = 0; trial < num_trials; ++trial) {
    const RandomPlan made = plan_with_times(random, 2 + below(random, 10));
    Placement placement = random_placement(random, made, 0);
    const double share = between(random, 0.2, 0.8);
    for (size_t unit = 0; unit < made.units.size(); ++unit) {
      const bool is_cache = made.units[unit].kind == UnitKind::kKvCache;  // which never advances
      placement.on_device[unit] = is_cache || between(random, 0, 1) < share;
    }
    Setup setup(made, path, placement, VirtualOptions{}, 1, 1);
    const DeviceShare& on = setup.residency->share();
    const TransferModel model(setup.plan, *setup.residency);
    const Choice& fold = model.fold();
    if (fold.advances.empty()) continue;
    ++num_folds;
    EXPECT(std::ranges::is_sorted(fold.retreats) && fold.promotions.empty());
    std::vector<bool> is_taken(on.weights_bytes);
    int first_unit = INT_MAX;
    for (const Advance& advance : fold.advances) {
      const uint64_t bytes = made.units[static_cast<size_t>(advance.unit)].bytes;
      EXPECT(advance.offset % 256 == 0 && advance.offset + bytes <= on.weights_bytes);
      EXPECT(on.unit_on_device[static_cast<size_t>(advance.unit)] == 0);
      for (uint64_t at = advance.offset; at < advance.offset + bytes; ++at) {
        EXPECT(!is_taken[at]);
        is_taken[at] = true;
      }
      first_unit = std::min(first_unit, advance.unit);
    }
    // What nobody gave up is nobody else's.
    for (int unit = 0; unit < setup.plan.num_units; ++unit) {
      const uint64_t begin = on.unit_offsets[static_cast<size_t>(unit)];
      if (begin == kNowhere || std::ranges::binary_search(fold.retreats, unit)) continue;
      for (uint64_t at = begin; at < begin + setup.plan.units[unit].bytes; ++at) EXPECT(!is_taken[at]);
    }
    EXPECT(fold.retreats.back() < first_unit);
    EXPECT(first_unit == first_with_room(made, on));
    const BuiltRound round = build_round(setup.plan, *setup.residency,
                                         *setup.residency->take_place(), 1, 1, fold);
    EXPECT(round.splits.runs.size() <= 2);
  }
  std::fprintf(stderr, "%d of %d placements can be folded\n", num_folds, num_trials);
  EXPECT(num_folds > num_trials / 4);
}

// A threshold of 50 % lets a change of 35 % pass; an interval of 200 rounds holds the next question up;
// a device that must not spin does not, however late it is.
void test_options(Random& random, const std::string& path, int num_trials) {
  for (int trial = 0; trial < num_trials; ++trial) {
    Game game(random, path, {.drift_threshold = 0.5});
    game.play(60, 0.02);
    game.num_questions = 0;
    game.machine().cpu = 1.35;
    game.play(100, 0.02);
    EXPECT(game.num_questions == 0);
    game.machine().cpu = 1.9;
    game.play(30, 0.02);
    EXPECT(game.num_questions > 0);

    Game patient(random, path, {.reschedule_interval = 200});
    patient.machine().cpu = 2;
    while (patient.num_questions == 0) patient.play(1, 0.02);
    patient.machine().cpu = 4;
    patient.play(60, 0.02);
    EXPECT(patient.num_questions == 1);
    patient.play(600, 0.02);
    EXPECT(patient.num_questions > 1);

    Game yielding(random, path, {.may_spin = false});
    yielding.machine().wake_ns = 1'000'000;
    for (int round = 0; round < 200; ++round) {
      yielding.play(1, 0.02);
      EXPECT(!yielding.spins());
    }
  }
}

// Rounds of one token with a run of the device in each layer, and copies in some.
struct Layers {
  Layers(Random& random, const std::string& path, int num_layers, size_t num_promoted)
      : made(plan_with_times(random, num_layers)),
        setup(made, path, placement_of(num_layers), VirtualOptions{}, 1, 1),
        machine(setup, random) {
    for (int unit = 4; choice.promotions.size() < num_promoted; unit += 3) {
      choice.promotions.push_back({unit, static_cast<int>(choice.promotions.size() % 2), -1});
    }
    SessionPlace& place = *setup.residency->take_place();
    round.built = build_round(setup.plan, *setup.residency, place, 1, 1, choice);
    const auto num_parts = static_cast<size_t>(num_layers);
    EXPECT(round.built.splits.segments.size() >= num_parts);
    EXPECT(round.built.splits.runs.size() >= num_parts);
  }

  static Placement placement_of(int num_layers) {
    Placement made;
    made.on_device = {0};
    made.num_slots = 2;
    made.slot_bytes = 1 << 20;
    for (int layer = 0; layer < num_layers; ++layer) {
      made.on_device.insert(made.on_device.end(), {0, 0, 1});
    }
    made.on_device.push_back(1);
    return made;
  }

  RandomPlan made;
  Setup setup;
  Machine machine;
  Choice choice;
  HybridRound round{.shape = {1, 1}};
};

// Another program's time slice comes in between in some runs, in others each time: units take as long as
// they do on average, those as well that do not run on the device.
void test_interruptions(Random& random, const std::string& path, int num_rounds) {
  constexpr double kSlice = 20;  // times of a run
  Layers layers(random, path, 24, 12);
  const TransferModel model(layers.setup.plan, *layers.setup.residency);
  LoadMonitor monitor(layers.setup.plan, model, 0.15);
  double taken_ns = 0, own_ns = 0;
  for (int count = 0; count < num_rounds; ++count) {
    RoundRecord record = layers.machine.run(layers.round, layers.choice, {random, 0.02});
    for (RoundRecord::Run& run : record.runs) {
      int64_t work_ns = run.end_ns - run.begin_ns;
      for (const RoundRecord::Copy& copy : record.copies) {
        const int64_t begin_ns = std::max(copy.wait_ns, run.begin_ns);
        work_ns -= std::max<int64_t>(std::min(copy.ready_ns, run.end_ns) - begin_ns, 0);
      }
      own_ns += static_cast<double>(work_ns);
      if (between(random, 0, 1) < 0.1) {
        const auto slice_ns = static_cast<int64_t>(kSlice * static_cast<double>(work_ns));
        run.end_ns += slice_ns;
        work_ns += slice_ns;
      }
      taken_ns += static_cast<double>(work_ns);
    }
    monitor.observe(layers.round, record);
  }
  const double slowdown = taken_ns / own_ns;
  const Speeds speeds = monitor.speeds();
  double highest = 0;
  for (const double factor : speeds.gpu) highest = std::max(highest, factor);
  std::fprintf(stderr, "%.2f times as slow, units at most %.2f times\n", slowdown, highest);
  EXPECT(highest < 2 * slowdown);
  EXPECT(monitor.drifts().gpu > 0.5 * slowdown);
}

// Rounds with 50 segments, 50 runs and 30 copies, at speeds that are not the plan's.
void test_overhead(Random& random, const std::string& path, int num_rounds) {
  constexpr size_t kPromoted = 30;
  constexpr int64_t kMostNs = 400'000;  // 1 % of 40 ms
  Layers layers(random, path, 50, kPromoted);
  Machine& machine = layers.machine;
  HybridRound& round = layers.round;
  TransferPolicy policy(layers.setup.plan, *layers.setup.residency, {});
  machine.cpu = 1.4, machine.gpu = 0.6, machine.link = 1.3;
  std::vector<int64_t> taken_ns;
  int num_questions = 0;
  for (int count = 0; count < num_rounds; ++count) {
    round.version = policy.choice_of(round.shape).version;
    const RoundRecord record = machine.run(round, layers.choice, {random, 0.02});
    EXPECT(record.copies.size() == kPromoted);
    const int64_t begin_ns = platform::now_ns();
    policy.observe(round, record);
    const auto question = policy.due(round.shape, machine.now_ns);
    taken_ns.push_back(platform::now_ns() - begin_ns);
    if (!question) continue;
    ++num_questions;
    policy.settle(*question, {}, {}, machine.now_ns);  // nothing is better than what there is
  }
  std::ranges::sort(taken_ns);
  const int64_t median_ns = taken_ns[taken_ns.size() / 2];
  std::fprintf(stderr, "%.1f us a round, %d questions in %d rounds\n",
               static_cast<double>(median_ns) / 1e3, num_questions, num_rounds);
  EXPECT(median_ns < kMostNs);
  EXPECT(num_questions <= 2);
}

}  // namespace
}  // namespace atsc::testing

int main(int argc, char** argv) {
  if (argc != 5) return 64;
  using namespace atsc::testing;
  Random random(static_cast<uint64_t>(std::atoi(argv[3])));
  const std::string name = argv[1];
  const int count = std::atoi(argv[2]);
  if (name == "change") test_change(random, argv[4], count);
  if (name == "noise") test_noise(random, argv[4], count);
  if (name == "probe") test_probe(random, argv[4], count);
  if (name == "retreat") test_retreat(random, argv[4], count);
  if (name == "turns") test_turns(random, argv[4], count);
  if (name == "refusal") test_refusal(random, argv[4], count);
  if (name == "fold") test_fold(random, argv[4], count);
  if (name == "mistake") test_mistake(random, argv[4], count);
  if (name == "options") test_options(random, argv[4], count);
  if (name == "interruptions") test_interruptions(random, argv[4], count);
  if (name == "overhead") test_overhead(random, argv[4], count);
  std::puts("fine");
}
