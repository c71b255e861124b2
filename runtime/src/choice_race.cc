#include "choice_race.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace atsc {
namespace {

constexpr int kHeats = 2, kRoundsOfHeat = 6;
constexpr double kClose = 1.05;  // to the fastest one of the first heat

// Without the slowest round, which may have met something else.
double mean_ns(const ChoiceRace::Entry& entry) {
  const std::vector<int64_t>& taken_ns = entry.taken_ns;
  const int64_t sum_ns = std::accumulate(taken_ns.begin(), taken_ns.end(), int64_t{0});
  return static_cast<double>(sum_ns - *std::ranges::max_element(taken_ns)) /
         static_cast<double>(taken_ns.size() - 1);
}

}  // namespace

void ChoiceRace::begin(std::vector<Entry> entries) {
  reset();
  if (entries.size() > 1) entries_ = std::move(entries);
}

void ChoiceRace::observe(int64_t taken_ns) {
  if (!is_under_way()) return;
  if (++num_rounds_ > 1) entries_[running_].taken_ns.push_back(taken_ns);
}

// The next one of this heat.
std::optional<size_t> ChoiceRace::next_from(size_t index) const {
  if (heat_ == 0) return index < entries_.size() ? std::optional(index) : std::nullopt;
  const double best_ns = mean_ns(*std::ranges::min_element(entries_, {}, mean_ns));
  for (; index < entries_.size(); ++index) {
    if (mean_ns(entries_[index]) < kClose * best_ns) return index;
  }
  return std::nullopt;
}

std::optional<ChoiceRace::Step> ChoiceRace::next() {
  if (!is_under_way() || num_rounds_ <= kRoundsOfHeat) return std::nullopt;
  const double before_ns = mean_ns(entries_[running_]);
  std::optional<size_t> found = next_from(running_ + 1);
  if (!found && ++heat_ < kHeats) found = next_from(0);
  const bool is_over = !found;
  if (is_over) found = std::ranges::min_element(entries_, {}, mean_ns) - entries_.begin();
  const Entry& entry = entries_[*found];
  const double after_ns =
      entry.taken_ns.empty() ? static_cast<double>(entry.round_ns) : mean_ns(entry);
  Step step{entry.choice, std::llrint(before_ns), std::llrint(after_ns),
            is_over ? entries_.size() : 0, *found != running_};
  running_ = *found;
  num_rounds_ = 0;
  if (is_over) reset();
  return step;
}

}  // namespace atsc
