#include "choice_trial.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace atsc {
namespace {

constexpr double kMuchSlower = 0.2;    // seen at once
constexpr double kErrorOfMedian = 1.6; // a sample's mean distance -> deviation -> that of a median

}  // namespace

void ChoiceTrial::observe(const RoundTime& round) {
  if (!is_under_way_) {
    if (before_.size() == kKept) before_.erase(before_.begin());
    before_.push_back(round);
    return;
  }
  if (++num_rounds_ == 1) return;  // it pays for the swap
  const RoundTime& before = before_.back();
  const int64_t reach =
      std::max({kAlikePositions, 2 * round.num_tokens, before.position / 4});
  if (std::abs(round.position - before.position) <= reach) after_.push_back(round);
}

void ChoiceTrial::begin(bool must_gain) {
  must_gain_ = must_gain;
  if (!before_.empty()) {
    const int64_t position = before_.back().position;
    std::erase_if(before_, [&](const RoundTime& round) {
      return std::abs(round.position - position) > std::max(kAlikePositions, position / 4);
    });
  }
  is_under_way_ = before_.size() >= kLeastBefore;
  if (!is_under_way_) before_.clear();
  after_.clear();
  num_rounds_ = 0;
}

bool ChoiceTrial::was_better_before() {
  if (!is_under_way_) return false;
  const bool is_late = num_rounds_ >= kMostRounds || after_.size() >= kEnough;
  if (!is_late && after_.size() < kEarly) return false;
  bool was_better = false;
  if (after_.size() >= kEarly) {
    const double excess = static_cast<double>(after_ns()) / static_cast<double>(before_ns()) - 1;
    const double sizes = 1.0 / static_cast<double>(before_.size()) +
                         1.0 / static_cast<double>(after_.size());
    const double error = kErrorOfMedian * std::max(jitter(before_), jitter(after_)) *
                         std::sqrt(sizes);
    const double most = must_gain_ ? -kWorthwhileGain : std::max(kWorthwhileGain, 2 * error);
    was_better = is_late ? excess > most : excess > std::max(kMuchSlower, 3 * error);
  }
  if (!was_better && !is_late) return false;
  is_under_way_ = false;
  if (!was_better) before_ = std::exchange(after_, {});
  if (before_.size() > kKept) before_.erase(before_.begin(), before_.end() - kKept);
  return was_better;
}

int64_t ChoiceTrial::median_ns(std::vector<RoundTime> rounds) {
  if (rounds.empty()) return 0;
  const auto middle = rounds.begin() + static_cast<std::ptrdiff_t>(rounds.size() / 2);
  std::ranges::nth_element(rounds, middle, {}, &RoundTime::taken_ns);
  return std::max<int64_t>(middle->taken_ns, 1);
}

// The mean distance of a round from the median, as a share.
double ChoiceTrial::jitter(const std::vector<RoundTime>& rounds) {
  const auto median = static_cast<double>(median_ns(rounds));
  double sum = 0;
  for (const RoundTime& round : rounds) {
    sum += std::abs(static_cast<double>(round.taken_ns) - median);
  }
  return sum / median / static_cast<double>(rounds.size());
}

}  // namespace atsc
