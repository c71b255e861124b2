#include "transfer_decision.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "choice_trial.h"

namespace atsc {
namespace {

// Beside another program predictions are worth less, the more so the more hand-offs and copies there are
// (an H200: 39 ms for 55). To move units may be predicted to take this much longer than to leave them where
// they are, for its trial decides; and once that has shown it to be faster, to come home must promise more.
constexpr double kUnsure = 1.1, kUnsureToReturn = 1.3;
// Speeds for which candidates are made where another program has the device in turn: times of copies as
// multiples of what they take alone, hand-offs late by so many slices.
constexpr double kLinks[] = {1.2, 2, 3}, kLateSlices[] = {0.05, 0.15, 0.3};
constexpr double kNearLinks[] = {1.2, 1.5, 2, 2.5, 3, 4};
constexpr double kNearLateSlices[] = {0.05, 0.1, 0.15, 0.2, 0.3};
constexpr double kGainOfAnother = 0.1;  // of one that has adapted: the model is no better
constexpr size_t kEachRetreat = 4;      // of the sets of retreats, and the largest
// What is left of a lateness, about, where the device keeps its turn while it waits.
constexpr double kLateSpinning = 0.6;

bool is_faster(int64_t round_ns, int64_t than_ns, double gain = kWorthwhileGain) {
  return static_cast<double>(round_ns) < static_cast<double>(than_ns) * (1 - gain);
}

// A device that spins yields again, and units come home, whatever is predicted: the trial tells whether
// that was right.
bool must_return(const TransferQuestion& question) {
  const bool may_move = question.may_retreat || question.may_exchange;
  return (question.present.spins && !question.may_spin) ||
         (has_retreated(question.present) && !may_move);
}

TransferAnswer decide_by_means(const TransferQuestion& question, const TransferModel& model,
                               TransferScheduler& scheduler) {
  TransferAnswer answer;
  const RoundShape& shape = question.shape;
  const Speeds& speeds = question.speeds;
  answer.before_ns = model.predict(scheduler, shape, speeds, question.present);
  TransferSchedule found = model.schedule(scheduler, shape, speeds);
  const auto stay_ns = static_cast<double>(found.round_ns);
  const double unsure = has_retreated(question.present) ? kUnsureToReturn : kUnsure;
  double most_moved_ns = stay_ns * unsure;
  const auto consider = [&](Choice moved) {
    TransferSchedule other = model.schedule(scheduler, shape, speeds, moved);
    const auto other_ns = static_cast<double>(other.round_ns);
    if (other_ns >= most_moved_ns) return;
    most_moved_ns = other_ns;
    found = std::move(other);
    answer.choice = std::move(moved);
  };
  if (question.may_retreat) {
    for (std::vector<int>& retreats : model.retreats(shape, speeds)) {
      consider({.promotions = {}, .retreats = std::move(retreats), .advances = {}});
    }
  }
  if (question.may_exchange && !model.fold().advances.empty()) {
    // A retreat that promises next to nothing is not in its way.
    if (most_moved_ns > stay_ns * (1 - kWorthwhileGain)) most_moved_ns = stay_ns * unsure;
    consider(model.fold());
  }
  // One thing at a time: what few hand-offs are left may be in time.
  const bool could_spin = question.may_spin && !question.present.spins;
  const bool begins_retreat = has_retreated(answer.choice) && !has_retreated(question.present);
  const bool gains = is_faster(found.round_ns, answer.before_ns);
  const bool begins_to_spin = could_spin && !(begins_retreat && gains);
  if (begins_to_spin && begins_retreat) answer.choice = {};
  if (begins_to_spin && !has_retreated(answer.choice)) {
    Speeds spinning = speeds;  // as they would be
    spinning.wake = std::max(speeds.wake * kLateSpinning, 1.0);
    spinning.hand_off = std::max(speeds.hand_off * kLateSpinning, 1.0);
    found = model.schedule(scheduler, shape, spinning);
  }
  answer.choice.spins = question.may_spin && (question.present.spins || begins_to_spin);
  answer.after_ns = found.round_ns;
  answer.is_worthwhile =
      begins_to_spin || must_return(question) || is_faster(answer.after_ns, answer.before_ns);
  answer.choice.promotions = std::move(found.promotions);
  return answer;
}

class InTurns {
 public:
  InTurns(const TransferQuestion& question, const TransferModel& model, TransferScheduler& scheduler)
      : question_(question), model_(model), scheduler_(scheduler) {}

  int64_t round_ns(const Choice& choice) const {
    return model_.predict_in_turns(question_.shape, question_.between, question_.now.slice_ns, choice);
  }
  ChoiceRace::Entry best(Choice moved) { return made(std::move(moved), kLinks, kLateSlices).front(); }
  std::vector<ChoiceRace::Entry> neighbours(const ChoiceRace::Entry& best);

 private:
  std::vector<ChoiceRace::Entry> made(Choice moved, std::span<const double> links,
                                      std::span<const double> lates);

  const TransferQuestion& question_;
  const TransferModel& model_;
  TransferScheduler& scheduler_;
};

// What to promote, and whether to spin, with the units moved as in `moved`: the most promising first. A
// scheduler that knows mean times of copies and hand-offs makes them, for links and hand-offs from fast to
// slow; what rounds would take beside the other program is another question.
std::vector<ChoiceRace::Entry> InTurns::made(Choice moved, std::span<const double> links,
                                             std::span<const double> lates) {
  std::vector<ChoiceRace::Entry> found;
  const double slice = static_cast<double>(question_.now.slice_ns) / model_.hand_off_ns();
  Speeds speeds = question_.between;
  for (const double link : links) {
    for (const double late : lates) {
      speeds.link = question_.between.link * link;
      speeds.wake = 1 + late * slice;
      speeds.hand_off = question_.between.hand_off + late * slice / 2;
      moved.promotions = model_.schedule(scheduler_, question_.shape, speeds, moved).promotions;
      const auto has_these = [&](const ChoiceRace::Entry& entry) {
        return entry.choice.promotions == moved.promotions;
      };
      if (std::ranges::any_of(found, has_these)) continue;
      for (const bool spins : {false, true}) {
        if (spins && !question_.may_spin) continue;
        moved.spins = spins;
        found.push_back({moved, round_ns(moved)});
      }
    }
  }
  std::ranges::stable_sort(found, {}, &ChoiceRace::Entry::round_ns);
  return found;
}

// A choice and its neighbours, which move the same units: the device spins or not, and as much is copied,
// or about as much more or less as the slots hold.
std::vector<ChoiceRace::Entry> InTurns::neighbours(const ChoiceRace::Entry& best) {
  std::vector<ChoiceRace::Entry> found;
  if (question_.may_spin) {
    Choice other = best.choice;
    other.spins = !other.spins;
    const int64_t other_ns = round_ns(other);
    found.push_back({std::move(other), other_ns});
  }
  const std::vector<ChoiceRace::Entry> all = made(best.choice, kNearLinks, kNearLateSlices);
  const auto step = static_cast<int64_t>(model_.bytes_of_slots());
  const auto bytes = static_cast<int64_t>(model_.promoted_bytes(best.choice));
  for (const int64_t wanted : {bytes - step, bytes + step}) {
    for (const bool spins : {false, true}) {
      const auto near = std::ranges::find_if(all, [&](const ChoiceRace::Entry& entry) {
        const auto far = std::abs(static_cast<int64_t>(model_.promoted_bytes(entry.choice)) - wanted);
        return entry.choice.spins == spins && 2 * far <= step;
      });
      if (near != all.end()) found.push_back(*near);
    }
  }
  std::ranges::stable_sort(found, {}, &ChoiceRace::Entry::round_ns);
  found.insert(found.begin(), best);
  return found;
}

TransferAnswer decide_in_turns(const TransferQuestion& question, const TransferModel& model,
                               TransferScheduler& scheduler) {
  std::vector<Choice> moves;
  if (question.may_retreat) {
    std::vector<std::vector<int>> sets = model.retreats(question.shape, question.speeds);
    for (size_t number = 0; number < sets.size(); ++number) {
      if ((sets.size() - 1 - number) % kEachRetreat > 0) continue;
      moves.push_back({.promotions = {}, .retreats = std::move(sets[number])});
    }
  }
  if (question.may_exchange && !model.fold().advances.empty()) moves.push_back(model.fold());
  InTurns rounds(question, model, scheduler);
  const int64_t before_ns = rounds.round_ns(question.present);
  ChoiceRace::Entry best = rounds.best({});
  const int64_t unsure_ns = std::llrint(kUnsure * static_cast<double>(best.round_ns));
  int64_t most_moved_ns = std::min(before_ns, unsure_ns);
  for (Choice& moved : moves) {
    ChoiceRace::Entry other = rounds.best(std::move(moved));
    if (other.round_ns >= most_moved_ns) continue;
    most_moved_ns = other.round_ns;
    best = std::move(other);
  }
  TransferAnswer answer{.choice = best.choice, .before_ns = before_ns, .after_ns = best.round_ns};
  const double gain = has_adapted(question.present) ? kGainOfAnother : kWorthwhileGain;
  answer.is_worthwhile = must_return(question) || is_faster(answer.after_ns, before_ns, gain);
  if (answer.is_worthwhile) answer.compared = rounds.neighbours(best);
  return answer;
}

}  // namespace

TransferAnswer decide(const TransferQuestion& question, const TransferModel& model,
                      TransferScheduler& scheduler) {
  return question.now.slice_ns > 0 ? decide_in_turns(question, model, scheduler)
                                   : decide_by_means(question, model, scheduler);
}

}  // namespace atsc
