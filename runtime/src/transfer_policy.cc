#include "transfer_policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>

#include "kernel.h"

namespace atsc {
namespace {

constexpr size_t kMostAdopted = 16, kMostChanges = 1000;
constexpr int kRoundsToConfirm = 20;
// The first steps of a process touch memory and wake clocks: they say little, also to compare with.
constexpr int kFirstSteps = 10;
constexpr int kRoundsToWait = 8;  // a drift takes four to follow
constexpr double kOtherWake = 2;  // by time slices it varies much
// Fewer hand-offs of a round say little: the device counts as at least so late as before they were few,
// and until it has been in time for long enough.
constexpr int kEnoughHandOffs = 3;
constexpr double kStillLate = 0.8;
constexpr int64_t kOtherSlice = 2;  // times as long

bool is_late(const Drifts& now) { return now.wake > kLateWake; }

// A device that nobody else presses waits for copies without yielding it.
Speeds speeds_of(const LoadMonitor& monitor) {
  Speeds speeds = monitor.speeds();
  if (!is_late(monitor.drifts())) speeds.wake = 1;
  return speeds;
}

bool is_other_wake(double one, double other) {
  return std::max(one / other, other / one) > kOtherWake;
}

TransferPolicy::Refusal refusal_under(const Conditions& now) {
  return {now.drifts.wake, now.slice_ns > 0};
}

// "CPU 38 % slower", "link 2.4 times as fast"
std::string change_text(const char* what, double assumed, double now) {
  char text[48];
  const bool is_slower = now > assumed;
  const double factor = is_slower ? now / assumed : assumed / now;
  if (factor < 2) {
    std::snprintf(text, sizeof text, "%s %.0f %% %s", what, 100 * (factor - 1),
                  is_slower ? "slower" : "faster");
  } else {
    std::snprintf(text, sizeof text, "%s %.1f times as %s", what, factor,
                  is_slower ? "slow" : "fast");
  }
  return text;
}

}  // namespace

TransferPolicy::TransferPolicy(const Plan& plan, const Residency& residency,
                               const TransferOptions& options)
    : plan_(plan),
      residency_(residency),
      options_(options),
      model_(plan, residency),
      chooses_(options.choose_at_random ||
               (options.mode != TransferMode::kNone && model_.has_times())),
      monitors_{LoadMonitor(plan, model_, options.drift_threshold),
                LoadMonitor(plan, model_, options.drift_threshold),
                LoadMonitor(plan, model_, options.drift_threshold)} {}

int TransferPolicy::class_of(const RoundShape& shape) const {
  if (shape.num_tokens <= kFewRows) return 0;
  return 4 * shape.num_tokens < plan_.chunk ? 1 : 2;
}

// As without a scheduler: long rounds stream all that they can, others promote nothing.
Choice TransferPolicy::plain_choice(const RoundShape& shape) const {
  const int64_t stream_from = plan_.device.stream_from_rows;
  if (stream_from <= 0 || shape.num_tokens < stream_from) return {};
  return streaming_choice(plan_, residency_, shape.num_logit_rows >= stream_from);
}

// Long rounds have next to no hand-offs. What a trial has refused is tried again when the device comes
// back sooner or later than then by far, and once more when another program turns out to have it in turn:
// then other promotions come with it.
bool TransferPolicy::may_adapt(const Adopted& adopted, const Conditions& now,
                               const Refusal& refusal) const {
  if (options_.choose_at_random) return true;
  if (class_of(adopted.shape) != 0 || !is_late(now.drifts)) return false;
  const bool is_refused = refusal.wake > 0 && !is_other_wake(refusal.wake, now.drifts.wake);
  return !is_refused || (now.slice_ns > 0 && !refusal.in_turns);
}

const TransferPolicy::Adopted& TransferPolicy::choice_of(const RoundShape& shape) {
  return find_or_choose(shape);
}

TransferPolicy::Adopted& TransferPolicy::find_or_choose(const RoundShape& shape) {
  ++num_uses_;
  const auto known = std::ranges::find(adopted_, shape, &Adopted::shape);
  if (known != adopted_.end()) {
    known->last_used = num_uses_;
    return *known;
  }
  if (adopted_.size() >= kMostAdopted) {
    adopted_.erase(std::ranges::min_element(adopted_, {}, &Adopted::last_used));
  }
  Adopted made{.shape = shape, .choice = plain_choice(shape), .version = num_versions_++,
               .last_used = num_uses_};
  if (chooses_) {
    const LoadMonitor& monitor = monitors_[static_cast<size_t>(class_of(shape))];
    made.assumed.drifts = monitor.drifts();
    const TransferQuestion question{.shape = shape,
                                    .version = made.version,
                                    .present = made.choice,
                                    .may_spin = false,
                                    .may_retreat = false,
                                    .may_exchange = false,
                                    .speeds = speeds_of(monitor),
                                    .now = made.assumed,
                                    .reason = "the plan's own times"};
    const int64_t begin_ns = platform::now_ns();
    TransferAnswer answer = decide(question, scheduler_);
    const int64_t taken_ns = platform::now_ns() - begin_ns;
    bool& is_logged = is_first_logged_[class_of(shape) == 0 ? 0 : 1];
    if (answer.is_worthwhile) made.choice = answer.choice;
    if (answer.is_worthwhile && !is_logged) {
      log(shape, question.reason, answer, {.adoption_ns = taken_ns});
      is_logged = true;
    }
  }
  adopted_.push_back(std::move(made));
  return adopted_.back();
}

void TransferPolicy::observe(const HybridRound& round, const RoundRecord& record) {
  if (!chooses_ || options_.mode != TransferMode::kLoadAware) return;
  const RoundShape& shape = round.shape;
  // Rounds of a few rows take their weights as those of one row do, but not quite so long.
  if (shape.num_tokens > 1 && shape.num_tokens <= kFewRows) return;
  monitors_[static_cast<size_t>(class_of(shape))].observe(round, record);
  const auto known = std::ranges::find(adopted_, shape, &Adopted::shape);
  if (known == adopted_.end() || known->version != round.version) return;
  ++known->num_rounds;
  known->rounds_to_wait = std::max(known->rounds_to_wait - 1, 0);
  const int64_t taken_ns = record.end_ns - record.begin_ns;
  known->trial.observe({taken_ns, record.position, shape.num_tokens});
  known->race.observe(taken_ns);
  if (known->trial.was_better_before()) {
    go_back(*known);
  } else if (!known->trial.is_under_way()) {
    go_on(*known);
  }
}

// With the race, if there is one.
void TransferPolicy::go_on(Adopted& adopted) {
  std::optional<ChoiceRace::Step> step = adopted.race.next();
  if (!step) return;
  std::string reason = "compares what may be faster";
  if (step->num_compared > 0) {
    adopted.rounds_to_confirm = 0;  // rounds have said so
    reason = "the fastest of " + std::to_string(step->num_compared) + " compared";
  }
  if (step->is_another) {
    adopted.choice = step->choice;
    adopted.version = num_versions_++;
    adopted.rounds_to_wait = kRoundsToWait;
  }
  log(adopted.shape, reason,
      {.choice = std::move(step->choice), .before_ns = step->before_ns, .after_ns = step->after_ns}, {});
}

// As soon as the device is late.
void TransferPolicy::ask_again(Adopted& adopted) {
  adopted.assumed.drifts.wake = 1;
  adopted.assumed.slice_ns = 0;
}

// What is assumed are the speeds of the question, which were measured with the choice before. What was
// begun for a late device and is given up leaves the question open, for what else there is.
void TransferPolicy::go_back(Adopted& adopted) {
  TransferAnswer answer;
  answer.before_ns = adopted.trial.after_ns();
  answer.after_ns = adopted.trial.before_ns();
  const Choice tried = std::exchange(adopted.choice, std::move(adopted.before));
  const Choice& present = answer.choice = adopted.choice;
  const bool spins_no_more = tried.spins && !present.spins;
  const bool has_returned = has_retreated(tried) && !has_retreated(present);
  const Refusal refusal = refusal_under(adopted.assumed);
  if (spins_no_more) {
    adopted.spin_refused = refusal;
  } else if (has_advanced(tried) && !has_advanced(present)) {
    adopted.exchange_refused = refusal;
  } else if (has_returned) {
    adopted.retreat_refused = refusal;
  }
  const bool must_gain = spins_no_more || has_returned;
  if (must_gain) {
    adopted.assumed = adopted.assumed_before;
    ask_again(adopted);
  } else if (has_adapted(present) && !has_adapted(tried)) {
    adopted.assumed = adopted.assumed_before;
    adopted.rounds_to_return = std::min(2 * adopted.rounds_to_return, kMostRoundsToReturn);
  }
  adopted.version = num_versions_++;
  adopted.trial.reset();
  adopted.race.reset();
  adopted.rounds_to_wait = kRoundsToWait;
  adopted.rounds_to_confirm = adopted.rounds_in_time = 0;
  log(adopted.shape,
      must_gain ? "back: measured no faster than before" : "back: measured slower than before",
      answer, {});
}

bool TransferPolicy::is_off(double assumed, double now) const {
  return std::max(assumed / now, now / assumed) > 1 + options_.drift_threshold;
}

// What is asked for time slices follows from them and from the CPU alone; all else is off most of the time.
std::string TransferPolicy::reason_for(const Adopted& adopted, const Drifts& now,
                                       int64_t slice_ns) const {
  const Drifts& assumed = adopted.assumed.drifts;
  const bool in_turns = adopted.assumed.slice_ns > 0 && slice_ns > 0;
  std::string reason;
  const auto add = [&](const std::string& text) {
    if (!reason.empty()) reason += ", ";
    reason += text;
  };
  if (is_off(assumed.cpu, now.cpu)) add(change_text("CPU", assumed.cpu, now.cpu));
  if (!in_turns && is_off(assumed.gpu, now.gpu)) add(change_text("GPU", assumed.gpu, now.gpu));
  if (!in_turns && is_off(assumed.link, now.link)) add(change_text("link", assumed.link, now.link));
  if (in_turns && (slice_ns > kOtherSlice * adopted.assumed.slice_ns ||
                   adopted.assumed.slice_ns > kOtherSlice * slice_ns)) {
    add("other time slices");
  }
  if (has_adapted(adopted.choice) && adopted.rounds_in_time >= adopted.rounds_to_return) {
    add("the GPU may be free again");
  }
  if (!in_turns && !has_retreated(adopted.choice) && is_late(now) &&
      is_other_wake(assumed.wake, now.wake)) {
    char text[48];
    std::snprintf(text, sizeof text, "GPU comes back %.0f times as late", now.wake);
    add(text);
  }
  return reason;
}

std::optional<TransferQuestion> TransferPolicy::due(const RoundShape& shape,
                                                            int64_t now_ns) {
  if (!chooses_ || options_.mode != TransferMode::kLoadAware) return std::nullopt;
  const LoadMonitor& monitor = monitors_[static_cast<size_t>(class_of(shape))];
  Adopted& adopted = find_or_choose(shape);
  if (adopted.rounds_to_confirm > 1) --adopted.rounds_to_confirm;
  const Drifts drifts = monitor.drifts();
  const bool adapted = has_adapted(adopted.choice);
  // Few hand-offs may all be in time while another program is there; copies are not.
  const bool is_pressed = is_late(drifts) || monitor.is_interrupted();
  adopted.rounds_in_time = adapted && !is_pressed ? adopted.rounds_in_time + 1 : 0;
  const bool is_new = class_of(shape) == 0 && adopted.num_rounds < kFirstSteps;
  if (adopted.rounds_in_time >= adopted.rounds_to_return) adopted.race.reset();  // nobody is there now
  const bool must_wait = is_new || adopted.trial.is_under_way() || adopted.race.is_under_way() ||
                         adopted.rounds_to_wait > 0;
  if (must_wait && !options_.choose_at_random) return std::nullopt;
  const auto least_ns = static_cast<double>(monitor.recent_round_ns()) * options_.reschedule_interval;
  const bool is_early = static_cast<double>(now_ns - adopted.asked_ns) < least_ns;
  if (is_early && !options_.choose_at_random) return std::nullopt;
  if (!adapted && !is_late(drifts)) {
    ask_again(adopted);
    adopted.spin_refused = adopted.retreat_refused = adopted.exchange_refused = {};
    adopted.may_exchange = true;
  }
  const bool may_stay = adapted && adopted.rounds_in_time < adopted.rounds_to_return;
  // A choice that has adapted to another program's slices may have too few copies to show them.
  const bool goes_on = may_stay && adopted.assumed.slice_ns > 0;
  const bool in_turns = class_of(shape) == 0 && (monitor.is_interrupted() || goes_on);
  const int64_t slice_ns = in_turns ? monitor.slice_ns() : 0;
  std::string reason = reason_for(adopted, drifts, slice_ns);
  if (options_.choose_at_random) reason = "at random";
  if (!reason.empty()) {
    adopted.reason = reason;
    adopted.rounds_to_confirm = kRoundsToConfirm;
  } else if (adopted.rounds_to_confirm == 1) {
    reason = adopted.reason + ", measured for longer";
    adopted.rounds_to_confirm = 0;
  } else {
    return std::nullopt;
  }
  const Conditions now = {drifts, slice_ns, goes_on ? adopted.assumed.calm : monitor.calm()};
  Speeds speeds = speeds_of(monitor);
  const bool stays_away = may_stay && has_retreated(adopted.choice);
  const bool has_few_hand_offs = monitor.num_hand_offs() < kEnoughHandOffs;
  if (stays_away && (has_few_hand_offs || !is_late(drifts))) {
    speeds.hand_off = std::max(speeds.hand_off, kStillLate * adopted.late_hand_off);
    speeds.wake = std::max(speeds.wake, kStillLate * adopted.late_wake);
  }
  adopted.asked_ns = now_ns;
  const bool may_spin = options_.may_spin &&
                        ((may_stay && adopted.choice.spins) ||
                         (!(stays_away && has_few_hand_offs) &&
                          may_adapt(adopted, now, adopted.spin_refused)));
  const bool may_retreat = stays_away || may_adapt(adopted, now, adopted.retreat_refused);
  const bool may_exchange = (stays_away && has_advanced(adopted.choice)) ||
                            may_adapt(adopted, now, adopted.exchange_refused);
  return TransferQuestion{.shape = shape,
                  .version = num_versions_++,
                  .present = adopted.choice,
                  .may_spin = may_spin,
                  .may_retreat = may_retreat,
                  .may_exchange = may_exchange && adopted.may_exchange,
                  .speeds = std::move(speeds),
                  .now = now,
                  .reason = std::move(reason),
                  .between = in_turns ? monitor.speeds_between(now.calm) : Speeds{}};
}

TransferAnswer TransferPolicy::decide(const TransferQuestion& question,
                                      TransferScheduler& scheduler) const {
  if (!options_.choose_at_random) return atsc::decide(question, model_, scheduler);
  TransferAnswer answer{.choice = options_.choose_at_random(question.shape), .is_worthwhile = true};
  answer.choice.spins &= question.may_spin;
  if (!question.may_retreat) answer.choice.retreats.clear();
  std::vector<int> advances;
  for (const Advance& advance : answer.choice.advances) advances.push_back(advance.unit);
  answer.choice.advances = model_.places_for(advances, answer.choice.retreats);
  return answer;
}

void TransferPolicy::settle(const TransferQuestion& question, const TransferAnswer& answer,
                            const Cost& cost, int64_t now_ns) {
  const auto known = std::ranges::find(adopted_, question.shape, &Adopted::shape);
  if (known == adopted_.end()) return;
  known->asked_ns = now_ns;
  known->assumed_before = std::exchange(known->assumed, question.now);
  known->rounds_in_time = 0;
  if (!answer.is_worthwhile) return;
  const bool begins_to_spin = answer.choice.spins && !known->choice.spins;
  const bool begins_retreat = has_retreated(answer.choice) && !has_retreated(known->choice);
  if (begins_to_spin || begins_retreat) known->rounds_to_return = kRoundsToReturn;
  if (begins_to_spin && has_retreated(answer.choice)) known->rounds_to_confirm = kRoundsToConfirm;
  if (begins_retreat) {
    known->late_hand_off = question.now.drifts.hand_off;
    known->late_wake = question.now.drifts.wake;
  }
  if (!options_.choose_at_random) known->trial.begin(begins_to_spin || begins_retreat);
  known->race.begin(answer.compared);
  known->before = std::exchange(known->choice, answer.choice);
  known->version = question.version;
  std::string begins;  // first, for a reason may have no room for all
  const auto add = [&](const std::string& text) { begins += (begins.empty() ? "" : ", ") + text; };
  if (begins_to_spin) add("the GPU spins");
  if (begins_retreat) add("units retreat");
  if (has_advanced(answer.choice) && !has_advanced(known->before)) {
    add(std::to_string(answer.choice.advances.size()) + " units advance");
  }
  log(question.shape, begins.empty() ? question.reason : begins + ": " + question.reason, answer, cost);
}

void TransferPolicy::put_off(const TransferQuestion& question, const TransferAnswer& answer,
                             int64_t until_ns) {
  const auto known = std::ranges::find(adopted_, question.shape, &Adopted::shape);
  if (known == adopted_.end()) return;
  if (has_advanced(answer.choice) && !has_advanced(known->choice)) {
    known->may_exchange = false;
  } else if (has_retreated(answer.choice) && !has_retreated(known->choice)) {
    known->retreat_refused = refusal_under(question.now);
  } else {
    known->asked_ns = until_ns;
  }
}

void TransferPolicy::stop_exchanges() {
  if (options_.choose_at_random) return;
  for (Adopted& adopted : adopted_) {
    if (!has_advanced(adopted.choice)) continue;
    adopted.choice = plain_choice(adopted.shape);
    adopted.version = num_versions_++;
    adopted.trial.reset();
    adopted.race.reset();
    ask_again(adopted);
    adopted.may_exchange = false;
    log(adopted.shape, "back: units change places too often", {.choice = adopted.choice}, {});
  }
}

void TransferPolicy::log(const RoundShape& shape, const std::string& reason, const TransferAnswer& answer,
                         const Cost& cost) {
  atsc_change change{};
  change.when_ns = platform::now_ns();
  change.kind = class_of(shape) == 0 ? ATSC_ROUND_DECODE : ATSC_ROUND_PREFILL;
  change.num_promoted = static_cast<int32_t>(answer.choice.promotions.size());
  change.promoted_bytes = model_.promoted_bytes(answer.choice);
  change.before_ns = answer.before_ns;
  change.after_ns = answer.after_ns;
  change.num_retreated = static_cast<int32_t>(answer.choice.retreats.size());
  change.host_bytes = cost.host_bytes;
  change.adoption_ns = cost.adoption_ns;
  change.build_ns = cost.build_ns;
  std::snprintf(change.reason, sizeof change.reason, "%s", reason.c_str());
  const std::lock_guard lock(mutex_);
  if (changes_.size() == kMostChanges) changes_.pop_front();
  changes_.push_back(change);
}

atsc_change TransferPolicy::take_change() {
  const std::lock_guard lock(mutex_);
  if (changes_.empty()) return {};
  const atsc_change change = changes_.front();
  changes_.pop_front();
  return change;
}

}  // namespace atsc
