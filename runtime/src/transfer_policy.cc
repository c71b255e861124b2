#include "transfer_policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "kernel.h"

namespace atsc {
namespace {

constexpr size_t kMostAdopted = 16, kMostChanges = 1000;
constexpr int kRoundsToConfirm = 20;
// The first steps of a process touch memory and wake clocks: they say little, also to compare with.
constexpr int kFirstSteps = 10;
constexpr int kRoundsToWait = 8;  // a drift takes four to follow
// 50 us and more: no clock is so wrong, and another program's time slice takes longer.
constexpr double kLateWake = 10;

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

Waits TransferPolicy::first_waits() const {
  return options_.waits == WaitMode::kHold ? Waits::kHold : Waits::kYield;
}

// Long rounds leave the device no time to yield. What was found not to help is not asked again before
// waking takes another time.
Waits TransferPolicy::waits_for(const Adopted& adopted, const Drifts& now) const {
  if (options_.waits != WaitMode::kLoadAware || class_of(adopted.shape) != 0) return adopted.waits;
  if (now.wake <= kLateWake) return Waits::kYield;
  return is_off(adopted.assumed.wake, now.wake) ? Waits::kHold : adopted.waits;
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
  Adopted made{.shape = shape, .choice = plain_choice(shape), .waits = first_waits(),
               .version = num_versions_++, .last_used = num_uses_};
  if (chooses_) {
    const LoadMonitor& monitor = monitors_[static_cast<size_t>(class_of(shape))];
    made.assumed = monitor.drifts();
    const Question question{shape, made.version, made.choice, made.waits, made.waits,
                            monitor.speeds(), made.assumed, "the plan's own times"};
    const int64_t begin_ns = platform::now_ns();
    Answer answer = decide(question, scheduler_);
    const int64_t taken_ns = platform::now_ns() - begin_ns;
    bool& is_logged = is_first_logged_[class_of(shape) == 0 ? 0 : 1];
    if (answer.is_worthwhile) made.choice = answer.choice;
    if (answer.is_worthwhile && !is_logged) {
      log(question, answer, {.adoption_ns = taken_ns});
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
  known->trial.observe({record.end_ns - record.begin_ns, record.position, shape.num_tokens});
  if (known->trial.was_better_before()) go_back(*known);
}

// What is assumed are the speeds of the question, which were measured with the choice before.
void TransferPolicy::go_back(Adopted& adopted) {
  Answer answer;
  answer.before_ns = adopted.trial.after_ns();
  answer.after_ns = adopted.trial.before_ns();
  adopted.choice = answer.choice = std::move(adopted.before);
  const Waits present_waits = std::exchange(adopted.waits, adopted.waits_before);
  const bool stops_holding = present_waits == Waits::kHold && adopted.waits == Waits::kYield;
  adopted.version = num_versions_++;
  adopted.trial.reset();
  adopted.rounds_to_wait = kRoundsToWait;
  adopted.rounds_to_confirm = 0;
  log({.shape = adopted.shape, .version = adopted.version, .present = {},
       .present_waits = present_waits, .waits = adopted.waits, .speeds = {}, .drifts = {},
       .reason = stops_holding ? "back: measured no faster than before"
                               : "back: measured slower than before"},
      answer, {});
}

bool TransferPolicy::is_off(double assumed, double now) const {
  return std::max(assumed / now, now / assumed) > 1 + options_.drift_threshold;
}

std::string TransferPolicy::reason_for(const Drifts& assumed, const Drifts& now) const {
  std::string reason;
  const auto add = [&](const char* what, double before, double after) {
    if (!is_off(before, after)) return;
    if (!reason.empty()) reason += ", ";
    reason += change_text(what, before, after);
  };
  add("CPU", assumed.cpu, now.cpu);
  add("GPU", assumed.gpu, now.gpu);
  add("link", assumed.link, now.link);
  return reason;
}

std::optional<TransferPolicy::Question> TransferPolicy::due(const RoundShape& shape,
                                                            int64_t now_ns) {
  if (!chooses_ || options_.mode != TransferMode::kLoadAware) return std::nullopt;
  const LoadMonitor& monitor = monitors_[static_cast<size_t>(class_of(shape))];
  Adopted& adopted = find_or_choose(shape);
  if (adopted.rounds_to_confirm > 1) --adopted.rounds_to_confirm;
  const bool is_new = class_of(shape) == 0 && adopted.num_rounds < kFirstSteps;
  const bool must_wait = is_new || adopted.trial.is_under_way() || adopted.rounds_to_wait > 0;
  if (must_wait && !options_.choose_at_random) return std::nullopt;
  const auto least_ns = static_cast<double>(monitor.recent_round_ns()) * options_.reschedule_interval;
  const bool is_early = static_cast<double>(now_ns - adopted.asked_ns) < least_ns;
  if (is_early && !options_.choose_at_random) return std::nullopt;
  const Drifts drifts = monitor.drifts();
  if (drifts.wake <= kLateWake) adopted.assumed.wake = 1;
  std::string reason = reason_for(adopted.assumed, drifts);
  // One thing at a time, so that a trial tells of it: promotions first, for it may be a slow link that
  // all waits for.
  const Waits waits = reason.empty() ? waits_for(adopted, drifts) : adopted.waits;
  if (waits != adopted.waits) {
    reason = waits == Waits::kHold ? change_text("GPU comes back", 1, drifts.wake)
                                   : "the GPU may be free again";
  }
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
  adopted.asked_ns = now_ns;
  return Question{shape,  num_versions_++,  adopted.choice, adopted.waits,
                  waits,  monitor.speeds(), drifts,         std::move(reason)};
}

TransferPolicy::Answer TransferPolicy::decide(const Question& question,
                                              TransferScheduler& scheduler) const {
  Answer answer;
  if (options_.choose_at_random) {
    answer.choice = options_.choose_at_random(question.shape);
    answer.is_worthwhile = true;
    return answer;
  }
  answer.before_ns = model_.predict(scheduler, question.shape, question.speeds, question.present);
  if (question.waits != question.present_waits) {
    // How long hand-offs will take is found out by the trial; at best, as long as planned.
    Speeds speeds = question.speeds;
    speeds.hand_off = 1;
    answer.choice = question.present;
    answer.after_ns = model_.predict(scheduler, question.shape, speeds, question.present);
    answer.is_worthwhile = true;
    return answer;
  }
  TransferSchedule found = model_.schedule(scheduler, question.shape, question.speeds);
  answer.choice = std::move(found.choice);
  answer.after_ns = found.round_ns;
  const auto most_ns = static_cast<double>(answer.before_ns) * (1 - kWorthwhileGain);
  answer.is_worthwhile = static_cast<double>(answer.after_ns) < most_ns;
  return answer;
}

void TransferPolicy::settle(const Question& question, const Answer& answer, const Cost& cost,
                            int64_t now_ns) {
  const auto known = std::ranges::find(adopted_, question.shape, &Adopted::shape);
  if (known == adopted_.end()) return;
  known->asked_ns = now_ns;
  const double assumed_wake = known->assumed.wake;
  known->assumed = question.drifts;
  if (question.waits == question.present_waits) known->assumed.wake = assumed_wake;
  if (!answer.is_worthwhile) return;
  const bool starts_to_hold = question.waits == Waits::kHold && known->waits == Waits::kYield;
  if (!options_.choose_at_random) known->trial.begin(starts_to_hold);
  known->before = std::exchange(known->choice, answer.choice);
  known->waits_before = std::exchange(known->waits, question.waits);
  known->version = question.version;
  log(question, answer, cost);
}

void TransferPolicy::put_off(const Question& question, int64_t until_ns) {
  const auto known = std::ranges::find(adopted_, question.shape, &Adopted::shape);
  if (known != adopted_.end()) known->asked_ns = until_ns;
}

void TransferPolicy::log(const Question& question, const Answer& answer, const Cost& cost) {
  atsc_change change{};
  change.when_ns = platform::now_ns();
  change.kind = class_of(question.shape) == 0 ? ATSC_ROUND_DECODE : ATSC_ROUND_PREFILL;
  change.num_promoted = static_cast<int32_t>(answer.choice.size());
  for (const Promotion& promotion : answer.choice) {
    change.promoted_bytes += plan_.units[promotion.unit].bytes;
  }
  change.before_ns = answer.before_ns;
  change.after_ns = answer.after_ns;
  change.holds_device = question.waits == Waits::kHold;
  change.adoption_ns = cost.adoption_ns;
  change.build_ns = cost.build_ns;
  std::snprintf(change.reason, sizeof change.reason, "%s", question.reason.c_str());
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
